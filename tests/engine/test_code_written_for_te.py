"""Operations, fusions and model code in the signatures of te.ops run as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

import pytest
import torch
from torch import nn

import opfuser
from opfuser.fuser import OperationFuser
from opfuser.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from tests.engine.toys import F64, Mixed, Square, Times, grads, randn, same


class Scale(BasicOperation):
    """Positional quantizers, no ``**kwargs``, a context with attributes of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale: nn.Parameter
        self.register_parameter("scale", nn.Parameter(torch.full((size,), 3.0, dtype=F64)))

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Optional[Any],  # noqa: UP045 - as found in the field
        next_op_input_quantizer: Optional[Any],  # noqa: UP045
    ) -> torch.Tensor:
        if ctx.requires_grad:
            ctx.save_for_backward(input_, self.scale)
            ctx.dtype = input_.dtype
            ctx.with_quantized_compute = False
            ctx.input_requires_grad = True
        return input_ * self.scale

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, list[Any]]:
        (x, scale) = ctx.saved_tensors
        assert ctx.dtype is F64
        assert ctx.with_quantized_compute is False
        return grad_output * scale, [(grad_output * x).sum(0)]


class AddTwo(BasicOperation):
    """Extra inputs, with the lists that te.ops passes."""

    num_extra_inputs: int = 2

    def op_forward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("extra inputs go through fuser_forward")

    def op_backward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("extra inputs go through fuser_backward")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Optional[Any],  # noqa: UP045
        next_op_input_quantizer: Optional[Any],  # noqa: UP045
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, list[list[Any]]]:
        assert len(basic_op_ctxs) == len(basic_op_kwargs) == len(basic_op_extra_inputs) == 1
        one, two = basic_op_extra_inputs[0]
        return input_ + one + basic_op_kwargs[0].get("factor", 1) * two, [[]]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, list[list[Any]], list[tuple[Any, ...]]]:
        return grad_output, [[]], [(grad_output, grad_output)]


class ForwardScales(FusedOperation):
    """Two scales in forward; fills the contexts of both."""

    runs = 0

    def __init__(self, *, first: Scale, second: Scale) -> None:
        super().__init__((first, second))

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Optional[Any],  # noqa: UP045
        next_op_input_quantizer: Optional[Any],  # noqa: UP045
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, list[tuple[()]]]:
        ForwardScales.runs += 1
        middle = input_ * self.basic_ops[0].scale
        for ctx, op, x in zip(basic_op_ctxs, self.basic_ops, (input_, middle)):
            if ctx.requires_grad:
                ctx.save_for_backward(x, op.scale)
                ctx.dtype = x.dtype
                ctx.with_quantized_compute = False
        return middle * self.basic_ops[1].scale, [(), ()]

    @staticmethod
    def fuse_forward_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        out: list[FusibleOperation] = []
        window, ops = ops[:2], ops[2:]
        while len(window) == 2:
            if type(window[0]) is type(window[1]) is Scale:
                window = [ForwardScales(first=window[0], second=window[1])]
            else:
                out.extend(window[:-1])
                window = window[-1:]
            out.extend(window[:-2])
            window = window[-2:]
            while ops and len(window) < 2:
                window.append(ops[0])
                ops = ops[1:]
        out.extend(window)
        return out


class BackwardScales(FusedOperation):
    """Two scales in backward; reads the contexts of both."""

    runs = 0

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, list[list[Any]], list[tuple[()]]]:
        BackwardScales.runs += 1
        (x1, s1), (x2, s2) = (ctx.saved_tensors for ctx in basic_op_ctxs)
        middle = grad_output * s2
        params = [[(middle * x1).sum(0)], [(grad_output * x2).sum(0)]]
        return middle * s1, params, [(), ()]


def fuse_backward(ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation]:
    assert recipe is None
    if [type(op) for op in ops[:2]] == [Scale, Scale]:
        return [BackwardScales(ops[:2]), *ops[2:]]
    return ops


class JointScales(ForwardScales):
    """Both passes, with state of its own in the first context."""

    runs = 0

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **unused: Any) -> Any:
        JointScales.runs += 1
        one, two = (op.scale for op in self.basic_ops)
        basic_op_ctxs[0].save_for_backward(input_, one, two)
        return input_ * one * two, [(), ()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: torch.Tensor, **unused: Any) -> Any:
        x, one, two = basic_op_ctxs[0].saved_tensors
        base = grad_output * x
        return grad_output * one * two, [[(base * two).sum(0)], [(base * one).sum(0)]], [(), ()]


