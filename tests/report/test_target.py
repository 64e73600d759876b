"""Models by name: how they are built, on which device, with which inputs, and their plans."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import TargetError
from opfuser.report.inputs import DTYPES
from opfuser.report.target import Target, calls, load, plans
from tests.cli import models

MODELS = "tests.cli.models"


def test_a_function_builds_on_the_device_without_drawing_weights() -> None:
    target = load(f"{MODELS}:layers")
    assert target.name == f"{MODELS}:layers"
    assert all(p.is_meta for p in target.model.parameters())
    assert [(tuple(t.shape), t.dtype, t.is_meta) for t in target.inputs] == [
        ((2, 8), torch.int64, True)
    ] * 2
    real = load(f"{MODELS}:mlp", device="cpu").model
    assert all(p.isfinite().all() and not p.is_meta for p in real.parameters())
    assert real[2].weight.std() > 0


def test_an_object_stays_as_it_is() -> None:
    before = {name: (id(t), t.clone()) for name, t in models.ready.named_parameters()}
    target = load(f"{MODELS}:ready", dtype=torch.bfloat16)
    assert {(p.dtype, p.device.type) for p in target.model.parameters()} == {
        (torch.bfloat16, "meta")
    }
    assert (tuple(target.inputs[0].shape), target.inputs[0].dtype) == ((4, 16), torch.bfloat16)
    for name, t in models.ready.named_parameters():
        assert (id(t), True) == (before[name][0], torch.equal(t, before[name][1]))
    assert load(f"{MODELS}:ready", device="cpu").model is models.ready


def test_a_copy_keeps_what_is_shared_and_what_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = opfuser.Sequential(opfuser.Linear(4, 4), opfuser.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    monkeypatch.setattr(models, "tied", model, raising=False)
    copied = load(f"{MODELS}:tied", ["2x4"]).model
    assert copied[0].weight is copied[1].weight
    assert [p.requires_grad for p in copied.parameters()] == [True, False, True]


def test_texts_of_inputs() -> None:
    texts = ["2x16:bf16", "3:int64", ":fp32", "2x2", "4:bool"]
    bf16, index, scalar, like_weights, flags = load(f"{MODELS}:mlp", texts, "cpu").inputs
    assert (tuple(bf16.shape), bf16.dtype, bf16.requires_grad) == ((2, 16), torch.bfloat16, True)
    assert (tuple(index.shape), index.dtype, index.requires_grad) == ((3,), torch.int64, False)
    assert (tuple(scalar.shape), scalar.dtype) == ((), torch.float32)
    assert (tuple(like_weights.shape), like_weights.dtype) == ((2, 2), torch.float32)
    assert flags.all()


def test_dtypes_have_short_names_and_those_of_torch() -> None:
    model = nn.Identity()
    for name, dtype in [*DTYPES.items(), ("bfloat16", torch.bfloat16), ("int32", torch.int32)]:
        assert load(f"{MODELS}:mlp", [f"2:{name}"]).inputs[0].dtype == dtype
    assert not list(model.parameters())


def test_indices_are_within_the_smallest_table() -> None:
    tokens, _ = load(f"{MODELS}:layers", ["64x8:int64"] * 2, "cpu").inputs
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 32
    assert len(tokens.unique()) > 8


def test_examples_may_be_computed() -> None:
    (x,) = load(f"{MODELS}:wrapped").inputs
    assert (tuple(x.shape), x.is_meta, x.requires_grad) == ((2, 16), True, True)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_sequential_is_called_as_its_plan_does_not_know_what_is_possible(device: str) -> None:
    target = load(f"{MODELS}:mlp", device=device)
    assert isinstance(target.model, opfuser.Sequential)
    assert plans(target) == {"": target.model.plan(*target.inputs)}
    for text in ("2x15", "2x16:int64"):
        wrong = load(f"{MODELS}:mlp", [text], device)
        assert wrong.model.plan(*wrong.inputs)  # type: ignore[operator]
        with pytest.raises(TargetError, match=r"The model has to run .*InputError"):
            plans(wrong)


def test_experts_are_called_without_data_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        (plan,) = plans(load(f"{MODELS}:experts", ["8x16"], dtype=dtype)).values()
        assert plan.env.dtype == dtype


def test_sequences_in_other_modules() -> None:
    target = load(f"{MODELS}:wrapped")
    found = plans(target)
    assert list(found) == ["first", "blocks.0"]
    x = torch.empty(2, 16, device="meta", requires_grad=True)
    assert found["first"] == target.model.first.plan(x)  # type: ignore[union-attr]
    (first, other) = calls(target)
    assert first.sequence is target.model.first
    assert first.inputs[0] is target.inputs[0]
    assert other.inputs[0].shape == (2, 16)


class Inside(nn.Module):
    """A plain module that holds a Sequential, in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def test_a_sequence_in_a_module_of_a_sequence_has_a_plan_of_its_own() -> None:
    model = opfuser.Sequential(opfuser.RMSNorm(16), models.mlp(), Inside())
    found = plans(Target("", model, (torch.zeros(2, 16, requires_grad=True),)))
    assert list(found) == ["", "2.inner"]
    assert [len(plan.basic_ops) for plan in found.values()] == [9, 8]


class Hidden(nn.Module):
    """Calls a Sequential that it does not register, as modules of opfuser.hf do."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["hidden"] = models.mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.hidden(x)
        return y


def test_a_hidden_sequence_has_the_path_of_its_caller() -> None:
    model = nn.Sequential(OrderedDict(a=Hidden()))
    assert list(plans(Target("", model, (torch.zeros(2, 16),)))) == ["a"]


class Own(opfuser.Sequential):
    """A Sequential whose forward calls another one beside its own modules."""

    def __init__(self) -> None:
        super().__init__(opfuser.RMSNorm(16))
        self.__dict__["other"] = models.mlp()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = super().forward(self.other(x))
        return y


def test_a_forward_of_its_own_is_run() -> None:
    found = plans(Target("", Own(), (torch.zeros(2, 16),)))
    assert sorted(len(plan.basic_ops) for plan in found.values()) == [1, 8]


def test_hooks_for_all_modules_are_gone_afterwards() -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    before = len(hooks)
    plans(load(f"{MODELS}:wrapped"))
    assert len(hooks) == before
