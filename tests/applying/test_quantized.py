"""Applied models in regions of quantized compute: their values, and where their scales are."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser.applying.forwards import state_of
from opfuser.errors import ArgumentError, QuantizedWeightError, RecomputationError
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from tests.reading.tiny import CACHE, CHECKPOINTING

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    # PEFT reads the old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning"),
]

DELAYED = DelayedScaling(amax_history_len=3)
PREDICTED = Float8PredictedScaling()
STATEFUL = pytest.mark.parametrize("recipe", [DELAYED, PREDICTED], ids=lambda r: type(r).__name__)
RECIPES: list[Recipe] = [
    DELAYED,
    PREDICTED,
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
]
DIM, KEYS, HEADS, HIDDEN, VOCABULARY = 256, 128, 4, 384, 64
BUFFERS = "scale", "amax_history", "amax"


def llama(**others: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        pad_token_id=0,
        **others,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()


def gpt2() -> Any:
    """Weights of its linear modules are stored as their transposes; its head is tied."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=DIM,
        n_layer=2,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        loss_type="ForCausalLM",
    )
    model = transformers.GPT2LMHeadModel(config)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.1)
    return model.to(torch.bfloat16).train()


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))


def applied(model: Any, **options: Any) -> Any:
    opfuser.apply(model, example={"input_ids": ids(0)}, **options)
    return model


def ids(step: int, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, VOCABULARY, (2, length), generator=generator)


def train(model: Any, steps: range, recipe: Recipe = DELAYED) -> list[Tensor]:
    """Losses and gradients of steps, and the scales after them."""
    seen: list[Tensor] = []
    parameters = [*model.parameters()]
    for step in steps:
        with opfuser.autocast(recipe=recipe):
            loss = model(input_ids=ids(step), labels=ids(step)).loss
        loss.backward()
        seen.append(loss.detach())
        with torch.no_grad():
            for p in parameters:
                seen.append(p.grad.clone())
                p.sub_(0.1 * p.grad)
                p.grad = None
    return [*seen, *scales(model)]


def scales(model: nn.Module) -> list[Tensor]:
    return [t.clone() for name, t in model.state_dict().items() if "quantization" in name]


def holders(model: nn.Module) -> list[str]:
    """The modules that keep scales, with all of their tensors."""
    keys = [key for key in model.state_dict() if "quantization" in key]
    found = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
    assert keys == [f"{name}.{buffer}" for name in found for buffer in BUFFERS]
    return found


