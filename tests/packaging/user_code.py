"""What the documentation shows, as users write it who check their types.

``make check`` runs mypy --strict on it; test_user_code.py runs what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import opfuser
from opfuser import (
    AddExtraInput,
    BasicOperation,
    ConstantScale,
    Env,
    FusedOperation,
    FusibleOperation,
    Linear,
    MakeExtraOutput,
    OperationContext,
    Optional,
    Plan,
    PointwiseOperation,
    Refusal,
    Repeated,
    Residual,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    SwiGLU,
)
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.recipe import Recipe
from opfuser.registry import effective
from opfuser.testing import check_fusion, check_op


class LayerScale(BasicOperation):
    """With the keywords that an operation is always given, and one of its own."""

    backward_reads_parameters = True

    class Saved(NamedTuple):
        input: Tensor | None

    class Settings(NamedTuple):
        scale: float

    def __init__(self, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.gamma = nn.Parameter(torch.ones(size))

    def make_settings(self) -> LayerScale.Settings:
        return self.Settings(self.scale)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        negate: bool = False,
    ) -> Tensor:
        ctx.sign = -1 if negate else 1
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(input_ if ctx.needs.parameters[0] else None))
        return self.reference(input_, negate=negate)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor | None]]:
        settings: LayerScale.Settings = self.frozen_settings(ctx)
        (x,), (gamma,) = ctx.saved_tensors, ctx.parameters
        dy = grad_output * (ctx.sign * settings.scale)
        dx = dy * gamma if ctx.needs.input else None
        return dx, ((dy * x).sum_to_size(gamma.shape) if ctx.needs.parameters[0] else None,)

    def reference(self, input_: Tensor, *, negate: bool = False) -> Tensor:
        return input_ * self.gamma * (-self.scale if negate else self.scale)


class Negative(BasicOperation):
    """Without the keywords."""

    def op_forward(self, ctx: OperationContext, input_: Tensor, **unused: Any) -> Tensor:
        return -input_

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        return -grad_output, []

    def reference(self, input_: Tensor) -> Tensor:
        return -input_


class SquaredError(BasicOperation):
    """With an extra input."""

    num_extra_inputs = 1

    class Saved(NamedTuple):
        difference: Tensor

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        **unused: Any,
    ) -> tuple[Tensor, list[tuple[()]]]:
        (ctx,), ((target,),) = basic_op_ctxs, basic_op_extra_inputs
        assert target is not None
        difference = input_ - target
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(difference))
        return difference.square().sum(), [()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, list[tuple[()]], list[tuple[Tensor | None]]]:
        (ctx,) = basic_op_ctxs
        (difference,) = ctx.saved_tensors
        dx: Tensor = 2 * grad_output * difference
        dtarget = -dx if ctx.needs.extra_inputs[0] else None
        return dx if ctx.needs.input else None, [()], [(dtarget,)]

    def reference(self, input_: Tensor, target: Tensor) -> Tensor:
        return (input_ - target).square().sum()


class Swish(PointwiseOperation):
    """By its mathematics alone."""

    def value(self, x: Tensor) -> Tensor:
        (beta,) = self.constants
        return x * torch.sigmoid(beta * x)


class ScaleAdd(FusedOperation):
    """Forward of ConstantScale and AddExtraInput."""

    def __init__(self, scale: ConstantScale, add: AddExtraInput, env: Env | None = None) -> None:
        super().__init__((scale, add))

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        **unused: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        scale, add = self.basic_ops
        (z,) = basic_op_extra_inputs[1]
        assert isinstance(scale, ConstantScale)
        assert z is not None
        if z.shape != input_.shape or z.dtype != input_.dtype:
            y: Tensor = add.reference(scale.reference(input_), z)
            return y, [(), ()]
        return torch.add(z, input_, alpha=scale.scale), [(), ()]


def refuses(scale: ConstantScale, add: AddExtraInput, *, env: Env) -> Refusal | None:
    if env.autocast_dtype is not None:
        return Refusal("AUTOCAST", f"{scale} computes in {env.compute_dtype}")
    return None


SCALE_ADD = opfuser.Fusion(
    name="user_scale_add",
    stage="forward",
    pattern=(ConstantScale, AddExtraInput),
    refuses=refuses,
    build=ScaleAdd,
)


class Negatives(FusedOperation):
    """Any number of Negatives, in both passes."""

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        return input_ * (-1) ** len(self.basic_ops), [()] * len(self.basic_ops)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]], Sequence[Sequence[Tensor]]]:
        nothing = [()] * len(self.basic_ops)
        return grad_output * (-1) ** len(self.basic_ops), nothing, nothing


NEGATIVES = opfuser.Fusion(
    name="user_negatives",
    stage="joint",
    pattern=(Repeated("Negative", lambda op: type(op) is Negative, at_least=2),),
    build=Negatives,
)


def fuse_nothing(
    ops: Sequence[FusibleOperation], *, recipe: Recipe | None, **unused: Any
) -> list[FusibleOperation]:
    """A fusion as te.ops has them."""
    return list(ops)


def decorated() -> None:
    @opfuser.fusion(name="user_decorated", stage="backward", pattern=(LayerScale, Optional(Swish)))
    class Decorated(FusedOperation):
        def __init__(self, scale: LayerScale, swish: Swish | None) -> None:
            super().__init__((scale,) if swish is None else (scale, swish))

    Decorated.handle.enabled = False
    Decorated.handle.remove()


def checks() -> None:
    check_op(LayerScale(6), torch.randn(5, 6))
    check_op(SquaredError(), torch.randn(5, 6), torch.randn(5, 6))
    check_op(Swish(1.5), torch.randn(5, 6))
    with opfuser.register_forward_fusion(SCALE_ADD) as handle:
        x, z = torch.randn(5, 6), torch.randn(5, 6)
        check_fusion(handle.name, [ConstantScale(0.5), AddExtraInput()], x, z)
    with opfuser.register_forward_backward_fusion(NEGATIVES, prepend=True):
        check_fusion("user_negatives", [Negative(), Negative()], torch.randn(5, 6))
    opfuser.register_backward_fusion(fuse_nothing, name="user_nothing").remove()


def channels() -> Tensor:
    tap = MakeExtraOutput()
    tap.set_extra_output_channel(0, "skip", output_to_caller=False)
    read = AddExtraInput().set_extra_input_channel(0, "skip")
    model = Sequential({"tap": tap, "linear": Linear(8, 8), "add": read})
    model.append(LayerScale(8)).extend([Swish(1.0), Residual(Linear(8, 8))])
    y: Tensor = model(torch.randn(3, 8), op_kwargs={3: {"negate": True}})
    return y


def rotated() -> Tensor:
    rope = RotaryEmbedding(2, 4)
    y: Tensor = Sequential(Linear(8, 24), rope)(
        torch.randn(2, 5, 8), op_kwargs={rope: {"positions": torch.arange(1, 6)}}
    )
    return y


def explained() -> list[str]:
    model = Residual(Linear(8, 8), ConstantScale(0.1))
    plan: Plan = model.plan(torch.randn(3, 8))
    record = plan.record("forward_linear_scale_add")
    lines = [f"{step.indices} {type(step.op).__name__}" for step in plan.forward]
    return [*lines, record.status, *(f"{index}: {why.code}" for index, why in record.refusals)]


def train(recipe: Recipe | None, steps: int = 60) -> tuple[list[float], tuple[int, ...]]:
    block = Residual(RMSNorm(32), Linear(32, 128), SwiGLU(), Linear(64, 32))
    model = Sequential(Linear(16, 32), block, Linear(32, 1), replay="off")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(steps):
        x = torch.randn(64, 16)
        with opfuser.autocast(enabled=recipe is not None, recipe=recipe):
            loss = nn.functional.mse_loss(model(x), x.square().sum(-1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    plan = model.last_plan
    return losses, () if plan is None else plan.quantized


def train_decoder() -> Tensor:
    config = DecoderConfig(vocab_size=32, dim=16, num_layers=1, num_heads=2)
    model = decoder_lm(config)
    optimizer = opfuser.optim.MasterWeights(model, torch.optim.AdamW, lr=1e-3)
    tokens = torch.randint(32, (2, 9))
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def without_norm_linear() -> list[str]:
    with opfuser.disable("norm_linear"):
        return [info.name for info in opfuser.fusions() if info.disabled_by]


def configured() -> list[str]:
    off = {"joint": {"norm_linear": {"enabled": False, "dtypes": [torch.bfloat16]}}}
    with opfuser.fusion_config(off) as block:
        model = Sequential(RMSNorm(8), Linear(8, 8), fusion_config=block.config)
        record = model.plan(torch.randn(3, 8)).record("norm_linear")
        rows = [row.origin for row in effective(model.fusion_config) if row.name == "norm_linear"]
    return [record.detail, *rows, *(plugin.error for plugin in opfuser.plugins())]
