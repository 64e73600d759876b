"""Mixtures of experts are read, whichever way they choose the rows of each expert."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser.reading.construction import build
from opfuser.reading.kept import KeptError
from opfuser.reading.operations import Experts, Gated

from .families import layer_of, stream
from .mutations import outcomes_of
from .recomputed import (
    Example,
    assert_equal_steps,
    assert_recomputed,
    called_in,
    operation_in,
    read_of,
)
from .tiny import WIDTH, model_of, randomized

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED: dict[str, Any] = {**_MOE, "n_routed_experts": 4, "first_k_dense_replace": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_ROUTED, **_LATENT},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "deepseek_v4": {**_MOE, "n_routed_experts": 4, "mlp_layer_types": ["moe"] * 2},
    "dots1": {**_ROUTED, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24,
                     "moe_layer_start_index": 0, "moe_num_shared_experts": 1},
    "exaone_moe": {**_MOE, "num_experts": 4, "n_group": 2, "topk_group": 1,
                   "mlp_layer_types": ["sparse"] * 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**_ROUTED, "n_group": 2, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 24},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_offset": 0,
              "attn_layer_period": 1, "expert_layer_offset": 0, "expert_layer_period": 1,
              "use_mamba_kernels": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_MOE, "num_experts": 4, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**_MOE, "num_experts": 4},
}  # fmt: skip
CALLED = {
    "afmoe": {**_MOE, "num_experts": 4, "num_dense_layers": 0},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
                    "moe_layers": [0, 1]},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
# Of these the attention is read, too.
LAYERS = sorted(set(FAMILIES) - {"deepseek_v2", "deepseek_v3", "deepseek_v4"})


def moe_model(family: str, implementation: str) -> nn.Module:
    attention = "eager" if family == "deepseek_v4" else "sdpa"
    model = model_of(family, attention, **{**FAMILIES, **CALLED}[family])
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = implementation
    return model


class Feed(nn.Module):
    """A mixture of experts with a residual sum."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        parents = [m for m in model.modules() if "experts" in m._modules]
        self.moe = parents[0]
        self.train(model.training)

    def forward(self, x: Tensor) -> Tensor:
        y = self.moe(x)
        return x + (y[0] if isinstance(y, tuple) else y).view(x.shape)


def routers_alone(example: Example) -> None:
    """Asserts that all is read but a router, and that it is right."""
    reading = assert_recomputed(example, whole=False)
    assert called_in(reading) == [operation_in(reading, Experts).router.path]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_a_family_are_read(family: str, implementation: str, train: bool) -> None:
    feed = Feed(moe_model(family, implementation).train(train))
    example = Example(feed, (stream().requires_grad_(),))
    if family == "phimoe" and implementation == "eager":
        reading = assert_recomputed(example, whole=False)
        assert called_in(reading) == ["moe"]
        return
    if family == "phimoe" and train:  # whose router draws random numbers
        assert called_in(read_of(example)) == ["moe.router"]
        return
    routers_alone(example)


