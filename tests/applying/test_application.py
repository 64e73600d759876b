"""Applying, reverting, and what both leave as it was."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import sys
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.applying import report
from opfuser.errors import ArgumentTypeError

from .models import IDS, NanoGPT, assert_equal_steps, inputs_of, llama, nano_gpt, paths, step


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(m)) for m in model.modules()]


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    """Whether modules hold the same objects under the same names, in the same order."""
    return all(
        [*x] == [*y] and all(x[name] is y[name] for name in x) for x, y in zip(a, b, strict=True)
    )


def test_revert_gives_back_every_object() -> None:
    model = llama()
    model.layers[0].mlp.forward = model.layers[0].mlp.forward  # the class's own, bound
    before = attributes(model)
    opfuser.apply(model)
    step(model)
    opfuser.revert(model)
    assert same(attributes(model), before)
    opfuser.revert(model)
    assert same(attributes(model), before)


def test_forwards_have_the_signatures_and_texts_of_their_classes() -> None:
    """A Trainer drops the columns of data that a forward does not name."""
    model, plain = llama(), llama()
    opfuser.apply(model)
    for module, other in zip(model.modules(), plain.modules()):
        if type(other).forward is not nn.Module.forward:
            assert inspect.signature(module.forward) == inspect.signature(other.forward)
            assert module.forward.__doc__ == other.forward.__doc__
    assert "position_ids" in inspect.signature(model.forward).parameters


def test_a_dry_run_changes_nothing() -> None:
    model = llama()
    before = attributes(model)
    told = opfuser.apply(model, example=inputs_of(model), dry_run=True)
    assert "layers.0" in paths(told)
    assert same(attributes(model), before)


def test_apply_again_begins_anew() -> None:
    model = nano_gpt()
    opfuser.apply(model)
    want = step(model)
    assert paths(opfuser.apply(model)) == []
    assert_equal_steps(step(model), want, rtol=0)
    assert [entry.calls for entry in report(model).computed] == [1, 1, 1]


def test_state_dict_and_pickles_are_those_of_the_model() -> None:
    model, plain = nano_gpt(), nano_gpt()
    opfuser.apply(model)
    want = step(model)
    assert [*model.state_dict()] == [*plain.state_dict()]
    stored = pickle.dumps(model)
    assert b"opfuser.applying" not in stored
    loaded = pickle.loads(stored)
    assert_equal_steps(step(loaded), want)
    assert paths(report(loaded)) == []
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    opfuser.apply(loaded)
    assert_equal_steps(step(loaded), want)
    assert paths(report(loaded)) == ["blocks.0", "blocks.1", "norm"]


class Counting(NanoGPT):
    """Writes to its buffer and draws random numbers in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.statistics = nn.BatchNorm1d(3)  # torch counts no version of what it writes there

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.statistics(torch.randn_like(self.statistics.weight.expand(4, -1)))
        assert torch.rand(()) >= 0
        return super().forward(ids)


def test_an_example_leaves_buffers_and_random_numbers() -> None:
    model = Counting().double()
    buffers, state = dict(model.named_buffers()), torch.get_rng_state()
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    opfuser.apply(model, example={"ids": IDS})
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, values[name])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("example", [{"ids": IDS}, (IDS,), [IDS], IDS])
def test_an_example_is_the_arguments_of_a_call(example: Any) -> None:
    assert paths(opfuser.apply(nano_gpt(), example=example)) == ["blocks.0", "blocks.1", "norm"]


@pytest.mark.parametrize(
    ("example", "text"),
    [
        (
            {"tokens": IDS},
            r"one call of the model .*Received: tokens: missing a required argument: 'ids'",
        ),
        ((), r"missing a required argument: 'ids'"),
        ((IDS, 3), r"Received: Tensor, int: too many positional arguments"),
    ],
)
def test_an_example_that_does_not_fit(example: Any, text: str) -> None:
    model = nano_gpt()
    before = attributes(model)
    with pytest.raises(ArgumentTypeError, match=text):
        opfuser.apply(model, example=example)
    assert same(attributes(model), before)


def test_an_example_that_the_model_refuses_leaves_nothing_applied() -> None:
    model = nano_gpt()
    before = attributes(model)
    with pytest.raises(RuntimeError, match="Long, Int") as caught:
        opfuser.apply(model, example={"ids": IDS.double()})
    if sys.version_info >= (3, 11):
        (note,) = caught.value.__notes__
        assert note == (
            "opfuser.apply called the model with its example: ids=(2, 7) of torch.float64 on cpu"
        )
    assert same(attributes(model), before)


def test_a_model_is_a_module() -> None:
    for function in (opfuser.apply, opfuser.revert, report):
        with pytest.raises(ArgumentTypeError, match=r"A model is a torch\.nn\.Module.*str"):
            function("gpt2")


def test_an_exception_in_a_call_leaves_the_model_as_applied() -> None:
    model, plain = nano_gpt(), nano_gpt()
    opfuser.apply(model)
    with pytest.raises(RuntimeError):
        model(IDS.double())
    with pytest.raises(RuntimeError):
        model.blocks[0](torch.randn(2, 7, 31, dtype=torch.float64))
    assert_equal_steps(step(model), step(plain))
    assert "blocks.0" in paths(report(model))


def test_a_forward_that_was_set_before_is_kept() -> None:
    model, plain = nano_gpt(), nano_gpt()
    for m in (model, plain):
        m.blocks[0].forward = lambda x: 2 * x
    own = model.blocks[0].forward
    opfuser.apply(model)
    assert_equal_steps(step(model), step(plain))
    kept = {entry.path: entry.reason for entry in report(model).kept}
    assert kept["blocks.0"].startswith("has a forward of its own, tests.applying.test_application.")
    opfuser.revert(model)
    assert model.blocks[0].forward is own


def test_a_wrapper_that_was_set_afterwards_survives_revert() -> None:
    model, plain = nano_gpt(), nano_gpt()
    opfuser.apply(model)
    for m in (model, plain):
        block = m.blocks[0]
        block._old_forward = block.forward
        block.forward = types.MethodType(lambda self, x: 2 * self._old_forward(x), block)
    assert_equal_steps(step(model), step(plain))
    opfuser.revert(model)
    assert_equal_steps(step(model), step(plain))
    assert not any("opfuser" in name for m in model.modules() for name in vars(m))
    assert model.blocks[0]._old_forward.__func__ is type(model.blocks[0]).forward


def test_models_go_when_nothing_holds_them() -> None:
    model = nano_gpt()
    opfuser.apply(model)
    step(model)
    copied = copy.deepcopy(model)
    step(copied)
    gone = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert gone() is None
    assert step(copied)
