"""Every operation with its attributes, for the tests of attributes that are set later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opfuser import LoRAAdapter, PointwiseOperation, RopeScaling, basic
from opfuser.attention.choice import KERNELS
from opfuser.basic.activation import ACTIVATIONS
from opfuser.basic.gated_activation import GATED_ACTIVATIONS
from opfuser.errors import ArgumentError, ArgumentTypeError, OpfuserError
from opfuser.op import BasicOperation

Inputs = Callable[[], list[Tensor]]


class Change(NamedTuple):
    """An attribute that can be set.

    Attributes:
        value: another legal one.
        argument: of the constructor; None is that with the name of the attribute.
        inputs: that go with ``value``; None are those of the case.
        neutral: whether it changes neither output nor gradients.
    """

    value: Any
    argument: str | None = None
    inputs: Inputs | None = None
    neutral: bool = False


class Bad(NamedTuple):
    """Values outside of a domain.

    Attributes:
        text: how the error begins, up to the name of the operation.
        values: some of them.
        error: its class.
    """

    text: str
    values: tuple[Any, ...]
    error: type[OpfuserError]


def bad(text: str, *values: Any, error: type[OpfuserError] = ArgumentError) -> Bad:
    return Bad(text, values, error)


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


EPS = {"eps": Change(0.5)}
GAMMA = {"zero_centered_gamma": Change(True)}
NORM = {"normalized_shape": ReadOnly((4,)), **EPS, **GAMMA}
INTERLEAVE = {"glu_interleave_size": Change(2)}
CAPS = {"beta1": Change(1.0), "beta2": Change(2.0)}
CLAMP = {
    "limit": Change(0.5),
    "alpha": Change(1.0),
    "glu_linear_offset": Change(0.0),
}
IN_PLACE = {"in_place": Change(True, neutral=True)}
RECOMPUTE = {"activation_recompute_in_mlp": Change(True, neutral=True)}
CACHE = {"cache_quantized_input": Change(True, neutral=True)}
FIXED_LAYOUT = Case({}, rows(), {"glu_interleave_size": ReadOnly(2), **CACHE})
ACTIVATION = Case({}, rows(), CACHE)
NOTHING = Case({}, rows(), {})
# Into ``grad`` of zeros the GEMM adds what autograd would add.
ACCUMULATE = {
    "accumulate_into_main_grad": Change(True),
    "accumulate_into_grad": Change(True, neutral=True),
}
HEADS = {"num_heads": 2, "head_dim": 4, "num_kv_heads": 1}
MORE_HEADS = {
    "num_heads": Change(4, inputs=f32((2, 5, 24))),
    "num_kv_heads": Change(2, inputs=f32((2, 5, 24))),
}
INF, NAN = float("inf"), float("nan")
GROUPS_OF_EXPERTS = (
    "num_groups must divide num_experts into groups of two or more, and top_k_groups be from 1 to "
    "num_groups"
)
HEADS_OF_ATTENTION = "num_heads must be a positive multiple of num_kv_heads"

# By attribute, or by operation and attribute.
CAPACITY = "num_experts must be positive, and capacity_factor positive and finite"
DOMAINS: dict[str, list[Bad]] = {
    "eps": [
        bad("eps must be finite and not negative", -1.0, -1e-9, INF, NAN),
        bad("eps must be a Python number", None, "1e-5", error=ArgumentTypeError),
    ],
    "glu_interleave_size": [bad("glu_interleave_size must be positive or None.", 0, -2)],
    "beta1": [bad("beta1 must be finite and positive.", 0.0, -1.0, INF, NAN)],
    "beta2": [bad("beta2 must be finite and positive.", 0.0, -1.0, INF, NAN)],
    "limit": [bad("limit must be positive.", 0.0, -7.0, NAN)],
    "tanh_clamp_scale": [bad("tanh_clamp_scale must be finite and positive", 0, -1.0, INF, NAN)],
    "num_heads": [bad("num_heads must be positive", 0, -4)],
    "num_kv_heads": [bad("num_kv_heads must be positive", 0, -4)],
    "head_dim": [bad("head_dim must be positive", 0, -4)],
    "DotProductAttention.num_heads": [bad(HEADS_OF_ATTENTION, 0, -2)],
    "DotProductAttention.num_kv_heads": [bad(HEADS_OF_ATTENTION, 0, 3, 4)],
    "RotaryEmbedding.num_kv_heads": [bad("num_kv_heads must not be negative", -4)],
    "scaling": [
        bad("scaling must be a RopeScaling or None", "yarn", error=ArgumentTypeError),
    ],
    "sections": [
        bad("sections must be positive integers that add up to rotary_dim / 2", (2, 1), (3, -1)),
    ],
    "window": [
        bad("window must be positive", 0, -1),
        bad("window must be an integer", 2.5),
        bad("window must be a real Python number", "a", error=ArgumentTypeError),
    ],
    "softcap": [bad("softcap must be positive", 0.0, -1.0, NAN)],
    "v_head_dim": [bad("v_head_dim must be positive", 0, -3)],
    "dropout_p": [
        bad("dropout_p must be between 0 and 1", -0.1, 1.5, NAN),
        bad("dropout_p must be a real Python number", "a", error=ArgumentTypeError),
    ],
    "kernel": [bad(f"kernel must be one of {', '.join(KERNELS)}", "fast")],
    "base": [bad("base must be positive", 0.0, -1.0)],
    "rotary_dim": [bad("rotary_dim must be even and at most head_dim", 3, 6)],
    "max_positions": [bad("max_positions must be positive", 0, -1)],
    "label_smoothing": [bad("label_smoothing must be between 0 and 1", -0.1, 1.1)],
    "reduction": [bad('reduction must be "mean", "sum" or "none"', "max")],
    "z_loss": [bad("z_loss must be a finite number, and not negative", -1.0, INF, NAN)],
    "score_function": [bad('score_function must be "softmax" or "sigmoid"', "tanh")],
    "scaling_factor": [bad("scaling_factor must be finite", INF, NAN)],
    "num_experts": [bad("num_experts must be positive", 0, -1)],
    "top_k": [
        bad("top_k must be from 1 to num_experts", 0, 9),
        bad("top_k_groups groups must have top_k experts", 5),
    ],
    "num_groups": [bad(GROUPS_OF_EXPERTS, 0, 1, 3, 8)],
    "top_k_groups": [bad(GROUPS_OF_EXPERTS, 0, 5)],
    "dropout_probability": [
        bad("p must be between 0 and 1", -0.1, 1.5, NAN),
        bad("p must be a real Python number", torch.tensor(0.5), "a", error=ArgumentTypeError),
    ],
    "jitter_eps": [
        bad("eps must be between 0 and 1", -0.1, 1.5, NAN),
        bad("eps must be a real Python number", torch.tensor(0.5), "a", error=ArgumentTypeError),
    ],
    "capacity_factor": [bad(CAPACITY, 0.0, -1.0, INF, NAN)],
    "padding_idx": [bad("padding_idx must be a row of the table", 7, -8)],
    "approximate": [bad("approximate must be 'tanh' or 'none'", "erf")],
    "Softplus.beta": [bad("beta must not be zero", 0, 0.0)],
    "DotProductAttention.scale": [
        bad(
            "scale must be a real Python number",
            *(torch.tensor(2.0), "two"),
            error=ArgumentTypeError,
        )
    ],
    "ConstantScale.scale": [
        bad(
            "The scale must be a real Python number",
            *(torch.tensor(2.0), "two", None, 1j),
            error=ArgumentTypeError,
        )
    ],
    "constants": [
        bad(
            "A constant of a pointwise operation must be a real Python number",
            *(("two",), (torch.ones(()),)),
            error=ArgumentTypeError,
        )
    ],
    "adapters": [
        bad(
            "An adapter has a name, a positive rank, a finite scale, a probability of dropout, "
            "and the number of an output",
            *(
                (LoRAAdapter(rank=2, **wrong),)
                for wrong in ({"scale": INF}, {"dropout": 1.5}, {"output": 1}, {"name": "a.b"})
            ),
        )
    ],
    "shape": [
        bad("Sizes must be non-negative, except for at most one -1", (-1, -1), (2, -2)),
        bad(
            "The shape must be an integer or an iterable of integers",
            *(2.5, (2.0, 3), "6", None),
            error=ArgumentTypeError,
        ),
    ],
}

CASES: dict[str, Case] = {
    **{op.__name__: ACTIVATION for op in ACTIVATIONS},
    **{op.__name__: FIXED_LAYOUT for op in GATED_ACTIVATIONS},
    "AddEmbedding": Case(
        {"num_embeddings": 7, "embedding_dim": 8},
        lambda: [torch.randn(3, 8), torch.tensor([0, 6, 6])],
        {"num_embeddings": ReadOnly(9), "embedding_dim": ReadOnly(9)},
    ),
    "AddExtraInput": Case({}, f32((3, 8), (3, 8)), IN_PLACE),
    "AllGather": Case({}, rows(), {"dim": ReadOnly(1)}),
    "AllReduce": NOTHING,
    "BasicLinear": Case(
        {"in_features": 8, "out_features": 6},
        rows(),
        {
            "in_features": ReadOnly(9),
            "out_features": ReadOnly(9),
            "sharding": ReadOnly(None),
            "weight_transposed": ReadOnly(True),
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
    "ClampedSwiGLU": Case({}, rows(), {**CLAMP, **INTERLEAVE, **CACHE}),
    "Combine": Case({}, lambda: [torch.randn(5, 8), torch.arange(5), torch.full((2, 1), 5)], {}),
    "ConstantScale": Case({"scale": 2.0}, rows(), {"scale": Change(3.0)}),
    "CrossEntropy": Case(
        {},
        lambda: [torch.randn(5, 7), torch.tensor([0, 1, 2, 5, 3])],
        {
            "ignore_index": Change(1),
            "label_smoothing": Change(0.2),
            "reduction": Change("sum"),
            "z_loss": Change(0.1),
            "vocabulary": ReadOnly(0),
        },
    ),
    "Dispatch": Case(
        {"num_experts": 3},
        lambda: [torch.randn(5, 8), torch.tensor([2, 0, 3]), torch.rand(5)],
        {"num_experts": ReadOnly(6), "weighted": ReadOnly(False), "padded": ReadOnly(True)},
    ),
    "DotProductAttention": Case(
        {"num_heads": 2, "num_kv_heads": 1},
        f32((2, 5, 24)),
        {
            "num_heads": Change(4),
            "num_kv_heads": Change(2),
            "causal": Change(False),
            "scale": Change(0.7),
            "layout": ReadOnly("separate"),
            "window": Change(2),
            "dropout_p": Change(0.5),
            "softcap": Change(0.3),
            "alibi": Change(True),
            "core_attention_bias": ReadOnly(True),
            "kernel": Change("blockwise", neutral=True),
            "v_head_dim": Change(3),
        },
    ),
    "DropTokens": Case(
        {"num_experts": 3, "capacity_factor": 1.0},
        lambda: [torch.randn(6, 8), torch.tensor([4, 0, 2]), torch.rand(6)],
        {
            "num_experts": ReadOnly(4),
            "capacity_factor": Change(1.5),
            "weighted": ReadOnly(False),
        },
    ),
    "Dropout": Case({"p": 0.5}, rows(), {"dropout_probability": Change(0.9, argument="p")}),
    "Embedding": Case(
        {"num_embeddings": 7, "embedding_dim": 4},
        lambda: [torch.tensor([0, 1, 6, 1])],
        {
            "num_embeddings": ReadOnly(9),
            "embedding_dim": ReadOnly(9),
            "padding_idx": Change(-6),
            "vocabulary": ReadOnly(0),
            "sequence_parallel": ReadOnly(True),
            "sequence_dim": ReadOnly(1),
        },
    ),
    "GELU": Case({}, rows(), {"approximate": Change("none"), **CACHE}),
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
            "weight_transposed": ReadOnly(True),
            "delay_wgrad_compute": Change(True),
            **ACCUMULATE,
        },
    ),
    "Identity": NOTHING,
    "Jitter": Case({"eps": 0.5}, rows(), {"jitter_eps": Change(0.9, argument="eps")}),
    "L2Normalization": Case({}, rows(), EPS),
    "LayerNorm": Case({"normalized_shape": 8}, rows(), NORM),
    "LoRALinear": Case(
        {"in_features": 8, "out_features": 6, "adapters": (LoRAAdapter(rank=2),)},
        rows(),
        {
            "in_features": ReadOnly(9),
            "out_features": ReadOnly(9),
            "sizes": ReadOnly((5,)),
            "sharding": ReadOnly(None),
            "weight_transposed": ReadOnly(True),
            "adapters": Change((LoRAAdapter(rank=2, scale=0.5),)),
        },
    ),
    "LoadBalancingLoss": Case(
        {"num_routers": 2, "coefficient": 0.5},
        f32((3, 8), (2, 4), (2, 4)),
        {
            "num_routers": ReadOnly(3),
            "num_extra_inputs": ReadOnly(3),
            "coefficient": Change(2.0),
        },
    ),
    "MakeExtraOutput": Case({}, rows(), IN_PLACE),
    "Permute": Case(
        {"num_experts": 3},
        lambda: [torch.randn(5, 8), torch.randint(3, (5, 2)), torch.rand(5, 2)],
        {"num_experts": Change(4), "weighted": ReadOnly(False)},
    ),
    "PointwiseOperation": Case({}, rows(), {"constants": Change((3.0,)), "exponent": Change(2)}),
    "PositionEmbedding": Case(
        {"num_positions": 7, "embedding_dim": 8},
        f32((2, 5, 8)),
        {"num_positions": ReadOnly(9), "embedding_dim": ReadOnly(9)},
    ),
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
    "ReduceScatter": Case({}, rows(), {"dim": ReadOnly(1)}),
    "Reshape": Case({"shape": (4, 6)}, rows(), {"shape": Change((2, -1))}),
    "RestoreTokens": Case({}, lambda: [torch.randn(6, 8), torch.tensor([0, 1, 6, 4, 2])], {}),
    "RotaryEmbedding": Case(
        {**HEADS, "base": 100.0, "rotary_dim": 4, "max_positions": 9},
        f32((2, 5, 16)),
        {
            **MORE_HEADS,
            "head_dim": Change(8, inputs=f32((2, 5, 32))),
            "base": Change(10.0),
            "interleaved": Change(True),
            "rotary_dim": Change(2),
            "max_positions": Change(20, neutral=True),
            "scaling": Change(RopeScaling(rope_type="linear", factor=3.0)),
            # Read where there are rows of positions alone.
            "sections": Change((1, 1), neutral=True),
            "interleave_sections": Change(True, neutral=True),
        },
    ),
    "ScaledClampedQGeGLU": Case({}, rows(scales=True), {**CLAMP, **INTERLEAVE, **RECOMPUTE}),
    "ScaledSReLU": Case({}, rows(scales=True), RECOMPUTE),
    "ScaledSiTUGLU": Case({}, rows(scales=True), {**CAPS, **INTERLEAVE, **RECOMPUTE}),
    "ScaledSwiGLU": Case({}, rows(scales=True), {**INTERLEAVE, **RECOMPUTE}),
    "ScaledTanhSReLU": Case(
        {"tanh_clamp_scale": 1.5},
        rows(scales=True),
        {"tanh_clamp_scale": Change(0.5), **RECOMPUTE},
    ),
    "SiTUGLU": Case({}, rows(), {**CAPS, **INTERLEAVE, **CACHE}),
    "Softplus": Case({}, rows(), {"beta": Change(3.0), "threshold": Change(0.1), **CACHE}),
    "SwiGLU": Case({}, rows(), {**INTERLEAVE, **CACHE}),
    "StartCombine": Case(
        {}, lambda: [torch.randn(5, 8), torch.arange(5), torch.full((2, 1), 5)], {}
    ),
    "SwapExtra": Case({}, f32((3, 8), (4, 6)), {}),
    "TopKRouter": Case(
        {"num_experts": 8, "top_k": 3, "num_groups": 4, "top_k_groups": 2},
        f32((9, 8)),
        {
            "num_experts": ReadOnly(9),
            "aux_loss": ReadOnly(True),
            "z_loss": ReadOnly(True),
            "balance_terms": ReadOnly(True),
            "top_k": Change(4),
            "score_function": Change("sigmoid"),
            "norm_topk_prob": Change(True),
            "scaling_factor": Change(2.0),
            "num_groups": Change(2),
            "top_k_groups": Change(3),
        },
    ),
    "Unpermute": Case(
        {},
        lambda: [torch.randn(10, 8), torch.randperm(10).view(5, 2)],
        {"weighted": ReadOnly(True)},
    ),
}
# Others compute other functions in the same way.
EACH_KIND = sorted(
    {name for name, case in CASES.items() if case not in (ACTIVATION, FIXED_LAYOUT)}
    - {"AllReduce", "ReduceScatter"}
    | {"GEGLU", "GLU", "SiLU"}
)


def outside(name: str, attribute: str) -> list[Bad]:
    """Values that an attribute of an operation must not have."""
    return DOMAINS.get(f"{name}.{attribute}", DOMAINS.get(attribute, []))


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
    of_numbers = [y for y in ys if y.is_floating_point()]
    torch.autograd.backward(of_numbers, [torch.cos(y.detach()) for y in of_numbers])
    grads = [t.grad for t in (*leaves, *parameters)]
    out = [*ys, *grads, *[p.main_grad for p in parameters]]  # type: ignore[attr-defined]
    return [t.detach().clone() for t in out if t is not None]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all(a.shape == b.shape and torch.allclose(a, b, 1e-5, 1e-5) for a, b in pairs)
