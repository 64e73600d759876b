"""One autograd function per group: gradients as torch gives them, whatever is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

import opfuser
from tests.engine.toys import F64, Mixed, RowSum, Square, Times, grads, plain_sigmoids, randn, same
from tests.engine.toys import sigmoids as model


def test_two_losses_share_a_graph() -> None:
    """Hazard 12."""
    seq, x, e = opfuser.Sequential(Times(), Mixed(), Square()), randn(2, 3, grad=True), randn(2, 3)
    y, extra = seq(x, e)
    base = x * seq[0].w
    wrt = [x, seq[0].w]
    same(grads(extra, wrt, retain_graph=True), grads(base + e, wrt, retain_graph=True))
    same(grads(y, wrt), grads((base * e) ** 2, wrt))
    with pytest.raises(RuntimeError, match="second time"):
        grads(y, wrt)


@pytest.mark.parametrize(
    "op", [opfuser.Identity(), opfuser.Reshape((3, 2)), opfuser.Dropout(0.5).eval()], ids=repr
)
def test_gradients_of_returned_inputs(op: nn.Module) -> None:
    """The output is the input itself, or a view of it, as far as memory goes."""
    x = randn(2, 3, grad=True)
    y = opfuser.Sequential(op)(x)
    assert y is not x
    same(grads(y, [x])[0].flatten(), torch.arange(1, 7, dtype=F64))


class OwnGraph(opfuser.BasicOperation):
    """``y = sin(x)``, differentiated by the graph that forward keeps."""

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        with torch.enable_grad():
            x = input_.detach().requires_grad_()
            y = torch.sin(x)
        ctx.graph = x, y
        return y

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        x, y = ctx.graph
        return torch.autograd.grad(y, x, grad_output)[0], ()


def test_an_operation_keeps_the_graph_of_what_it_returns() -> None:
    seq, x = opfuser.Sequential(OwnGraph(), OwnGraph()), randn(2, 3, grad=True)
    for _ in range(3):
        same(grads(seq(x), [x]), grads(torch.sin(torch.sin(x)), [x]))


def test_one_tensor_as_the_output_and_as_an_extra_output_without_gradient() -> None:
    """What is tapped needs none; the output, which is the same tensor, is taken to need one."""
    tap = opfuser.MakeExtraOutput().set_extra_output_channel(0, "x")
    swap = opfuser.SwapExtra().set_extra_input_channel(0, "x")
    seq = opfuser.Sequential(opfuser.Tanh(), tap, Times(), swap)
    x = randn(2, 3)
    for _ in range(3):  # recorded, too
        outputs = seq(x)
        assert [y.requires_grad for y in outputs] == [True, False, True]
        assert torch.equal(outputs[1], torch.tanh(x))
        wanted = [y for y in outputs if y.requires_grad]
        (dw,) = torch.autograd.grad([y.sum() for y in wanted], [seq[2].w])
        same(dw, torch.tanh(x).sum(0))


@pytest.mark.parametrize(
    "last", [Times(), Square(), opfuser.Identity(), opfuser.Reshape((3, 2))], ids=str
)
def test_the_output_may_be_changed_in_place(last: Any) -> None:
    """``nn.ReLU(inplace=True)`` behind operations, as behind torch.nn modules."""
    seq, x = opfuser.Sequential(Times(), last), randn(2, 3, grad=True)
    wrt = [x, seq[0].w]
    expected = grads(torch.relu(seq(x)), wrt)
    same(grads(torch.relu_(seq(x)), wrt), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch, for tangents
def test_an_output_without_gradients_may_be_changed_by_what_has_some() -> None:
    """As that of ``torch.nn.Linear``; a view that was made without gradients may not."""
    seq, x = opfuser.Sequential(opfuser.Linear(3, 2, dtype=F64)), randn(2, 2, 3)
    scale = torch.ones((), dtype=F64, requires_grad=True)
    with torch.no_grad():
        y, given = seq(x), opfuser.Sequential(opfuser.Reshape((4, 3)))(x)
        before = y.clone()
    y.mul_(scale).sum().backward()
    same(scale.grad, before.sum())
    with pytest.raises(RuntimeError, match="view was created in no_grad mode"):  # of the input
        given.mul_(scale)
    with torch.no_grad(), forward_ad.dual_level():
        y = seq(forward_ad.make_dual(x, x))
        same(forward_ad.unpack_dual(y).tangent, x @ seq[0].weight.detach().T)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    seq = opfuser.Sequential(Times(), Mixed(), nn.Tanh(), Square())
    x, e = randn(2, 3, grad=True), randn(2, 3)
    saved: list[Tensor] = []
    with mode(), saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, extra = seq(x, e)
    assert saved == []
    assert y.grad_fn is None
    assert not y.requires_grad
    assert not extra.requires_grad
    assert x.requires_grad
    assert y.is_inference() == (mode is torch.inference_mode)
    expected = torch.tanh(x * seq[0].w * e) ** 2
    same(y.clone(), expected.detach())
    wrt = [x, seq[0].w]
    same(grads(seq(x, e)[0], wrt), grads(expected, wrt))


def test_no_function_where_nothing_requires_grad() -> None:
    """Also for tensors of inference mode."""
    seq = model().requires_grad_(False)
    assert seq(randn(2, 3)).grad_fn is None
    with torch.inference_mode():
        x = randn(2, 3)
    same(seq(x).clone(), plain_sigmoids(seq, x).clone())


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
    text = "Function '_SequenceFunctionBackward' returned nan values"
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match=text):
        opfuser.Sequential(Bad())(x).sum().backward()


class TimesKeyword(opfuser.BasicOperation):
    """Multiplies by a keyword."""

    def op_forward(
        self, ctx: opfuser.OperationContext, input_: Tensor, *, factor: Tensor, **kwargs: Any
    ) -> Tensor:
        ctx.save_for_backward(factor)
        return input_ * factor

    def op_backward(self, ctx: opfuser.OperationContext, grad_output: Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return grad_output * factor, ()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("name", "how"), [("factor", ""), ("tables", ""), ("tables", "compiled")])
def test_keywords_that_require_grad_are_refused(name: str, how: str) -> None:
    """Their gradient would be missing: calls have those of inputs and parameters alone."""
    seq = opfuser.Sequential(opfuser.RotaryEmbedding(2, 4) if name == "tables" else TimesKeyword())
    run: Any = torch.compile(seq, backend="eager", fullgraph=True) if how else seq
    x = torch.randn(1, 3, 24, requires_grad=True)
    value = torch.randn(2, 3, 2) if name == "tables" else torch.randn(24)

    def gradient() -> Tensor:
        (dx,) = torch.autograd.grad(run(x, op_kwargs={0: {name: value}}).sum(), x)
        return dx

    before = [gradient() for _ in range(3)]
    value.requires_grad_()
    # Dynamo raises an error of its own.
    text = "Observed exception" if how else f"constants.*{name}, which requires grad"
    with pytest.raises(RuntimeError if how else opfuser.errors.NotSupportedError, match=text):
        gradient()
    with torch.no_grad():
        run(x, op_kwargs={0: {name: value}})
    value = value.detach()
    torch.testing.assert_close(gradient(), before[-1])
