"""What training loops put around an optimizer, around one with masters: as by hand in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, lr_scheduler

from opfuser.optim import MasterWeights
from tests.quantization.masters_by_hand import ByHand, assert_stored, give_gradients, model

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

in_bf16_and_fp8 = pytest.mark.parametrize("fp8", [False, True])
adamw = partial(AdamW, lr=0.05, weight_decay=0.1)


def _sequential(optimizer: Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3),
        lr_scheduler.ExponentialLR(optimizer, 0.7),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),  # betas too
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "sequential": _sequential,
}


@pytest.mark.parametrize("name", SCHEDULERS)
@in_bf16_and_fp8
def test_schedulers(name: str, fp8: bool) -> None:
    """Also of a scheduler and an optimizer that go on from their state dicts."""
    seq = model(fp8)
    hand, optimizer = ByHand(seq, adamw), MasterWeights(seq, adamw)
    ours, theirs = SCHEDULERS[name](optimizer), SCHEDULERS[name](hand.optimizer)
    metric = [(1.0,), (2.0,), (3.0,), (1.0,)] * 2 if name == "plateau" else [()] * 8
    seen = set()
    for n in range(8):
        give_gradients(seq.parameters(), n)
        optimizer.step()
        hand.step()
        hand.check()
        ours.step(*metric[n])
        theirs.step(*metric[n])
        options = ({**o.param_groups[0], "params": 0} for o in (optimizer, hand.optimizer))
        assert next(options) == next(options)
        seen.add(optimizer.param_groups[0]["lr"])
        if n == 4:
            states = copy.deepcopy((optimizer.state_dict(), ours.state_dict()))
            optimizer = MasterWeights(seq, adamw)
            ours = SCHEDULERS[name](optimizer)
            optimizer.load_state_dict(states[0])
            ours.load_state_dict(states[1])
    assert len(seen) > 3


@in_bf16_and_fp8
def test_a_gradient_scaler(fp8: bool) -> None:
    """Gradients that are not finite leave parameters, masters and state as they are."""
    seq = model(fp8)
    hand, optimizer = ByHand(seq, adamw), MasterWeights(seq, adamw)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for n in range(6):
        optimizer.zero_grad()
        scale = scaler.scale(torch.ones(()))
        give_gradients(seq.parameters(), n)
        finite = n not in (0, 3)
        if finite:
            hand.step()
        for p in seq.parameters():
            assert p.grad is not None
            p.grad.mul_(scale)
        if not finite:
            assert seq[1].weight.grad is not None
            seq[1].weight.grad[0, 0] = torch.inf
        if n % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if n:
            hand.check()
        assert bool(optimizer.state) == bool(n)
        scales.append(scaler.get_scale())
    assert scales == [32, 32, 64, 32, 32, 64]
    hand.check_state(optimizer, set(seq.parameters()))


@pytest.mark.parametrize("clip", ["norm", "value"])
@in_bf16_and_fp8
def test_clipping(clip: str, fp8: bool) -> None:
    seq = model(fp8)
    hand, optimizer = ByHand(seq, adamw), MasterWeights(seq, adamw)
    for n in range(3):
        give_gradients(seq.parameters(), n)
        grads = [p.grad.clone() for p in seq.parameters() if p.grad is not None]
        if clip == "norm":
            norm = nn.utils.clip_grad_norm_(seq.parameters(), 1.0)
            norms = torch.stack([g.double().norm() for g in grads])
            torch.testing.assert_close(norm.double(), norms.norm(), rtol=2**-7, atol=0)
        else:
            nn.utils.clip_grad_value_(seq.parameters(), 0.5)
        assert not torch.equal(grads[1], seq[1].weight.grad)
        optimizer.step()
        hand.step()
        hand.check()


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.rows = torch.randn(24, 16).bfloat16()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.rows[index]}


class _Regression(nn.Module):
    """The model and its loss, as Trainer calls them."""

    def __init__(self, fp8: bool) -> None:
        super().__init__()
        self.seq = model(fp8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.seq(x)
        return {"loss": y.float().square().mean(), "logits": y}


@in_bf16_and_fp8
def test_accelerate(fp8: bool, tmp_path: Path) -> None:
    """Accumulation over two batches, clipping, a scheduler, a state that is saved and loaded."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    whole = _Regression(fp8)
    hand = ByHand(whole.seq, adamw)
    inner = MasterWeights(whole.seq, adamw)
    loader = torch.utils.data.DataLoader(_Rows(), batch_size=4)
    schedule = lr_scheduler.LambdaLR(inner, lambda n: 0.9**n)
    prepared, optimizer, batches, scheduler = accelerator.prepare(whole, inner, loader, schedule)
    assert not inner.state
    n = 0
    for batch in batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                hand.optimizer.param_groups[0]["lr"] = 0.05 * 0.9**n
                hand.step()
                n += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if n == 1 and accelerator.sync_gradients:
            accelerator.save_state(str(tmp_path))
            moments = copy.deepcopy(inner.state_dict())
            inner.state.clear()
            accelerator.load_state(str(tmp_path))
            torch.testing.assert_close(inner.state_dict(), moments, rtol=0, atol=0)
    assert n == 3
    hand.check()
    hand.check_state(inner, set(whole.seq.parameters()))


@in_bf16_and_fp8
def test_trainer(fp8: bool, tmp_path: Path) -> None:
    """Its losses and parameters, also where it resumes from a checkpoint of its own."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")

    def trainer(steps: int) -> Any:
        whole = _Regression(fp8)
        optimizer = MasterWeights(whole.seq, adamw)
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=4,
            max_grad_norm=0.5,
            logging_steps=1,
            save_steps=3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=0,
        )
        schedule = lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
        return transformers.Trainer(
            model=whole, args=settings, train_dataset=_Rows(), optimizers=(optimizer, schedule)
        )

    unbroken = trainer(6)
    hand = ByHand(unbroken.model.seq, adamw)

    class Follow(transformers.TrainerCallback):  # type: ignore[misc]
        n = 0

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            hand.optimizer.param_groups[0]["lr"] = 0.05 * 0.9**self.n
            hand.step()
            self.n += 1

    unbroken.add_callback(Follow())
    unbroken.train()
    hand.check()
    resumed = trainer(6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_stored(resumed.model.seq, hand.masters)
    assert hand.optimizer.state[hand.masters[0]]["step"] == 6
