"""Every operation with its attributes, for the tests of attributes that are set later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opfuser import PointwiseOperation, basic
from opfuser.op import BasicOperation

__all__ = [
    "CASES",
    "EACH_KIND",
    "Case",
    "Change",
    "Inputs",
    "ReadOnly",
    "attributes_of",
    "f32",
    "make",
    "public",
    "results",
    "rows",
    "same",
]

Inputs = Callable[[], list[Tensor]]


class Change(NamedTuple):
    """An attribute that can be set.

    Attributes:
        value: another legal one.
        bad: one outside its domain, if there is any.
        argument: of the constructor; None is that with the name of the attribute.
        inputs: that go with ``value``; None are those of the case.
        neutral: whether it changes neither output nor gradients.
    """

    value: Any
    bad: Any = None
    argument: str | None = None
    inputs: Inputs | None = None
    neutral: bool = False


class ReadOnly(NamedTuple):
    """An attribute that cannot be set, and a value that it cannot be set to."""

    value: Any


class Case(NamedTuple):
    arguments: dict[str, Any]
    inputs: Inputs
    attributes: dict[str, Change | ReadOnly]


class Power(PointwiseOperation):
    """``y = c |x| ** exponent``."""

    def __init__(self, constants: tuple[float, ...] = (2.0,), exponent: int = 3) -> None:
        super().__init__(*constants)
        self.exponent = exponent

    def value(self, x: Tensor) -> Tensor:
        (c,) = self.constants
        return c * x.abs() ** self.exponent


def f32(*shapes: tuple[int, ...]) -> Inputs:
    return lambda: [torch.randn(shape) for shape in shapes]


def rows(*, scales: bool = False) -> Inputs:
    return f32((3, 8), (3,)) if scales else f32((3, 8))


EPS = {"eps": Change(0.5, bad=-1.0)}
GAMMA = {"zero_centered_gamma": Change(True)}
NORM = {"normalized_shape": ReadOnly((4,)), **EPS, **GAMMA}
INTERLEAVE = {"glu_interleave_size": Change(2, bad=0)}
CAPS = {"beta1": Change(1.0, bad=0.0), "beta2": Change(2.0, bad=-1.0)}
CLAMP = {
    "limit": Change(0.5, bad=-1.0),
    "alpha": Change(1.0),
    "glu_linear_offset": Change(0.0),
}
IN_PLACE = {"in_place": Change(True, neutral=True)}
RECOMPUTE = {"activation_recompute_in_mlp": Change(True, neutral=True)}
FIXED_LAYOUT = Case({}, rows(), {"glu_interleave_size": ReadOnly(2)})
NOTHING = Case({}, rows(), {})
# Into ``grad`` of zeros the GEMM adds what autograd would add.
ACCUMULATE = {
    "accumulate_into_main_grad": Change(True),
    "accumulate_into_grad": Change(True, neutral=True),
}
HEADS = {"num_heads": 2, "head_dim": 4, "num_kv_heads": 1}
MORE_HEADS = {
    "num_heads": Change(4, bad=0, inputs=f32((2, 5, 24))),
    "num_kv_heads": Change(2, bad=0, inputs=f32((2, 5, 24))),
}

CASES: dict[str, Case] = {
    "AddExtraInput": Case({}, f32((3, 8), (3, 8)), IN_PLACE),
    "AllGather": NOTHING,
    "AllReduce": NOTHING,
    "BasicLinear": Case(
        {"in_features": 8, "out_features": 6},
        rows(),
        {
            "in_features": ReadOnly(9),
            "out_features": ReadOnly(9),
            "sharding": ReadOnly(None),
            **ACCUMULATE,
        },
    ),
    "Bias": Case(
        {"size": 8},
        rows(),
        {
            "size": ReadOnly(9),
            "local_size": ReadOnly(9),
            "tensor_parallel": ReadOnly(True),
            "tensor_parallel_size": ReadOnly(2),
        },
    ),
    "ClampedSwiGLU": Case({}, rows(), {**CLAMP, **INTERLEAVE}),
    "ConstantScale": Case({"scale": 2.0}, rows(), {"scale": Change(3.0, bad="two")}),
    "CrossEntropy": Case(
        {},
        lambda: [torch.randn(5, 7), torch.tensor([0, 1, 2, 5, 3])],
        {
            "ignore_index": Change(1),
            "label_smoothing": Change(0.2, bad=2.0),
            "reduction": Change("sum", bad="max"),
            "z_loss": Change(0.1, bad=-1.0),
        },
    ),
    "DotProductAttention": Case(
        {"num_heads": 2, "num_kv_heads": 1},
        f32((2, 5, 24)),
        {
            "num_heads": Change(4, bad=0),
            "num_kv_heads": Change(2, bad=3),
            "causal": Change(False),
            "scale": Change(0.7),
        },
    ),
    "Dropout": Case(
        {"p": 0.5}, rows(), {"dropout_probability": Change(0.9, bad=2.0, argument="p")}
    ),
    "Embedding": Case(
        {"num_embeddings": 7, "embedding_dim": 4},
        lambda: [torch.tensor([0, 1, 6, 1])],
        {
            "num_embeddings": ReadOnly(9),
            "embedding_dim": ReadOnly(9),
            "padding_idx": Change(-6, bad=7),
        },
    ),
    "GEGLU": FIXED_LAYOUT,
    "GELU": Case({}, rows(), {"approximate": Change("none", bad="erf")}),
    "GLU": FIXED_LAYOUT,
    "GroupedLinear": Case(
        {"num_groups": 2, "in_features": 8, "out_features": 6},
        lambda: [torch.randn(5, 8), torch.tensor([2, 3])],
        {
            "num_groups": ReadOnly(3),
            "in_features": ReadOnly(9),
            "out_features": ReadOnly(9),
            "use_bias": ReadOnly(False),
            "scale_bias": ReadOnly(True),
            "single_grouped_weight": ReadOnly(True),
            "single_grouped_bias": ReadOnly(True),
            "delay_wgrad_compute": Change(True),
            **ACCUMULATE,
        },
    ),
    "Identity": NOTHING,
    "L2Normalization": Case({}, rows(), EPS),
    "LayerNorm": Case({"normalized_shape": 8}, rows(), NORM),
    "MakeExtraOutput": Case({}, rows(), IN_PLACE),
    "PointwiseOperation": Case(
        {}, rows(), {"constants": Change((3.0,), bad=("two",)), "exponent": Change(2)}
    ),
    "QGEGLU": FIXED_LAYOUT,
    "QGELU": NOTHING,
    "QKNorm": Case(HEADS, f32((2, 5, 16)), {"head_dim": ReadOnly(8), **MORE_HEADS, **EPS, **GAMMA}),
    "Quantize": Case(
        {},
        rows(),
        {
            "quantize_forward": Change(False, argument="forward", neutral=True),
            "quantize_backward": Change(True, argument="backward", neutral=True),
        },
    ),
    "RMSNorm": Case({"normalized_shape": 8}, rows(), NORM),
    "ReGLU": FIXED_LAYOUT,
    "ReLU": NOTHING,
    "ReduceScatter": NOTHING,
    "Reshape": Case({"shape": (4, 6)}, rows(), {"shape": Change((2, -1), bad=(-1, -1))}),
    "RotaryEmbedding": Case(
        {**HEADS, "base": 100.0, "rotary_dim": 4, "max_positions": 9},
        f32((2, 5, 16)),
        {
            **MORE_HEADS,
            "head_dim": Change(8, bad=0, inputs=f32((2, 5, 32))),
            "base": Change(10.0, bad=0.0),
            "interleaved": Change(True),
            "rotary_dim": Change(2, bad=3),
            "max_positions": Change(20, bad=0, neutral=True),
        },
    ),
    "SReGLU": FIXED_LAYOUT,
    "SReLU": NOTHING,
    "ScaledClampedQGeGLU": Case({}, rows(scales=True), {**CLAMP, **INTERLEAVE, **RECOMPUTE}),
    "ScaledSReLU": Case({}, rows(scales=True), RECOMPUTE),
    "ScaledSiTUGLU": Case({}, rows(scales=True), {**CAPS, **INTERLEAVE, **RECOMPUTE}),
    "ScaledSwiGLU": Case({}, rows(scales=True), {**INTERLEAVE, **RECOMPUTE}),
    "SiLU": NOTHING,
    "SiTUGLU": Case({}, rows(), {**CAPS, **INTERLEAVE}),
    "Sigmoid": NOTHING,
    "Softplus": Case({}, rows(), {"beta": Change(3.0, bad=0), "threshold": Change(0.1)}),
    "SwiGLU": Case({}, rows(), INTERLEAVE),
    "Tanh": NOTHING,
}
# Others compute other functions in the same way.
EACH_KIND = sorted(
    {*CASES}
    - {"AllReduce", "QGEGLU", "QGELU", "ReGLU", "ReLU", "ReduceScatter", "SReGLU", "SReLU"}
    - {"Sigmoid", "Tanh"}
)


def make(name: str, **arguments: Any) -> BasicOperation:
    """An operation, constructed with the table's arguments or, in their place, with others."""
    cls = Power if name == "PointwiseOperation" else getattr(basic, name)
    return cls(**{**CASES[name].arguments, **arguments})


