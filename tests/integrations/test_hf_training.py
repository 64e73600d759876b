"""Replaced models under Trainer, PEFT, accelerate and checkpointing train as untouched ones do."""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import opfuser.hf
from tests.reading.tiny import CHECKPOINTING

from .hf_models import (
    MODELS,
    Pair,
    assert_close,
    assert_same,
    batch_of,
    calls,
    pair,
    step,
    transformers,
)

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

# PEFT reads the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")

STEPS = 8
PROJECTIONS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()


class _Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of different lengths, padded."""

    def __init__(self) -> None:
        self.tokens = torch.randint(2, 61, (STEPS * 4, 9))
        self.masks = torch.ones_like(self.tokens)
        self.masks[::3, -2:] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, mask = self.tokens[index], self.masks[index]
        labels = tokens.masked_fill(mask == 0, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def losses(model: Any, path: Path, data: _Tokens, **arguments: Any) -> list[float]:
    """Those of steps of Trainer, and of its evaluation."""
    settings = transformers.TrainingArguments(
        output_dir=str(path),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
        **arguments,
    )
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=data)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*logged, trainer.evaluate(data)["eval_loss"]]


class Training(NamedTuple):
    """Of which model, with which arguments, and which modules LoRA layers are put on."""

    name: str
    arguments: dict[str, Any]
    lora: Sequence[str] = ()


BF16 = {"bf16": True}
TRAININGS = {
    "llama in bf16": Training("llama", BF16),
    "bert": Training("bert", {"gradient_accumulation_steps": 2}),
    "mixtral": Training("mixtral", {}),
    "gpt2 checkpointed": Training("gpt2", {CHECKPOINTING: True}),
    "qwen3, LoRA, in bf16": Training("qwen3", BF16, PROJECTIONS),
}


@pytest.mark.parametrize("case", TRAININGS)
def test_steps_of_trainer(case: str, tmp_path: Path) -> None:
    name, arguments, lora = TRAININGS[case]
    trained = pair(name)
    models = adapted(trained, lora) if lora else trained[:2]
    data = _Tokens()
    got, want = (losses(m, tmp_path, data, **arguments) for m in models)
    assert len(got) == STEPS + 1
    rtol = 2e-3 if "bf16" in arguments else 1e-5
    assert got == pytest.approx(want, rel=rtol)
    assert any(entry.calls >= STEPS for entry in opfuser.hf.report(trained.model).computed)


def adapted(pair: Pair, targets: Sequence[str]) -> tuple[Any, Any]:
    """Both with the same LoRA layers on those modules, which change the outputs."""
    made = []
    for model in pair[:2]:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False)
        made.append(peft.get_peft_model(model, config))
    return made[0], made[1]


def test_checkpointing_keeps_less() -> None:
    model, _, _ = pair("llama")
    batch = batch_of("llama")

    def kept() -> int:
        total = 0

        def pack(t: Tensor) -> Tensor:
            nonlocal total
            total += t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(**batch).loss
        loss.backward()  # or torch keeps for good what these hooks return of a checkpoint
        return total

    whole = kept()
    getattr(model.train(), f"{CHECKPOINTING}_enable")({"use_reentrant": False})
    assert kept() < whole / 2


@pytest.mark.parametrize("when", ["before apply", "after apply"])
def test_offloaded_by_accelerate(when: str) -> None:
    """Hooks that bring parameters of modules are never passed over."""
    untouched = MODELS["llama"]()
    model = copy.deepcopy(untouched)
    if when == "after apply":
        opfuser.hf.apply(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    if when == "before apply":
        opfuser.hf.apply(model)
    batch = batch_of("llama")
    with torch.no_grad():
        assert_close(model(**batch).logits, untouched(**batch).logits, 1e-5)
    report = opfuser.hf.report(model)
    assert len(PROJECTIONS) == 7
    assert not any(entry.path.endswith("_proj") for entry in report.computed)


def losses_of(report: opfuser.hf.Report) -> list[str]:
    """Modules whose logits are not computed."""
    return [e.path for e in report.computed if e.operations.endswith("Linear, CrossEntropy")]


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_fused_loss(name: str) -> None:
    """The loss of training comes without logits; everything else is as before."""
    untouched = MODELS[name]()
    model = copy.deepcopy(untouched)
    report = opfuser.hf.apply(model, fused_loss=True)
    assert losses_of(report) == ["lm_head"]
    batch = batch_of(name)
    for given in ({}, {"num_items_in_batch": torch.tensor(11)}, {"num_items_in_batch": 7}):
        want = step(untouched.train(), **batch, **given)
        model.train().zero_grad()
        out = model(**batch, **given)
        assert out.logits is None
        assert type(out) is type(untouched(**batch))
        out.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_same(want._replace(loss=out.loss, grads=grads), want)
    assert calls(model) == {}
    tokens = {"input_ids": batch["input_ids"]}
    assert_close(model(**tokens).logits, untouched(**tokens).logits, 1e-5)
    few, want_few = (m(**tokens, logits_to_keep=torch.arange(3)) for m in (model, untouched))
    assert_close(few.logits, want_few.logits, 1e-5)
    got, right = (m(**batch, return_dict=False)[:2] for m in (model, untouched))
    assert_close(got[0], right[0], 1e-5)
    assert got[1] is None
    assert calls(model) == {"has nothing to fuse, so torch computes it": 2}
    assert_same(step(model.eval(), **batch), step(untouched.eval(), **batch))
    opfuser.hf.revert(model)
    assert_same(step(model.train(), **batch), step(untouched.train(), **batch))


def test_fused_loss_with_trainer(tmp_path: Path) -> None:
    untouched = MODELS["llama"]()
    for arguments in ({}, {"bf16": True, "gradient_accumulation_steps": 2}):
        model, plain = copy.deepcopy(untouched), copy.deepcopy(untouched)
        opfuser.hf.apply(model, fused_loss=True)
        data = _Tokens()
        got, want = (losses(m, tmp_path, data, **arguments) for m in (model, plain))
        assert got == pytest.approx(want, rel=2e-3 if arguments else 1e-5)
        assert losses_of(opfuser.hf.report(model)) == ["lm_head"]
        opfuser.hf.revert(model)  # accelerate has left its wrapper
        plain.load_state_dict(model.state_dict())
        batch = batch_of("llama")
        got, want = step(model, **batch), step(plain, **batch)
        assert torch.equal(got.logits, want.logits)


def test_a_forward_that_was_wrapped_and_unwrapped() -> None:
    """accelerate makes it a method of the model; copies of that have parameters of their own."""
    untouched = MODELS["llama"]()
    model = copy.deepcopy(untouched).train()
    opfuser.hf.apply(model, fused_loss=True)
    model.forward = types.MethodType(model.forward.__func__, model)
    other = copy.deepcopy(model)
    batch = batch_of("llama")
    want = step(untouched.train(), **batch)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    out = other(**batch)
    assert out.logits is None
    assert_close(out.loss, want.loss, 1e-5)
    assert losses_of(opfuser.hf.report(other)) == ["lm_head"]
    for each in (model, other):
        opfuser.hf.revert(each)
        assert "forward" not in vars(each)


def test_a_head_with_an_adapter_is_called() -> None:
    untouched = MODELS["llama"]()
    model = copy.deepcopy(untouched)
    opfuser.hf.apply(model, fused_loss=True)
    made = []
    for each in (model, untouched):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        made.append(peft.get_peft_model(each, config).train())
    batch = batch_of("llama")
    assert_same(step(made[0], **batch), step(made[1], **batch))
    assert calls(made[0]) == {"has nothing to fuse, so torch computes it": 1}