@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_with_experts_is_read(family: str) -> None:
    routers_alone(layer_of(moe_model(family, "batched_mm").eval()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen2_moe"])
def test_rows_sorted_by_expert_are_as_exact_as_torch(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = moe_model(family, "grouped_mm")
    feed = Feed(model).to(dtype)
    x = stream(3, 11, WIDTH).to(dtype)
    wide = copy.deepcopy(feed).double()
    chosen: list[Any] = []
    router, wide_router = (
        (f.moe.router if family == "gpt_oss" else f.moe.gate) for f in (feed, wide)
    )
    hook = router.register_forward_hook(lambda module, args, out: chosen.append(out))
    feed(x)
    hook.remove()
    wide_router.forward = lambda x: tuple(  # the same experts, whatever was rounded
        t.double() if t.is_floating_point() else t for t in chosen[0]
    )
    wide.moe.experts.config._experts_implementation = "batched_mm"
    want = wide(x.double())
    wide.moe.experts.config._experts_implementation = "grouped_mm"
    built = build(read_of(Example(feed, (x,))), feed)
    ours, theirs = (error_of(y, want) for y in (built([x]), feed(x)))
    assert ours <= 2 * theirs


def error_of(y: Tensor, want: Tensor) -> float:
    return float((y.detach().double() - want.detach()).abs().max())


@pytest.mark.parametrize("family", CALLED)
def test_experts_that_are_not_read_are_called(family: str) -> None:
    """Of whichever shape their result is, and whatever stands beside it."""
    example = Example(Feed(moe_model(family, "eager").eval()), (stream().requires_grad_(),))
    assert called_in(assert_recomputed(example, whole=False)) == ["moe"]


# A loop as people write it


class Router(nn.Module):
    def __init__(self, count: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.linear, self.top_k = nn.Linear(WIDTH, count), top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(self.linear(x).softmax(-1), self.top_k, -1)


class Loop(nn.Module):
    """A mixture whose loop over experts can be changed.

    Args:
        visit: gives the experts to visit, of the mask (expert, place, row).
        turn: what is added for the rows of an expert, of (self, expert, rows).
        after: what is made of the sum.
    """

    def __init__(
        self,
        visit: Callable[[Tensor], Any] = lambda mask: range(len(mask)),
        turn: Callable[..., Any] | None = None,
        after: Callable[[Tensor], Tensor] = lambda y: y,
        top_k: int = 2,
    ) -> None:
        super().__init__()
        self.router = Router(top_k=top_k)
        self.up = nn.Parameter(torch.randn(4, 48, WIDTH))
        self.up_bias = nn.Parameter(torch.randn(4, 48))
        self.down = nn.Parameter(torch.randn(4, WIDTH, 24))
        self.down_bias = nn.Parameter(torch.randn(4, WIDTH))
        self.visit, self.turn, self.after = visit, turn or Loop.expert, after

    def gated(self, e: Any, rows: Tensor, f: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
        gate, up = (F.linear(rows, self.up[e]) + self.up_bias[e]).chunk(2, -1)
        return f(gate) * up

    def expert(self, e: Any, rows: Tensor, f: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
        return F.linear(self.gated(e, rows, f), self.down[e]) + self.down_bias[e]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        weights, indices = self.router(rows)
        mask = F.one_hot(indices, 4).permute(2, 1, 0)
        y = torch.zeros_like(rows)
        for e in self.visit(mask):
            if isinstance(e, Tensor):
                e = e[0]  # noqa: PLW2901 - as loops over experts are written
                if e == 4:
                    continue
            place, token = torch.where(mask[e])
            added = self.turn(self, e, rows[token]) * weights[token, place, None]
            y.index_add_(0, token, added)
        return x + self.after(y).view(x.shape)


def hits(mask: Tensor) -> Any:
    return torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


def twice_in_one(self: Loop, e: Any, rows: Tensor) -> Tensor:
    found = Loop.expert(self, e, rows)
    return found * 2 if e == 1 else found


def by_size(self: Loop, e: Any, rows: Tensor) -> Tensor:
    found = Loop.expert(self, e, rows)
    return found * 2 if rows.shape[0] < 3 else found


class Counting:
    """The third turn of a loop computes something else."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: Loop, e: Any, rows: Tensor) -> Tensor:
        self.count += 1
        return Loop.expert(module, e, rows) * (2 if self.count % 4 == 3 else 1)


@pytest.mark.parametrize("visit", [lambda mask: range(len(mask)), hits])
@pytest.mark.parametrize("shape", [(2, 7), (1, 1), (5, 1), (1, 4)])
def test_a_loop_over_experts_is_read(visit: Any, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module = randomized(Loop(visit))
    routers_alone(Example(module, (stream(*shape, WIDTH).requires_grad_(),)))


@pytest.mark.parametrize("top_k", [1, 4])
def test_one_expert_and_all_experts(top_k: int) -> None:
    torch.manual_seed(0)
    routers_alone(Example(randomized(Loop(hits, top_k=top_k)), (stream().requires_grad_(),)))


def skipping(number: int) -> Callable[[Tensor], Any]:
    return lambda mask: (e for e in hits(mask) if not e == number)  # noqa: SIM201 - which asks no tensor


KEPT: dict[str, tuple[Loop, str]] = {
    "some experts": (Loop(lambda mask: range(3)), "computes index_add"),
    "an expert twice": (Loop(lambda mask: [0, 1, 2, 3, 3]), "computes index_add"),
    "in an order": (Loop(lambda mask: [1, 0, 2, 3]), "computes index_add"),
    "but one that is there": (Loop(skipping(2)), "decides by the numbers of entries"),
    "with many rows": (
        Loop(lambda mask: (mask.sum(dim=(-1, -2)) > 3).nonzero()),
        "computes index_add",
    ),
    "experts that are not hit": (
        Loop(lambda mask: (mask.sum(dim=(-1, -2)) == 0).nonzero()),
        "computes index_add",
    ),
    "one differs": (Loop(hits, twice_in_one), "leaves out experts that there may be"),
    "few rows differ": (Loop(hits, by_size), "asks how many entries there are"),
    "few experts differ": (
        Loop(lambda mask: found if len(found := [*hits(mask)]) > 2 else found[:1]),
        "computes index_add",
    ),
    "few experts are asked for": (
        Loop(lambda mask: found if len(found := hits(mask)) > 2 else found[:1]),
        "asks how many entries there are",
    ),
    "few experts are counted": (
        Loop(lambda mask: (e for n, e in enumerate(hits(mask)) if n < 6)),
        "counts the turns of a loop",
    ),
    "over rows": (
        Loop(lambda mask: mask.expand(20, 4, 2, 14).nonzero()),
        "has a loop of up to 2240 turns",
    ),
    "the third turn differs": (Loop(hits, Counting()), "computes index_add"),
    "an expert gates by another function": (
        Loop(turn=lambda self, e, rows: Loop.expert(self, e, rows, F.relu if e == 2 else F.silu)),
        "computes index_add",
    ),
    "another expert's bias": (
        Loop(turn=lambda self, e, rows: Loop.expert(self, e, rows) + self.down_bias[3]),
        "computes index_add",
    ),
    "two biases": (
        Loop(
            turn=lambda self, e, rows: (
                F.linear(Loop.gated(self, e, rows), self.down[e], self.down_bias[e])
                + self.down_bias[e]
            )
        ),
        "computes index_add",
    ),
    "an expert besides": (Loop(lambda mask: [*hits(mask), 3]), "computes index_add"),
    "no rows of the input": (
        Loop(turn=lambda self, e, rows: Loop.expert(self, e, rows.flip(0))),
        "computes index_add",
    ),
    "sin": (Loop(turn=lambda self, e, rows: Loop.expert(self, e, rows).sin()), "index_add"),
}


@pytest.mark.parametrize("name", KEPT)
def test_another_loop_is_kept(name: str) -> None:
    loop, reason = KEPT[name]
    with pytest.raises(KeptError, match=reason):
        read_of(Example(randomized(loop), (stream().requires_grad_(),)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("clamped", [False, True])
def test_activations_of_experts(interleaved: bool, clamped: bool) -> None:
    def turn(self: Loop, e: Any, rows: Tensor) -> Tensor:
        both = F.linear(rows, self.up[e])
        gate, up = both.chunk(2, -1)
        if interleaved:
            gate, up = both[..., ::2], both[..., 1::2]
        if clamped:
            gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0) + 1
            return F.linear(up * (gate * torch.sigmoid(1.702 * gate)), self.down[e])
        return F.linear(up * F.silu(gate), self.down[e])

    torch.manual_seed(0)
    example = Example(randomized(Loop(hits, turn)), (stream().requires_grad_(),))
    routers_alone(example)
    gated = operation_in(read_of(example), Gated)
    assert (gated.interleaved, gated.limit) == (interleaved, 2.0 if clamped else None)


def test_experts_without_a_gate() -> None:
    def turn(self: Loop, e: Any, rows: Tensor) -> Tensor:
        return F.linear(F.linear(rows, self.down[e].mT.mT[:24]).relu(), self.down[e])

    with pytest.raises(KeptError):
        read_of(Example(randomized(Loop(hits, turn)), (stream().requires_grad_(),)))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_no_operation_of_experts_is_overlooked(implementation: str) -> None:
    torch.manual_seed(0)
    example = Example(Feed(moe_model("mixtral", implementation)), (stream(2, 3, WIDTH),))
    found = outcomes_of(example, *((0,) if implementation == "eager" else (0, 4, 9)))
    assert found["called"] + found["recomputed"] > 0


def test_experts_in_layers_are_built_into_one_sequence() -> None:
    example = layer_of(moe_model("mixtral", "eager").eval())
    assert_equal_steps(example, build(read_of(example), example.module))
