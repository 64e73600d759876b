"""``output`` and ``grad_input``: results of GroupedLinear in memory of the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opfuser import GroupedLinear, Reshape, ScaledSReLU, Sequential, SiLU
from opfuser.errors import InputError, NotSupportedError, OpKwargsError
from opfuser.testing import assert_fused
from tests.basic import groups

LENGTHS = [2, 0, 5]
SIZES = torch.tensor(LENGTHS)
NAN = float("nan")


def grouped(**kwargs: Any) -> GroupedLinear:
    return groups.grouped(3, 6, 4, **kwargs)


def rand(leading: tuple[int, ...] = (7,), **kwargs: Any) -> tuple[Tensor, Tensor]:
    """An input and a gradient of the output."""
    return torch.randn(*leading, 6).to(**kwargs), torch.randn(*leading, 4).to(**kwargs)


def buffers(leading: tuple[int, ...] = (7,), **kwargs: Any) -> dict[str, Tensor]:
    """For both results, filled with what must not be left in them."""
    x, dy = rand(leading, **kwargs)
    return {"output": torch.full_like(dy, NAN), "grad_input": torch.full_like(x, NAN)}


def run(
    op: GroupedLinear,
    x: Tensor,
    dy: Tensor,
    *extras: Tensor,
    sizes: Tensor = SIZES,
    **kwargs: Any,
) -> list[Tensor]:
    """Output, gradients of an input that is no leaf, of the extra inputs, of the parameters."""
    x = x.detach().requires_grad_() * 1
    inputs = [t.detach().requires_grad_() for t in extras]
    y = op(x, sizes, *inputs, **kwargs)
    return [y, *torch.autograd.grad(y, [x, *inputs, *op.parameters()], dy)]


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(found), list(wanted), rtol=0, atol=0)


def assert_lies_in(results: list[Tensor], into: dict[str, Tensor]) -> None:
    """The first two, output and gradient of the input, are those buffers."""
    for result, buffer in zip(results, (into["output"], into["grad_input"])):
        assert result.data_ptr() == buffer.data_ptr()
        assert result.shape == buffer.shape


@pytest.mark.parametrize(
    ("single", "mode", "leading", "lengths", "dtype"),
    [
        (False, "bias", (7,), LENGTHS, torch.float32),
        (False, "scaled bias", (1,), [0, 1, 0], torch.bfloat16),
        (True, "no bias", (0,), [0, 0, 0], torch.float16),
        (True, "scaled bias", (7,), LENGTHS, torch.float64),
        (False, "bias", (), [1, 0, 0], torch.float32),
        (False, "bias", (7, 1), [7, 0, 0], torch.float32),
        (False, "bias", (0, 3), [0, 0, 0], torch.float32),
    ],
    ids=str,
)
def test_results_are_the_same_and_lie_there(
    single: bool, mode: str, leading: Any, lengths: Any, dtype: torch.dtype, device: torch.device
) -> None:
    on: Any = {"dtype": dtype, "device": device}
    op = grouped(
        bias=mode != "no bias",
        scale_bias=mode == "scaled bias",
        single_grouped_weight=single,
        single_grouped_bias=single,
        **on,
    )
    sizes, given = torch.tensor(lengths, device=device), list(rand(leading, **on))
    if mode == "scaled bias":
        given.append(torch.rand(leading).to(**on))
    into = buffers(leading, **on)
    ours = run(op, *given, sizes=sizes, **into)
    assert_same(ours, run(op, *given, sizes=sizes))
    assert_lies_in(ours, into)


@pytest.mark.gpu
def test_grouped_gemm_of_the_device() -> None:
    op = GroupedLinear(3, 32, 16, dtype=torch.bfloat16, device="cuda")
    x, dy = (torch.randn(7, n, device="cuda").bfloat16() for n in (32, 16))
    into = {"output": torch.full_like(dy, NAN), "grad_input": torch.full_like(x, NAN)}
    ours = run(op, x, dy, sizes=SIZES.cuda(), **into)
    assert_same(ours, run(op, x, dy, sizes=SIZES.cuda()))
    assert_lies_in(ours, into)


def test_without_gradients() -> None:
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        op, (x, _), into = grouped().requires_grad_(False), rand(), buffers()
        with mode():
            y = op(x, SIZES, **into)
            assert torch.equal(y, op(x, SIZES))
        assert y.data_ptr() == into["output"].data_ptr()
        assert into["grad_input"].isnan().all(), "no backward has run"


def test_in_a_sequence() -> None:
    op, second = grouped(), groups.grouped(3, 4, 6)
    seq, (x, _), dy = Sequential(op, SiLU(), second), rand(), torch.randn(7, 6)
    given = torch.full((7, 4), NAN)
    into = {op: {"output": torch.full_like(given, NAN)}, 2: {"grad_input": given}}
    leaves = [x.requires_grad_(), *seq.parameters()]
    y, plain = seq(x, SIZES, SIZES, op_kwargs=into), seq(x, SIZES, SIZES)
    assert torch.equal(y, plain)
    assert_same(*[torch.autograd.grad(out, leaves, dy) for out in (y, plain)])
    assert torch.equal(into[op]["output"], op(x, SIZES))
    assert not given.isnan().any()


def test_one_of_both_or_none_and_other_names() -> None:
    op, (x, dy) = grouped(), rand()
    want = run(op, x, dy)
    wanted = {"output": want[0], "grad_input": want[1]}
    for names in (
        {"output": "output", "grad_input": "grad_input"},
        {"output": "output"},
        {"grad_input": "grad_input"},
        {"output": "output_buffer", "grad_input": "grad_input_buffer"},
        {"output": "output_buffer", "grad_input": "grad_input"},
    ):
        into = buffers()
        nothing = dict.fromkeys(into.keys() - names.keys())
        given = {other: into[name] for name, other in names.items()}
        assert_same(run(op, x, dy, **nothing, **given), want)
        assert all(torch.equal(into[name], wanted[name]) for name in names)
    into = buffers()
    y = Sequential(op)(x, SIZES, op_kwargs={0: {"output_buffer": into["output"]}})
    assert_same([y, into["output"]], [want[0]] * 2)


def test_other_names_of_the_buffers_of_fused_experts() -> None:
    ops = [GroupedLinear(2, 6, 8), ScaledSReLU(), GroupedLinear(2, 8, 6)]
    seq, sizes = Sequential(*ops), torch.tensor([3, 4])
    x, given = torch.randn(7, 6, requires_grad=True), torch.full((7, 6), NAN)
    y = seq(x, sizes, torch.rand(7), sizes, op_kwargs={2: {"output_buffer": given}})
    assert_fused(seq, x, sizes, torch.rand(7), sizes, joint={"grouped_mlp": 1})
    assert torch.equal(y, given)


@pytest.mark.parametrize("name", ["output", "grad_input"])
def test_a_buffer_under_both_names_is_an_error(name: str) -> None:
    memory = buffers()[name]
    with pytest.raises(OpKwargsError) as error:
        grouped()(rand()[0], SIZES, **{name: memory, f"{name}_buffer": memory})
    assert str(error.value) == (
        f"A buffer is given once (GroupedLinear). Received: {name} and {name}_buffer, which mean "
        f"the same. Leave out {name}_buffer."
    )


@pytest.mark.parametrize("how", ["alone", "reshaped", "not the leaf itself"])
def test_a_leaf_accumulates_in_memory_of_its_own(how: str) -> None:
    """Its ``grad`` must not be the buffer, which the next backward pass writes to."""
    op, (x, _), into = grouped(), rand(), buffers()
    x.requires_grad_()
    total, weights = torch.zeros_like(x), 0.0
    for _ in range(3):
        dy = rand()[1]
        want = run(op, x, dy)
        weights = weights + want[2]
        if how == "alone":
            op(x, SIZES, **into).backward(dy)
        elif how == "reshaped":
            Sequential(Reshape((7, 6)), op)(x, SIZES, op_kwargs={1: into}).backward(dy)
        else:
            h = x * 1
            h.retain_grad()
            op(h, SIZES, **into).backward(dy)
            assert h.grad.data_ptr() != into["grad_input"].data_ptr()
        assert x.grad.data_ptr() != into["grad_input"].data_ptr()
        assert_same([into["output"], into["grad_input"]], want[:2])
        total += want[1]
        assert_same([x.grad, op.weight0.grad], [total, weights])
    for buffer in into.values():
        assert not buffer.requires_grad
        assert buffer.grad_fn is None


def test_a_second_backward_writes_again() -> None:
    op, (x, dy), into = grouped(), rand(), buffers()
    y = op(x.requires_grad_(), SIZES, **into)
    y.backward(dy, retain_graph=True)
    once = x.grad.clone()
    assert torch.equal(into["grad_input"], once)
    into["grad_input"].fill_(NAN)
    y.backward(2 * dy)
    assert torch.equal(into["grad_input"], 2 * once)
    torch.testing.assert_close(x.grad, 3 * once)


def test_writing_over_an_output_that_backward_needs_is_noticed() -> None:
    seq, (x, _), into = Sequential(grouped(), SiLU()), rand(), buffers()
    first = seq(x, SIZES, op_kwargs={0: into})
    seq(x, SIZES, op_kwargs={0: into})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_the_output_may_be_changed_in_place() -> None:
    op, (x, dy), into = grouped(), rand(), buffers()
    results = []
    for kwargs in (into, {}):
        y = op(x, SIZES, **kwargs).mul_(2)
        results.append([y, *torch.autograd.grad(y, list(op.parameters()), dy)])
    assert_same(*results)
    assert torch.equal(into["output"], results[0][0])


def test_gradient_that_is_not_needed() -> None:
    op, (x, _), into = grouped(), rand(), buffers()
    op(x, SIZES, **into).sum().backward()
    assert into["grad_input"].isnan().all()
    assert op.weight0.grad is not None


def test_gradient_that_arrives_in_the_buffer() -> None:
    op, (x, _), memory = grouped(), rand(), torch.empty(7, 6)
    dy = memory.view(-1)[:28].view(7, 4).normal_()
    want = run(op, x, dy.clone())
    assert_same(run(op, x, dy, grad_input=memory), want)
    assert torch.equal(memory, want[1])


def test_slices_of_one_memory() -> None:
    op, (_, dy), memory = grouped(), rand(), torch.full((7 * 16,), NAN)
    x, y, dx = (memory[7 * a : 7 * b].view(7, b - a) for a, b in ((0, 6), (6, 10), (10, 16)))
    x.normal_()
    want = run(op, x, dy)
    leaf = x.detach().requires_grad_()
    out = op(leaf, SIZES, output=y, grad_input=dx)
    out.backward(dy)
    assert_same([out, y, leaf.grad, dx], [want[0], want[0], want[1], want[1]])


def test_dtypes_are_those_of_output_and_input() -> None:
    op, (x, dy) = grouped(dtype=torch.bfloat16), rand()
    into = {"output": torch.empty(7, 4).bfloat16(), "grad_input": torch.empty(7, 6)}
    want = run(op, x, dy.bfloat16())
    assert_same(run(op, x, dy.bfloat16(), **into), want)
    assert torch.equal(into["grad_input"], want[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped()(x, SIZES, output=into["output"])
    assert y.data_ptr() == into["output"].data_ptr()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    op, (x, dy), into = grouped(), rand(), buffers()
    want = run(op, x, dy)
    y = checkpoint(lambda t: op(t, SIZES, **into), x.requires_grad_(), use_reentrant=reentrant)
    y.backward(dy)
    assert_same([y, x.grad, into["grad_input"]], [want[0], want[1], want[1]])


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
    x, text = rand()[0], rf"in memory of its own \(GroupedLinear\).*{text}"
    with pytest.raises(InputError, match=text):
        grouped()(x, SIZES, **kwargs)
    with pytest.raises(InputError, match=text):
        Sequential(grouped())(x, SIZES, op_kwargs={0: kwargs})


@pytest.mark.parametrize("name", ["output", "grad_input"])
@pytest.mark.parametrize("kind", ["input", "part of the input", "weight", "bias", "scales"])
def test_memory_of_another_tensor_is_an_error(kind: str, name: str) -> None:
    op = GroupedLinear(1, 6, 6, scale_bias=True)
    memory, scales = torch.randn(12, 6), torch.rand(6)
    given = {"input": memory[:6], "part of the input": memory[5:11], "weight": op.weight0.detach()}
    buffer = given.get(kind, torch.randn(6, 6))
    if kind == "bias":
        op.bias0 = nn.Parameter(buffer[2])
    elif kind == "scales":
        scales = buffer[-1]
    before = buffer.clone()
    with pytest.raises(InputError, match=f"{name} that shares memory with another tensor"):
        op(memory[:6], torch.tensor([6]), scales, **{name: buffer})
    assert torch.equal(buffer, before)


def test_both_results_in_one_place_are_an_error() -> None:
    op, memory = GroupedLinear(1, 6, 6), torch.empty(7, 6)
    with pytest.raises(InputError, match="grad_input that shares memory with another tensor"):
        op(torch.randn(7, 6), torch.tensor([7]), output=memory, grad_input=memory)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_torch_compile_leaves_the_call_to_eager_mode() -> None:
    op, (x, dy), into = grouped(), rand(), buffers()
    want = run(op, x, dy)
    torch.compiler.reset()
    y = torch.compile(op, backend="aot_eager")(x.requires_grad_(), SIZES, **into)
    (dx,) = torch.autograd.grad(y, x, dy)
    found = [y, into["output"], dx, into["grad_input"]]
    assert_same(found, [want[0], want[0], want[1], want[1]])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["output", "grad_input"])
def test_torch_compile_of_the_whole_graph_says_why_not(name: str) -> None:
    op, into = grouped(), buffers()
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="buffers of the caller") as error:
        torch.compile(op, fullgraph=True, backend="aot_eager")(
            rand()[0], SIZES, **{name: into[name]}
        )
    assert NotSupportedError.__name__ in str(error.value)
    assert into[name].isnan().all()
