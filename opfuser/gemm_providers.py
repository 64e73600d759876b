"""Libraries that multiply quantized operands: torch, or one that a recipe names.

A provider decides by what a plan knows, a :class:`Gemm`, so that plans can say who multiplies what
and why not; products that it refuses are torch's, and no provider multiplies groups of rows.
``Recipe.gemm`` chooses one for a region or a Sequential::

    with opfuser.autocast(recipe=opfuser.recipe.Float8CurrentScaling(gemm="te")):
        ...

Providers are:

- ``"torch"``: ``torch.nn.functional.scaled_mm``, and fp32 where a device has no such GEMM;
- ``"te"``: ``general_gemm`` of Transformer Engine, for one scale per tensor and for blocks of 128;
- ``"deepgemm"``: ``fp8_gemm_nt`` of DeepGEMM, forward and dgrad of blocks of 128 in bf16. It
  compiles a kernel for each pair of features when it first meets it;
- those that :func:`register` adds.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from .errors import ArgumentError
from .runtime.libraries import imported

__all__ = ["Gemm", "GemmChoice", "GemmOperand", "GemmProvider", "find", "names", "register"]


class Gemm(NamedTuple):
    """What is known of a product before it is computed: all but the number of rows.

    Attributes:
        product: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        out_features, in_features: N and K of the weight (N, K).
        formats: dtypes of the codes of both operands.
        scalings: what has a scale of its own in both operands, of
            :class:`torch.nn.functional.ScalingType`.
        dtype: of the result.
        split: whether to add up in fp32 after every 128 products.
        device: of the operands.
        hardware: whether that device multiplies such codes.
    """

    product: str
    out_features: int
    in_features: int
    formats: tuple[torch.dtype, torch.dtype]
    scalings: tuple[ScalingType, ScalingType]
    dtype: torch.dtype
    split: bool
    device: torch.device
    hardware: bool


class GemmChoice(NamedTuple):
    """A product for which a recipe names a library other than torch.

    Attributes:
        product: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        provider: the name that the recipe has.
        refusal: why torch computes it all the same; None: the provider does.
        op: the basic operation, by index.
    """

    product: str
    provider: str
    refusal: str | None
    op: int = 0

    def __str__(self) -> str:
        what = f"{self.product} of op {self.op}"
        if self.refusal is None:
            return f"{what}: {self.provider}"
        return f"{what}: torch, because {self.provider} refuses: {self.refusal}"


class GemmOperand(NamedTuple):
    """Codes (M, K), row-major, and what they are multiplied by.

    Attributes:
        codes: (M, K) of an fp8 dtype, or (M, K / 2) of fp4.
        scale: (1,) for a tensor; (K / 128, M) for blocks of 1 x 128; (M / 128, at least K / 128)
            for squares; for blocks of 32 and 16 flat and swizzled, as
            ``torch.nn.functional.scaled_mm`` takes them, with the fp32 scale of the tensor in the
            last 4 bytes of the latter.
        scaling: which of these.
    """

    codes: Tensor
    scale: Tensor
    scaling: ScalingType


class GemmProvider(NamedTuple):
    """A library that multiplies quantized operands.

    Attributes:
        name: by which recipes choose it.
        refuses: why it does not compute a product, or None. Reads nothing but its argument, and is
            asked at every call as well.
        multiply: ``(a, b, dtype, split)`` to ``a bᵀ``, (M, N) of ``dtype``, for operands (M, K)
            and (N, K) that are not empty. A gradient that is added to an fp32 ``main_grad`` is
            asked for in fp32. Runs in the current stream, and waits for nothing.
        replayable: whether it does nothing but launch kernels, so that its launches may be
            recorded.
    """

    name: str
    refuses: Callable[[Gemm], str | None]
    multiply: Callable[[GemmOperand, GemmOperand, torch.dtype, bool], Tensor]
    replayable: bool = False


_providers: dict[str, GemmProvider] = {}


def names() -> list[str]:
    """Names of the providers that a recipe may choose."""
    return ["torch", *_providers]


def register(provider: GemmProvider) -> None:
    """Makes a provider known. Recipes that name it may be constructed from now on.

    Args:
        provider: with the name by which recipes choose it.

    Raises:
        ArgumentError: there is one of that name.
    """
    if provider.name in names():
        raise ArgumentError.explained(
            "The name of a GEMM provider is its own",
            where="register",
            received=repr(provider.name),
            remedy="Register it once, under another name",
        )
    _providers[provider.name] = provider


def find(name: str) -> GemmProvider | None:
    """The provider with a given name; None for torch.

    Args:
        name: as recipes have it.

    Raises:
        ArgumentError: there is none.
    """
    if name == "torch":
        return None
    found = _providers.get(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(str(name), names(), n=1)
    raise ArgumentError.explained(
        f"A GEMM provider is one of {', '.join(names())}",
        where="Recipe.gemm",
        received=repr(name),
        remedy=f"Did you mean {close[0]!r}?" if close else "Register it before",
    )


_BLOCK = ScalingType.BlockWise1x128
_SQUARE = ScalingType.BlockWise128x128
_OF_BLOCKS = frozenset({_BLOCK, _SQUARE})


def _refusal(gemm: Gemm, module: str, scalings: frozenset[ScalingType]) -> str | None:
    if not gemm.hardware:
        return f"products are emulated on {gemm.device.type}"
    if not scalings.issuperset(gemm.scalings):
        return f"it has no scales of {gemm.scalings[0].name}"
    found = imported(module)
    return found if isinstance(found, str) else None


_TE = "transformer_engine.pytorch"


def _te_refuses(gemm: Gemm) -> str | None:
    return _refusal(gemm, _TE, _OF_BLOCKS | {ScalingType.TensorWise})


def _te_operand(x: GemmOperand) -> Any:
    engine = importlib.import_module(_TE)
    formats = {
        torch.float8_e4m3fn: engine.DType.kFloat8E4M3,
        torch.float8_e5m2: engine.DType.kFloat8E5M2,
    }
    codes, dtype = x.codes.contiguous().view(torch.uint8), formats[x.codes.dtype]
    if x.scaling is ScalingType.TensorWise:
        module = importlib.import_module(f"{_TE}.tensor.storage.float8_tensor_storage")
        made = module.Float8TensorStorage
        return made(data=codes, fp8_scale_inv=x.scale, fp8_dtype=dtype)
    module = importlib.import_module(f"{_TE}.tensor.storage.float8_blockwise_tensor_storage")
    made = module.Float8BlockwiseQTensorStorage
    return made(codes, x.scale.contiguous(), None, None, dtype, None, x.scaling is _SQUARE)


def _te_multiply(a: GemmOperand, b: GemmOperand, dtype: torch.dtype, split: bool) -> Tensor:
    gemm = importlib.import_module(f"{_TE}.cpp_extensions").general_gemm
    # It names operands as cuBLAS does, in columns: the result is B Aᵀ.
    how: Any = {"out_dtype": dtype, "layout": "TN", "use_split_accumulator": split}
    y: Tensor = gemm(_te_operand(b), _te_operand(a), **how)[0]
    return y


def _deepgemm_refuses(gemm: Gemm) -> str | None:
    if gemm.product == "wgrad":
        return "its GEMM has squares in one operand"
    if gemm.dtype != torch.bfloat16:
        return f"its results are in bfloat16, not {gemm.dtype}"
    if set(gemm.formats) != {torch.float8_e4m3fn}:
        return "its operands are in E4M3"
    return _refusal(gemm, "deep_gemm", _OF_BLOCKS)


def _deepgemm_multiply(a: GemmOperand, b: GemmOperand, dtype: torch.dtype, split: bool) -> Tensor:
    engine = importlib.import_module("deep_gemm")
    y = torch.empty(a.codes.shape[0], b.codes.shape[0], dtype=dtype, device=a.codes.device)
    blocks = -(-b.codes.shape[1] // 128)
    squares = b.scale[: -(-b.codes.shape[0] // 128), :blocks].contiguous()
    engine.fp8_gemm_nt((a.codes, a.scale.t()), (b.codes.contiguous(), squares), y)
    return y


register(GemmProvider("te", _te_refuses, _te_multiply))
register(GemmProvider("deepgemm", _deepgemm_refuses, _deepgemm_multiply))
