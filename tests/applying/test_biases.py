"""Models of the T5 family, whose layers share a bias of attention that the first one makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.applying import report

from ..reading.tiny import CHECKPOINTING
from .models import IDS, paths

transformers = pytest.importorskip("transformers")

FAMILIES = ["T5", "MT5", "UMT5"]
LABELS = IDS[:, :5].contiguous()
PADDED = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
LEFT = torch.tensor([[1] * 5, [0] * 2 + [1] * 3])
BLOCKS = [f"{stack}.block.{n}" for stack in ("encoder", "decoder") for n in range(3)]


def _wide_norm(norm: Any, x: Tensor) -> Tensor:
    """The norm of the family, which computes in fp32, in fp64."""
    return norm.weight * (
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    )


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in FAMILIES:
        modeling = getattr(transformers.models, family.lower())
        modeling = getattr(modeling, f"modeling_{family.lower()}")
        monkeypatch.setattr(getattr(modeling, f"{family}LayerNorm"), "forward", _wide_norm)


def model_of(family: str = "T5", attention: str = "sdpa", **others: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        d_model=24, d_kv=8, d_ff=32, num_layers=3, num_heads=3, vocab_size=99, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=6, use_cache=False,
        decoder_start_token_id=0, attn_implementation=attention, **others,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).double().train()
    for name, p in model.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.normal_(p)
    return model


def step(model: Any, **given: Any) -> dict[str, Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(**{"input_ids": IDS, "labels": LABELS, **given}).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in grads.values())
    return {"loss": loss.detach(), **{name: grad.clone() for name, grad in grads.items()}}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, theirs in want.items():
        limit = 1e-10 * theirs.abs().max().clamp(min=1e-3)
        assert (got[name] - theirs).abs().max() <= limit, name


def tables_in(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if "relative_attention_bias" in name]


def fallbacks_of(model: nn.Module) -> dict[str, list[str]]:
    """Why calls of computed blocks went to their own forwards."""
    found = report(model).computed
    return {e.path: [reason for reason, _ in e.fell_back] for e in found if e.fell_back}


def left_of(model: nn.Module) -> set[str]:
    """What is kept, as its attention may hide all keys of a query."""
    reason = "may hide all keys of a query by large numbers that it adds to scores"
    return {entry.path for entry in report(model).kept if entry.reason == reason}


@pytest.mark.parametrize(
    ("family", "attention", "padded"),
    [
        (family, ("sdpa", "eager")[(n + padded) % 2], bool(padded))
        for n, family in enumerate(FAMILIES)
        for padded in (0, 1)
    ],
)
def test_training_and_evaluation(family: str, attention: str, padded: bool) -> None:
    ours, theirs = model_of(family, attention), model_of(family, attention)
    opfuser.apply(ours)
    given = {"attention_mask": PADDED} if padded else {}
    for labels in (LABELS, IDS[:, :3].contiguous(), IDS):
        got, want = (step(model, labels=labels, **given) for model in (ours, theirs))
        assert_same(got, want)
        assert all(want[name].any() for name in tables_in(theirs))
    assert set(BLOCKS) <= set(paths(report(ours)))
    assert not fallbacks_of(ours)
    with torch.no_grad():
        outs = [m.eval()(input_ids=IDS, labels=LABELS, **given).logits for m in (ours, theirs)]
    torch.testing.assert_close(*outs)
    assert not fallbacks_of(ours)


def _frozen(model: Any) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_("relative_attention_bias" not in name)


def _exchanged(model: Any) -> None:
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    table.weight = nn.Parameter(table.weight.detach() * 2 + 1)


def _doubled(model: Any) -> None:
    table = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias
    table.register_forward_hook(lambda module, args, y: y * 2)


def _other_buckets(model: Any) -> None:
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_max_distance = 3


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", [_frozen, _exchanged, _doubled, _other_buckets])
def test_changes_of_the_table(change: Callable[[Any], None], later: bool) -> None:
    ours, theirs = model_of(), model_of()
    given = {"attention_mask": PADDED}
    if not later:
        change(ours)
    opfuser.apply(ours)
    if later:
        assert_same(step(ours, **given), step(theirs, **given))
        change(ours)
    change(theirs)
    for _ in range(2):
        assert_same(step(ours, **given), step(theirs, **given))


def test_queries_all_of_whose_keys_are_hidden_are_left_to_the_model() -> None:
    """The model attends to all keys then, of which no kernel has exact gradients."""
    ours, theirs = model_of(), model_of()
    opfuser.apply(ours)
    for _ in range(2):
        got, want = (step(model, decoder_attention_mask=LEFT) for model in (ours, theirs))
        assert_same(got, want)
    blocks = {path for path in left_of(ours) if path.count(".") == 2}
    assert blocks == {f"decoder.block.{n}" for n in range(3)}
    with torch.no_grad():
        outs = [
            model.eval()(input_ids=IDS, labels=LABELS, decoder_attention_mask=LEFT).logits
            for model in (ours, theirs)
        ]
    torch.testing.assert_close(*outs)


def test_a_bias_of_large_numbers_is_left_to_the_model() -> None:
    ours, theirs = model_of(), model_of()
    for model in (ours, theirs):
        with torch.no_grad():
            model.get_parameter(tables_in(model)[0])[:3, 1] -= 1e30
    opfuser.apply(ours)
    for _ in range(2):
        assert_same(step(ours), step(theirs))
    assert {"encoder.block.1", "encoder.block.2"} <= left_of(ours)


def test_dropout_of_weights_is_drawn_in_training_alone() -> None:
    model = model_of()
    model.encoder.block[1].layer[0].SelfAttention.dropout = 0.5
    opfuser.apply(model)
    first, second = step(model), step(model)
    assert first["loss"] != second["loss"]
    assert set(BLOCKS) <= set(paths(report(model)))
    with torch.no_grad():
        model.eval()
        outs = [model(input_ids=IDS, labels=LABELS).logits for _ in range(2)]
        opfuser.revert(model)
        outs.append(model(input_ids=IDS, labels=LABELS).logits)
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=0)
    torch.testing.assert_close(outs[0], outs[2])


def test_copies_checkpointing_and_generation() -> None:
    ours, theirs = model_of(), model_of()
    opfuser.apply(ours)
    want = step(theirs)
    assert_same(step(ours), want)
    assert_same(step(copy.deepcopy(ours)), want)
    for model in (ours, theirs):
        getattr(model, f"{CHECKPOINTING}_enable")()
    assert_same(step(ours), step(theirs))
    given = {"attention_mask": PADDED, "max_new_tokens": 6, "do_sample": False}
    found = [model.eval().generate(IDS, use_cache=True, **given) for model in (ours, theirs)]
    assert torch.equal(*found)


def test_under_torch_compile() -> None:
    ours, theirs = model_of(), model_of()
    opfuser.apply(ours)
    call: Any = torch.compile(ours, backend="aot_eager")
    with pytest.warns(UserWarning, match="under torch.compile"):
        loss = call(input_ids=IDS, labels=LABELS).loss
    loss.backward()
    want = step(theirs)
    grads = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert_same({"loss": loss.detach(), **grads}, want)


def test_under_autocast() -> None:
    """Masks of the dtype of keys in a bias of another; gradients as near as those of the model."""
    ours, theirs, exact = model_of().float(), model_of().float(), model_of()
    opfuser.apply(ours)
    want = step(exact, attention_mask=PADDED)
    found = []
    for model in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=LABELS, attention_mask=PADDED).loss
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert set(BLOCKS) <= set(paths(report(ours)))
    error, allowed = (
        sum((grads[name] - want[name]).square().sum() for name in grads).sqrt() for grads in found
    )
    assert error <= 2 * allowed