def fuse_joint(ops: list[FusibleOperation], *, recipe: Any = None) -> list[FusibleOperation]:
    if [type(op) for op in ops[:2]] == [Scale, Scale]:
        return [JointScales(first=ops[0], second=ops[1]), *ops[2:]]
    return ops


@pytest.fixture(params=["none", "forward", "backward", "both", "joint"])
def fused(request: pytest.FixtureRequest) -> Iterator[str]:
    handles = []
    if request.param in ("forward", "both"):
        handles.append(opfuser.register_forward_fusion(ForwardScales.fuse_forward_ops))
    if request.param in ("backward", "both"):
        handles.append(opfuser.register_backward_fusion(fuse_backward, prepend=True))
    if request.param == "joint":
        handles.append(opfuser.register_forward_backward_fusion(fuse_joint))
    ForwardScales.runs = BackwardScales.runs = JointScales.runs = 0
    yield request.param
    for handle in handles:
        handle.remove()


def test_operations_and_fusions(fused: str) -> None:
    seq = opfuser.Sequential(Scale(3), Scale(3), AddTwo(), Square())
    x, one, two = (randn(2, 3, grad=True) for _ in range(3))
    expected = (x * seq[0].scale * seq[1].scale + one + two) ** 2
    y = seq(x, one, two)
    same(y, expected)
    wrt = [x, one, two, *seq.parameters()]
    same(grads(y, wrt), grads(expected, wrt))
    ran = [ForwardScales.runs, BackwardScales.runs, JointScales.runs]
    assert ran == {
        "none": [0, 0, 0], "forward": [1, 0, 0], "backward": [0, 1, 0], "both": [1, 1, 0],
        "joint": [0, 0, 1],
    }[fused]  # fmt: skip
    same(
        seq(x, one, two, op_kwargs={2: {"factor": 5}}),
        (x * seq[0].scale * seq[1].scale + one + 5 * two) ** 2,
    )


def test_a_fusion_that_spans_the_first_gradient(fused: str) -> None:
    """The first operation owes nothing, the second does."""
    seq, x = opfuser.Sequential(Scale(3), Scale(3)), randn(2, 3)
    seq[0].requires_grad_(False)
    expected = x * seq[0].scale * seq[1].scale
    same(seq(x), expected)
    same(grads(seq(x), [seq[1].scale]), grads(expected, [seq[1].scale]))
    with torch.no_grad():
        same(seq(x), expected)


def test_private_views_of_a_fuser(fused: str) -> None:
    seq = opfuser.Sequential(Scale(3), Scale(3), nn.Tanh(), Square())
    assert seq._module_groups is None
    x = randn(2, 3, grad=True)
    seq(x)
    first, module, second = seq._module_groups
    assert isinstance(first, OperationFuser)
    assert module is seq[2]
    assert first._basic_ops == [seq[0], seq[1]]
    kinds = {"forward": ForwardScales, "backward": BackwardScales, "joint": JointScales}
    for pass_, steps in (("forward", first._forward_ops), ("backward", first._backward_ops)):
        if fused in (pass_, "both", "joint"):
            ((op, indices),) = steps
            assert type(op) is (JointScales if fused == "joint" else kinds[pass_])
            assert indices == [0, 1]
            assert list(op.basic_ops) == [seq[0], seq[1]]
        else:
            assert steps == [(seq[0], [0]), (seq[1], [1])]
    assert second._forward_ops == [(seq[3], [0])]


def test_lists_of_fusion_functions(fused: str) -> None:
    lists = {
        "forward": OperationFuser.forward_fusion_functions,
        "backward": OperationFuser.backward_fusion_functions,
        "joint": OperationFuser.forward_backward_fusion_functions,
    }
    functions = {
        "forward": ForwardScales.fuse_forward_ops, "backward": fuse_backward, "joint": fuse_joint,
    }  # fmt: skip
    for stage, function in functions.items():
        assert (function in lists[stage]) == (
            fused in (stage, *(["both"] if stage != "joint" else []))
        )
    if fused in ("backward", "both"):
        assert lists["backward"][0] is fuse_backward