def assert_same(mine: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(mine, wanted, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------- layers by hand


class ByHand(nn.Module):
    """A layer as a sequence that was written down."""

    def __init__(self, sequence: opfuser.Sequential, turn: nn.Module | None = None) -> None:
        super().__init__()
        self.sequence, self.turn = sequence, turn

    def forward(self, x: Tensor, *args: Any, position_embeddings: Any = None, **kw: Any) -> Tensor:
        if self.turn is None:
            return self.sequence(x)
        tables = torch.stack([t[0, :, : t.shape[-1] // 2] for t in position_embeddings])
        return self.sequence(x, op_kwargs={self.turn: {"tables": tables.float()}})


def norm(module: Any) -> nn.Module:
    if hasattr(module, "bias"):
        made: Any = opfuser.LayerNorm(DIM, eps=module.eps, dtype=torch.bfloat16)
        made.bias = module.bias
    else:
        made = opfuser.RMSNorm(DIM, eps=module.variance_epsilon, dtype=torch.bfloat16)
    made.weight = module.weight
    return made


def linear(module: Any) -> opfuser.Linear:
    transposed = not isinstance(module, nn.Linear)
    sizes = module.weight.shape if transposed else module.weight.shape[::-1]
    has_bias = module.bias is not None
    made = opfuser.Linear(*sizes, bias=has_bias, weight_transposed=transposed, dtype=torch.bfloat16)
    made.weight = module.weight
    if has_bias:
        made.bias = module.bias
    return made


def merged(*modules: nn.Linear) -> opfuser.MergedLinear:
    named = {f"p{n}": m for n, m in enumerate(modules)}
    sizes = {name: m.out_features for name, m in named.items()}
    made = opfuser.MergedLinear(modules[0].in_features, sizes, bias=False, dtype=torch.bfloat16)
    for name, m in named.items():
        made.get_submodule(name).weight = m.weight
    return made


def llama_by_hand(model: Any) -> list[nn.Module]:
    """Replaces the layers; returns the linear operations."""
    found: list[nn.Module] = []
    for n, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        own = [
            merged(attention.q_proj, attention.k_proj, attention.v_proj),
            linear(attention.o_proj),
            merged(mlp.gate_proj, mlp.up_proj),
            linear(mlp.down_proj),
        ]
        turn = opfuser.RotaryEmbedding(HEADS, DIM // HEADS, num_kv_heads=HEADS // 2)
        attend = opfuser.DotProductAttention(HEADS, HEADS // 2, causal=True)
        sequence = opfuser.Sequential(
            opfuser.Residual(norm(layer.input_layernorm), own[0], turn, attend, own[1]),
            opfuser.Residual(
                norm(layer.post_attention_layernorm), own[2], opfuser.SwiGLU(), own[3]
            ),
        )
        model.model.layers[n] = ByHand(sequence, turn)
        found += own
    model.model.norm = ByHand(opfuser.Sequential(norm(model.model.norm)))
    return found


def gpt2_by_hand(model: Any) -> list[nn.Module]:
    found: list[nn.Module] = []
    for n, layer in enumerate(model.transformer.h):
        modules = layer.attn.c_attn, layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj
        own = [*map(linear, modules)]
        attend = opfuser.DotProductAttention(HEADS, causal=True)
        sequence = opfuser.Sequential(
            opfuser.Residual(norm(layer.ln_1), own[0], attend, own[1]),
            opfuser.Residual(norm(layer.ln_2), own[2], opfuser.GELU(), own[3]),
        )
        model.transformer.h[n] = ByHand(sequence)
        found += own
    model.transformer.ln_f = ByHand(opfuser.Sequential(norm(model.transformer.ln_f)))
    return found


MODELS = {"Llama": (llama, llama_by_hand), "GPT-2": (gpt2, gpt2_by_hand)}
MODEL = pytest.mark.parametrize("name", MODELS)


class Twin:
    """A model whose layers were written down, which goes the way of an applied one."""

    def __init__(self, name: str) -> None:
        make, by_hand = MODELS[name]
        self.model = make()
        self.parameters = [*self.model.parameters()]  # in the order of the model as it was
        self.linear = by_hand(self.model)

    def train(self, steps: range, recipe: Recipe) -> list[Tensor]:
        order = [*self.model.parameters()]
        assert {*map(id, order)} == {*map(id, self.parameters)}
        self.model.parameters = lambda: iter(self.parameters)
        try:
            seen = train(self.model, steps, recipe)
        finally:
            del self.model.parameters
        count = len(scales(self.model))
        return [*seen[: len(seen) - count], *self.scales()]

    def scales(self) -> list[Tensor]:
        states = [op._modules.get("quantization") for op in self.linear]
        return [t.clone() for s in states if s is not None for t in s.state_dict().values()]


@pytest.mark.parametrize(
    ("name", "recipe"),
    [*(("Llama", recipe) for recipe in RECIPES), *(("GPT-2", recipe) for recipe in RECIPES[:2])],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_steps_are_those_of_layers_by_hand(name: str, recipe: Recipe) -> None:
    """Losses, gradients and scales are equal bit for bit; those of bf16 are others."""
    stateless = not isinstance(recipe, DelayedScaling | Float8PredictedScaling)
    model, twin, steps = applied(MODELS[name][0]()), Twin(name), range(2 if stateless else 4)
    got = train(model, steps, recipe)
    assert_same(got, twin.train(steps, recipe))
    unquantized = train(MODELS[name][0](), range(1), recipe)
    assert not any(torch.equal(a, b) for a, b in zip(got[1:20], unquantized[1:20]))
    for layer in model.model.layers if name == "Llama" else model.transformer.h:
        assert plan_of(layer).high_precision == ()
        assert len(plan_of(layer).quantized) == 4
    assert (holders(model) == []) == stateless


def plan_of(module: nn.Module) -> Any:
    """The plan of the last kind of calls of a module."""
    return state_of(module).decisions[-1].built.sequence.last_plan


# -------------------------------------------------------------------------------- state dicts


def test_names_of_scales() -> None:
    model = applied(llama())
    assert holders(model) == []
    train(model, range(1))
    assert holders(model) == [
        f"model.layers.{n}.{name}.quantization"
        for n in range(2)
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    ]
    assert not [name for name, _ in model.named_modules() if "quantization" in name]
    assert not [name for name, _ in model.named_buffers() if "quantization" in name]


def saved(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def loaded(make: Callable[[], Any], state: dict[str, Tensor]) -> Any:
    model = applied(make())
    model.load_state_dict(state)
    return model


def loaded_after_calls(make: Callable[[], Any], state: dict[str, Tensor]) -> Any:
    model = applied(make())
    train(model, range(20, 22))
    model.load_state_dict(state)
    return model


def loaded_before_apply(make: Callable[[], Any], state: dict[str, Tensor]) -> Any:
    """The scales come later."""
    model = make()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == []
    assert unexpected == [key for key in state if "quantization" in key]
    opfuser.apply(model)  # without an example
    model.load_state_dict(state)
    return model


def loaded_by_parts(make: Callable[[], Any], state: dict[str, Tensor]) -> Any:
    model = applied(make())
    for name, module in model.named_modules():
        own = {
            key.removeprefix(f"{name}."): t
            for key, t in state.items()
            if key.startswith(f"{name}.")
        }
        if not [*module.children()] or not name:
            continue
        module.load_state_dict(own)
    model.lm_head.load_state_dict({"weight": state["lm_head.weight"]})
    return model


def assigned(make: Callable[[], Any], state: dict[str, Tensor]) -> Any:
    model = applied(make())
    model.load_state_dict(copy.deepcopy(state), assign=True)
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("GPT-2", loaded), ("Llama", loaded_after_calls), ("GPT-2", loaded_before_apply),
        ("Llama", loaded_by_parts), ("Llama", assigned),
    ],
)  # fmt: skip
def test_a_resumed_run(name: str, load: Any) -> None:
    make, _ = MODELS[name]
    model = applied(make())
    train(model, range(5))
    state = saved(model)
    wanted = train(model, range(5, 8))
    assert_same(train(load(make, state), range(5, 8)), wanted)


@STATEFUL
def test_a_run_resumed_from_a_distributed_checkpoint(recipe: Recipe, tmp_path: Any) -> None:
    model = applied(llama())
    train(model, range(5), recipe)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    wanted = train(model, range(5, 8), recipe)
    resumed = applied(llama())
    opfuser.init_recipe_state(resumed, recipe)
    assert holders(resumed) == holders(model)
    state = resumed.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    assert_same(train(resumed, range(5, 8), recipe), wanted)


def test_a_model_that_was_not_called_cannot_be_told_its_recipe() -> None:
    model = llama()
    opfuser.apply(model)
    with pytest.raises(
        ArgumentError,
        match=r"Which linear operations compute a model is known once it was called "
        r"\(init_recipe_state\)\. Received: a LlamaForCausalLM that was not called since "
        r"opfuser\.apply\. Pass an example to apply, or call the model once",
    ):
        opfuser.init_recipe_state(model, DELAYED)
    model(ids(0))
    opfuser.init_recipe_state(model, DELAYED)
    assert len(holders(model)) == 8


def test_a_checkpoint_with_scales_in_a_model_that_was_not_applied() -> None:
    model = applied(llama())
    train(model, range(2))
    other = llama()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*q_proj\.quantization\.scale"):
        other.load_state_dict(model.state_dict())
    other.load_state_dict(model.state_dict(), strict=False)
    opfuser.revert(model)
    assert_same([*other.state_dict().values()], [*model.state_dict().values()])


def test_scales_that_do_not_fit() -> None:
    model = applied(llama())
    train(model, range(2))
    key = "model.layers.0.self_attn.q_proj.quantization.scale"
    state, other = model.state_dict(), applied(llama())
    with pytest.raises(RuntimeError, match=f"Unexpected key.*{key}"):
        other.load_state_dict({**state, key: torch.ones(2)})
    before = scales(model)
    with pytest.raises(
        RuntimeError, match=f"size mismatch for {key}: .*shape .2,. from checkpoint"
    ):
        model.load_state_dict({**state, key: torch.ones(2)})
    del state[key]
    with pytest.raises(RuntimeError, match=f"Missing key.*{key}"):
        model.load_state_dict(state)
    assert_same(scales(model), before)


def test_what_transformers_saves(tmp_path: Any) -> None:
    """Files hold the scales. Its own loading leaves them out, ours does not."""
    model = applied(llama())
    train(model, range(3))
    model.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    assert [*state] != [*opened(tmp_path).state_dict()]
    wanted = train(model, range(3, 5))
    other = applied(opened(tmp_path))
    assert holders(other) == []
    other.load_state_dict(state, strict=False)
    assert_same(train(other.train(), range(3, 5)), wanted)


def opened(path: Any) -> Any:
    model = transformers.LlamaForCausalLM.from_pretrained(path)
    return model.to(torch.bfloat16)  # frequencies, too


# ---------------------------------------------------------------- apply, revert, and copies


def test_revert_leaves_a_plain_model() -> None:
    plain, model = llama(), applied(llama())
    train(model, range(2))
    opfuser.revert(model)
    assert [*model.state_dict()] == [*plain.state_dict()]
    for mine, its in zip(model.modules(), plain.modules()):
        assert mine.__dict__.keys() == its.__dict__.keys()
        assert mine._modules.keys() == its._modules.keys()
    plain.load_state_dict(model.state_dict())
    # What begins anew has forgotten its scales.
    assert_same(train(applied(model), range(3)), train(applied(plain), range(3)))


def test_revert_leaves_operations_of_the_model_alone() -> None:
    model = nn.Sequential(opfuser.Linear(32, 32), nn.ReLU())
    with opfuser.autocast(recipe=DELAYED):
        model(torch.randn(16, 32))
    before = [*model.state_dict()]
    opfuser.apply(model)
    opfuser.revert(model)
    assert [*model.state_dict()] == before
    assert "0.quantization.scale" in before


def test_apply_once_more_keeps_scales() -> None:
    model, other = applied(llama()), applied(llama())
    train(model, range(3))
    train(other, range(3))
    applied(model, dry_run=True)
    applied(model)
    assert_same(train(model, range(3, 6)), train(other, range(3, 6)))


def told_its_recipe() -> Any:
    model = applied(llama())
    opfuser.init_recipe_state(model, DELAYED)
    opfuser.init_recipe_state(model, Float8CurrentScaling())
    return model


def applied_in_a_region() -> Any:
    model = llama()
    with opfuser.autocast(recipe=DELAYED), opfuser.quantized_model_init(recipe=DELAYED):
        applied(model)
    assert holders(model) == []
    return model


def without_an_example() -> Any:
    """Operations that are made at the first call, in a region, have no scales of their own."""
    model = llama()
    opfuser.apply(model)
    return model


def with_merged_storages() -> Any:
    model = applied(llama(), merge_storages=True)
    opfuser.init_recipe_state(model, DELAYED)
    return model


@pytest.fixture(scope="module")
def three_steps() -> list[Tensor]:
    return train(applied(llama()), range(3))


@pytest.mark.parametrize(
    "make", [told_its_recipe, applied_in_a_region, without_an_example, with_merged_storages]
)
def test_how_a_model_begins_makes_no_difference(make: Any, three_steps: list[Tensor]) -> None:
    assert_same(train(make(), range(3)), three_steps)


def test_copies() -> None:
    model = applied(llama())
    train(model, range(3))
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    opened = torch.load(file, weights_only=False)
    opfuser.apply(opened)
    state = saved(model)
    wanted = train(model, range(3, 6))
    assert_same(train(copied, range(3, 6)), wanted)
    assert_same(train(opened, range(3, 6)), wanted)
    assert_same(train(opened, range(6, 7)), train(model, range(6, 7)))
    for other in (opened, loaded(llama, state)):
        other.load_state_dict(state)
        assert_same([*saved(other).values()], [*state.values()])


def test_moves_keep_scales_in_fp32() -> None:
    model = applied(llama())
    train(model, range(2))
    before = scales(model)
    assert_same(scales(model.to(torch.float16)), before)
    assert_same(scales(model.to("cpu")), before)
    train(model.to(torch.bfloat16), range(2, 3))
    assert {t.dtype for t in scales(model)} == {torch.float32}


# ------------------------------------------------------------------------- calls of all kinds


def evaluate(model: Any, recipe: Recipe) -> Tensor:
    model.eval()
    with torch.no_grad(), opfuser.autocast(recipe=recipe):
        y = model(input_ids=ids(30, 12)).logits
    with torch.inference_mode(), opfuser.autocast(recipe=recipe):
        y = y[:, :5] + model(input_ids=ids(31, 5)).logits.clone()
    model.train()
    return y


@MODEL
@STATEFUL
def test_kinds_of_calls_have_the_same_scales(name: str, recipe: Recipe) -> None:
    model, twin = applied(MODELS[name][0]()), Twin(name)
    seen: list[list[Tensor]] = []  # regions update scales of all models
    for own, step_of in ((model, partial(train, model)), (twin.model, twin.train)):
        seen.append([])
        for step in range(3):
            seen[-1] += [evaluate(own, recipe), *step_of(range(step, step + 1), recipe)]
    assert_same(*seen)


def test_parts_of_layers_have_the_scales_of_layers() -> None:
    model = applied(llama())
    train(model, range(2))
    before = holders(model)
    states = [model.get_submodule(name) for name in before]
    amaxes = [state.amax.clone() for state in states]
    model.eval()
    with opfuser.autocast(recipe=DELAYED):
        model(input_ids=ids(3), output_attentions=True)  # attention is not that of the layers
    with torch.no_grad(), opfuser.autocast(recipe=DELAYED):
        filled = model(input_ids=ids(4), use_cache=True).past_key_values
        model(input_ids=ids(5, 1), **{CACHE: filled}, use_cache=True)
        model.generate(ids(4), max_new_tokens=3, do_sample=False)
    assert holders(model) == before
    assert all(a is b for a, b in zip([model.get_submodule(name) for name in before], states))
    assert not any(torch.equal(a, state.amax) for a, state in zip(amaxes, states))


@STATEFUL
def test_a_call_that_fills_a_cache_has_the_scales_of_others(recipe: Recipe) -> None:
    """Keys of all tokens are computed in one call here."""
    model = applied(llama()).eval()
    train(model, range(2), recipe)
    state = saved(model)
    with torch.no_grad(), opfuser.autocast(recipe=recipe):
        found = model(input_ids=ids(3), use_cache=True)
        first = scales(model)
    model.load_state_dict(state)
    with torch.no_grad(), opfuser.autocast(recipe=recipe):
        wanted = model(input_ids=ids(3), use_cache=False)
    assert_same([found.logits, *first], [wanted.logits, *scales(model)])


@STATEFUL
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(recipe: Recipe, reentrant: bool) -> None:
    """What is computed again has the scales of its forward, and changes none.

    Layers are computed in parts then. Plans without gradients, as of forwards that are reentrant,
    round otherwise: there, parts are checkpointed as well.
    """
    model, other = applied(llama()), llama()
    getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})
    for layer in other.model.layers:
        for part in layer.children():
            opfuser.apply(part)
    opfuser.apply(other.model.norm)
    if reentrant:
        getattr(other, f"{CHECKPOINTING}_enable")({"use_reentrant": True})
    for m in (model, other):
        m.enable_input_require_grads()
    assert_same(train(model, range(4), recipe), train(other, range(4), recipe))
    before = holders(model)
    getattr(model, f"{CHECKPOINTING}_disable")()
    train(model, range(4, 5), recipe)
    assert holders(model) == holders(other) == before


def test_a_recomputation_that_is_not_known_is_an_error() -> None:
    """Also at the first call of a kind: the module's own forward would not quantize."""

    def unpack(x: Tensor) -> Tensor:
        with torch.enable_grad(), opfuser.autocast(recipe=DELAYED):
            layer(x.requires_grad_())
        return x

    layer = block()
    opfuser.apply(layer)
    x = torch.randn(4, 32, requires_grad=True)
    with saved_tensors_hooks(Tensor.detach, unpack):
        y = x * x
    with pytest.raises(RecomputationError, match="has the scales of its forward"):
        y.sum().backward()


def test_weights_that_are_kept() -> None:
    model, other = applied(llama()), applied(llama())
    for step in range(3):
        with opfuser.keep_quantized_weights():
            for m in (model, other):
                with opfuser.autocast(recipe=DELAYED):
                    m(input_ids=ids(step), labels=ids(step)).loss.backward()
        if step == 1:
            assert_same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    with opfuser.keep_quantized_weights():
        with opfuser.autocast(recipe=DELAYED):
            model(input_ids=ids(0))
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(2)
        with (
            pytest.raises(QuantizedWeightError, match="does not change within keep_quantized"),
            opfuser.autocast(recipe=DELAYED),
        ):
            model(input_ids=ids(0))


def test_the_head_stays_in_high_precision() -> None:
    model, other = applied(llama(), fused_loss=True), applied(llama())
    got, wanted = train(model, range(2)), train(other, range(2))
    assert not [name for name in holders(model) if "lm_head" in name]
    assert holders(model) == holders(other)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-2, atol=0)
    # The gradients of the head, which is the last parameter.
    count = len([*model.parameters()])
    torch.testing.assert_close(got[count], wanted[count], rtol=2e-2, atol=1e-4)


def test_adapters_and_what_they_are_put_on_stay_in_high_precision() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = applied(peft.get_peft_model(llama(), config))
    with opfuser.autocast(recipe=DELAYED):
        model(input_ids=ids(0), labels=ids(0)).loss.backward()
    assert "products of low rank" in str(plan_of(model.base_model.model.model.layers[0]))
    layers = "base_model.model.model.layers"
    assert holders(model) == [
        f"{layers}.{n}.{name}.quantization"
        for n in range(2)
        for name in ("self_attn.o_proj", "mlp.gate_proj")
    ]


def test_experts() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        config = transformers.MixtralConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            num_local_experts=4,
            max_position_embeddings=64,
            pad_token_id=0,
        )
        return transformers.MixtralForCausalLM(config).to(torch.bfloat16).train()

    model = applied(make())
    train(model, range(4))
    assert holders(model) == [
        "model.layers.0.self_attn.q_proj.quantization",
        "model.layers.0.self_attn.o_proj.quantization",
        "model.layers.0.mlp.experts.gate_up_proj_quantization",
        "model.layers.0.mlp.experts.down_proj_quantization",
    ]
    state = saved(model)
    wanted = train(model, range(4, 7))
    assert_same(train(loaded(make, state), range(4, 7)), wanted)
    opfuser.revert(model)
    assert holders(model) == []


# ----------------------------------------------------------------------- refusals, and watching


def test_a_place_that_is_taken() -> None:
    model, x = block(), torch.randn(4, 32)
    model[1].quantization = "none"
    opfuser.apply(model)
    text = r"Scales are kept in the child 'quantization' of the module that has the weight"
    with opfuser.autocast(recipe=DELAYED):
        y = model(x)
    torch.testing.assert_close(y, block()(x))
    assert text in str(opfuser.applying.report(model))
    opfuser.apply(model, example=x)
    received = r" \(Linear\)\. Received: an attribute 'quantization', a str\. Rename it, or use"
    with pytest.raises(ArgumentError, match=text + received), opfuser.autocast(recipe=DELAYED):
        model(x)
    model[1].quantization = nn.Identity()
    with (
        pytest.raises(ArgumentError, match=text + r" .* a Identity"),
        opfuser.autocast(recipe=DELAYED),
    ):
        model(x)
    with opfuser.autocast(recipe=Float8CurrentScaling()):
        assert not torch.equal(model(x), y)


@pytest.mark.parametrize("traced_before", [False, True])
def test_compiled_calls_are_refused(traced_before: bool) -> None:
    model, x = block(), torch.randn(4, 32)
    opfuser.apply(model, example=x)
    compiled = torch.compile(model, backend="aot_eager")
    if traced_before:
        compiled(x)
    with (
        pytest.raises(Exception, match=r"Quantized compute is not traced by torch\.compile"),
        opfuser.autocast(recipe=DELAYED),
    ):
        compiled(x)
    with opfuser.autocast(enabled=False):
        compiled(x)


def test_records_name_the_modules_of_the_model() -> None:
    model = applied(llama())
    with opfuser.watch_quantization(model) as tensors, opfuser.autocast(recipe=DELAYED):
        model(ids(0))
    names = {t.operation for t in tensors}
    assert names == {name.removesuffix(".quantization") for name in holders(model)}


def test_layers_in_a_checkpoint_of_ones_own() -> None:
    results = []
    for again in (False, True):
        model = block()
        opfuser.apply(model)
        for step in range(4):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with opfuser.autocast(recipe=DELAYED):
                y = checkpoint(model, x, use_reentrant=False) if again else model(x)
            with opfuser.autocast(recipe=DELAYED):
                pass  # scales change before anything is computed again
            y.square().sum().backward()
        results.append([y.detach(), x.grad, *[p.grad for p in model.parameters()], *scales(model)])
    assert_same(*results)


def test_sequences_that_are_converted_have_scales_of_their_own() -> None:
    module = block()
    with opfuser.autocast(recipe=DELAYED):
        sequence = opfuser.from_torch(module, example=torch.randn(4, 32))
    assert len(holders(sequence)) == 2
    opfuser.apply(module)
    with opfuser.autocast(recipe=DELAYED):
        sequence(torch.randn(4, 32))
    assert holders(module) == []
    assert all(t.abs().sum() > 0 for t in scales(sequence)[::3])
