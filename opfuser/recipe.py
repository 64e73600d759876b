"""Recipes of quantized compute: the format and the scales of the operands of GEMMs.

A recipe is a frozen dataclass, equal by value. Names and fields are those of Transformer Engine's
``common.recipe``; ``fprop``, ``dgrad`` and ``wgrad`` are opfuser's own. Which formats and scalings
are right for training: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
"""

# Longer than 500 lines: a class for each recipe of Transformer Engine, mostly its
# documentation.

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import torch

from . import gemm_providers
from .errors import ArgumentError, NotSupportedError

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8PredictedScaling",
    "Float8RowwiseScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]

Mode = Literal["fp8", "bf16"]


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """The formats of forward and backward; the value holds the largest number of each.

    E4M3: 4 bits of exponent, largest 448. E5M2: 5 bits of exponent, largest 57344. HYBRID: E4M3 in
    forward, E5M2 for gradients of outputs. E2M1, for NVFP4 only: 4 bits, the numbers 0, 0.5, 1,
    1.5, 2, 3, 4, 6 and their negatives.
    """

    E2M1 = _Largest(6.0, 6.0)
    E4M3 = _Largest(448.0, 448.0)
    E5M2 = _Largest(57344.0, 57344.0)
    HYBRID = _Largest(448.0, 57344.0)

    @property
    def forward(self) -> torch.dtype:
        """The dtype of inputs and weights."""
        if self is Format.E2M1:
            return torch.float4_e2m1fn_x2
        return torch.float8_e5m2 if self is Format.E5M2 else torch.float8_e4m3fn

    @property
    def backward(self) -> torch.dtype:
        """The dtype of gradients of outputs."""
        if self is Format.E2M1:
            return torch.float4_e2m1fn_x2
        return torch.float8_e4m3fn if self is Format.E4M3 else torch.float8_e5m2


