"""Problems: losses, and operations on queries and keys."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from benchmarks import timing
from benchmarks.gpu import peers
from benchmarks.gpu.gemm_problems import in_float64
from benchmarks.gpu.problem import STEP, Function, Inputs, Options, Problem
from benchmarks.gpu.row_problems import EPS, drawing, parameter
from benchmarks.gpu.torch_models import Rotary


def cross_entropy(options: Options, tokens: int, classes: int) -> Problem:
    """Loss and gradient: logits are read twice and the gradient is written."""

    def draw() -> Inputs:
        logits = torch.randn(tokens, classes, device=options.device).to(options.dtype)
        targets = torch.randint(classes, (tokens,), device=options.device)
        return Inputs((logits, targets), (torch.ones((), device=options.device),))

    functions: dict[str, Function] = {
        "opfuser": opfuser.Sequential(opfuser.CrossEntropy()),
        "torch": lambda x, t: F.cross_entropy(x.float(), t),
        "torch, not upcast": F.cross_entropy,
        **peers.cross_entropy(),
    }
    traffic = {STEP: 3 * tokens * classes * options.dtype.itemsize}
    return Problem(draw, functions, traffic, fresh=True)


def linear_cross_entropy(options: Options, tokens: int, dim: int, classes: int) -> Problem:
    """Loss of a head and gradients of its input and weight. The floor is its three GEMMs."""
    w = parameter(options, classes, dim, scale=dim**-0.5)
    head = opfuser.Linear(dim, classes, bias=False, device=options.device, dtype=options.dtype)
    head.weight = w

    def draw() -> Inputs:
        x = torch.randn(tokens, dim, device=options.device).to(options.dtype)
        targets = torch.randint(classes, (tokens,), device=options.device)
        return Inputs((x, targets), (torch.ones((), device=options.device),))

    logits = torch.randn(tokens, classes, device=options.device).to(options.dtype)

    def floor(x: Tensor, targets: Tensor) -> timing.Call:
        weight = w.detach()

        def gemms() -> None:
            torch.mm(x, weight.t())
            torch.mm(logits, weight)
            torch.mm(logits.t(), x)

        return gemms

    source = Loss(w)
    functions: dict[str, Function] = {
        "opfuser": opfuser.Sequential(head, opfuser.CrossEntropy()),
        "torch": source,
        "torch, not upcast": lambda x, t: F.cross_entropy(F.linear(x, w), t),
        **peers.linear_cross_entropy(w),
    }
    exact = partial(in_float64, source)
    return Problem(draw, functions, {STEP: None}, (w,), floor=floor, exact=exact)


class Loss(nn.Module):
    """The mean loss of a head, computed in fp32 or wider."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


HEAD_DIM = 128


def rotary(options: Options, batch: int, length: int, heads: int, kv_heads: int) -> Problem:
    """Packed queries, keys and values; the values are copied unchanged."""
    shape = (batch, length, (heads + 2 * kv_heads) * HEAD_DIM)
    op = opfuser.RotaryEmbedding(heads, HEAD_DIM, num_kv_heads=kv_heads)
    turn = Rotary(heads, kv_heads, HEAD_DIM, length, 10000.0, options.device)
    functions: dict[str, Function] = {"opfuser": opfuser.Sequential(op), "torch": turn}
    size = batch * length * shape[2] * options.dtype.itemsize
    traffic = {"forward": 2 * size, "backward": 2 * size}
    return Problem(drawing(options, (shape,), (shape,)), functions, traffic)


def qk_norm_rotary(options: Options, batch: int, length: int, heads: int, kv_heads: int) -> Problem:
    """RMSNorm of each query and key head, then the rotation. Backward also reads the input."""
    shape = (batch, length, (heads + 2 * kv_heads) * HEAD_DIM)
    to = {"device": options.device, "dtype": options.dtype}
    wq, wk = (parameter(options, HEAD_DIM, scale=0.1, shift=1.0) for _ in range(2))
    norm = opfuser.QKNorm(heads, HEAD_DIM, num_kv_heads=kv_heads, eps=EPS, **to)
    norm.q_weight, norm.k_weight = wq, wk
    op = opfuser.RotaryEmbedding(heads, HEAD_DIM, num_kv_heads=kv_heads)
    turn = Rotary(heads, kv_heads, HEAD_DIM, length, 10000.0, options.device)

    def torch_function(qkv: Tensor) -> Tensor:
        packed = qkv.unflatten(-1, (-1, HEAD_DIM))
        q, k, v = packed.split((heads, kv_heads, kv_heads), dim=-2)
        q, k = (F.rms_norm(t, (HEAD_DIM,), w, EPS) for t, w in ((q, wq), (k, wk)))
        return torch.cat([turn.rotate(q), turn.rotate(k), v], dim=-2).flatten(-2)

    size = batch * length * shape[2] * options.dtype.itemsize
    unread = size * kv_heads // (heads + 2 * kv_heads)  # backward skips the values
    return Problem(
        drawing(options, (shape,), (shape,)),
        {"opfuser": opfuser.Sequential(norm, op), "torch": torch_function},
        {"forward": 2 * size, "backward": 3 * size - unread},
        (wq, wk),
    )
