"""Problems limited by memory: norms, activations and chains. All inputs are (rows, columns).

A is the size of one such tensor in bytes, without padding; in gated activations that of the output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from benchmarks.gpu import peers
from benchmarks.gpu.problem import RANDOM_TOLERANCE, Function, Inputs, Options, Problem, norms

EPS = 1e-5
DROPOUT = 0.1


def drawing(
    options: Options, arguments: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...]
) -> Callable[[], Inputs]:
    """Normally distributed tensors of these shapes."""
    to = {"device": options.device, "dtype": options.dtype}
    return lambda: Inputs(
        tuple(torch.randn(shape, **to) for shape in arguments),
        tuple(torch.randn(shape, **to) for shape in outputs),
    )


def parameter(
    options: Options, *shape: int, scale: float = 1.0, shift: float = 0.0
) -> nn.Parameter:
    values = torch.randn(shape, device=options.device) * scale + shift
    return nn.Parameter(values.to(options.dtype))


def nbytes(options: Options, rows: int, cols: int) -> int:
    return rows * cols * options.dtype.itemsize


def rms(options: Options, cols: int) -> tuple[nn.Parameter, opfuser.RMSNorm]:
    w = parameter(options, cols, scale=0.1, shift=1.0)
    op = opfuser.RMSNorm(cols, eps=EPS, device=options.device, dtype=options.dtype)
    op.weight = w
    return w, op


def layer(options: Options, cols: int) -> tuple[nn.Parameter, nn.Parameter, opfuser.LayerNorm]:
    w, b = parameter(options, cols, scale=0.1, shift=1.0), parameter(options, cols)
    op = opfuser.LayerNorm(cols, eps=EPS, device=options.device, dtype=options.dtype)
    op.weight, op.bias = w, b
    return w, b, op


def after_sum(*before: nn.Module, norm: nn.Module) -> nn.Module:
    """``(x, r)`` to the norm of the sum, and the sum."""
    return opfuser.Sequential(*before, opfuser.AddExtraInput(), opfuser.MakeExtraOutput(), norm)


def rms_norm(options: Options, rows: int, cols: int) -> Problem:
    w, op = rms(options, cols)
    size = nbytes(options, rows, cols)
    functions: dict[str, Function] = {
        "opfuser": opfuser.Sequential(op),
        "torch": lambda x: F.rms_norm(x, (cols,), w, EPS),
        **peers.rms_norm(w, EPS),
    }
    draw = drawing(options, ((rows, cols),), ((rows, cols),))
    return Problem(draw, functions, {"forward": 2 * size, "backward": 3 * size}, (w,))


def add_rms_norm(options: Options, rows: int, cols: int) -> Problem:
    w, op = rms(options, cols)
    size = nbytes(options, rows, cols)

    def torch_function(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        return F.rms_norm(total, (cols,), w, EPS), total

    functions: dict[str, Function] = {
        "opfuser": after_sum(norm=op),
        "torch": torch_function,
        **peers.add_rms_norm(w, EPS),
    }
    draw = drawing(options, ((rows, cols),) * 2, ((rows, cols),) * 2)
    return Problem(draw, functions, {"forward": 4 * size, "backward": 4 * size}, (w,))


def layer_norm(options: Options, rows: int, cols: int) -> Problem:
    w, b, op = layer(options, cols)
    size = nbytes(options, rows, cols)
    functions: dict[str, Function] = {
        "opfuser": opfuser.Sequential(op),
        "torch": lambda x: F.layer_norm(x, (cols,), w, b, EPS),
        **peers.layer_norm(w, b, EPS),
    }
    draw = drawing(options, ((rows, cols),), ((rows, cols),))
    return Problem(draw, functions, {"forward": 2 * size, "backward": 3 * size}, (w, b))


def add_layer_norm(options: Options, rows: int, cols: int) -> Problem:
    w, b, op = layer(options, cols)
    size = nbytes(options, rows, cols)

    def torch_function(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        return F.layer_norm(total, (cols,), w, b, EPS), total

    functions: dict[str, Function] = {"opfuser": after_sum(norm=op), "torch": torch_function}
    draw = drawing(options, ((rows, cols),) * 2, ((rows, cols),) * 2)
    return Problem(draw, functions, {"forward": 4 * size, "backward": 4 * size}, (w, b))


def dropout_add_rms_norm(options: Options, rows: int, cols: int) -> Problem:
    """The mask need not be stored: backward can recompute it."""
    w, op = rms(options, cols)
    size = nbytes(options, rows, cols)

    def torch_function(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        total = F.dropout(x, DROPOUT) + r
        return F.rms_norm(total, (cols,), w, EPS), total

    functions: dict[str, Function] = {
        "opfuser": after_sum(opfuser.Dropout(DROPOUT), norm=op),
        "torch": torch_function,
    }
    draw = drawing(options, ((rows, cols),) * 2, ((rows, cols),) * 2)
    traffic = {"forward": 4 * size, "backward": 5 * size}
    return Problem(draw, functions, traffic, (w,), observe=norms, tolerance=RANDOM_TOLERANCE)


def dropout_add(options: Options, rows: int, cols: int) -> Problem:
    """The mask need not be stored; the residual's gradient is the output's."""
    size = nbytes(options, rows, cols)
    functions: dict[str, Function] = {
        "opfuser": opfuser.Sequential(opfuser.Dropout(DROPOUT), opfuser.AddExtraInput()),
        "torch": lambda x, r: F.dropout(x, DROPOUT) + r,
    }
    draw = drawing(options, ((rows, cols),) * 2, ((rows, cols),))
    return Problem(
        draw,
        functions,
        {"forward": 3 * size, "backward": 2 * size},
        observe=norms,
        tolerance=RANDOM_TOLERANCE,
    )


def gated(
    options: Options, rows: int, cols: int, op: nn.Module, torch_function: Function, others: dict
) -> Problem:
    size = nbytes(options, rows, cols)
    functions = {"opfuser": opfuser.Sequential(op), "torch": torch_function, **others}
    draw = drawing(options, ((rows, 2 * cols),), ((rows, cols),))
    return Problem(draw, functions, {"forward": 3 * size, "backward": 5 * size})


def swiglu(options: Options, rows: int, cols: int) -> Problem:
    def torch_function(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    return gated(options, rows, cols, opfuser.SwiGLU(), torch_function, peers.swiglu())


def geglu(options: Options, rows: int, cols: int) -> Problem:
    def torch_function(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    return gated(options, rows, cols, opfuser.GEGLU(), torch_function, peers.geglu())


def bias_gelu(options: Options, rows: int, cols: int) -> Problem:
    """The activation's backward reads the biased input and sums the bias gradient."""
    size = nbytes(options, rows, cols)
    b = parameter(options, cols)
    op = opfuser.Bias(cols, device=options.device, dtype=options.dtype)
    op.bias = b
    functions: dict[str, Function] = {
        "opfuser": opfuser.Sequential(op, opfuser.GELU()),
        "torch": lambda x: F.gelu(x + b, approximate="tanh"),
    }
    draw = drawing(options, ((rows, cols),), ((rows, cols),))
    return Problem(draw, functions, {"forward": 2 * size, "backward": 3 * size}, (b,))


def chain(options: Options, rows: int, cols: int) -> Problem:
    """A chain of element-wise operations: ``0.5 silu(x + b) + z``."""
    size = nbytes(options, rows, cols)
    b = parameter(options, cols)
    op = opfuser.Bias(cols, device=options.device, dtype=options.dtype)
    op.bias = b
    functions: dict[str, Function] = {
        "opfuser": opfuser.Sequential(
            op, opfuser.SiLU(), opfuser.ConstantScale(0.5), opfuser.AddExtraInput()
        ),
        "torch": lambda x, z: F.silu(x + b) * 0.5 + z,
    }
    draw = drawing(options, ((rows, cols),) * 2, ((rows, cols),))
    return Problem(draw, functions, {"forward": 3 * size, "backward": 3 * size}, (b,))
