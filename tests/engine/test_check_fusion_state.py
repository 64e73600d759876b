"""check_fusion finds what shows only later, elsewhere or in memory; default arguments do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opfuser import BasicLinear, Bias, ConstantScale
from opfuser.fusion import Fusion
from opfuser.gemm import dgrad, wgrad
from opfuser.op import BasicOperation, FusedOperation, OperationContext
from opfuser.testing import check_fusion


class Gain(BasicOperation):
    """``y = gain x``, with a factor in a buffer, and a flag that turns the sign."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.tensor(1.5))
        self.negative = False

    def factor(self, like: Tensor) -> Tensor:
        return (-self.gain if self.negative else self.gain).to(like.dtype)

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        ctx.factor = self.factor(input_)
        return input_ * ctx.factor

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        return grad_output * ctx.factor, ()


class Right(FusedOperation):
    """``y = gain s x Wᵀ``, both passes, with steps that are open to being spoilt."""

    def __init__(self, linear: BasicLinear, scale: ConstantScale, gain: Gain) -> None:
        super().__init__((linear, scale, gain))
        self.capture(linear, scale, gain)

    def capture(self, linear: BasicLinear, scale: ConstantScale, gain: Gain) -> None:
        """What a fault keeps from construction."""

    def weight(self) -> Tensor:
        return self.basic_ops[0].weight

    def factor(self, x: Tensor) -> Any:
        return self.basic_ops[1].scale * self.basic_ops[2].factor(x)

    def compute(self, ctxs: Any, x: Tensor, w: Tensor, s: Any) -> Tensor:
        return nn.functional.linear(x, w) * s

    def save(self, ctx: Any, x: Tensor, w: Tensor) -> None:
        if ctx.requires_grad:
            needs = ctx.needs
            ctx.save_for_backward(x if needs.parameters[0] else None, w if needs.input else None)

    def fuser_forward(self, ctxs: Any, x: Tensor, **kwargs: Any) -> Any:
        w = self.weight()
        x = x.to(w.dtype)
        s = self.factor(x)
        self.save(ctxs[0], x, w)
        ctxs[0].factor = s
        return self.compute(ctxs, x, w, s), [(), (), ()]

    def saved(self, ctx: Any) -> Any:
        return ctx.saved_tensors

    def grads(self, dx: Tensor | None, dw: Tensor | None) -> Any:
        return dx, dw

    def fuser_backward(self, ctxs: Any, dy: Tensor, **kwargs: Any) -> Any:
        ctx = ctxs[0]
        x, w = self.saved(ctx)
        dy = dy * ctx.factor
        dx = dgrad(dy, w) if ctx.needs.input else None
        dw = wgrad(dy, x) if ctx.needs.parameters[0] else None
        dx, dw = self.grads(dx, dw)
        return dx, [(dw,), (), ()], [(), (), ()]


def _keep(**what: Callable[[Any, Any, Any], Any]) -> Callable[..., None]:
    """A constructor's step that keeps values of linear, scale and gain under these names."""

    def capture(self: Any, *ops: Any) -> None:
        for name, value in what.items():
            self.__dict__[name] = value(*ops)

    return capture


def _where(wrong: Callable[[Any, Any, Tensor], bool]) -> Callable[..., Tensor]:
    """Computes something else where ``wrong`` says so."""

    def compute(self: Any, ctxs: Any, x: Tensor, w: Tensor, s: Any) -> Tensor:
        y = nn.functional.linear(x, w) * s
        return y * 1.1 if wrong(self, ctxs, x) else y

    return compute


def _saves(tensors: Callable[[Any, Tensor, Tensor], Any]) -> Callable[..., None]:
    def save(self: Any, ctx: Any, x: Tensor, w: Tensor) -> None:
        if ctx.requires_grad:
            ctx.save_for_backward(*tensors(ctx.needs, x, w))

    return save


def spoilt(**methods: Any) -> type[Right]:
    return type("Spoilt", (Right,), methods)


