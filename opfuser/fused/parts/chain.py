"""A chain of element-wise operations as a part of a fused operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ...basic.activation import ACTIVATIONS, _Activation
from ...basic.add_extra_input import AddExtraInput
from ...basic.bias import Bias
from ...basic.constant_scale import ConstantScale
from ...basic.dropout import Dropout
from ...basic.pointwise import PointwiseOperation
from ...core.context import COMPUTE_DTYPES, Contexts, Extras, autocast_dtype, refuse_dtype
from ...core.fusion import Env, Refusal
from ...errors import NotSupportedError
from ...kernels.functions import Scale
from ...kernels.launch import INTERPRETED
from ...kernels.philox import draw_seed
from ...kernels.pointwise import Chain
from ...kernels.pointwise_launch import MAX_OPERANDS
from ...kernels.pointwise_plain import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Link
from ...op import BasicOperation, FusibleOperation
from ...quantization.quantizers import Quantizer
from .part import Gradients, Part, PartGrads, Wanted

_ACCEPTED = frozenset((*ACTIVATIONS, Bias, ConstantScale, Dropout, AddExtraInput))
_PASSES = ("op_forward", "op_backward", "fuser_forward", "fuser_backward")


def accepts(op: FusibleOperation) -> bool:
    """Whether an operation can be in a chain."""
    if not isinstance(op, PointwiseOperation):
        return type(op) in _ACCEPTED
    own = any(getattr(type(op), name) is not getattr(PointwiseOperation, name) for name in _PASSES)
    return not own and type(op).device_function is not None and not op.parameter_slots()


def active(ops: Sequence[FusibleOperation]) -> list[type[FusibleOperation]]:
    """The classes of those operations that are not the identity."""
    return [type(op) for op in ops if _link(op, _settings_of(op)) is not None]


def refuse(ops: Sequence[FusibleOperation], env: Env) -> Refusal | None:
    """Why no kernel can run these operations."""
    if env.device.type not in ("cuda", "meta") and not INTERPRETED:
        return Refusal(
            "DEVICE", f"there is no kernel for {env.device.type}; the steps would be the same"
        )
    if env.compute_dtype == torch.float64:
        return Refusal("DTYPE", "there is no kernel for fp64; the steps would be the same")
    return _refusal(ops)


def _refusal(ops: Sequence[FusibleOperation]) -> Refusal | None:
    """Why these operations cannot be a chain."""
    odd = [type(op).__name__ for op in ops if not accepts(op)]
    if odd:
        return Refusal("LAYOUT", f"{odd[0]} is not an element-wise operation with a kernel")
    # A sum may be saved as well.
    tensors = sum(2 if isinstance(op, AddExtraInput) else _has_tensor(op) for op in ops)
    if tensors > MAX_OPERANDS:
        return Refusal("LAYOUT", f"kernels take {MAX_OPERANDS} tensors besides x and y, not more")
    return None


def _has_tensor(op: FusibleOperation) -> bool:
    return isinstance(op, (Bias, Dropout))


class ChainCall(NamedTuple):
    """The kernel call: a chain, the operations of its links by index, operands and dtypes."""

    chain: Chain
    owners: tuple[int, ...]
    operands: list[Tensor | None]
    dtypes: tuple[torch.dtype, ...]


class ChainPart(Part):
    """Element-wise operations, computed in one kernel for each pass.

    Saves the seeds of dropouts and what derivatives are computed from: the input, and sums with
    extra inputs.

    Raises:
        NotSupportedError: an operation is not element-wise, or too many have a tensor.
    """

    keeps_input: ClassVar[bool] = True
    recomputes: ClassVar[bool] = False

    def __init__(self, ops: Sequence[FusibleOperation], where: str) -> None:
        no = _refusal(ops)
        if no is not None:
            raise NotSupportedError.explained(no.detail, where=where)
        self.ops = cast("tuple[BasicOperation, ...]", tuple(ops))
        self._layouts = _Layouts(self.ops)

    def forward(
        self, ctxs: Contexts, x: Any, extras: Extras, save_input: bool, quantizer: Quantizer | None
    ) -> tuple[Tensor, Extras]:
        call = self.prepare(ctxs, x, extras)
        y, kept = call.chain.forward(x, call.operands, call.dtypes)
        self.save(ctxs, call, x, kept)
        return y, [()] * len(ctxs)

    def prepare(self, ctxs: Contexts, x: Tensor, extra_inputs: Extras) -> ChainCall:
        """The chain of this call and its operands.

        Raises:
            InputError: as in forward of the operations.
        """
        chain, owners, _ = self._layouts.get(ctxs)
        ops = self.ops
        operands: list[Tensor | None] = []
        dtypes = []
        dtype = x.dtype
        if dtype not in COMPUTE_DTYPES:
            refuse_dtype(x, self.ops[0])
        lower = autocast_dtype(x.device)
        for link, owner in zip(chain.links, owners):
            operand = None
            if link.kind == BIAS:
                operand = cast("Bias", ops[owner]).operand(x)
            elif link.kind == ADD:
                operand = extra_inputs[owner][0]
                assert operand is not None
                if operand.shape != x.shape:
                    ops[owner].reference(x, operand)  # raises
                if operand.dtype != dtype:
                    dtype = torch.promote_types(dtype, operand.dtype)
            elif link.kind == DROPOUT:
                operand = draw_seed(x)
            elif not link.linear:
                dtype = lower or dtype
            operands.append(operand)
            dtypes.append(dtype)
        return ChainCall(chain, owners, operands, tuple(dtypes))

    def save(
        self, ctxs: Contexts, call: ChainCall, x: Tensor, kept: Sequence[Tensor | None]
    ) -> None:
        """Saves what backward reads, if it will run.

        Args:
            kept: the sums that the kernel wrote.
        """
        ctx, (chain, owners, operands, dtypes) = ctxs[0], call
        if not ctx.requires_grad:
            return
        sums = tuple(
            [
                None if operand is None or link.kind != BIAS else operand.dtype
                for link, operand in zip(chain.links, operands)
            ]
        )
        ctx.chain = _Done(chain, owners, dtypes, sums, x.shape)
        tensors = zip(operands, kept, chain.reads)
        reads = [(a if b is None else b) if read else None for a, b, read in tensors]
        ctx.save_for_backward(x if chain.reads_x else None, *reads)

    def backward(
        self, ctxs: Contexts, dy: Tensor, x: Tensor | None, grad_extras: Extras, wanted: Wanted
    ) -> PartGrads:
        needs = [ctx.needs for ctx in ctxs]
        params: list[Gradients] = [(None,) * len(need.parameters) for need in needs]
        extras: list[Gradients] = [(None,) * len(need.extra_inputs) for need in needs]
        x, *operands = ctxs[0].saved_tensors
        chain, owners, dtypes, sums, shape = ctxs[0].chain
        dy = dy if dy.dim() == len(shape) else dy.view(shape)
        wants: list[Any] = []
        for link, owner, dtype in zip(chain.links, owners, sums):
            if link.kind == BIAS:
                wants.append(any(needs[owner].parameters) and dtype)
            else:
                wants.append(link.kind == ADD and needs[owner].extra_inputs[0])
        wants.append(needs[0].input)
        dx, grads = chain.backward(dy, x, operands, tuple(wants), dtypes)
        for link, owner, grad in zip(chain.links, owners, grads):
            if link.kind == BIAS and params[owner]:
                params[owner] = (grad,)
            elif link.kind == ADD:
                extras[owner] = (grad,)
        return PartGrads(dx, params, extras)


class _Done(NamedTuple):
    """What forward ran: links, their operations, dtypes of results and biases' gradients, shape."""

    chain: Chain
    owners: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    sums: tuple[torch.dtype | None, ...]
    shape: torch.Size


