"""Each kernel against plain PyTorch, torch.compile and other libraries, and against a copy.

Kernels are called through the public operations, as users call them. Forward is that of training.
"100 %" is the rate of a large device-to-device copy in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.gpu import gemm_problems, loss_problems, row_problems
from benchmarks.gpu.contest import solve
from benchmarks.gpu.problem import Case, Options, Row

# Both, as autotuning element-wise kernels takes seconds.
MODES = ("default", "max-autotune-no-cudagraphs")


def rows_by_cols(*pairs: tuple[int, int]) -> tuple[Mapping[str, int], ...]:
    return tuple({"rows": rows, "cols": cols} for rows, cols in pairs)


NORMS = rows_by_cols(
    (8192, 4096), (2048, 1024), (16384, 1024), (2048, 4096), (2048, 8192), (16384, 8192)
)
FEW_NORMS = rows_by_cols((8192, 4096), (2048, 1024), (16384, 8192))
GATED = rows_by_cols((8192, 14336), (2048, 3584), (8192, 3584), (16384, 14336))
GEMMS = tuple({"dim": dim, "tokens": 8192} for dim in (4096, 2048, 1024))
TINY_GEMM = {"dim": 32, "tokens": 6}
HEADS = (
    {"batch": 2, "length": 4096, "heads": 32, "kv_heads": 8},
    {"batch": 1, "length": 2048, "heads": 8, "kv_heads": 8},
)
TINY_HEADS = {"batch": 2, "length": 3, "heads": 2, "kv_heads": 1}
TINY = {"rows": 5, "cols": 32}

CASES = (
    Case("RMSNorm", row_problems.rms_norm, NORMS, TINY),
    Case("add + RMSNorm", row_problems.add_rms_norm, NORMS, TINY),
    Case("LayerNorm", row_problems.layer_norm, FEW_NORMS, TINY),
    Case("add + LayerNorm", row_problems.add_layer_norm, FEW_NORMS, TINY),
    Case("SwiGLU", row_problems.swiglu, GATED, TINY),
    Case("GEGLU", row_problems.geglu, GATED[:2], TINY),
    Case("bias + GELU", row_problems.bias_gelu, GATED[:2], TINY),
    Case("element-wise chain", row_problems.chain, FEW_NORMS[:2], TINY),
    Case("dropout + add", row_problems.dropout_add, FEW_NORMS[:2], {"rows": 128, "cols": 256}),
    Case(
        "dropout + add + RMSNorm",
        row_problems.dropout_add_rms_norm,
        FEW_NORMS[:2],
        {"rows": 128, "cols": 256},
    ),
    Case("rotary embedding", loss_problems.rotary, HEADS, TINY_HEADS),
    Case("QK-norm + rotary", loss_problems.qk_norm_rotary, HEADS, TINY_HEADS),
    Case(
        "cross entropy",
        loss_problems.cross_entropy,
        (
            {"tokens": 8192, "classes": 128256},
            {"tokens": 8192, "classes": 32000},
            {"tokens": 2048, "classes": 32000},
        ),
        {"tokens": 6, "classes": 65},
    ),
    Case("RMSNorm + linear", gemm_problems.norm_linear, GEMMS, TINY_GEMM),
    Case("linear + SwiGLU", gemm_problems.linear_swiglu, GEMMS, TINY_GEMM),
    Case(
        "linear + cross entropy",
        loss_problems.linear_cross_entropy,
        (
            {"tokens": 8192, "dim": 4096, "classes": 128256},
            {"tokens": 8192, "dim": 4096, "classes": 32000},
            {"tokens": 4096, "dim": 2048, "classes": 128256},
            {"tokens": 8192, "dim": 1024, "classes": 128256},
        ),
        {"tokens": 6, "dim": 16, "classes": 65},
    ),
)


def rows(options: Options) -> Iterator[Row]:
    modes = MODES if options.modes is None else options.modes
    for case in CASES:
        # Here autotuning the GEMMs would take minutes.
        own = modes[:1] if "linear" in case.name else modes
        yield from solve(case, options, own)
