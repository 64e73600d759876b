"""How a recipe quantizes the operands of a linear operation's GEMMs, and tensors on their way."""

# Longer than 500 lines: half of it is OperandQuantizer, one class, whose methods say what every
# format and scaling does with an operand.

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import QuantizedWeightError, explain
from ..kernels.groups import (
    Grouped,
    VectorScaling,
    gathered,
    group_ends,
    maxima_of_groups,
    quantize_groups,
)
from ..kernels.microscaling import dequantized_rows, quantize_mxfp8, quantize_nvfp4
from ..kernels.philox import draw_seed
from ..kernels.quantize import (
    BlockScaling,
    Codes,
    MeasuredScaling,
    Scaling,
    TensorScaling,
    amax_of,
    dequantize,
    quantize,
    quantize_by_squares,
)
from ..kernels.zeros import zero_for
from ..recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from ..runtime.recording import is_recording
from ..torch_internals import storage_address
from .operation_state import state_of
from .region import amax_group
from .state import QuantizationState
from .watch import is_watched, tell
from .weights import weight_codes


class QuantizedTensor(NamedTuple):
    """A tensor on its way from one operation to the next, as codes.

    The dtype is that which the tensor would have otherwise, whatever the codes were made from.

    Attributes:
        codes: of the matrix of all rows.
        shape: of the tensor.
        dtype: as said.
        amax: (1,), its largest value, if the scale of its codes comes from that.
    """

    codes: Codes
    shape: torch.Size
    dtype: torch.dtype
    amax: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        codes = self.codes.rows if self.codes.cols is None else self.codes.cols
        assert codes is not None
        return codes.device

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def to(self, dtype: torch.dtype) -> QuantizedTensor:
        """The same codes in place of a tensor of another dtype."""
        return self._replace(dtype=dtype)

    def dequantize(self) -> Tensor:
        """The values that the codes stand for."""
        rows = self.numel() // self.shape[-1]
        return dequantize(self.codes, rows, self.dtype).view(self.shape)


