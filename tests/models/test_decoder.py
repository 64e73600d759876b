"""Decoder blocks and models against the same network in plain torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from examples.lm_twin import Twin
from opfuser.errors import ArgumentError
from opfuser.models import (
    DecoderConfig,
    attention_block,
    decoder_layer,
    decoder_layers,
    decoder_lm,
    mlp_block,
    swiglu_block,
)
from opfuser.quantization import scale_updates
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)

SMALL: dict[str, Any] = {"vocab_size": 11, "dim": 24, "num_layers": 2, "num_heads": 4}
CONFIGS = {
    "defaults": SMALL,
    "grouped heads": {**SMALL, "num_kv_heads": 2, "rope_base": 100.0},
    "untied": {**SMALL, "tied_head": False, "ffn_dim": 20, "norm_eps": 1e-3},
    "one layer, one head": {**SMALL, "num_layers": 1, "num_heads": 1, "ffn_dim": 7},
}
ODD = (1, 1), (2, 1), (1, 17)


def make_pair(
    config: DecoderConfig, seed: int = 0, scale: float = 8.0
) -> tuple[opfuser.Sequential, Twin]:
    """The model and its twin, with weights large enough that every part matters."""
    torch.manual_seed(seed)
    model = decoder_lm(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale) if p.dim() > 1 else p.uniform_(0.5, 1.5)
    twin = Twin(config)
    twin.load_state_dict(model.state_dict())
    return model, twin


def run(model: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Loss and the gradient of every parameter."""
    loss = model(tokens, targets)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **{k: g for k, g in grads.items() if g is not None}}


def batch(config: DecoderConfig, rows: int = 3, length: int = 9) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocab_size, (rows, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [*((sizes, (3, 9)) for sizes in CONFIGS.values()), *((SMALL, s) for s in ODD)],
    ids=[*CONFIGS, *map(str, ODD)],
)
def test_loss_and_gradients_are_those_of_torch_nn(
    sizes: dict[str, Any], shape: tuple[int, int]
) -> None:
    config = DecoderConfig(**sizes, dtype=torch.float64)
    model, twin = make_pair(config)
    ours, theirs = (run(m, *batch(config, *shape)) for m in (model, twin) if torch.manual_seed(1))
    assert ours.keys() == theirs.keys()
    assert len(ours) == 1 + len(list(twin.parameters()))
    for name, wanted in theirs.items():
        assert shape in ODD or wanted.norm() > 1e-6
        torch.testing.assert_close(ours[name], wanted, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=str,
)
def test_error_is_at_most_twice_that_of_torch_nn(dtype: torch.dtype, autocast: bool) -> None:
    # One seed decides little about rounding, so errors are pooled over several.
    own_error, twin_error = {}, {}
    for seed in range(4):
        exact = DecoderConfig(**SMALL, dtype=torch.float64)
        own_dtype = torch.float32 if autocast else dtype
        config = DecoderConfig(**SMALL, dtype=own_dtype)
        model, twin = make_pair(config, seed, scale=4.0)
        reference = Twin(exact)
        reference.load_state_dict(model.state_dict())
        data = batch(config, 4, 32)
        wanted = run(reference, *data)
        with torch.autocast("cpu", dtype, enabled=autocast):
            ours, theirs = run(model, *data), run(twin, *data)
        for name, value in wanted.items():
            for got, error in ((ours, own_error), (theirs, twin_error)):
                off = (got[name].double() - value).norm() / value.norm()
                error[name] = error.get(name, 0.0) + off.item() / 4
    floor = torch.finfo(dtype).eps
    for name, error in own_error.items():
        assert error <= 2 * twin_error[name] + floor, name


def test_whole_model_is_one_run_of_operations() -> None:
    config = DecoderConfig(**SMALL)
    model = decoder_lm(config)
    plan = model.plan(*batch(config))
    assert len(plan.basic_ops) == 1 + 13 * config.num_layers + 3
    border = [type(op) for op in plan.basic_ops[7:10]]
    assert border == [opfuser.AddExtraInput, opfuser.MakeExtraOutput, opfuser.RMSNorm]
    assert model.num_extra_inputs == 1  # the targets
    assert model.num_extra_outputs == 0  # residuals stay inside


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fusions_reach_across_blocks_and_layers(device: str) -> None:
    """A plan for meta is that for a GPU, where sums go into norms, not GEMMs."""
    config = DecoderConfig(**SMALL, device=device)
    tokens, targets = (t.to(device) for t in batch(config))
    plan = decoder_lm(config).plan(tokens, targets)
    layers = config.num_layers
    both = {"norm_linear": 2 * layers, "linear_cross_entropy": 1}
    if device == "cpu":
        both["activation_linear_add"] = layers
        forward = {"forward_linear_bias_add": layers}
    else:
        both["activation_linear"] = layers
        forward = {"forward_add_rms_norm": 1}  # the one before the head, which goes with the loss
    assert plan.fused("forward") == {**both, **forward}
    assert plan.fused("backward") == both
    borders = [step.indices for step in plan.forward if step.fusion == "norm_linear"]
    first = [opfuser.MakeExtraOutput, opfuser.RMSNorm, opfuser.BasicLinear]
    longer = [opfuser.AddExtraInput, *first] if device == "meta" else first
    found = [[type(plan.basic_ops[i]) for i in indices] for indices in borders]
    assert found == [first, *[longer] * (2 * layers - 1)]


