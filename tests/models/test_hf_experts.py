"""Decoders with experts against Hugging Face's: losses of all layers together, checkpoints.

Logits, gradients, and weights in and out are in test_hf.py, bf16 in test_hf_random.py, as for all
decoders.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser.errors import ArgumentError
from opfuser.models import (
    DecoderConfig,
    MoEConfig,
    attention_kwargs,
    decoder_lm,
    hf_state_dict,
    load_hf,
    router_kwargs,
)
from opfuser.testing import assert_fused
from tests.models.hf import CONFIGS, EXPERTS, distance, hf_model

FAMILIES = [name for name, (_, sizes) in CONFIGS.items() if "output_router_logits" in sizes]
MOE = MoEConfig(dim=24, ffn_dim=10, num_experts=6, top_k=2)
LENGTHS = torch.tensor([[11], [9], [3]])


def data(padded: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, what follows each of them, and which of them are no padding."""
    tokens = torch.randint(37, (3, 11), device=device)
    mask = torch.arange(11, device=device) < LENGTHS.to(device)
    mask = mask if padded else torch.ones_like(mask)
    labels = tokens.masked_fill(~mask, -100)
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    return tokens, targets, mask


def same_lm(theirs: Any, **of_moe: Any) -> opfuser.Sequential:
    """Their model with its loss, made where it is."""
    config = DecoderConfig.from_hf(theirs.config, device=theirs.device, dtype=theirs.dtype)
    assert config.moe is not None
    model = decoder_lm(replace(config, moe=replace(config.moe, **of_moe)))
    load_hf(model, theirs.state_dict())
    return model


def grads_of(model: opfuser.Sequential) -> dict[str, Tensor]:
    """The gradients, by the names of transformers."""
    grads = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(grads.parameters(), model.parameters()):
            assert q.grad is not None
            p.copy_(q.grad)
    return hf_state_dict(grads)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_with_the_loss_of_all_routers(name: str, padded: bool, device: torch.device) -> None:
    theirs: Any = hf_model(*CONFIGS[name]).to(device)
    model = same_lm(theirs, aux_loss=True)
    tokens, targets, mask = data(padded, device)
    kwargs = {}
    if padded:
        kwargs = {**attention_kwargs(model, mask=mask), **router_kwargs(model, mask=mask)}
    loss, aux = model(tokens, targets, op_kwargs=kwargs)
    labels = tokens.masked_fill(~mask, -100)
    wanted = theirs(input_ids=tokens, labels=labels, attention_mask=mask.long() if padded else None)
    assert distance(loss, wanted.loss) <= 1e-5
    assert distance(aux, wanted.aux_loss) <= 1e-5
    assert wanted.aux_loss > 0.01 * wanted.loss
    loss.backward()
    wanted.loss.backward()
    got = grads_of(model)
    for key, p in theirs.named_parameters():
        assert distance(got[key], p.grad) <= 1e-5, key


def test_the_loss_of_all_routers_alone() -> None:
    """As an output beside logits, it has gradients too, and is not the mean over the layers."""
    theirs: Any = hf_model(*CONFIGS["qwen3 moe"])
    config = DecoderConfig.from_hf(theirs.config)
    assert config.moe is not None
    moe = replace(config.moe, aux_loss=True, balance_terms=True, tokens_per_expert=True)
    model = decoder_lm(replace(config, moe=moe), with_loss=False)
    load_hf(model, theirs.state_dict())
    tokens, _, _ = data(False, theirs.device)
    logits, *of_layers, aux = model(tokens)
    counts, terms = of_layers[::2], of_layers[1::2]
    wanted = theirs(input_ids=tokens)
    assert distance(logits, wanted.logits) <= 1e-5
    assert distance(aux, wanted.aux_loss) <= 1e-5
    fractions = torch.stack(terms)[:, 0]
    torch.testing.assert_close(fractions, torch.stack(counts) / tokens.numel())
    apart = torch.stack([len(t[0]) * t.prod(0).sum() for t in terms]).mean()
    assert distance(apart, aux) > 1e-3
    aux.backward()
    wanted.aux_loss.backward()
    for n, layer in enumerate(theirs.model.layers):
        router = model.get_parameter(f"layers.{n}.mlp.2.router.weight")
        assert router.grad is not None
        assert distance(router.grad, layer.mlp.gate.weight.grad) <= 1e-5


def test_without_its_coefficient_there_is_no_loss_of_routers() -> None:
    """As in transformers, whose configurations ask for it by output_router_logits."""
    family, sizes = CONFIGS["mixtral"]
    theirs: Any = hf_model(family, {**sizes, "output_router_logits": False})
    model = same_lm(theirs)
    tokens, targets, _ = data(False, theirs.device)
    assert distance(model(tokens, targets), theirs(input_ids=tokens, labels=tokens).loss) <= 1e-5
    kinds = {type(op) for op in model.plan(tokens, targets).basic_ops}
    assert opfuser.LoadBalancingLoss not in kinds
    config = DecoderConfig.from_hf(theirs.config, router_aux_loss_coef=0.25)
    (balance,) = [
        m for m in decoder_lm(config).modules() if isinstance(m, opfuser.LoadBalancingLoss)
    ]
    assert (balance.coefficient, balance.num_routers) == (0.25, 3)


