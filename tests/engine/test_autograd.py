"""One autograd function per run: gradients as torch gives them, whatever is asked for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import opfuser
from opfuser.errors import DoubleBackwardError
from tests.engine.toys import F64, Mixed, RowSum, Sigmoid, Square, Times, grads, randn, same


def model() -> opfuser.Sequential:
    return opfuser.Sequential(Times(), Square(), Times(), Sigmoid())


def plain(seq: opfuser.Sequential, x: Tensor) -> Tensor:
    return torch.sigmoid((x * seq[0].w) ** 2 * seq[2].w)


def test_retain_graph() -> None:
    seq, x = model(), randn(2, 3, grad=True)
    wrt = [x, *seq.parameters()]
    expected = grads(plain(seq, x), wrt)
    y = seq(x)
    for _ in range(3):
        same(grads(y, wrt, retain_graph=True), expected)
    same(grads(y, wrt), expected)
    with pytest.raises(RuntimeError, match="second time"):
        grads(y, wrt)


def test_two_losses_share_a_graph() -> None:
    seq, x, e = opfuser.Sequential(Times(), Mixed(), Square()), randn(2, 3, grad=True), randn(2, 3)
    y, extra = seq(x, e)
    base = x * seq[0].w
    wrt = [x, seq[0].w]
    same(grads(extra, wrt, retain_graph=True), grads(base + e, wrt, retain_graph=True))
    same(grads(y, wrt), grads((base * e) ** 2, wrt))


def test_accumulation_over_calls() -> None:
    seq = model()
    xs = [randn(2, 3) for _ in range(3)]
    for x in xs:
        seq(x).sum().backward()
    total = sum(plain(seq, x).sum() for x in xs)
    same([p.grad for p in seq.parameters()], grads(total, list(seq.parameters())))


def test_backward_twice_differentiated() -> None:
    seq, x = model(), randn(2, 3, grad=True)
    (dx,) = torch.autograd.grad(seq(x).sum(), x, create_graph=True)
    same(dx, grads(plain(seq, x).sum(), [x])[0])
    with pytest.raises(DoubleBackwardError) as error:
        dx.sum().backward()
    text = str(error.value)
    assert "can be differentiated only once" in text
    assert "create_graph=True" in text
    assert "reference()" in text


def test_create_graph_alone_works() -> None:
    seq, x = model(), randn(2, 3, grad=True)
    wrt = [x, *seq.parameters()]
    ours = grads(seq(x), wrt, create_graph=True)
    same([g.detach() for g in ours], grads(plain(seq, x), wrt))


def test_shared_parameters_and_operations() -> None:
    times, other = Times(), Times()
    other.w = times.w
    seq = opfuser.Sequential(times, Square(), other, nn.Tanh(), times)
    x = randn(2, 3, grad=True)
    expected = torch.tanh((x * times.w) ** 2 * times.w) * times.w
    assert len(list(seq.parameters())) == 1
    same(seq(x), expected)
    same(grads(seq(x), [x, times.w]), grads(expected, [x, times.w]))


@pytest.mark.parametrize("frozen", [(), (0,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("input_grad", [False, True])
def test_frozen_parameters(frozen: tuple[int, ...], input_grad: bool) -> None:
    seq, x = model(), randn(2, 3, grad=input_grad)
    for n in frozen:
        seq[n].requires_grad_(False)
    wrt = [t for t in (x, seq[0].w, seq[2].w) if t.requires_grad]
    y = seq(x)
    assert y.requires_grad == bool(wrt)
    if wrt:
        same(grads(y, wrt), grads(plain(seq, x), wrt))
        seq(x).sum().backward()
    for n in frozen:
        assert seq[n].w.grad is None


def test_needs_tell_operations_what_is_read() -> None:
    seen: list[Any] = []

    class Tells(Times):
        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            seen.append((ctx.needs.input, ctx.needs.parameters))
            return super().op_backward(ctx, grad_output)

    seq = opfuser.Sequential(Tells(), Tells(), Tells())
    seq[1].requires_grad_(False)
    seq(randn(2, 3)).sum().backward()
    assert seen == [(True, (True,)), (True, (False,)), (False, (True,))]


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided", "overlapping rows"])
def test_layouts_of_the_incoming_gradient(kind: str) -> None:
    seq, x = model(), randn(4, 3, grad=True)
    grad = {
        "expanded": torch.ones((), dtype=F64).expand(4, 3),
        "transposed": randn(3, 4).t(),
        "strided": randn(8, 6)[::2, ::2],
        "overlapping rows": randn(1, 3).expand(4, 3),
    }[kind]
    before = grad.clone()
    wrt = [x, *seq.parameters()]
    ours = torch.autograd.grad(seq(x), wrt, grad)
    same(ours, torch.autograd.grad(plain(seq, x), wrt, grad))
    same(grad, before)


@pytest.mark.parametrize("view", ["transposed", "strided", "expanded", "0 rows", "1-d", "3-d"])
def test_layouts_of_the_input(view: str) -> None:
    base = randn(
        *{"1-d": (3,), "3-d": (2, 2, 3), "strided": (4, 6), "transposed": (3, 4)}.get(view, (4, 3)),
        grad=True,
    )
    x = {
        "transposed": base.t, "strided": lambda: base[::2, ::2],
        "expanded": lambda: base[:1].expand(5, 3), "0 rows": lambda: base[:0],
    }.get(view, lambda: base)()  # fmt: skip
    seq = model()
    wrt = [base, *seq.parameters()]
    same(grads(seq(x), wrt), grads(plain(seq, x), wrt))


def test_gradients_of_returned_inputs() -> None:
    """The output is the input itself, or a view of it, as far as memory goes."""
    x = randn(2, 3, grad=True)
    for seq in (
        opfuser.Sequential(opfuser.Identity()),
        opfuser.Sequential(opfuser.Reshape((3, 2))),
        opfuser.Sequential(opfuser.Dropout(0.5)).eval(),
    ):
        y = seq(x)
        assert y is not x
        same(grads(y, [x])[0].flatten(), torch.arange(1, 7, dtype=F64))


@pytest.mark.parametrize(
    "last", [Times(), Square(), opfuser.Identity(), opfuser.Reshape((3, 2))], ids=str
)
def test_the_output_may_be_changed_in_place(last: Any) -> None:
    """``nn.ReLU(inplace=True)`` behind a run of operations, as behind torch.nn modules."""
    seq, x = opfuser.Sequential(Times(), last), randn(2, 3, grad=True)
    wrt = [x, seq[0].w]
    expected = grads(torch.relu(seq(x)), wrt)
    same(grads(torch.relu_(seq(x)), wrt), expected)


def test_an_input_that_is_changed_in_place_is_noticed() -> None:
    seq, x = model(), randn(2, 3)
    y = seq(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    seq, x, e = (
        opfuser.Sequential(Times(), Mixed(), nn.Tanh(), Square()),
        randn(2, 3, grad=True),
        randn(2, 3),
    )
    saved: list[Tensor] = []
    with mode(), saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, extra = seq(x, e)
    assert not y.requires_grad
    assert y.grad_fn is None
    assert not extra.requires_grad
    assert saved == []
    assert x.requires_grad
    assert y.is_inference() == (mode is torch.inference_mode)
    same(y.clone(), torch.tanh(x * seq[0].w * e).detach() ** 2)


def test_tensors_of_inference_mode_as_input() -> None:
    seq = model().requires_grad_(False)
    with torch.inference_mode():
        x = randn(2, 3)
    same(seq(x).clone(), plain(seq, x).clone())


def test_detached_inputs_need_no_function() -> None:
    seq = opfuser.Sequential(Square(), opfuser.Identity())
    assert seq(randn(2, 3)).grad_fn is None


def test_hooks_on_tensors_fire() -> None:
    seq, x = opfuser.Sequential(Times(), RowSum()), randn(2, 3, grad=True)
    seen: list[str] = []
    x.register_hook(lambda g: seen.append("input"))
    seq[0].w.register_post_accumulate_grad_hook(lambda p: seen.append("parameter"))
    y, sums = seq(x)
    y.register_hook(lambda g: seen.append("output"))
    sums.register_hook(lambda g: seen.append("extra output"))
    (y.sum() + sums.sum()).backward()
    assert sorted(seen) == ["extra output", "input", "output", "parameter"]


@pytest.mark.filterwarnings("ignore")
def test_anomaly_mode_names_the_function() -> None:
    class Bad(Square):
        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output * float("nan"), ()

    x = randn(2, 3, grad=True)
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(
            RuntimeError, match="Function '_SequenceFunctionBackward' returned nan values"
        ),
    ):
        opfuser.Sequential(Bad())(x).sum().backward()


def test_threads() -> None:
    """Backward of several graphs of one model at once, on threads of their own."""
    seq = model()
    xs = [randn(2, 3, grad=True) for _ in range(4)]
    out: dict[int, Any] = {}

    def work(n: int) -> None:
        for _ in range(10):
            out[n] = grads(seq(xs[n]), [xs[n]])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for n, x in enumerate(xs):
        same(out[n], grads(plain(seq, x), [x]))
