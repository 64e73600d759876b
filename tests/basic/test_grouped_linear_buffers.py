"""``output`` and ``grad_input``: results of GroupedLinear in memory of the caller's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opfuser import GroupedLinear, Reshape, Sequential, SiLU
from opfuser.errors import InputError, NotSupportedError
from tests.basic import groups

SIZES = [2, 0, 5]
NAN = float("nan")
F64: dict[str, Any] = {"dtype": torch.float64}


def grouped(**kwargs: Any) -> GroupedLinear:
    return groups.grouped(3, 6, 4, **kwargs)


def buffers(rows: int = 7, **kwargs: Any) -> dict[str, Tensor]:
    """For both results, filled with what must not be left in them."""
    shapes = {"output": (rows, 4), "grad_input": (rows, 6)}
    return {name: torch.full(shape, NAN, **kwargs) for name, shape in shapes.items()}


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape


def run(
    op: GroupedLinear, x: Tensor, sizes: Tensor, extras: list[Tensor], dy: Tensor, **kwargs: Any
) -> list[Tensor]:
    """Output, gradients of an input that is no leaf, of the extra inputs, of the parameters."""
    x = x.detach().requires_grad_() * 1
    extras = [t.detach().requires_grad_() for t in extras]
    y = op(x, sizes, *extras, **kwargs)
    return [y, *torch.autograd.grad(y, [x, *extras, *op.parameters()], dy)]


@pytest.mark.parametrize(
    ("single", "mode", "sizes", "dtype"),
    [
        (False, "bias", SIZES, torch.float32),
        (False, "scaled bias", [0, 1, 0], torch.bfloat16),
        (False, "no bias", [0, 0, 0], torch.float64),
        (True, "bias", [0, 1, 0], torch.float16),
        (True, "scaled bias", [0, 0, 0], torch.float32),
        (True, "no bias", SIZES, torch.bfloat16),
        (True, "scaled bias", SIZES, torch.float64),
    ],
    ids=str,
)
def test_results_are_the_same_and_lie_there(
    single: bool, mode: str, sizes: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    op = grouped(
        bias=mode != "no bias",
        scale_bias=mode == "scaled bias",
        single_grouped_weight=single,
        single_grouped_bias=single,
        dtype=dtype,
        device=device,
    )
    rows = sum(sizes)
    x, dy = (torch.randn(rows, n).to(device, dtype) for n in (6, 4))
    extras = [torch.rand(rows).to(device, dtype)] if mode == "scaled bias" else []
    where = torch.tensor(sizes, device=device)
    into = buffers(rows, dtype=dtype, device=device)
    ours = run(op, x, where, extras, dy, **into)
    for a, b in zip(ours, run(op, x, where, extras, dy), strict=True):
        assert torch.equal(a, b)
    assert same_memory(ours[0], into["output"])
    assert same_memory(ours[1], into["grad_input"])


@pytest.mark.gpu
def test_grouped_gemm_of_the_device() -> None:
    op = GroupedLinear(3, 32, 16, dtype=torch.bfloat16, device="cuda")
    x, dy = (torch.randn(7, n, device="cuda").bfloat16() for n in (32, 16))
    into = {"output": torch.full_like(dy, NAN), "grad_input": torch.full_like(x, NAN)}
    sizes = torch.tensor(SIZES, device="cuda")
    ours = run(op, x, sizes, [], dy, **into)
    for a, b in zip(ours, run(op, x, sizes, [], dy), strict=True):
        assert torch.equal(a, b)
    assert same_memory(ours[0], into["output"])
    assert same_memory(ours[1], into["grad_input"])


@pytest.mark.parametrize("shape", [(6,), (7, 1, 6), (0, 3, 6)], ids=str)
def test_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    op = grouped(**F64)
    x = torch.randn(shape, dtype=torch.float64)
    dy = torch.randn(*shape[:-1], 4, dtype=torch.float64)
    sizes = torch.tensor([x.numel() // 6, 0, 0])
    into = {"output": torch.full_like(dy, NAN), "grad_input": torch.full_like(x, NAN)}
    ours, plain = run(op, x, sizes, [], dy, **into), run(op, x, sizes, [], dy)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain))
    assert same_memory(ours[0], into["output"])
    assert same_memory(ours[1], into["grad_input"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_without_gradients(mode: Any) -> None:
    op = grouped().requires_grad_(False)
    x, sizes, into = torch.randn(7, 6), torch.tensor(SIZES), buffers()
    with mode():
        y = op(x, sizes, **into)
        assert torch.equal(y, op(x, sizes))
    assert same_memory(y, into["output"])
    assert into["grad_input"].isnan().all(), "no backward has run"


def test_in_a_sequence() -> None:
    op, second = grouped(**F64), GroupedLinear(3, 4, 6, **F64)
    seq = Sequential(op, SiLU(), second)
    x, dy = (torch.randn(7, 6, dtype=torch.float64) for _ in range(2))
    sizes, given = torch.tensor(SIZES), torch.full((7, 4), NAN, dtype=torch.float64)
    into = {op: {"output": torch.full_like(given, NAN)}, 2: {"grad_input": given}}
    leaves = [x.requires_grad_(), *seq.parameters()]
    y, plain = seq(x, sizes, sizes, op_kwargs=into), seq(x, sizes, sizes)
    assert torch.equal(y, plain)
    ours, wants = (torch.autograd.grad(out, leaves, dy) for out in (y, plain))
    assert all(torch.equal(a, b) for a, b in zip(ours, wants))
    assert torch.equal(into[op]["output"], op(x, sizes))
    assert not given.isnan().any()


def test_one_of_both_or_none() -> None:
    op, x, sizes, into = grouped(), torch.randn(7, 6), torch.tensor(SIZES), buffers()
    dy = torch.randn(7, 4)
    want = run(op, x, sizes, [], dy)
    for kwargs in (
        {"output": into["output"], "grad_input": None},
        {"grad_input": into["grad_input"]},
        {"output": None},
    ):
        got = run(op, x, sizes, [], dy, **kwargs)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert torch.equal(into["output"], want[0])
    assert torch.equal(into["grad_input"], want[1])


def test_call_after_call_with_the_same_buffers() -> None:
    op, into, sizes = grouped(**F64), buffers(dtype=torch.float64), torch.tensor(SIZES)
    twin = grouped(**F64)
    twin.load_state_dict(op.state_dict())
    for _ in range(3):
        x, dy = (torch.randn(7, n, dtype=torch.float64) for n in (6, 4))
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        op(ours, sizes, **into).backward(dy)
        twin(theirs, sizes).backward(dy)
        assert torch.equal(ours.grad, theirs.grad)
        assert torch.equal(into["grad_input"], theirs.grad)
    for name, buffer in into.items():
        assert not buffer.requires_grad, name
        assert buffer.grad_fn is None, name
    for p, q in zip(op.parameters(), twin.parameters()):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("how", ["alone", "reshaped", "not the leaf itself"])
def test_a_leaf_accumulates_in_memory_of_its_own(how: str) -> None:
    """Its ``grad`` must not be the buffer, which the next backward pass writes to."""
    op, into, sizes = grouped(**F64), buffers(dtype=torch.float64), torch.tensor(SIZES)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    total = torch.zeros_like(x)
    for _ in range(3):
        dy = torch.randn(7, 4, dtype=torch.float64)
        if how == "alone":
            op(x, sizes, **into).backward(dy)
        elif how == "reshaped":
            seq = Sequential(Reshape((7, 6)), op)
            seq(x, sizes, op_kwargs={1: into}).backward(dy)
        else:
            h = x * 1
            h.retain_grad()
            op(h, sizes, **into).backward(dy)
            assert h.grad.data_ptr() != into["grad_input"].data_ptr()
        assert x.grad.data_ptr() != into["grad_input"].data_ptr()
        total += into["grad_input"]
        torch.testing.assert_close(x.grad, total)


def test_a_second_backward_writes_again() -> None:
    op, into, sizes = grouped(**F64), buffers(dtype=torch.float64), torch.tensor(SIZES)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(7, 4, dtype=torch.float64)
    y = op(x, sizes, **into)
    y.backward(dy, retain_graph=True)
    once = x.grad.clone()
    assert torch.equal(into["grad_input"], once)
    into["grad_input"].fill_(NAN)
    y.backward(2 * dy)
    assert torch.equal(into["grad_input"], 2 * once)
    assert torch.equal(x.grad, 3 * once)


def test_writing_over_an_output_that_backward_needs_is_noticed() -> None:
    op, into, sizes = grouped(), buffers(), torch.tensor(SIZES)
    seq = Sequential(op, SiLU())
    x = torch.randn(7, 6)
    seq(x, sizes, op_kwargs={0: into})
    first = seq(x, sizes, op_kwargs={0: into})
    seq(x, sizes, op_kwargs={0: into})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_the_output_may_be_changed_in_place() -> None:
    op, into, sizes = grouped(**F64), buffers(dtype=torch.float64), torch.tensor(SIZES)
    x, dy = (torch.randn(7, n, dtype=torch.float64) for n in (6, 4))
    for kwargs in (into, {}):
        op.zero_grad()
        y = op(x, sizes, **kwargs)
        y.mul_(2)
        y.backward(dy)
        grads = [p.grad for p in op.parameters()]
        if kwargs:
            ours = grads
    assert all(torch.equal(a, b) for a, b in zip(ours, grads))
    assert torch.equal(into["output"], y)


def test_gradient_that_is_not_needed() -> None:
    op, into, sizes = grouped(), buffers(), torch.tensor(SIZES)
    op(torch.randn(7, 6), sizes, **into).sum().backward()
    assert into["grad_input"].isnan().all()
    assert op.weight0.grad is not None


def test_gradient_that_arrives_in_the_buffer() -> None:
    op, x, sizes = grouped(), torch.randn(7, 6), torch.tensor(SIZES)
    memory = torch.empty(7, 6)
    dy = memory.view(-1)[:28].view(7, 4).normal_()
    want = run(op, x, sizes, [], dy.clone())
    got = run(op, x, sizes, [], dy, grad_input=memory)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert torch.equal(memory, want[1])


def test_slices_of_one_memory() -> None:
    op, sizes = grouped(**F64), torch.tensor(SIZES)
    memory = torch.full((7 * 16,), NAN, dtype=torch.float64)
    x, y, dx = (
        memory[7 * a : 7 * b].view(7, b - a) for a, b in ((0, 6), (6, 10), (10, 16))
    )  # fmt: skip
    x.normal_()
    dy = torch.randn(7, 4, dtype=torch.float64)
    want = run(op, x, sizes, [], dy)
    leaf = x.detach().requires_grad_()
    out = op(leaf, sizes, output=y, grad_input=dx)
    out.backward(dy)
    for got, expected in zip((out, y, leaf.grad, dx), (want[0], want[0], want[1], want[1])):
        assert torch.equal(got, expected)


def test_dtypes_are_those_of_output_and_input() -> None:
    op, x, sizes = grouped(dtype=torch.bfloat16), torch.randn(7, 6), torch.tensor(SIZES)
    into = {
        "output": torch.empty(7, 4, dtype=torch.bfloat16),
        "grad_input": torch.empty(7, 6),
    }
    dy = torch.randn(7, 4).bfloat16()
    ours, want = run(op, x, sizes, [], dy, **into), run(op, x, sizes, [], dy)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, want))
    assert torch.equal(into["grad_input"], want[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped()(x, sizes, output=into["output"])
    assert same_memory(y, into["output"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    op, into, sizes = grouped(**F64), buffers(dtype=torch.float64), torch.tensor(SIZES)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(7, 4, dtype=torch.float64)
    want = run(op, x, sizes, [], dy)
    y = checkpoint(lambda t: op(t, sizes, **into), x, use_reentrant=reentrant)
    y.backward(dy)
    for got, expected in zip((y, x.grad, into["grad_input"]), (want[0], want[1], want[1])):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"output": torch.empty(7, 5)}, r"output of shape \(7, 5\), expected \(7, 4\)"),
        ({"grad_input": torch.empty(6, 6)}, r"grad_input of shape \(6, 6\), expected \(7, 6\)"),
        ({"output": torch.empty(28)}, r"output of shape \(28,\), expected \(7, 4\)"),
        (
            {"output": torch.empty(7, 4).half()},
            "output of torch.float16 on cpu, expected torch.float32 on cpu",
        ),
        ({"grad_input": torch.empty(7, 6).double()}, "grad_input of torch.float64 on cpu, expec"),
        ({"output": torch.empty(7, 4, device="meta")}, "output of torch.float32 on meta, expected"),
        ({"output": torch.empty(4, 7).t()}, r"output with strides \(1, 7\), expected a contiguous"),
        ({"grad_input": torch.empty(7, 6, requires_grad=True)}, "grad_input that requires grad"),
        ({"output": [1]}, "output of type list, expected a tensor"),
    ],
    ids=["shape", "shape of gradient", "flat", "dtype", "dtype of gradient", "device", "strides",
         "requires grad", "no tensor"],
)  # fmt: skip
def test_what_cannot_take_a_result_is_an_error(kwargs: dict[str, Any], text: str) -> None:
    x, sizes = torch.randn(7, 6), torch.tensor(SIZES)
    for model, call in (
        (grouped(), lambda model: model(x, sizes, **kwargs)),
        (Sequential(grouped()), lambda model: model(x, sizes, op_kwargs={0: kwargs})),
    ):
        with pytest.raises(InputError, match=rf"in memory of its own \(GroupedLinear\).*{text}"):
            call(model)


@pytest.mark.parametrize("name", ["output", "grad_input"])
@pytest.mark.parametrize("kind", ["input", "part of the input", "weight", "bias", "scales"])
def test_memory_of_another_tensor_is_an_error(kind: str, name: str) -> None:
    op = GroupedLinear(1, 6, 6, scale_bias=True, **F64)
    memory, scales = torch.randn(12, 6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    x = memory[:6]
    given = {
        "input": x,
        "part of the input": memory[5:11],
        "weight": op.weight0.detach(),
        "bias": torch.empty(36, dtype=torch.float64).view(6, 6),
        "scales": torch.empty(36, dtype=torch.float64).view(6, 6),
    }[kind]
    if kind == "bias":
        op.bias0 = nn.Parameter(given[2])
    elif kind == "scales":
        scales = given[-1]
    before = given.clone()
    with pytest.raises(InputError, match=f"{name} that shares memory with another tensor"):
        op(x, torch.tensor([6]), scales, **{name: given})
    assert torch.equal(given, before) or before.isnan().any()


def test_both_results_in_one_place_are_an_error() -> None:
    op, memory = GroupedLinear(1, 6, 6), torch.empty(7, 6)
    with pytest.raises(InputError, match="grad_input that shares memory with another tensor"):
        op(torch.randn(7, 6), torch.tensor([7]), output=memory, grad_input=memory)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_torch_compile_leaves_the_call_to_eager_mode() -> None:
    op, into, sizes = grouped(), buffers(), torch.tensor(SIZES)
    x, dy = torch.randn(7, 6, requires_grad=True), torch.randn(7, 4)
    want = run(op, x, sizes, [], dy)
    torch._dynamo.reset()
    y = torch.compile(op, backend="aot_eager")(x, sizes, **into)
    (dx,) = torch.autograd.grad(y, x, dy)
    for got, expected in ((y, want[0]), (into["output"], want[0]), (into["grad_input"], want[1])):
        assert torch.equal(got, expected)
    assert torch.equal(dx, want[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["output", "grad_input"])
def test_torch_compile_of_the_whole_graph_says_why_not(name: str) -> None:
    op, into = grouped(), buffers()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="buffers of the caller") as error:
        torch.compile(op, fullgraph=True, backend="aot_eager")(
            torch.randn(7, 6), torch.tensor(SIZES), **{name: into[name]}
        )
    assert NotSupportedError.__name__ in str(error.value)
    assert into[name].isnan().all()