@dataclass(frozen=True)
class MMParams:
    """Parameters of one GEMM.

    Attributes:
        use_split_accumulator: accumulate in fp32 after every 128 products. Without it, the GPU
            keeps about 14 bits of a sum.
    """

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How one kind of tensor is quantized.

    Attributes:
        power_2_scale: whether scales are powers of two.
        amax_epsilon: a lower bound for the amax that a scale is computed from.
        random_hadamard_transform, stochastic_rounding, fp4_2d_quantization: for NVFP4 only; see
            :class:`NVFP4BlockScaling`.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Abstract base class of all recipes.

    Attributes:
        fp8_format: of the operands.
        fp8_dpa, fp8_mha: attention in FP8; not supported.
        backward_override: ``"high_precision"`` computes both gradients without quantization, as
            ``dgrad="bf16", wgrad="bf16"`` does.
        save_activations: ``"fp8"`` saves the input of an activation before a quantized linear
            operation for backward in E4M3: one byte per element, and four per 128 for a scale.
            Forward does not change. ``cache_quantized_input`` of :class:`opfuser.SwiGLU` lists the
            conditions. None saves it unchanged.
        min_features: linear operations with fewer input or output features, in this rank's slice,
            compute without the recipe, and the plan says so; except those whose weight is stored
            quantized. If CPU overhead limits an operation, FP8 saves no time.
        gemm: the name of the provider of :mod:`opfuser.gemm_providers` that multiplies quantized
            operands. torch computes the products that it refuses; the plan says which, and why.
        fprop, dgrad, wgrad: formats of the forward GEMM, and of the GEMMs of the gradients of input
            and weight: ``"fp8"`` for the recipe's format, whatever its name, or ``"bf16"`` for the
            dtype that the operation computes in without a recipe.

    Raises:
        ArgumentError: a value outside its domain.
        NotSupportedError: attention in FP8; another ``backward_override``.
    """

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fprop: Mode = "fp8"
    dgrad: Mode = "fp8"
    wgrad: Mode = "fp8"
    save_activations: Literal["fp8"] | None = None
    gemm: str = "torch"
    min_features: int = 0

    # Features of a linear operation are multiples of this.
    multiple: ClassVar[int] = 16
    # Of the GPUs that multiply the format: from the first one on, before the second. Elsewhere it
    # is emulated.
    capability: ClassVar[tuple[tuple[int, int], tuple[int, int] | None]] = ((8, 9), None)
    # Of the operands, in messages.
    operands: ClassVar[str] = "FP8"
    # Whether operations hand on codes of what they compute; else whoever takes it quantizes it.
    handed_on: ClassVar[bool] = True
    # Whether only operations of groups of rows follow the recipe.
    of_groups: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.fp8_dpa or self.fp8_mha:
            self._refuse("Attention is not computed in FP8", "fp8_dpa or fp8_mha")
        if self.backward_override not in (None, "high_precision"):
            self._refuse(
                "backward_override is None or 'high_precision'", repr(self.backward_override)
            )
        if self.fp8_format is Format.E5M2:
            self._refuse("No GPU multiplies E5M2 by E5M2", "Format.E5M2")
        modes = self.fprop, self.dgrad, self.wgrad
        if not set(modes) <= {"fp8", "bf16"}:
            self._wrong("fprop, dgrad and wgrad are 'fp8' or 'bf16'", repr(modes))
        if self.save_activations not in (None, "fp8"):
            self._wrong("save_activations is None or 'fp8'", repr(self.save_activations))
        if self.min_features < 0:
            self._wrong("min_features is at least 0", repr(self.min_features))
        gemm_providers.find(self.gemm)
        if not isinstance(self.fp8_format, Format):
            self._wrong("fp8_format is a Format", repr(self.fp8_format))
        if self.fp8_format is Format.E2M1:
            self._refuse("fp8_format is a format of 8 bits", "Format.E2M1")
        for name, value in vars(self).items():
            if isinstance(value, QParams) and value != QParams(
                value.power_2_scale, value.amax_epsilon
            ):
                self._refuse("Transforms and stochastic rounding are of NVFP4", f"{name}={value}")
        if self.backward_override is not None:
            object.__setattr__(self, "dgrad", "bf16")
            object.__setattr__(self, "wgrad", "bf16")

    def _wrong(self, invariant: str, received: str) -> NoReturn:
        raise ArgumentError.explained(invariant, where=type(self).__name__, received=received)

    def _refuse(self, invariant: str, received: str) -> NoReturn:
        raise NotSupportedError.explained(invariant, where=type(self).__name__, received=received)

    def dtype(self, role: str) -> torch.dtype:
        """The format of an ``"input"``, a ``"weight"`` or a ``"grad_output"``."""
        return self.fp8_format.backward if role == "grad_output" else self.fp8_format.forward

    def splits(self, gemm: str) -> bool:
        """Whether the GEMM ``"fprop"``, ``"dgrad"`` or ``"wgrad"`` adds up in fp32."""
        return gemm != "fprop"

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is delayed scaling."""
        return issubclass(cls, DelayedScaling) and not issubclass(cls, Float8PredictedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is current scaling of whole tensors."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether a tensor has one scale."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether blocks have scales of their own."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether the format is MXFP8."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether the format is NVFP4."""
        return issubclass(cls, NVFP4BlockScaling)


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the largest values of earlier calls.

    ``s = largest / amax / 2^margin``, with the amax that ``amax_compute_algo`` finds in the
    history. The first call computes its amax before it quantizes: with a scale of 1, small
    gradients would be lost. Values that exceed the largest value of the history saturate.

    Attributes:
        margin: headroom for values to grow, in powers of two.
        amax_history_len: number of calls in the history.
        amax_compute_algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
        scaling_factor_compute_algo: not supported.
        reduce_amax: whether the ranks of the region's group share the largest values.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.amax_compute_algo not in ("max", "most_recent"):
            self._refuse(
                "amax_compute_algo is 'max' or 'most_recent'", repr(self.amax_compute_algo)
            )
        if self.scaling_factor_compute_algo is not None:
            self._refuse(
                "Scales are computed by the library", repr(self.scaling_factor_compute_algo)
            )
        if self.amax_history_len < 1:
            self._wrong("amax_history_len is positive", repr(self.amax_history_len))


@dataclass(frozen=True, kw_only=True)
class Float8PredictedScaling(DelayedScaling):
    """Delayed scaling from the previous call only, with headroom for values to grow.

    In E4M3, a scale that is too small by 2^margin costs no precision as long as small values stay
    in the normal range, 2^-6 to 448 times 1/s.

    Attributes:
        margin, amax_history_len, amax_compute_algo: see :class:`DelayedScaling`, with other
            defaults.
    """

    margin: int = 4
    amax_history_len: int = 1
    amax_compute_algo: str = "most_recent"


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from its own largest value: every tensor is read twice.

    ``s = largest / amax``.

    Attributes:
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: of inputs, weights, and
            gradients of outputs.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: of the GEMMs.
    """

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = QParams()
    fp8_quant_fwd_weight: QParams = QParams()
    fp8_quant_bwd_grad: QParams = QParams()
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)

    def splits(self, gemm: str) -> bool:
        params: MMParams = getattr(self, f"fp8_gemm_{gemm}")
        return params.use_split_accumulator