def test_tied_head_is_the_token_table() -> None:
    model = decoder_lm(DecoderConfig(**SMALL))
    assert model[-2].weight is model[0].weight
    assert "head.weight" not in dict(model.named_parameters())
    untied = decoder_lm(DecoderConfig(**SMALL, tied_head=False))
    assert untied[-2].weight is not untied[0].weight


def test_model_without_loss_gives_logits() -> None:
    config = DecoderConfig(**SMALL, dtype=torch.float64)
    model, _ = make_pair(config)
    logits_of = decoder_lm(config, with_loss=False)
    missing = logits_of.load_state_dict(model.state_dict())
    assert not missing.missing_keys
    tokens, targets = batch(config)
    logits = logits_of(tokens)
    assert logits.shape == (*tokens.shape, config.vocab_size)
    torch.testing.assert_close(model[:-1](tokens), logits)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), loss)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    config = DecoderConfig(**SMALL, dtype=torch.float64)
    model, _ = make_pair(config)
    tokens, _ = batch(config)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % config.vocab_size
    before, after = model[:-1](tokens), model[:-1](changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().min(dim=-1).values.max() > 0


@pytest.mark.parametrize("block", [attention_block, swiglu_block, decoder_layers])
def test_blocks_keep_the_shape_and_start_near_the_identity(block: Any) -> None:
    config = DecoderConfig(**SMALL, init_std=1e-3, dtype=torch.float64)
    x = torch.randn(2, 5, config.dim, dtype=torch.float64)
    y = block(config)(x)
    torch.testing.assert_close(y, x, rtol=0, atol=1e-2)
    assert (y != x).all()


def test_initial_weights() -> None:
    config = DecoderConfig(256, 64, 8, 4, init_std=0.05)
    model = decoder_lm(config)
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    for name, std in stds.items():
        wanted = 0.05 / 4 if name.endswith(("attention.5.weight", "mlp.4.weight")) else 0.05
        assert std == pytest.approx(wanted, rel=0.1), name


def test_default_feed_forward_size() -> None:
    assert DecoderConfig(**{**SMALL, "dim": 96}).ffn_features == 256
    assert DecoderConfig(**{**SMALL, "dim": 128}).ffn_features == 384
    assert DecoderConfig(**{**SMALL, "dim": 4096}).ffn_features == 10944


def test_padding_row_starts_at_zero() -> None:
    table = decoder_lm(DecoderConfig(**SMALL, padding_idx=3))[0].weight
    assert table.any(1).tolist() == [n != 3 for n in range(SMALL["vocab_size"])]


def test_swiglu_block_is_one_whatever_the_activation() -> None:
    config = DecoderConfig(**SMALL, activation="relu")
    assert isinstance(swiglu_block(config)[3], opfuser.SwiGLU)
    assert isinstance(mlp_block(config)[3], opfuser.ReLU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, r"Sizes must be positive \(DecoderConfig\). Received: num_layers=0"),
        ({"ffn_dim": -1}, "Received: ffn_dim=-1"),
        ({"num_heads": 5}, "multiple of num_heads.*Received: dim=24, num_heads=5"),
        ({"num_heads": 8}, "even for each head.*Received: dim=24, num_heads=8"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads.*num_heads=4, num_kv_heads=3"),
        ({"recompute": "all"}, "recompute must be None or 'mlp'.*Received: recompute='all'"),
        ({"head_dim": 5}, "head_dim must be even for rotary.*Received: head_dim=5"),
        ({"num_heads": 5, "learned_positions": 9}, "dim must be a multiple of num_heads \\("),
        ({"norm": "batch"}, "norm must be 'rms' or 'layer'.*Received: norm='batch'"),
        ({"activation": "mish"}, "activation must be 'swiglu' or .*Received: activation='mish'"),
        ({"learned_positions": 0}, "Sizes must be positive.*Received: learned_positions=0"),
        ({"window": 0}, "Windows must be positive.*Received: window=0"),
        ({"window": (1, None, 2)}, r"one for each layer.*window=\(1, None, 2\), num_layers=2"),
        ({"logit_softcap": -1.0}, "Caps must be positive.*Received: logit_softcap=-1.0"),
        ({"residual_dropout": 1.5}, r"lie in \[0, 1\].*Received: residual_dropout=1.5"),
        ({"recipe": "fp8"}, r"one of opfuser.recipe \(DecoderConfig\). Received: 'fp8'"),
    ],
)
def test_arguments_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DecoderConfig(**{**SMALL, **change})