PLANTED: dict[str, tuple[type[Right], str]] = {
    "a parameter captured": (
        spoilt(
            capture=_keep(w=lambda linear, scale, gain: linear.weight),
            weight=lambda op: op.w,
        ),
        "is wrong.*parameters replaced between two calls",
    ),
    "values of a parameter captured": (
        spoilt(
            capture=_keep(w=lambda linear, scale, gain: linear.weight.detach().clone()),
            compute=lambda op, ctxs, x, w, s: nn.functional.linear(x, op.w) * s,
        ),
        "is wrong.*parameters changed in place between two calls",
    ),
    "a buffer captured": (
        spoilt(
            capture=_keep(g=lambda linear, scale, gain: float(gain.gain)),
            factor=lambda op, x: (
                op.basic_ops[1].scale * op.g * (-1 if op.basic_ops[2].negative else 1)
            ),
        ),
        "is wrong.*parameters changed in place between two calls",
    ),
    "a scale captured": (
        spoilt(
            capture=_keep(s=lambda linear, scale, gain: scale.scale),
            factor=lambda op, x: op.s * op.basic_ops[2].factor(x),
        ),
        r"is wrong.*during forward .*2\.scale = 0\.5",
    ),
    "a scale captured for good": (
        spoilt(
            capture=_keep(s=lambda linear, scale, gain: scale.scale),
            factor=lambda op, x: op.s * op.basic_ops[2].factor(x),
        ),
        r"is wrong.*between two calls .*2\.scale = 0\.25",
    ),
    "a flag captured for good": (
        spoilt(
            capture=_keep(n=lambda linear, scale, gain: gain.negative),
            factor=lambda op, x: (
                op.basic_ops[1].scale * op.basic_ops[2].gain.to(x.dtype) * (-1 if op.n else 1)
            ),
        ),
        r"is wrong.*between two calls 3\.negative = True",
    ),
    "a dtype captured": (
        spoilt(
            capture=_keep(dtype=lambda linear, scale, gain: torch.get_default_dtype()),
            compute=lambda op, ctxs, x, w, s: (nn.functional.linear(x, w) * s).to(op.dtype),
        ),
        r"Expected torch\.bfloat16 .*all in torch\.bfloat16 between two calls.*: torch\.float32",
    ),
    "a dtype captured for good": (
        spoilt(
            capture=_keep(dtype=lambda linear, scale, gain: linear.weight.dtype),
            compute=lambda op, ctxs, x, w, s: (nn.functional.linear(x, w) * s).to(op.dtype),
        ),
        r"Expected torch\.bfloat16 .*all in torch\.bfloat16 between two calls.*: torch\.float32",
    ),
    "the dtype of the input": (
        spoilt(
            fuser_forward=lambda op, ctxs, x, **kwargs: (
                (r := Right.fuser_forward(op, ctxs, x))[0].to(x.dtype),
                r[1],
            )
        ),
        r"Expected torch\.float32 .*input in torch\.bfloat16 and parameters not.*: torch\.bfloat16",
    ),
    "wrong without gradients": (
        spoilt(compute=_where(lambda op, ctxs, x: not ctxs[0].requires_grad)),
        "output is wrong.*joint fused, under no_grad",
    ),
    "wrong in eval mode": (
        spoilt(compute=_where(lambda op, ctxs, x: not op.basic_ops[0].training)),
        "output is wrong.*joint fused, in eval mode",
    ),
    "wrong in inference": (
        spoilt(compute=_where(lambda op, ctxs, x: torch.is_inference_mode_enabled())),
        "output is wrong.*joint fused, in eval and inference mode",
    ),
    "wrong for one row": (
        spoilt(compute=_where(lambda op, ctxs, x: x.numel() == x.shape[-1])),
        "output is wrong.*joint fused, one row",
    ),
    "fails without rows": (
        spoilt(compute=lambda op, ctxs, x, w, s: nn.functional.linear(x, w) * s + 0 * x.max()),
        r"The call failed .*joint fused, zero rows\)\. Received: max",
    ),
    "wrong without rows": (
        spoilt(
            grads=lambda op, dx, dw: (dx, None if dw is None or not len(dw) else dw),
            fuser_backward=lambda op, ctxs, dy, **kwargs: (
                (r := Right.fuser_backward(op, ctxs, dy))[0],
                [(r[1][0][0] if dy.numel() else torch.full((3, 4), torch.nan),), (), ()],
                r[2],
            ),
        ),
        r"gradient of parameter 1\.weight is wrong.*zero rows",
    ),
    "an input gradient of another dtype": (
        spoilt(grads=lambda op, dx, dw: (None if dx is None else dx.double(), dw)),
        r"Expected torch\.float32 .*gradient of the input\)\. Received: torch\.float64.*Cast it",
    ),
    "a parameter gradient of another dtype": (
        spoilt(grads=lambda op, dx, dw: (dx, None if dw is None else dw.double())),
        r"Expected torch\.float32 .*weight of op 1 \(BasicLinear\)\)\. Received: torch\.float64",
    ),
    "a parameter gradient in fp32 whatever the parameter": (
        spoilt(grads=lambda op, dx, dw: (dx, None if dw is None else dw.float())),
        r"Expected torch\.bfloat16 .*weight of op 1 \(BasicLinear\)\)\. Received: torch\.float32",
    ),
    "a parameter read in backward": (
        spoilt(saved=lambda op, ctx: (ctx.saved_tensors[0], op.weight())),
        "gradient of .* is wrong.*parameters replaced between forward and backward",
    ),
    "saves without gradients": (
        spoilt(save=lambda op, ctx, x, w: ctx.save_for_backward(x, w)),
        r"Nothing may be saved without ctx\.requires_grad .*op 1 \(BasicLinear\).*: 2 tensors",
    ),
    "saves the input of a frozen weight": (
        spoilt(save=_saves(lambda needs, x, w: (x, w if needs.input else None))),
        "A fusion may save 4 bytes, .*only the input requires grad.*Received: 84 bytes",
    ),
    "saves the weight where the input needs no gradient": (
        spoilt(save=_saves(lambda needs, x, w: (x if needs.parameters[0] else None, w))),
        r"nothing else .*only the last parameter .*saved for op 1 .*tensor 1, torch\.float32",
    ),
    "saves the output besides": (
        spoilt(
            save=_saves(
                lambda needs, x, w: (
                    x if needs.parameters[0] else None,
                    w if needs.input else None,
                    x @ w.t(),
                )
            ),
            saved=lambda op, ctx: ctx.saved_tensors[:2],
        ),
        "A fusion may save 84 bytes, as the unfused.*Received: 144 bytes",
    ),
    "keeps the output on the context": (
        spoilt(
            fuser_forward=lambda op, ctxs, x, **kwargs: (
                (r := Right.fuser_forward(op, ctxs, x))[0],
                (setattr(ctxs[1], "kept", [{"y": r[0]}]), r[1])[1],
            )
        ),
        "A fusion may save .* bytes, as the unfused",
    ),
}