_POWERS = QParams(power_2_scale=True)


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """A scale for each 128 consecutive values of inputs and gradients, and 128 x 128 of weights.

    ``s = largest / amax`` of the block, by default rounded down to a power of two. The scheme of
    DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437.

    Attributes:
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: of inputs, weights, and
            gradients of outputs.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1, 2 and 1; others are
            not supported.
        wgrad_x_block_scaling_dim: of inputs as wgrad reads them, by columns: 2 for 128 x 128, which
            GPUs multiply faster (on an H200 by a quarter), or 1, as in Transformer Engine.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: of the GEMMs; the accumulator is always
            split.
    """

    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = _POWERS
    fp8_quant_fwd_weight: QParams = _POWERS
    fp8_quant_bwd_grad: QParams = _POWERS
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    wgrad_x_block_scaling_dim: int = 2
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    multiple: ClassVar[int] = 128
    # torch has its GEMM for these alone.
    capability: ClassVar[tuple[tuple[int, int], tuple[int, int] | None]] = ((9, 0), (10, 0))

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim
        if dims != (1, 2, 1):
            self._refuse("Blocks are 1 x 128, 128 x 128 and 1 x 128", f"dimensions {dims}")
        if self.wgrad_x_block_scaling_dim not in (1, 2):
            received = f"wgrad_x_block_scaling_dim={self.wgrad_x_block_scaling_dim!r}"
            self._wrong("Blocks of inputs in wgrad are 1 x 128 or 128 x 128", received)
        if self.fp8_format is not Format.E4M3:
            self._refuse("Blocks are in E4M3", str(self.fp8_format))
        gemms = self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad
        if not all(params.use_split_accumulator for params in gemms):
            self._refuse("GEMMs of blocks split their sums", "use_split_accumulator=False")

    def splits(self, gemm: str) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Float8RowwiseScaling(Recipe):
    """A scale for each row of inputs and gradients and each output channel of a weight.

    ``s = largest / amax`` of the row: every tensor is read twice. For mixtures of experts: only
    ``GroupedLinear`` follows it; other linear operations compute without a recipe, and the plan
    says so. For dgrad, which sums over output channels, a weight has a scale for each input
    feature; for wgrad, which sums over the rows of a group, operands have a scale for each feature.

    These are the scales of torch's grouped FP8 GEMM, which multiplies all groups at once on GPUs of
    compute capability 9.0, in E4M3 with results in bf16. For other GPUs, formats and results,
    opfuser has its own kernel.
    """

    fp8_format: Format = Format.E4M3

    handed_on: ClassVar[bool] = False
    of_groups: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """A scale for each 32 consecutive values, a power of two in 8 bits (E8M0).

    ``1/s`` is the smallest power of two with ``amax s <= largest``, amax of the block. Nothing
    saturates: the exponent is rounded up, as in Mishra et al., "Recipes for Pre-training LLMs with
    MXFP8", arXiv:2506.08027, and not down, as in the conversion that OCP, "Microscaling Formats
    (MX) Specification v1.0", describes. Blocks run along the dimension that a GEMM sums over, so a
    tensor and its transpose are rounded separately.

    GPUs of compute capability 10.0 and later multiply this format; elsewhere, and for groups of
    rows, values are multiplied in bf16 or fp32. It has never run on a GPU of that kind: codes,
    scales and the arguments of the products are tested against plain torch, and the kernel is
    compiled for sm_100.

    Attributes:
        margin: 0; other values are not supported.
        fp8_format: E4M3 or HYBRID.
        enable_2d_quantization: one scale per 32 x 32 block of a weight; not supported.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    multiple: ClassVar[int] = 32
    capability: ClassVar[tuple[tuple[int, int], tuple[int, int] | None]] = ((10, 0), None)
    operands: ClassVar[str] = "MXFP8"
    handed_on: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin:
            self._refuse("Scales of MXFP8 leave no margin", f"margin={self.margin}")
        if self.enable_2d_quantization:
            self._refuse("Blocks of MXFP8 are 1 x 32", "enable_2d_quantization=True")

    def splits(self, gemm: str) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """4-bit values, an E4M3 scale for each 16 of them, and an fp32 scale for each tensor.

    The tensor's scale is ``g = amax / (6 * 448)`` with the amax of the tensor; a block's scale is
    ``d = amax / (6 g)`` with the amax of the block, rounded to nearest; a code is ``x / (g d)``,
    rounded to E2M1. The scheme of NVIDIA, "Pretraining Large Language Models with NVFP4",
    arXiv:2509.25149, with its three measures against the loss of precision:

    - blocks of 16 x 16 of a weight share a scale, so that forward and dgrad read the same weight;
    - gradients of outputs are rounded stochastically: up with the probability that leaves the
      expectation exact, by 16 random bits from a seed of the device's generator;
    - both operands of wgrad are multiplied by an orthogonal 16 x 16 Hadamard matrix with fixed
      random signs along the dimension that it sums over, which spreads outliers and does not change
      the product.

    A tensor is read twice, for its amax and then for its codes. For transformed tensors, g comes
    from ``4 amax``, an upper bound after the transform, and not, as in Transformer Engine, from the
    amax of the transformed tensor: the scales of blocks have enough range for that.

    GPUs of compute capability 10.0 and later multiply this format; elsewhere, and for groups of
    rows, values are multiplied in bf16 or fp32. It has never run on a GPU of that kind: codes,
    scales and the arguments of the products are tested against plain torch, and the kernel is
    compiled for sm_100.

    Attributes:
        disable_rht: no Hadamard transform.
        disable_stochastic_rounding: gradients are rounded to nearest even, like all else.
        disable_2d_quantization: blocks of weights are 1 x 16 as well.
        row_scaled_activation, nvfp4_4over6: only False and ``"none"`` are supported.
        fp4_format, fp8_format: E2M1 of values, and E4M3 of scales.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3

    # GEMMs take rows of 16 bytes, which are 32 values.
    multiple: ClassVar[int] = 32
    capability: ClassVar[tuple[tuple[int, int], tuple[int, int] | None]] = ((10, 0), None)
    operands: ClassVar[str] = "NVFP4"
    handed_on: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        formats = self.fp4_format, self.fp8_format
        if formats != (Format.E2M1, Format.E4M3):
            self._refuse(
                "Values of NVFP4 are in E2M1, their scales in E4M3", ", ".join(map(str, formats))
            )
        if self.row_scaled_activation or self.nvfp4_4over6 != "none":
            self._refuse(
                "A tensor has one scale in fp32, and its blocks reach 6",
                f"row_scaled_activation={self.row_scaled_activation}, "
                f"nvfp4_4over6={self.nvfp4_4over6!r}",
            )

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """Parameters for inputs."""
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """Parameters for weights."""
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """Parameters for gradients of outputs."""
        return QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )

    def params(self, role: str) -> QParams:
        """How an ``"input"``, a ``"weight"`` or a ``"grad_output"`` is quantized."""
        if role == "input":
            return self.fp4_quant_fwd_inp
        return self.fp4_quant_fwd_weight if role == "weight" else self.fp4_quant_bwd_grad

    def dtype(self, role: str) -> torch.dtype:
        return self.fp4_format.forward

    def splits(self, gemm: str) -> bool:
        return True