def public(op: BasicOperation) -> set[str]:
    """The public attributes that can be set, other than parameters and ``training``."""
    settable = {
        name
        for cls in type(op).__mro__
        for name, member in vars(cls).items()
        if isinstance(member, property) and member.fset is not None
    }
    return {name for name in {*vars(op), *settable} if not name.startswith("_")} - {"training"}


def attributes_of(kind: type[Change | ReadOnly]) -> list[tuple[str, str]]:
    """Operations and attributes of that kind."""
    return [
        (name, attribute)
        for name, case in CASES.items()
        for attribute, how in case.attributes.items()
        if isinstance(how, kind)
    ]


def results(
    module: nn.Module, inputs: list[Tensor], between: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """Outputs, and all gradients wherever they go.

    Args:
        between: called between forward and backward.
    """
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    torch.manual_seed(7)
    y = module(*leaves)
    ys = y if isinstance(y, tuple) else (y,)
    between()
    torch.autograd.backward(ys, [torch.cos(y.detach()) for y in ys])
    grads = [t.grad for t in (*leaves, *parameters)]
    out = [*ys, *grads, *[p.main_grad for p in parameters]]  # type: ignore[attr-defined]
    return [t.detach().clone() for t in out if t is not None]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all(a.shape == b.shape and torch.allclose(a, b, 1e-5, 1e-5) for a, b in pairs)