def test_a_fuser_used_directly() -> None:
    first, second = Mixed(), Mixed()
    first.set_extra_output_channel(0, "sum", output_to_caller=False)
    second.set_extra_input_channel(0, "sum")
    fuser = OperationFuser([Times(), first, second])
    assert fuser._basic_op_extra_input_sources == [[], [None], [(1, 0)]]
    x, e = randn(2, 3, grad=True), randn(2, 3, grad=True)
    y, extra = fuser(x, e)
    base = x * fuser._basic_ops[0].w
    expected = (base * e * (base + e), base * e + base + e)
    same((y, extra), expected)
    wrt = [x, e, fuser._basic_ops[0].w]
    same(grads((y, extra), wrt), grads(expected, wrt))
    assert fuser.num_extra_inputs == 1
    assert fuser._forward_ops == [(op, [n]) for n, op in enumerate(fuser._basic_ops)]


def test_a_fuser_takes_keywords_per_basic_operation() -> None:
    fuser = OperationFuser([AddTwo(), Square()])
    x = randn(2, 3)
    same(fuser(x, x, x, basic_op_kwargs=[{"factor": 3}, {}]), (5 * x) ** 2)


def test_operations_that_override_preparation() -> None:
    seen: list[Any] = []

    class Prepares(Square):
        def pre_first_fuser_forward(self) -> None:
            seen.append("first")

        def pre_fuser_forward(self, *, requires_grad: bool) -> None:
            seen.append(requires_grad)

    seq, x = opfuser.Sequential(Prepares(), Prepares()), randn(2, 3)
    seq(x)
    seq(x.requires_grad_())
    with torch.no_grad():
        seq(x)
    assert seen == ["first", "first", False, False, True, True, False, False]


# ---------------------------------------------------------------------- placed by the user


@pytest.mark.parametrize("kind", [ForwardScales, BackwardScales, JointScales])
def test_a_fused_operation_placed_by_the_user_runs_its_own_kernels(kind: Any) -> None:
    kind.runs = 0
    scales = [Scale(3), Scale(3)]
    mine = kind(scales) if kind is BackwardScales else kind(first=scales[0], second=scales[1])
    seq = opfuser.Sequential(Times(), mine, Square())
    x = randn(2, 3, grad=True)
    expected = (x * seq[0].w * scales[0].scale * scales[1].scale) ** 2
    wrt = [x, *seq.parameters()]
    assert len(wrt) == 4
    same(seq(x), expected)
    same(grads(seq(x), wrt), grads(expected, wrt))
    assert kind.runs == (1 if kind is BackwardScales else 2)
    assert [n for n, _ in seq.named_parameters()] == [
        "0.w", "1.basic_ops.0.scale", "1.basic_ops.1.scale",
    ]  # fmt: skip
    same(mine(x), x * 9)
    same(grads(mine(x), [x]), grads(x * 9, [x]))


def test_a_fusion_by_class_without_kernels_for_a_pass() -> None:
    """What is missing is the parts' work, by name where nothing can be done."""

    class Neither(FusedOperation):
        pass

    compound = Neither([Scale(3), Scale(3)])
    x = randn(2, 3)
    same(opfuser.Sequential(compound)(x), x * 9)
    same(compound(x), x * 9)
    with pytest.raises(NotImplementedError, match=r"must implement fuser_forward \(Neither\)"):
        FusibleOperation.fuser_forward(
            compound, [], x, basic_op_extra_inputs=[], prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None, basic_op_kwargs=[],
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"must implement fuser_backward \(Neither\)"):
        FusibleOperation.fuser_backward(compound, [], x, basic_op_grad_extra_outputs=[])


@pytest.mark.parametrize("method", ["op_forward", "op_backward"])
def test_a_basic_operation_without_a_pass(method: str) -> None:
    half = {
        "op_forward": type("Half", (BasicOperation,), {}),
        "op_backward": type("Half", (BasicOperation,), {"op_forward": lambda s, c, x, **k: x * 1}),
    }[method]
    with pytest.raises(NotImplementedError, match=rf"must implement {method} \(Half\)"):
        half()(randn(2, grad=True)).sum().backward()


def test_fused_operations_of_nothing_or_of_modules() -> None:
    with pytest.raises(ValueError, match=r"at least one basic operation \(BackwardScales\)"):
        BackwardScales([])
    with pytest.raises(TypeError, match=r"consists of operations\. Received: Tanh"):
        BackwardScales([nn.Tanh()])
