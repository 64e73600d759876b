"""Kernels that exist, by what they compute: what an audit looks up before it asks for a new one."""

from __future__ import annotations

import operator
from typing import Literal, NamedTuple

import torch

import opfuser

from ...runtime.libraries import installed

Source = Literal["opfuser", "torch", "triton", "cuda"]
Recommendation = Literal["use_existing_kernel", "needs_triton", "defer"]


class Kernel(NamedTuple):
    """A kernel, or a function that launches one.

    Attributes:
        source: what it belongs to.
        symbol: how it is imported, with the package first.
        documented: where.
        trains: whether it has a backward, and takes tensors of torch.
        condition: what it asks for besides.
    """

    source: Source
    symbol: str
    documented: str
    trains: bool = True
    condition: str = ""

    @property
    def package(self) -> str:
        """What has to be importable."""
        return self.symbol.partition(".")[0]

    def importable(self) -> bool:
        """Whether it could be imported here. Packages other than torch are not imported."""
        own = {"torch": torch, "opfuser": opfuser}
        package, _, rest = self.symbol.partition(".")
        if package not in own:
            return installed(package)
        try:
            operator.attrgetter(rest)(own[package])
        except AttributeError:
            return False
        return True

    def __str__(self) -> str:
        here = "importable here" if self.importable() else "not importable here"
        limits = "" if self.trains else "; forward only"
        condition = f"; {self.condition}" if self.condition else ""
        return f"{self.symbol} ({self.documented}; {here}{limits}{condition})"


class Existing(NamedTuple):
    """The result of a look-up.

    Attributes:
        lookup: "found" or "not_found".
        evidence: a line for each kernel that was found, or looked at and found wanting.
    """

    lookup: str
    evidence: tuple[str, ...]


def _torch(name: str, condition: str = "") -> Kernel:
    page = f"https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.{name}.html"
    return Kernel("torch", f"torch.nn.functional.{name}", page, condition=condition)


def _ours(name: str, condition: str = "") -> Kernel:
    return Kernel("opfuser", f"opfuser.{name}", "docs/reference/operations.md", condition=condition)


def _liger(name: str, condition: str = "") -> Kernel:
    page = "https://github.com/linkedin/Liger-Kernel, 0.8.5"
    return Kernel("triton", f"liger_kernel.ops.{name}", page, condition=condition)


def _quack(name: str, condition: str = "") -> Kernel:
    page = "https://github.com/Dao-AILab/quack, 0.6.5"
    return Kernel("cuda", f"quack.{name}", page, condition=condition)


# By kind of formula; the one to use first. Symbols of Liger-Kernel and quack were looked up in the
# named versions.
KNOWN: dict[str, tuple[Kernel, ...]] = {
    "adaptive_layer_norm": (),
    "adaptive_rms_norm": (
        _liger("LigerModulatedRMSNormFunction", "y = (1 + scale) * norm(x) + shift"),
    ),
    "attention": (
        _torch("scaled_dot_product_attention"),
        _ours("DotProductAttention", "takes queries, keys and values as one tensor"),
    ),
    "embedding_norm": (
        Kernel(
            "cuda", "onnxruntime.EmbedLayerNormalization",
            "https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md",
            trains=False, condition="a node of ONNX graphs, for LayerNorm",
        ),
    ),
    "geglu": (
        _ours("GEGLU", "takes both halves as one tensor"),
        _liger("LigerGELUMulFunction"),
    ),
    "geglu_exact": (),
    "gelu": (_torch("gelu"), _ours("GELU")),
    "gelu_tanh": (_torch("gelu", 'approximate="tanh"'), _ours("GELU")),
    "glu": (_torch("glu", "the gate is the second half"), _ours("GLU", "the gate is the first")),
    "layer_norm": (
        _torch("layer_norm"), _ours("LayerNorm"), _liger("LigerLayerNormFunction"),
    ),
    "linear": (_torch("linear"), _ours("Linear")),
    "merged_linear": (_ours("MergedLinear"),),
    "qgeglu": (_ours("QGEGLU", "takes both halves as one tensor"),),
    "quick_gelu": (_ours("QGELU"),),
    "reglu": (_ours("ReGLU", "takes both halves as one tensor"),),
    "rms_norm": (
        _torch("rms_norm"), _ours("RMSNorm"), _liger("LigerRMSNormFunction"),
        _quack("rmsnorm.rmsnorm", "sm_90 or later"),
    ),
    "rotary_embedding": (
        _ours("RotaryEmbedding", "takes queries, keys and values as one tensor"),
        _liger("LigerRopeFunction", "halves of a head turn"),
        _quack("rotary.apply_rotary_emb", "sm_90 or later"),
    ),
    "silu": (_torch("silu"), _ours("SiLU")),
    "sreglu": (_ours("SReGLU", "takes both halves as one tensor"),),
    "squared_relu": (_ours("SReLU"), _liger("LigerReLUSquaredFunction")),
    "swiglu": (
        _ours("SwiGLU", "takes both halves as one tensor"),
        _liger("LigerSiLUMulFunction"),
    ),
}  # fmt: skip

_WANTING = {
    "adaptive_layer_norm": (
        "torch.nn.functional.layer_norm: a weight and a bias per feature, not per sample",
        "liger_kernel.ops.LigerModulatedRMSNormFunction, 0.8.5: for RMSNorm",
        "opfuser.fused.PointwiseNorm: element-wise operations before a norm, not behind it",
    ),
    "geglu_exact": (
        "opfuser.GEGLU: the tanh form of GELU, not that with erf",
        "liger_kernel.ops.LigerGELUMulFunction, 0.8.5: likewise",
    ),
}


def look_up(kind: str) -> Existing:
    """Which kernels compute a formula, and which nearly do.

    Args:
        kind: a key of ``KNOWN``; anything else is not found.
    """
    found = KNOWN.get(kind, ())
    if found:
        return Existing("found", tuple(map(str, found)))
    wanting = _WANTING.get(kind, (f"{', '.join(_PLACES)}: none is known",))
    return Existing("not_found", wanting)


_PLACES = ("torch.nn.functional", "opfuser", "Liger-Kernel 0.8.5", "quack 0.6.5")


def advice(kind: str, gradient: bool) -> tuple[str, Recommendation]:
    """The package that has the kernel to use, and what to do.

    A kernel that cannot train is none where gradients are needed; then a new one is due.
    """
    for kernel in KNOWN.get(kind, ()):
        if kernel.trains or not gradient:
            return kernel.source, "use_existing_kernel"
    return "triton", "needs_triton"
