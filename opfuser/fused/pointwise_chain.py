"""A run of element-wise operations in one kernel forward and one backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..basic.activation import (
    GELU,
    QGELU,
    ReLU,
    Sigmoid,
    SiLU,
    Softplus,
    SReLU,
    Tanh,
    _Activation,
)
from ..basic.add_extra_input import AddExtraInput
from ..basic.bias import Bias
from ..basic.constant_scale import ConstantScale
from ..basic.dropout import Dropout
from ..basic.pointwise import PointwiseOperation
from ..context import COMPUTE_DTYPES, autocast_dtype, refuse_dtype
from ..errors import NotSupportedError, explain
from ..fusion import Env, Fusion, Refusal, Repeated, Requires
from ..kernels.launch import INTERPRETED
from ..kernels.pointwise import (
    ADD,
    BIAS,
    DROPOUT,
    FUNCTION,
    KEEP,
    MAX_OPERANDS,
    Chain,
    Scale,
    Stage,
    draw_seed,
)
from ..op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from ..tracked import Clock

__all__ = ["FUSION", "PointwiseChain"]

_ACTIVATIONS = (GELU, QGELU, ReLU, SReLU, SiLU, Softplus, Tanh, Sigmoid)
_ACCEPTED = frozenset((*_ACTIVATIONS, Bias, ConstantScale, Dropout, AddExtraInput))
_PASSES = ("op_forward", "op_backward", "fuser_forward", "fuser_backward")


class PointwiseChain(FusedOperation):
    r"""Forward and backward of a run of element-wise operations, each as one kernel.

    They are Bias, activations, ConstantScale, Dropout, AddExtraInput, and operations of users that
    derive from PointwiseOperation and override neither pass. All arithmetic between the run's input
    and output is fp32. The output is contiguous, and has the dtype that the operations lead to.

    Backward makes the values that it needs again, and the masks of dropout from their seeds; it
    sums the gradients of biases, in fp32, while it walks down the rows. Saved are the seeds, the
    input if a function of it has a derivative that varies, and for the same reason each sum of an
    AddExtraInput, made in the kernel: never more than the operations save apart. With n operations
    on A elements that is 2A + A per extra input of traffic forward instead of 2nA and as much.

    Kernel: opfuser's own. ATen has kernels for each of the operations and for none of their pairs.

    Args:
        ops: the operations, in forward order.

    Raises:
        NotSupportedError: an operation is none of those, or there are too many that have a tensor.
        InputError: in forward, as in the operations that it replaces.
    """

    def __init__(self, ops: Sequence[FusibleOperation]) -> None:
        no = _refusal(ops)
        if no is not None:
            raise NotSupportedError(explain(no.detail, where=type(self).__name__))
        super().__init__(ops)
        self._layouts = _Layouts(cast("Sequence[BasicOperation]", tuple(ops)))

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        ctx = basic_op_ctxs[0]
        saves = ctx.requires_grad
        ops, chain, owners = self._layouts.get(saves)
        operands: list[Tensor | None] = []
        dtypes = []
        dtype = input_.dtype
        if dtype not in COMPUTE_DTYPES:
            refuse_dtype(input_, self)
        lower = autocast_dtype(input_.device)
        for stage, owner in zip(chain.stages, owners):
            operand = None
            if stage.kind == BIAS:
                operand = _bias(cast("Bias", ops[owner]), input_)
            elif stage.kind == ADD:
                operand = basic_op_extra_inputs[owner][0]
                assert operand is not None
                if operand.shape != input_.shape:
                    ops[owner].reference(input_, operand)  # raises
                if operand.dtype != dtype:
                    dtype = torch.promote_types(dtype, operand.dtype)
            elif stage.kind == DROPOUT:
                operand = draw_seed(input_)
            elif not stage.linear:
                dtype = lower or dtype
            operands.append(operand)
            dtypes.append(dtype)
        y, kept = chain.forward(input_, operands, dtypes)
        if saves:
            sums = tuple(
                None if operand is None or stage.kind != BIAS else operand.dtype
                for stage, operand in zip(chain.stages, operands)
            )
            ctx.chain = _Done(chain, owners, tuple(dtypes), sums)
            x = input_ if chain.reads_x else None
            tensors = (a if b is None else b for a, b in zip(operands, kept))
            ctx.save_for_backward(x, *(t if r else None for t, r in zip(tensors, chain.reads)))
        return y, [()] * len(basic_op_ctxs)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]],
    ) -> tuple[
        Tensor | None,
        Sequence[Sequence[Tensor | None] | None],
        Sequence[Sequence[Tensor | None] | None],
    ]:
        x, *operands = basic_op_ctxs[0].saved_tensors
        chain, owners, dtypes, sums = basic_op_ctxs[0].chain
        needs = [ctx.needs for ctx in basic_op_ctxs]
        wants: list[Any] = []
        for stage, owner, dtype in zip(chain.stages, owners, sums):
            if stage.kind == BIAS:
                wants.append(any(needs[owner].parameters) and dtype)
            else:
                wants.append(stage.kind == ADD and needs[owner].extra_inputs[0])
        wants.append(needs[0].input)
        dx, grads = chain.backward(grad_output, x, operands, tuple(wants), dtypes)
        params: list[tuple[Tensor | None, ...]] = [(None,) * len(need.parameters) for need in needs]
        extras: list[tuple[Tensor | None, ...]] = [
            (None,) * len(need.extra_inputs) for need in needs
        ]
        for stage, owner, grad in zip(chain.stages, owners, grads):
            if stage.kind == BIAS and params[owner]:
                params[owner] = (grad,)
            elif stage.kind == ADD:
                extras[owner] = (grad,)
        return dx, params, extras


class _Done(NamedTuple):
    """What forward did: its stages, whose they are, dtypes of results and of biases' gradients."""

    chain: Chain
    owners: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    sums: tuple[torch.dtype | None, ...]