RECIPES: list[Recipe] = [
    DelayedScaling(),
    Float8CurrentScaling(),
    Float8BlockScaling(),
]
# Every feature is a multiple of 128, as blocks need.
QUANTIZED: dict[str, Any] = {"vocab_size": 256, "dim": 128, "num_layers": 2, "num_heads": 2}
emulated = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")


@emulated
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_recipe_is_that_of_a_region_around_the_calls(recipe: Recipe) -> None:
    config = DecoderConfig(**QUANTIZED)
    own, plain = (
        decoder_lm(c) for c in (replace(config, recipe=recipe), config) if torch.manual_seed(0)
    )
    assert (own.recipe, plain.recipe) == (recipe, None)
    for _ in range(3):  # of which the later ones have scales from earlier ones
        data = batch(config, 2, 8)
        got = run(own, *data)
        with opfuser.autocast(recipe=recipe):
            wanted = run(plain, *data)
        for model in (own, plain):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    with opfuser.autocast(recipe=recipe):
        pass  # scales of both follow their last calls
    torch.testing.assert_close(dict(own.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    fresh = decoder_lm(replace(config, recipe=recipe))
    fresh.load_state_dict(own.state_dict())
    wanted = run(own, *data)
    torch.testing.assert_close(run(fresh, *data)["loss"], wanted["loss"], rtol=0, atol=0)
    assert not torch.equal(plain(*data), wanted["loss"])  # it is outside of a region now


@emulated
def test_only_layers_are_quantized() -> None:
    config = DecoderConfig(**QUANTIZED, recipe=DelayedScaling())
    data = batch(config, 2, 8)
    for model, inputs in ((decoder_lm(config), data), (decoder_lm(config, False), data[:1])):
        plan = model.plan(*inputs)
        found = [at for at, op in enumerate(plan.basic_ops) if isinstance(op, opfuser.BasicLinear)]
        *layers, head = found
        assert plan.quantized == tuple(layers)
        assert [(at, why.code) for at, why in plan.high_precision] == [(head, "NO_RECIPE")]
    model = decoder_lm(config)
    model(*data)
    assert len([name for name in model.state_dict() if name.endswith("quantization.scale")]) == 8
    model.recipe = Float8CurrentScaling()  # the same at every call
    logits = model[:-1](data[0])
    torch.testing.assert_close(
        model(*data), nn.functional.cross_entropy(logits.flatten(0, 1), data[1].flatten())
    )


@emulated
@pytest.mark.parametrize("block", [attention_block, swiglu_block, decoder_layer, decoder_layers])
def test_blocks_have_the_recipe_once(block: Callable[[DecoderConfig], Any]) -> None:
    """So that a call opens one region, and scales are updated once."""
    config = DecoderConfig(**QUANTIZED, recipe=Float8CurrentScaling())
    seq = block(config)
    assert [m.recipe for m in seq.modules() if isinstance(m, opfuser.Sequential)] == [
        config.recipe,
        *[None] * (sum(isinstance(m, opfuser.Sequential) for m in seq.modules()) - 1),
    ]
    x = torch.randn(2, 8, config.dim)
    seq(x)
    linears = [n for n, op in enumerate(seq.last_plan.basic_ops) if hasattr(op, "weight_grad")]
    assert seq.last_plan.quantized == tuple(linears)
    assert len(linears) in (2, 4, 8)


@emulated
def test_a_call_updates_scales_once(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[None] = []
    monkeypatch.setattr(scale_updates, "update_scales", lambda: updates.append(None))
    config = DecoderConfig(**QUANTIZED, recipe=DelayedScaling())
    model = decoder_lm(config)
    for calls in (1, 2):
        run(model, *batch(config, 2, 8))
        assert len(updates) == calls