class OperandQuantizer(NamedTuple):
    """Quantizes the operands of one operation, as a recipe says.

    Roles are ``"input"`` (T, K), ``"weight"`` (N, K) and ``"grad_output"`` (T, N).

    What a forward has rounded and its backward rounds again gets the same codes: for that,
    :meth:`used_scales` is saved, and handed in. Gradients follow the scales of now.

    Attributes:
        op: whose scales are kept.
        recipe: the recipe.
        used: of the forward whose operands are rounded again; None: they are rounded for the first
            time.
    """

    op: nn.Module
    recipe: Recipe
    used: Tensor | None = None

    def used_scales(self) -> Tensor | None:
        """In forward, once its operands are rounded: the scales, if they are kept between calls."""
        if not isinstance(self.recipe, DelayedScaling):
            return None
        return state_of(self.op, self.recipe, amax_group()).used_scales()

    def quantize(
        self,
        role: str,
        x: Tensor,
        *,
        rows: bool,
        cols: bool,
        column_sum: bool = False,
        amax: Tensor | None = None,
    ) -> Codes:
        """Codes of a matrix in the layouts that are wanted, and the sums of its columns.

        Args:
            role: of ``x``.
            x: (R, C).
            rows, cols: which layouts are wanted.
            column_sum: whether the sums are.
            amax: the largest value of ``x``, where it is known.
        """
        codes = self._codes(role, x, {"rows": rows, "cols": cols}, column_sum, amax)
        if is_watched():
            tell(self.op, role, x, codes)
        return codes

    def _codes(
        self, role: str, x: Tensor, wants: Any, column_sum: bool, amax: Tensor | None
    ) -> Codes:
        if role == "weight" and isinstance(self.recipe, Float8BlockScaling):
            powers = self.recipe.fp8_quant_fwd_weight.power_2_scale
            return quantize_by_squares(x, self.recipe.dtype(role), **wants, power_of_two=powers)
        if isinstance(self.recipe, (MXFP8BlockScaling, NVFP4BlockScaling)):
            return _in_small_blocks(self.recipe, role, x, amax, column_sum=column_sum, **wants)
        if isinstance(self.recipe, Float8RowwiseScaling):
            return quantize_groups(x, Grouped(1), VectorScaling(self.recipe.dtype(role)), **wants)
        scaling = self.given(role)
        if scaling is None:
            scaling = self.from_amax(role, amax_of(x) if amax is None else amax)
        return quantize(x, scaling, **wants, column_sum=column_sum)

    def weight_amax(self, w: Tensor) -> Tensor | None:
        """The largest value of a weight, where codes of both passes need it; else None."""
        needed = isinstance(self.recipe, (Float8CurrentScaling, NVFP4BlockScaling))
        return amax_of(w) if needed else None

    def given(self, role: str) -> Scaling | None:
        """The scaling of an operand, if it is known without its values."""
        recipe = self.recipe
        if isinstance(recipe, Float8BlockScaling):
            squares = role == "input" and recipe.wgrad_x_block_scaling_dim == 2
            return BlockScaling(recipe.dtype(role), _params(recipe, role).power_2_scale, squares)
        if isinstance(recipe, Float8CurrentScaling):
            return None
        if self.used is not None and role != "grad_output":
            return QuantizationState.used_scaling(self.used, role, recipe.dtype(role))
        assert isinstance(recipe, DelayedScaling)
        return state_of(self.op, recipe, amax_group()).known_scaling(role, recipe)

    def from_amax(self, role: str, amax: Tensor) -> Scaling:
        """The scaling of an operand that :meth:`given` has none for, from its largest value."""
        recipe, dtype = self.recipe, self.recipe.dtype(role)
        if isinstance(recipe, Float8CurrentScaling):
            params = _params(recipe, role)
            if params.amax_epsilon:
                amax = amax.clamp_min(params.amax_epsilon)
            return MeasuredScaling(amax, dtype, params.power_2_scale)
        assert isinstance(recipe, DelayedScaling)
        state = state_of(self.op, recipe, amax_group())
        return TensorScaling(state.learn(role, amax, recipe), dtype, state.amax_seen(role))

    def quantize_groups(
        self, role: str, x: Tensor, groups: Grouped, *, rows: bool, cols: bool
    ) -> Codes:
        """Codes of the rows of groups, as ``kernels.groups`` lays them out.

        A scale of a tensor is one for all groups, but for weights of ``Float8CurrentScaling``, of
        which each has its own. Weights in squares are laid out as those of one tall matrix.

        Args:
            role: of ``x``.
            x: (R, C), unless they are gathered.
            groups: which rows are those of groups. Weights have R / G rows each; each row of what
                is gathered is that of a group.
            rows, cols: which layouts are wanted.
        """
        watched = is_watched()
        codes = self._codes_of_groups(role, x, groups, {"rows": rows or watched, "cols": cols})
        if watched:
            x = gathered(x, groups)
            self._tell_groups(role, x, codes, groups.groups if role == "weight" else 1)
        return codes

    def _codes_of_groups(self, role: str, x: Tensor, groups: Grouped, wants: Any) -> Codes:
        recipe, dtype = self.recipe, self.recipe.dtype(role)
        if isinstance(recipe, Float8RowwiseScaling):
            return quantize_groups(x, groups, VectorScaling(dtype), **wants)
        if role == "weight" and isinstance(recipe, Float8BlockScaling):
            return self._codes(role, x, wants, False, None)
        if isinstance(recipe, (MXFP8BlockScaling, NVFP4BlockScaling)):
            reads = isinstance(recipe, NVFP4BlockScaling)
            amax = self._amax_of_groups(role, x, groups) if reads else None
            return _in_small_blocks(recipe, role, x, amax, groups=groups, **wants)
        scaling = self.given(role)
        if scaling is None:
            scaling = self.from_amax(role, self._amax_of_groups(role, x, groups))
        return quantize_groups(x, groups, scaling, **wants)

    def _amax_of_groups(self, role: str, x: Tensor, groups: Grouped) -> Tensor:
        """The largest value of all rows, (1,), or of each weight, (G,), if it has its own scale."""
        if groups.sources is not None:
            return amax_of(x)
        # Not amax_of(x): what lies behind the last group is nobody's.
        most, _ = maxima_of_groups(x, groups, rows=True, cols=False)
        assert most is not None
        own = role == "weight" and isinstance(
            self.recipe, (Float8CurrentScaling, NVFP4BlockScaling)
        )
        parts = most.view(groups.groups if own else 1, -1)
        return parts.amax(1) if len(most) else parts.new_zeros(len(parts))

    def _tell_groups(self, role: str, x: Tensor, codes: Codes, parts: int) -> None:
        """Tells who watches of rows, and of each weight."""
        assert codes.rows is not None
        assert codes.row_scale is not None
        size = len(x) // parts
        for n in range(parts):
            own, scale = slice(n * size, (n + 1) * size), codes.row_scale
            if self.recipe.float8_per_tensor_scaling():
                scale = scale[own][:1]
            part = Codes(codes.rows[own], scale, None, None, None)
            tell(self.op, role, x[own], part)

    def weights(
        self,
        ws: Tensor | Sequence[Tensor],
        sources: Sequence[Tensor | None],
        kept: KeptWeights | None,
        *,
        rows: bool,
        cols: bool,
    ) -> Codes:
        """Codes of the weights of groups, as :meth:`quantize_groups` lays them out.

        Args as of :meth:`weight`; weights of all groups, (G, N, K) or G of them, and the parameters
        that they come from.
        """

        def codes(rows: bool, cols: bool) -> Codes:
            w = ws if isinstance(ws, Tensor) else torch.stack(list(ws))
            whole = w.reshape(-1, w.shape[-1])
            return self.quantize_groups("weight", whole, Grouped(len(w)), rows=rows, cols=cols)

        return self._once(codes, sources, kept, rows=rows, cols=cols)

    def weight(
        self,
        w: Tensor,
        source: Tensor | None,
        kept: KeptWeights | None,
        *,
        rows: bool,
        cols: bool,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> Codes:
        """(N, K); both layouts, once, within :func:`keep_quantized_weights`.

        Args:
            w: the weight in the dtype that the operation computes in.
            source: the parameter that it comes from; None if it is computed anew at every call.
            kept: ``region.kept_weights()`` in forward; autograd's threads do not see the block.
            rows, cols: which layouts are wanted.
            scale: what it is to be multiplied by, where it is stored as codes.
            amax: its largest value, where it is known.
        """

        def codes(rows: bool, cols: bool) -> Codes:
            if scale is not None:
                return weight_codes(w, scale, self.recipe, rows=rows, cols=cols)
            return self.quantize("weight", w, rows=rows, cols=cols, amax=amax)

        return self._once(codes, (source,), kept, rows=rows, cols=cols)

    def _once(
        self,
        codes: Callable[[bool, bool], Codes],
        sources: Sequence[Tensor | None],
        kept: KeptWeights | None,
        *,
        rows: bool,
        cols: bool,
    ) -> Codes:
        """What ``codes`` makes of parameters, of those layouts; where they are kept, of both."""
        parameters = [source for source in sources if source is not None]
        # A recording outlives the block, and would read what it kept.
        if kept is None or len(parameters) < len(sources) or not sources or is_recording():
            return codes(rows, cols)
        key = id(self.op), self.recipe
        found = kept.get(key)
        if found is None or any(ref() is not p for ref, p in zip(found.sources, parameters)):
            found = kept[key] = _Kept(
                [weakref.ref(source) for source in parameters],
                [source._version for source in parameters],
                [source.untyped_storage() for source in parameters],
                codes(True, True),
            )
        versions = [source._version for source in parameters]
        places = [storage_address(source.untyped_storage()) for source in parameters]
        were_at = [storage_address(storage) for storage in found.storages]
        if found.versions != versions or places != were_at:
            raise QuantizedWeightError.explained(
                "A weight does not change within keep_quantized_weights",
                where=f"{type(self.op).__name__}({self.op.extra_repr()})",
                received="a weight that was written to since it was quantized",
                remedy="Leave the block before the optimizer's step",
            )
        return found.codes


class Quantizer(NamedTuple):
    """How an operation wants a tensor that another one makes for it.

    Attributes:
        operands: of the operation.
        role: what the tensor is to it.
        rows, cols: the layouts that it reads.
        column_sum: whether it reads the sums of the columns.
    """

    operands: OperandQuantizer
    role: str
    rows: bool
    cols: bool
    column_sum: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return self.operands.recipe.dtype(self.role)

    @property
    def kind(self) -> tuple[torch.dtype, bool, bool]:
        """The format, and whether by rows and by columns."""
        return self.dtype, self.rows, self.cols

    def __call__(self, x: Tensor) -> QuantizedTensor:
        rows = x.reshape(-1, x.shape[-1])
        return QuantizedTensor(self.codes(rows), x.shape, x.dtype)

    def codes(self, x: Tensor) -> Codes:
        """Codes of a matrix."""
        return self.operands.quantize(
            self.role, x, rows=self.rows, cols=self.cols, column_sum=self.column_sum
        )


class GroupQuantizer(NamedTuple):
    """How an operation wants the rows of groups that another one gathers for it.

    Attributes:
        operands: of the operation.
        groups: how many.
        rows, cols: the layouts that it reads.
    """

    operands: OperandQuantizer
    groups: int
    rows: bool
    cols: bool

    @property
    def kind(self) -> tuple[torch.dtype, bool, bool]:
        """The format, and whether by rows and by columns."""
        return self.operands.recipe.dtype("input"), self.rows, self.cols

    def gathered(self, x: Tensor, sources: Tensor, sizes: Tensor) -> QuantizedTensor:
        """Codes of rows of x (..., C) in the order of groups.

        Args:
            x: the tensor.
            sources: (R,): for each row of the groups which row of x it is.
            sizes: (G,): rows of the groups.
        """
        groups = Grouped(self.groups, group_ends(sizes, len(sources)), sources)
        codes = self.operands.quantize_groups(
            "input", x.reshape(-1, x.shape[-1]), groups, rows=self.rows, cols=self.cols
        )
        return QuantizedTensor(codes, torch.Size((len(sources), x.shape[-1])), x.dtype)


def scalings(
    quantizers: Sequence[Quantizer], like: Tensor, measure: Callable[..., object]
) -> list[Scaling]:
    """The scalings for a kernel that quantizes what it computes, one for each tensor.

    Args:
        quantizers: of the tensors.
        like: on whose device largest values are kept.
        measure: runs the kernel with scalings without scales, to raise their largest values; called
            where one of the scales is to come from values of this call.
    """
    found = [q.operands.given(q.role) for q in quantizers]
    if None not in found:
        return found  # type: ignore[return-value]
    seen = [zero_for(like) for _ in quantizers]
    measure(*[TensorScaling(None, q.dtype, m) for q, m in zip(quantizers, seen)])
    return [
        scaling or q.operands.from_amax(q.role, m) for q, scaling, m in zip(quantizers, found, seen)
    ]


def rounded(x: Tensor, role: str, recipe: Recipe) -> Tensor:
    """What a recipe keeps of a tensor by rows, with scales from its own values."""
    if not x.dim():
        return rounded(x[None], role, recipe)[0]
    rows, dtype = x.reshape(-1, x.shape[-1]), recipe.dtype(role)
    if isinstance(recipe, (MXFP8BlockScaling, NVFP4BlockScaling)):
        if x.shape[-1] % recipe.multiple:  # what no GEMM of this recipe takes
            return x
        codes = _in_small_blocks(recipe, role, rows, None, rows=True, cols=False)
        return dequantized_rows(codes, len(rows)).to(x.dtype).view(x.shape)
    scaling: Scaling
    if isinstance(recipe, Float8RowwiseScaling):
        codes = quantize_groups(rows, Grouped(1), VectorScaling(dtype), rows=True, cols=False)
        return QuantizedTensor(codes, x.shape, x.dtype).dequantize()
    if isinstance(recipe, Float8BlockScaling) and x.shape[-1] % recipe.multiple == 0:
        scaling = BlockScaling(dtype, _params(recipe, role).power_2_scale)
    else:
        scaling = MeasuredScaling(amax_of(rows), dtype)
    codes = quantize(rows, scaling, rows=True, cols=False)
    return QuantizedTensor(codes, x.shape, x.dtype).dequantize()


def _in_small_blocks(
    recipe: MXFP8BlockScaling | NVFP4BlockScaling,
    role: str,
    x: Tensor,
    amax: Tensor | None,
    **wants: Any,
) -> Codes:
    """Codes of blocks of 32 or 16, whose scales come from the values."""
    if isinstance(recipe, MXFP8BlockScaling):
        return quantize_mxfp8(x, recipe.dtype(role), **wants)
    how = recipe.params(role)
    return quantize_nvfp4(
        x,
        amax_of(x) if amax is None else amax,
        **wants,
        squares=how.fp4_2d_quantization,
        transform=how.random_hadamard_transform,
        seed=draw_seed(x) if how.stochastic_rounding else None,
    )


def _params(recipe: Float8BlockScaling | Float8CurrentScaling, role: str) -> QParams:
    if role == "input":
        return recipe.fp8_quant_fwd_inp
    return recipe.fp8_quant_fwd_weight if role == "weight" else recipe.fp8_quant_bwd_grad


class _Kept(NamedTuple):
    """Codes of parameters, and what these were when they were made.

    Attributes:
        sources: the parameters.
        versions: of their values.
        storages: of them. ``fully_shard`` frees and fills their memory, but does not replace it.
        codes: of the values.
    """

    sources: list[weakref.ref[Tensor]]
    versions: list[int]
    storages: list[torch.UntypedStorage]
    codes: Codes


KeptWeights = dict[object, _Kept]


_warned: set[str] = set()
_capabilities: dict[torch.device, tuple[int, int]] = {}


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; asking torch takes 20 us on a slow host."""
    found = _capabilities.get(device)
    if found is None:
        found = torch.cuda.get_device_capability(device)
        if device.index is not None:
            _capabilities[device] = found
    return found


def multiplies(device: torch.device, recipe: Recipe) -> bool:
    """Whether ``device`` multiplies what the recipe rounds to."""
    first, before = recipe.capability
    if device.type != "cuda":
        return False
    own = _capability(device)
    return own >= first and (before is None or own < before)


def has_hardware(device: torch.device, recipe: Recipe) -> bool:
    """As :func:`multiplies`, for a call.

    Elsewhere the same codes and scales are multiplied in fp32. The first such device of a format is
    told in a warning.
    """
    if multiplies(device, recipe):
        return True
    (first, before), name = recipe.capability, recipe.operands
    told = f"{name} on {device.type}"
    if told not in _warned:
        _warned.add(told)
        range_ = "{}.{}".format(*first) + (" and later" if before is None else " alone")
        warnings.warn(
            explain(
                f"{name} is emulated: operands are rounded to {name} and multiplied in fp32",
                received=f"tensors on {device}",
                remedy=f"GPUs of compute capability {range_} multiply {name}",
            ),
            stacklevel=2,
        )
    return False
