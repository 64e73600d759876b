"""Chains of element-wise operations to test kernels with, and sequences that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opfuser import (
    GELU,
    QGELU,
    AddExtraInput,
    Bias,
    ConstantScale,
    Dropout,
    Sequential,
    Sigmoid,
    SiLU,
    Softplus,
    SReLU,
)
from opfuser.kernels import functions
from opfuser.kernels.philox import draw_seed
from opfuser.kernels.pointwise_plain import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Link
from opfuser.kernels.scalar import ScalarFunction


def link_of(function: ScalarFunction) -> Link:
    return Link(FUNCTION, f"@scalar:{function.name}", function.parameters, function, linear=False)


def scale(factor: float) -> Link:
    return Link(FUNCTION, "@scalar:scale", (factor,), functions.Scale(factor))


SILU, GELU_TANH = link_of(functions.Swish()), link_of(functions.GeluTanh())
# A sigmoid is not zero where its argument is, as it is beyond the end of a row.
SIGMOID = link_of(functions.Sigmoid())
SOFTPLUS = link_of(Softplus(2.0).make_function())
BIASED, ADDED, KEPT = Link(BIAS), Link(ADD), Link(KEEP)
DROPPED = Link(DROPOUT, parameters=(0.3,))

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
    "expanded": lambda t: t[:1].expand(t.shape),
}


def random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Drawn on the CPU, so that numbers are the same on every device."""
    return torch.randn(tuple(shape)).to(device, dtype)


def operands_of(
    links: Sequence[Link], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Tensor | None]:
    made: dict[int, Callable[[], Tensor]] = {
        BIAS: lambda: random(shape[-1:], dtype, device),
        ADD: lambda: random(shape, dtype, device),
        DROPOUT: lambda: draw_seed(torch.empty(0)).to(device),
    }
    return [made[link.kind]() if link.kind in made else None for link in links]


def laid_out(how: str, tensors: Sequence[Tensor | None]) -> list[Any]:
    """The tensors, but seeds, in another memory layout."""
    lay = LAYOUTS[how]
    return [t if t is None or t.dtype == torch.int64 else lay(t) for t in tensors]


# What they are made of, and the number of extra inputs.
EXAMPLES: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "bias and activation": (lambda: [Bias(6), GELU()], 0),
    "bias and sum": (lambda: [Bias(6), AddExtraInput()], 1),
    "dropout alone": (lambda: [Dropout(0.4)], 0),
    "end of a feed-forward": (lambda: [Bias(6), Dropout(0.3), AddExtraInput()], 1),
    "everything": (
        lambda: [Bias(6), SiLU(), ConstantScale(0.5), Dropout(0.2), AddExtraInput(), Bias(6)],
        1,
    ),
    "functions": (lambda: [QGELU(), Softplus(2.0), Sigmoid(), SReLU(), GELU("none")], 0),
    "nothing but sums": (lambda: [AddExtraInput(), Bias(6), AddExtraInput()], 2),
    "one function": (lambda: [Sigmoid()], 0),
    "sums before functions": (lambda: [AddExtraInput(), SiLU(), AddExtraInput(), Sigmoid()], 2),
    "two dropouts": (lambda: [Dropout(0.2), Dropout(0.5)], 0),
}


def example(
    name: str, device: torch.device, *behind: nn.Module, shape: Sequence[int] = (5, 6)
) -> tuple[Sequential, list[Tensor]]:
    """The sequence, with random parameters and more operations behind it, and its inputs."""
    ops, extras = EXAMPLES[name]
    seq = Sequential(*ops(), *behind)
    for parameter in seq.parameters():
        nn.init.normal_(parameter)
    return seq.to(device), [random(shape, torch.float32, device) for _ in range(1 + extras)]


def results(seq: Sequential, tensors: Sequence[Tensor], model: Any = None) -> list[Tensor]:
    """Outputs and gradients of all inputs and parameters.

    Args:
        model: what calls ``seq``, if not that itself.
    """
    torch.manual_seed(3)
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = (model or seq)(*leaves)
    ys = found if isinstance(found, tuple) else (found,)
    douts = [f(y.detach()) for f, y in zip((torch.cos, torch.sin), ys)]
    grads = torch.autograd.grad(ys, [*leaves, *seq.parameters()], douts)
    return [*(y.detach() for y in ys), *grads]