def rule(build: Callable[..., FusedOperation]) -> Fusion:
    return Fusion("mine", "joint", (BasicLinear, ConstantScale, Gain), build)


def operations(*first: nn.Module) -> list[nn.Module]:
    return [*first, BasicLinear(4, 3), ConstantScale(0.5), Gain()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_right_fusion_passes(dtype: torch.dtype) -> None:
    check_fusion(rule(Right), operations(Bias(4)), torch.randn(5, 4), dtypes=[dtype])
    check_fusion(rule(Right), operations(Bias(4)), torch.randn(2, 3, 4), dtypes=[dtype])


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    cls, text = PLANTED[fault]
    kept: dict[int, FusedOperation] = {}

    def once(linear: BasicLinear, *others: Any) -> FusedOperation:
        return kept.setdefault(id(linear), cls(linear, *others))

    build = once if "for good" in fault else cls
    with pytest.raises(AssertionError, match=f"(?s){text}") as error:
        check_fusion(rule(build), operations(Bias(4)), torch.randn(5, 4))
    assert "fusion 'mine'" in str(error.value)


def test_a_fusion_may_say_that_it_saves_more() -> None:
    """This one saves its input twice, and reads both."""
    cls = spoilt(
        save=_saves(
            lambda needs, x, w: (
                (x, w if needs.input else None, x.clone()) if needs.parameters[0] else (None, w)
            )
        ),
        saved=lambda op, ctx: (
            ctx.saved_tensors
            if ctx.saved_tensors[0] is None
            else ((ctx.saved_tensors[0] + ctx.saved_tensors[2]) / 2, ctx.saved_tensors[1])
        ),
    )
    ops = [BasicLinear(4, 3), ConstantScale(0.5), Gain()]
    with pytest.raises(
        AssertionError, match=r"may save 84 bytes.*: 164 bytes\..*saves_more = True"
    ):
        check_fusion(rule(cls), ops, torch.randn(5, 4))
    said = type("Said", (cls,), {"saves_more": True})
    check_fusion(rule(said), ops, torch.randn(5, 4))
