"""The feed-forward networks of experts in both passes, which save no copy of a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import Unpack

from ..basic._grouped_products import PLAIN, GroupedProducts
from ..basic.grouped_linear import GroupedLinear
from ..basic.permute import Permute
from ..basic.scaled_activation import (
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
    _ScaledActivation,
)
from ..core.buffer_reuse import only_reference
from ..core.context import (
    BackwardResult,
    Contexts,
    Extras,
    ForwardArguments,
    ForwardResult,
    GradNeeds,
    OperationContext,
)
from ..core.fusion import Env, Fusion, Optional, Refusal
from ..gemm import RowGroups
from ..kernels.scalar import cast
from ..op import BasicOperation, FusedOperation


class _Unsaved(GroupedProducts):
    """Products whose input is recomputed in backward."""

    def forward(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        groups: RowGroups,
        *,
        out: Tensor | None,
        save: bool,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return super().forward(x, weights, groups, out=out, save=False)


_UNSAVED = _Unsaved()

# Which extra output of Permute has gradients.
_WEIGHTS = 2


class _Channel(NamedTuple):
    """An extra input that is an extra output of Permute.

    Attributes:
        op, slot: the operation, among those that are fused, and which of its extra inputs.
        source: which of the extra outputs.
    """

    op: int
    slot: int
    source: int


class GroupedMLP(FusedOperation):
    r"""Permute, GroupedLinear, a scaled activation and GroupedLinear.

    .. math:: y_r = s_r\, f(x_{t(r)} W_e^T + b_e)\, V_e^T + c_e

    for row r of expert e, whose token is t(r). Permute is optional: x are rows then. f is a plain
    or gated activation, s its scales, such as the weights of the router.

    Saves x by token, the activation's input and the scales; the rows that Permute copies and the
    activation's output are recomputed in backward, by the copy that made them and by the kernel
    of the activation's gradients. For T tokens of k experts, D features outside and F inside, these
    are k T (D + F) elements less of about k T (D + 3 F). The gradient of the activation's input
    overwrites it if nothing else refers to it.

    Kernels: those of the operations that it replaces; no GEMM runs twice. Where the sizes of groups
    are on a GPU, it waits for them as :class:`GroupedLinear` does.

    Args:
        linear1: the first linear operation.
        activation: the activation.
        linear2: the second linear operation.
        permute: what copies tokens to the rows of their experts, or None.

    Raises:
        InputError: in forward, as in the operations that it replaces.
    """

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        return self.linear1.replayable and self.linear2.replayable

    def __init__(
        self,
        *,
        linear1: GroupedLinear,
        activation: _ScaledActivation,
        linear2: GroupedLinear,
        permute: Permute | None = None,
    ) -> None:
        super().__init__([*([] if permute is None else [permute]), linear1, activation, linear2])
        self.permute, self.linear1 = permute, linear1
        self.activation, self.linear2 = activation, linear2
        # Which extra inputs read which extra output of Permute; Dynamo of torch 2.11 could not
        # compare the names.
        made = [] if permute is None else permute._extra_output_channels
        self._made = {
            (at, slot): made.index(channel)
            for at, op in enumerate(self.basic_ops)
            for slot, channel in enumerate(op._extra_input_channels)
            if channel is not None and channel in made
        }

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        first, act, second = basic_op_ctxs[-3:]
        extras = given["basic_op_extra_inputs"]
        kwargs = given["basic_op_kwargs"]
        rows, recomputes_rows = input_, False
        of_permute: Extras = []
        if self.permute is not None:
            ctx, own = basic_op_ctxs[0], _given(extras[0], kwargs[0])
            rows, of_permute = self.permute.fuser_forward([ctx], input_, **own)
            ctx.inner = self._inner(extras)
            extras = _filled(extras, of_permute[0], ctx.inner)
            _narrow(basic_op_ctxs, ctx.inner)
            recomputes_rows = first.requires_grad and self.linear1.wants_weights(first)
            if ctx.requires_grad:
                reads_map = recomputes_rows or ctx.needs.input or any(ctx.needs.extra_inputs)
                row_map = of_permute[0][0] if reads_map else None
                # In place of what Permute saves.
                ctx.to_save = row_map, input_ if recomputes_rows else None
        products = _UNSAVED if recomputes_rows else PLAIN
        x, _ = self.linear1.forward_by(products, first, rows, _given(extras[-3], kwargs[-3]))
        del rows
        h, _ = self.activation.fuser_forward([act], x, **_given(extras[-2], kwargs[-2]))
        products = _UNSAVED if second.needs.input else PLAIN
        y, _ = self.linear2.forward_by(products, second, h, _given(extras[-1], kwargs[-1]))
        for ctx in (first, act, second):
            if ctx.requires_grad and not _owes(ctx):
                ctx.to_save = ()
        if act.to_save:
            reads_scales = act.needs.input or self.linear2.wants_weights(second)
            act.to_save = act.to_save[0], act.to_save[1] if reads_scales else None
        return y, [*of_permute, (), (), ()]

    def _inner(self, extras: Extras) -> tuple[_Channel, ...]:
        """The extra inputs that Permute makes: the engine leaves them out."""
        return tuple(
            _Channel(at, slot, self._made[at, slot])
            for at, row in enumerate(extras)
            for slot, given in enumerate(row)
            if given is None
        )

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        first, act, second = basic_op_ctxs[-3:]
        parameters: list[Sequence[Tensor | None]] = [
            (None,) * len(ctx.needs.parameters) for ctx in basic_op_ctxs
        ]
        extras: list[list[Tensor | None]] = [[None] * op.num_extra_inputs for op in self.basic_ops]

        dh, of_y = self.linear2.input_grad(PLAIN, second, grad_output)
        dx, grads, h = None, None, second.saved_tensors[2:]
        if dh is not None:
            grads = self.activation.gradients(
                act,
                dh,
                want_output=self.linear2.wants_weights(second),
                over_input=only_reference(act.saved_tensors),
            )
            dx, extras[-2][0] = grads.dx, grads.dscales
            del dh  # it is as large as the gradient of a weight
            h = (None if grads.y is None else cast(grads.y, of_y.dy.dtype),)
        own = self.linear2.parameter_grads(PLAIN, second, of_y, h)
        parameters[-1], extras[-1][1:] = own[0], [own[1]] if self.linear2.scale_bias else []
        del grads, h, of_y

        of_tokens: BackwardResult | None = None
        if dx is not None:
            drows, of_x = self.linear1.input_grad(PLAIN, first, dx)
            if not self.linear1.scale_bias:  # all that Permute's gradients are made of is there
                given = basic_op_grad_extra_outputs[0]
                of_tokens = self._of_tokens(basic_op_ctxs[0], drows, grad_output, extras, given)
                drows = drows if of_tokens is None else None  # before rows are recomputed
            saved: Sequence[Tensor | None] = first.saved_tensors[2:]
            if self.permute is not None and self.linear1.wants_weights(first):
                row_map, x = basic_op_ctxs[0].saved_tensors
                saved = (cast(self.permute.recompute(x, row_map), of_x.dy.dtype),)
            own = self.linear1.parameter_grads(PLAIN, first, of_x, saved)
            parameters[-3], extras[-3][1:] = own[0], [own[1]] if self.linear1.scale_bias else []
            dx = drows
        if of_tokens is None:
            given = basic_op_grad_extra_outputs[0]
            of_tokens = self._of_tokens(basic_op_ctxs[0], dx, grad_output, extras, given)
        if of_tokens is None:
            return dx if self.permute is None else None, parameters, extras
        return of_tokens[0], parameters, [*of_tokens[2], *extras[1:]]

    def _of_tokens(
        self,
        ctx: OperationContext,
        drows: Tensor | None,
        grad_output: Tensor,
        extras: Extras,
        given: Sequence[Tensor | None],
    ) -> BackwardResult | None:
        """The backward of Permute, if there is one that owes gradients.

        Args:
            ctx: of Permute.
            drows: gradient of the rows, if it is needed.
            grad_output: of the experts, which stands in for it if it is not.
            extras: gradients of extra inputs, of which some are outputs of Permute.
            given: gradients of Permute's extra outputs from elsewhere.
        """
        if self.permute is None or not _owes(ctx):
            return None
        of_outputs: list[Tensor | None] = [None] * self.permute.num_extra_outputs
        of_outputs[: len(given)] = given
        for at, slot, source in ctx.inner:
            of_outputs[source] = _sum(of_outputs[source], extras[at][slot])
        return self.permute.fuser_backward(
            [ctx],
            grad_output if drows is None else drows,
            basic_op_grad_extra_outputs=[of_outputs],
        )


def _filled(
    extras: Extras, outputs: Sequence[Tensor | None], inner: Sequence[_Channel]
) -> list[list[Tensor | None]]:
    """Extra inputs, with those that Permute makes."""
    own = [list(row) for row in extras]
    for at, slot, source in inner:
        own[at][slot] = outputs[source]
    return own


def _narrow(ctxs: Contexts, inner: Sequence[_Channel]) -> None:
    """Leaves out the needs that are only those of a gradient which Permute does not owe.

    For the engine every gradient is needed that reaches an operation whose backward runs.
    """
    permute, first, act, second = ctxs
    extras = [list(ctx.needs.extra_inputs) for ctx in ctxs]
    for at, slot, source in inner:
        extras[at][slot] = source == _WEIGHTS and permute.needs.extra_inputs[-1]
    before = permute.needs.input
    for ctx, own in zip((first, act, second), extras[1:]):
        ctx.needs = GradNeeds(ctx.needs.input and before, ctx.needs.parameters, tuple(own))
        before = _owes(ctx)


def _given(extra_inputs: Sequence[Tensor | None], kwargs: dict[str, Any]) -> ForwardArguments:
    return {
        "basic_op_extra_inputs": [extra_inputs],
        "prev_op_grad_output_quantizer": None,
        "next_op_input_quantizer": None,
        "basic_op_kwargs": [kwargs],
    }


def _owes(ctx: OperationContext) -> bool:
    """Whether a gradient of the operation will be read."""
    needs = ctx.needs
    return needs.input or any(needs.parameters) or any(needs.extra_inputs)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _refuses(permute: Permute | None, *ops: BasicOperation, env: Env) -> Refusal | None:
    if not any(env.needs_backward):
        return Refusal("NO_GRAD", "no gradient is needed, so that nothing is saved")
    if env.recipe is not None and any(
        isinstance(op, GroupedLinear) and op.quantized_refusal(env) is None for op in ops
    ):
        return Refusal("CONFLICT", "quantised linear operations save codes of their inputs")
    return None


def _build(
    permute: Permute | None,
    linear1: GroupedLinear,
    activation: _ScaledActivation,
    linear2: GroupedLinear,
) -> GroupedMLP:
    return GroupedMLP(linear1=linear1, activation=activation, linear2=linear2, permute=permute)


FUSION = Fusion(
    name="grouped_mlp",
    stage="joint",
    pattern=(
        Optional(Permute),
        GroupedLinear,
        (ScaledSwiGLU, ScaledSiTUGLU, ScaledClampedQGeGLU, ScaledSReLU, ScaledTanhSReLU),
        GroupedLinear,
    ),
    refuses=_refuses,
    build=_build,
)