def test_layers_that_carry_hooks() -> None:
    """The terms of their routers reach the loss behind them, or as extra outputs the caller."""
    config = DecoderConfig(37, 24, 3, 4, moe=MOE, router_aux_loss_coef=0.5, dtype=torch.float64)
    model = decoder_lm(config)
    tokens, targets, _ = data(False, torch.device("cpu"))
    wanted = model(tokens, targets)
    apart = replace(config, moe=replace(MOE, balance_terms=True), router_aux_loss_coef=0.0)
    hooked = decoder_lm(apart)
    hooked.load_state_dict(model.state_dict())
    for m in (model, hooked):
        m[1][1].register_forward_hook(lambda *args: None)
    torch.testing.assert_close(model(tokens, targets), wanted)
    loss, *terms = hooked(tokens, targets)
    got, _ = opfuser.LoadBalancingLoss(3, 0.5)(loss, *terms)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_experts_and_their_loss_keep_the_fusions(device: str) -> None:
    theirs: Any = hf_model(*CONFIGS["qwen2 moe"])
    model = decoder_lm(DecoderConfig.from_hf(theirs.config, device=device))
    tokens, targets = (t.to(device) for t in data(False, theirs.device)[:2])
    assert_fused(model, tokens, targets, joint={"grouped_mlp": 2, "linear_cross_entropy": 1})
    assert model.num_extra_outputs == 0
    assert model[:-1].num_extra_outputs == 0


@pytest.mark.parametrize("name", ["mixtral", "qwen2 moe", "qwen3 moe"])
def test_checkpoints_on_disk(name: str, tmp_path: Path) -> None:
    """In which every expert has tensors of its own."""
    safetensors = pytest.importorskip("safetensors.torch")
    theirs: Any = hf_model(*CONFIGS[name])
    theirs.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert any(".experts.5." in key for key in saved)
    model = decoder_lm(DecoderConfig.from_hf(theirs.config))
    load_hf(model, saved)
    torch.testing.assert_close(hf_state_dict(model), dict(theirs.state_dict()), rtol=0, atol=0)
    dropped = next(key for key in saved if ".experts.3." in key)
    with pytest.raises(ArgumentError, match=f"no {dropped}"):
        load_hf(model, {key: t for key, t in saved.items() if key != dropped})


def test_layers_without_experts() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(**{**EXPERTS, "num_experts": 0})
    assert DecoderConfig.from_hf(config).moe is None
    config = transformers.Qwen3MoeConfig(**EXPERTS, mlp_only_layers=[0, 2])
    ours = DecoderConfig.from_hf(config)
    assert ours.moe_layers == (1,)
    assert ours.expert_layers == {1}
    assert ours.ffn_dim == config.intermediate_size


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"moe": replace(MOE, dim=16)}, r"^moe\.dim must be dim \(DecoderConfig\).*, dim=24\."),
        (
            {"moe_layers": (0,)},
            r"Fields about experts need moe .*Received: moe=None, moe_layers=\(0,\)",
        ),
        (
            {"router_aux_loss_coef": 0.1},
            r"Fields about experts need moe .*router_aux_loss_coef=0\.1\.",
        ),
        ({"moe": MOE, "moe_layers": (0, 2)}, r"numbers of layers .*=\(0, 2\), num_layers=2\."),
    ],
    ids=str,
)
def test_what_a_configuration_cannot_be(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        DecoderConfig(37, 24, 2, 4, **change)


def test_initial_weights_of_experts() -> None:
    moe = replace(MOE, dim=64, ffn_dim=64, shared_ffn_dim=64, init_std=9.0, dtype=torch.float16)
    model = decoder_lm(DecoderConfig(99, 64, 8, 4, moe=moe, init_std=0.05, dtype=torch.float64))
    for name, p in model.named_parameters():
        assert p.dtype is torch.float64
        if p.dim() > 1:
            sums = name.endswith(("attention.5.weight", "down.weight"))
            assert p.std().item() == pytest.approx(0.05 / 4 if sums else 0.05, rel=0.15), name


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(no_waiting: Any) -> None:
    """In bf16, with rows of 16 bytes, as GroupedLinear wants them."""
    family, sizes = CONFIGS["qwen2 moe"]
    names = "hidden_size", "intermediate_size", "shared_expert_intermediate_size"
    sizes = {**sizes, **dict.fromkeys(names, 32), "moe_intermediate_size": 16}
    theirs: Any = hf_model(family, sizes).to("cuda", torch.bfloat16)
    model = same_lm(theirs, aux_loss=True)
    tokens, targets, mask = data(True, theirs.device)
    kwargs = router_kwargs(model, mask=mask)

    def step() -> list[Tensor]:
        loss, aux = model(tokens, targets, op_kwargs=kwargs)
        return [loss.detach(), aux.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

    wanted = step()
    with no_waiting():
        got = step()
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b)