class _Layout(NamedTuple):
    """Links, for each the index of its operation, and the settings that they depend on."""

    chain: Chain
    owners: tuple[int, ...]
    settings: list[Any]


class _Layouts:
    """The links of operations, for calls with and without gradients."""

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        self._ops = ops
        self._with_settings = [(i, op) for i, op in enumerate(ops) if _settings_of(op) is not None]
        self._by_need: dict[bool, _Layout] = {}

    def __reduce__(self) -> Any:
        return _Layouts, (self._ops,)

    def get(self, ctxs: Contexts) -> _Layout:
        """The layout of a call: probabilities, factors and flags may change between calls."""
        saves = ctxs[0].requires_grad
        settings = [op.frozen_settings(ctxs[i]) for i, op in self._with_settings]
        if ctxs[0].traced:  # a cached layout would cause recompilations
            return _lay_out(self._ops, ctxs, settings, saves)
        layout = self._by_need.get(saves)
        if layout is None or layout.settings != settings:
            layout = self._by_need[saves] = _lay_out(self._ops, ctxs, settings, saves)
        return layout


def _lay_out(
    ops: Sequence[BasicOperation], ctxs: Contexts, settings: list[Any], saves: bool
) -> _Layout:
    """The links of operations, with one that saves each sum that backward needs."""
    links: list[Link] = []
    owners: list[int] = []
    needed = False
    for i in reversed(range(len(ops))):
        link = _link(ops[i], ctxs[i].settings)
        if link is None:
            continue
        needed = needed or not link.linear
        if link.kind == ADD and needed and saves:
            links.append(Link(KEEP))
            owners.append(i)
            needed = False
        links.append(link)
        owners.append(i)
    return _Layout(Chain(links[::-1]), tuple(reversed(owners)), settings)


def _settings_of(op: FusibleOperation) -> Any:
    return op.settings if isinstance(op, BasicOperation) else None


def _link(op: FusibleOperation, settings: Any) -> Link | None:
    """The link of an operation with those settings, or None for the identity."""
    if isinstance(op, Bias):
        return Link(BIAS)
    if isinstance(op, AddExtraInput):
        return Link(ADD)
    if isinstance(op, Dropout):
        (p,) = settings
        return Link(DROPOUT, parameters=(p,)) if p > 0 else None
    if isinstance(op, ConstantScale):
        factor = float(settings.scale)
        return Link(FUNCTION, "@scalar:scale", (factor,), Scale(factor))
    if isinstance(op, PointwiseOperation):
        link: Link | None = settings.link
        return link
    assert isinstance(op, _Activation)
    function, name, parameters = settings.function
    return Link(FUNCTION, f"@scalar:{name}", parameters, function, linear=False)
