"""Calls unlike the recorded one: other values, modules, inputs and keywords take effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import Linear, RMSNorm, Sequential
from opfuser.core.change_tracking import active_calls
from opfuser.engine.recorded.recordable import unrecorded
from opfuser.op import BasicOperation, OperationContext
from tests.engine.recorded_toys import (
    ENOUGH,
    D,
    assert_same,
    block,
    both,
    image,
    mlp,
    output,
    passes,
    record,
    twin,
)


def _linears(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, Linear)]


def _transpose_weights(module: nn.Module) -> None:
    for layer in _linears(module):
        layer.weight.data = layer.weight.data.t().contiguous().t()


def _replace_weights(module: nn.Module) -> None:
    for layer in _linears(module):
        layer.weight = nn.Parameter(layer.weight.detach() + 1)


def _tie_biases(module: nn.Module) -> None:
    first, *others = _linears(module)
    for other in others:
        if other.bias.shape == first.bias.shape:
            other.bias = first.bias


def _each(change: Callable[[nn.Parameter], object], step: int = 1) -> Callable[[nn.Module], None]:
    def changes(module: nn.Module) -> None:
        for p in list(module.parameters())[::step]:
            change(p)

    return changes


CHANGES: dict[str, Callable[[Any], Any]] = {
    "transposed weights": _transpose_weights,
    "other weights": _replace_weights,
    "tied biases": _tie_biases,
    "eps": lambda m: setattr(next(n for n in m.modules() if isinstance(n, RMSNorm)), "eps", 0.5),
    "other values": _each(lambda p: p.data.mul_(2)),
    "moved": _each(lambda p: setattr(p, "data", p.data.clone())),
    "partly frozen": _each(lambda p: p.requires_grad_(False), 2),
    "double": nn.Module.double,
    "eval": nn.Module.eval,
    "trained": nn.Module.requires_grad_,
}


@pytest.mark.parametrize("make", [block, mlp])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_module_take_effect(change: str, make: Callable[[], Sequential]) -> None:
    module = make()
    x = image()
    record(module, x)
    other = twin(make, module)
    for each in (module, other):
        CHANGES[change](each)
    x = x.detach().to(next(module.parameters()).dtype).requires_grad_()
    with unrecorded():
        theirs = both(other, x)
    for _ in range(ENOUGH):
        assert_same(both(module, x), theirs)


class _Times(BasicOperation):
    recordable = True

    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        return input_ * self.factor

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        return None, ()


@pytest.mark.parametrize(("before", "after"), [(1, 1.0), (True, 1.0), (1.0, True), (1, True)])
def test_equal_numbers_of_another_type_take_effect(before: Any, after: Any) -> None:
    module, x = Sequential(_Times(before)), torch.tensor([True, False])
    for factor in (before, after, before):
        module[0].factor = factor
        for _ in range(ENOUGH):
            y, expected = module(x), x * factor
            assert y.dtype is expected.dtype
            assert torch.equal(y, expected)


def test_the_sign_of_zero_takes_effect() -> None:
    x = torch.ones(3, requires_grad=True)
    module = Sequential(opfuser.ConstantScale(0.0))
    for zero in (0.0, -0.0, 0.0):
        module[0].scale = zero
        for _ in range(ENOUGH):
            y = module(x)
            (dx,) = torch.autograd.grad(y.sum(), x)
            for t in (y, dx):
                assert torch.equal(t.signbit(), torch.full((3,), zero).signbit())


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.randn(2, 3, D)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.randn(3, D).expand(2, 3, D),
    "strided": lambda: torch.randn(2, 3, 2 * D)[..., ::2],
    "other rows": lambda: torch.randn(5, 3, D),
    "two dimensions": lambda: torch.randn(6, D),
    "empty": lambda: torch.randn(0, 3, D),
    "of inference mode": _inference,
    "double": lambda: torch.randn(2, 3, D, dtype=torch.float64),
}


@pytest.mark.parametrize("call", [both, output])
@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_other_kinds(kind: str, call: Callable[..., list[Tensor]]) -> None:
    module = mlp()
    record(module, image(), call=call)
    x = INPUTS[kind]()
    if x.dtype == torch.float64:
        module.double()
    if x.is_inference():
        module.requires_grad_(False)
        call = output
    with unrecorded():
        theirs = call(twin(mlp, module).to(x.dtype), x)
    for _ in range(ENOUGH):
        assert_same(call(module, x), theirs)


class _Wrapped(Tensor):
    """A subclass, which may mean anything."""


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3, D).to_sparse(),
    "csr": lambda: torch.eye(3, D).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(D), torch.ones(2 * D)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(3, D)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_other_layouts(layout: str) -> None:
    """Also where they claim the sizes and strides of the tensor that was recorded."""
    x = LAYOUTS[layout]()
    module = opfuser.ReLU()
    record(module, torch.zeros(()).expand(3, D), call=output)
    with unrecorded():
        theirs = opfuser.ReLU()(x)
    for _ in range(ENOUGH):
        with passes() as names:
            (ours,) = output(module, x)
        assert not names
        assert (type(ours), ours.layout) == (type(theirs), theirs.layout)
        if x.layout is not torch.jagged and not x.is_nested:
            assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_a_subclass_of_tensor_runs_the_program() -> None:
    module = mlp()
    x = torch.randn(2, 3, D)
    record(module, x, call=output)
    with passes() as names:
        output(module, x.as_subclass(_Wrapped))
    assert not names


def test_a_number_that_another_operation_sets() -> None:
    """No plan depends on it, since it is set during a forward pass; the next operation reads it."""
    norm = RMSNorm(D)
    norm.eps = 1e-5
    x = image(grad=False)
    record(norm, x, call=output)
    for eps in (0.5, 2.0, 0.5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(active_calls, "depth", 1)
            norm.eps = eps
        with unrecorded():
            other = RMSNorm(D, eps=eps)
            assert_same(output(norm, x), output(other, x))


def test_parameters_of_functional_call() -> None:
    module, x = block(), image()
    record(module, x)
    own = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    y = torch.func.functional_call(module, own, (x,))
    with unrecorded():
        theirs = torch.func.functional_call(twin(block, module), own, (x,))
    assert_same([y], [theirs])


def masked(module: Sequential, x: Tensor, mask: Tensor, **keywords: Any) -> list[Tensor]:
    """The output of attention with a mask, and gradients."""
    own = {"mask": mask, **keywords}
    y = module(x, op_kwargs={1: own})
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def with_mask() -> Sequential:
    attention = opfuser.DotProductAttention(2)
    return Sequential(opfuser.BasicLinear(D, 3 * D), attention, opfuser.BasicLinear(D, D))


def test_keywords_of_operations() -> None:
    """Tensors among them are arguments of what was recorded, all else tells calls apart."""
    module, x = with_mask(), image()
    masks = [torch.rand(2, 1, 3, 3) > 0.3 for _ in range(6)]
    for mask in masks:
        mask[..., 0] = True
    wanted = []
    with unrecorded():
        other = twin(with_mask, module)
        wanted = [masked(other, x, mask) for mask in masks]
    with passes() as names:
        for mask, own in zip(masks, wanted):
            assert_same(masked(module, x, mask), own)
    assert names.count("forward") >= 4
    names.clear()
    with passes() as names:
        assert_same(masked(module, x, masks[0][:, :, :1].expand(2, 1, 3, 3)), masked(
            other, x, masks[0][:, :, :1].expand(2, 1, 3, 3)))  # fmt: skip
        module(x)
    assert not names, "other strides, and a call without keywords, are other kinds"


class Times(BasicOperation):
    """Multiplies by a keyword."""

    recordable = True

    def op_forward(
        self, ctx: OperationContext, input_: Tensor, *, factor: Any = 1, **kwargs: Any
    ) -> Tensor:
        ctx.factor = float(factor.scale if isinstance(factor, Factor) else factor)
        return input_ * ctx.factor

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        return grad_output * ctx.factor, ()


class Factor:
    """What no guard compares."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_keywords_that_are_numbers() -> None:
    module, x = Sequential(Times()), image()
    for factor in (2, 2.0, True, 2, 3, 2.0, True, 2, 3, 2.0, True, 1, 3, 3, Factor(5.0)):
        for _ in range(2):
            y = module(x, op_kwargs={0: {"factor": factor}})
            number = float(factor.scale if isinstance(factor, Factor) else factor)
            assert torch.equal(y, x * number)
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, number))
    with passes() as names:
        module(x, op_kwargs={0: {"factor": 3}})
    assert names == ["forward"]
    with passes() as names:
        for _ in range(ENOUGH):
            module(x, op_kwargs={0: {"factor": Factor(5.0)}})
    assert not names