class _Layout(NamedTuple):
    """Stages, and for each the index of its operation."""

    ops: Sequence[BasicOperation]
    chain: Chain
    owners: tuple[int, ...]


class _Layouts:
    """The stages of operations, for calls with and without gradients."""

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        self._ops = ops
        self._made_at = -1
        self._by_need: dict[bool, _Layout] = {}

    def __reduce__(self) -> Any:
        return _Layouts, (self._ops,)

    def get(self, saves: bool) -> _Layout:
        """Those of now: probabilities, factors and flags may be changed between two calls."""
        if torch.compiler.is_compiling():  # it would make another graph after every change
            return _lay_out(self._ops, saves)
        if self._made_at != Clock.now:
            self._by_need = {}
            self._made_at = Clock.now
        layout = self._by_need.get(saves)
        if layout is None:
            layout = self._by_need[saves] = _lay_out(self._ops, saves)
        return layout


def _lay_out(ops: Sequence[BasicOperation], saves: bool) -> _Layout:
    """The stages of operations; where backward needs a sum, it is kept."""
    stages: list[Stage] = []
    owners: list[int] = []
    needed = False
    for i in reversed(range(len(ops))):
        stage = _stage(ops[i])
        if stage is None:
            continue
        needed = needed or not stage.linear
        if stage.kind == ADD and needed and saves:
            stages.append(Stage(KEEP))
            owners.append(i)
            needed = False
        stages.append(stage)
        owners.append(i)
    return _Layout(ops, Chain(stages[::-1]), tuple(reversed(owners)))


def _stage(op: FusibleOperation) -> Stage | None:
    """What an operation does, or None if it does nothing."""
    if isinstance(op, Bias):
        return Stage(BIAS)
    if isinstance(op, AddExtraInput):
        return Stage(ADD)
    if isinstance(op, Dropout):
        p = op.dropout_probability
        return Stage(DROPOUT, parameters=(p,)) if op.training and p > 0 else None
    if isinstance(op, ConstantScale):
        factor = float(op.scale)
        return Stage(FUNCTION, "@pointwise:scale", (factor,), Scale(factor))
    if isinstance(op, PointwiseOperation):
        return op.stage
    assert isinstance(op, _Activation)
    name, parameters = op.function.arguments
    return Stage(FUNCTION, f"@scalar:{name}", parameters, op.function, linear=False)


def _bias(op: Bias, x: Tensor) -> Tensor | None:
    bias = op._parameters.get("bias")
    if bias is None:
        bias = op.bias  # parametrised, or cleared
    if bias is not None and (not x.dim() or x.shape[-1] != op.local_size):
        op._refuse_input(x)
    return bias


def _accepts(op: FusibleOperation) -> bool:
    if not isinstance(op, PointwiseOperation):
        return type(op) in _ACCEPTED
    own = any(getattr(type(op), name) is not getattr(PointwiseOperation, name) for name in _PASSES)
    return not own and type(op).device_function is not None and not op.parameter_slots()


def _refusal(ops: Sequence[FusibleOperation]) -> Refusal | None:
    """Why no chain can be made of these operations."""
    odd = [type(op).__name__ for op in ops if not _accepts(op)]
    if odd:
        return Refusal("LAYOUT", f"{odd[0]} is not an element-wise operation with a kernel")
    # A sum may also be kept.
    tensors = sum(2 if isinstance(op, AddExtraInput) else _has_tensor(op) for op in ops)
    if tensors > MAX_OPERANDS:
        return Refusal("LAYOUT", f"kernels take {MAX_OPERANDS} tensors besides x and y, not more")
    return None


def _has_tensor(op: FusibleOperation) -> bool:
    return isinstance(op, (Bias, Dropout))


def _refuses(ops: tuple[FusibleOperation, ...], *, env: Env) -> Refusal | None:
    if env.device.type not in ("cuda", "meta") and not INTERPRETED:
        return Refusal(
            "DEVICE", f"there is no kernel for {env.device.type}; the steps would be the same"
        )
    if env.compute_dtype == torch.float64:
        return Refusal("DTYPE", "there is no kernel for fp64; the steps would be the same")
    if sum(_stage(op) is not None for op in ops) < 2:
        return Refusal("LAYOUT", "fewer than two of the operations change anything")
    if [type(op) for op in ops] in _BY_GEMM:
        return Refusal("CONFLICT", "left to the linear operation that may stand before it")
    return _refusal(ops)


# A GEMM does these on the way, in both passes, and writes what it would write without them.
_BY_GEMM = ([Bias, AddExtraInput], [ConstantScale, AddExtraInput])

FUSION = Fusion(
    name="pointwise_chain",
    stage="joint",
    pattern=(Repeated("pointwise operation", _accepts, at_least=2),),
    refuses=_refuses,
    build=PointwiseChain,
    requires=Requires(package="triton"),
)
