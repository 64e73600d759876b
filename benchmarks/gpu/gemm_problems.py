"""GEMMs with what stands before or behind them, and what problems are in float64."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

import opfuser
from benchmarks.gpu import peer_blocks
from benchmarks.gpu.problem import STEP, Function, Inputs, Options, Problem
from benchmarks.gpu.row_problems import EPS, drawing
from benchmarks.gpu.torch_models import Gated, Parts

ROWS = 4096  # at a time, or one sequence: numbers of float64 take memory


def in_float64(module: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The output of a module and all gradients, in float64.

    Rows, or sequences, may not depend on each other; an output without dimensions is their mean.
    """
    model = copy.deepcopy(module).double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    (grad,), rows = inputs.grads, len(inputs.args[0])
    step = ROWS if inputs.args[0].dim() == 2 else 1
    outputs: list[Tensor] = []
    of_input: list[Tensor] = []
    sums = [torch.zeros_like(p) for p in parameters]
    for first in range(0, rows, step):
        part = slice(first, first + step)
        x, *others = (t[part] for t in inputs.args)
        x = x.double().requires_grad_(bool(parameters))
        y = model(x, *others)
        y, dy = (y, grad[part]) if y.dim() else (y * (len(x) / rows), grad)
        outputs.append(y.detach())
        if parameters:
            dx, *own = torch.autograd.grad(y, [x, *parameters], dy.double())
            of_input.append(dx)
            sums = [total + g for total, g in zip(sums, own)]
    whole = torch.cat(outputs) if outputs[0].dim() else torch.stack(outputs).sum()
    return [whole, *([torch.cat(of_input)] if of_input else []), *sums]


def norm_linear(options: Options, dim: int, tokens: int) -> Problem:
    """RMSNorm and the first linear of a SwiGLU block, f = 3.5 d."""
    to = {"device": options.device, "dtype": options.dtype}
    norm, linear = nn.RMSNorm(dim, EPS, **to), nn.Linear(dim, 7 * dim, bias=False, **to)
    nn.init.normal_(norm.weight, 1.0, 0.1)
    ours = opfuser.Sequential(
        opfuser.RMSNorm(dim, eps=EPS, **to), opfuser.Linear(dim, 7 * dim, bias=False, **to)
    )
    ours[0].weight, ours[1].weight = norm.weight, linear.weight
    source = nn.Sequential(norm, linear)
    functions: dict[str, Function] = {
        "opfuser": ours,
        "torch": source,
        **peer_blocks.norm_linear(norm.weight, linear.weight, EPS),
    }
    return Problem(
        drawing(options, ((tokens, dim),), ((tokens, 7 * dim),)),
        functions,
        {STEP: None},
        (norm.weight, linear.weight),
        exact=partial(in_float64, source),
    )


def linear_swiglu(options: Options, dim: int, tokens: int) -> Problem:
    """The same linear and SwiGLU: forward without gradients."""
    to = {"device": options.device, "dtype": options.dtype}
    linear = nn.Linear(dim, 7 * dim, bias=False, **to).requires_grad_(False)
    op = opfuser.Linear(dim, 7 * dim, bias=False, **to)
    op.weight = linear.weight
    source = nn.Sequential(linear, Gated(Parts()))
    functions: dict[str, Function] = {
        "opfuser": opfuser.Sequential(op, opfuser.SwiGLU()),
        "torch": source,
        **peer_blocks.linear_swiglu(linear.weight),
    }
    return Problem(
        drawing(options, ((tokens, dim),), ((tokens, 7 * dim // 2),)),
        functions,
        {"forward": None},
        exact=partial(in_float64, source),
        input_grads=False,
    )
