"""Scales in checkpoints of Transformer Engine, in entries built as version 2.20 pickles them."""

from __future__ import annotations

import enum
import io
import pickle
import sys
import types
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser as of
from opfuser.integrations.te import (
    LayerNormMLPOptions,
    LinearOptions,
    load_te_state_dict,
    te_state_dict,
)
from opfuser.kernels.quantize_plain import scale_for
from opfuser.quantization.operation_state import state_of
from opfuser.recipe import DelayedScaling, Format

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

DTYPES = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture
def te() -> Any:
    """The module of recipes there, which is gone when an entry is read."""
    module: Any = types.ModuleType("transformer_engine.common.recipe")

    _FormatHelper = namedtuple("_FormatHelper", ["max_fwd", "max_bwd"])

    class Format(enum.Enum):
        E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
        HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)

    @dataclass
    class DelayedScaling:
        margin: int = 0
        fp8_format: Any = Format.HYBRID
        amax_history_len: int = 4
        amax_compute_algo: str = "max"

    @dataclass
    class Float8CurrentScaling:
        fp8_format: Any = Format.HYBRID

    for made in (_FormatHelper, Format, DelayedScaling, Float8CurrentScaling):
        made.__module__, made.__qualname__ = module.__name__, made.__name__
        setattr(module, made.__name__, made)
    return module


def pickled(te: Any, value: Any) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("transformer_engine", "transformer_engine.common", te.__name__):
            patch.setitem(sys.modules, name, te)
        data = pickle.dumps(value)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Half:
    """Scales of n tensors in one pass there, as ``_amax_and_scale_update`` keeps them."""

    def __init__(self, n: int, largest: list[float], recipe: Any) -> None:
        self.scale, self.largest = torch.ones(n), torch.tensor(largest)
        self.history, self.recipe = torch.zeros(recipe.amax_history_len, n), recipe

    def see(self, amax: Tensor) -> None:
        """Of one call, and the update after it."""
        self.history[0] = torch.maximum(self.history[0], amax)
        algo = self.recipe.amax_compute_algo
        most = self.history.amax(0) if algo == "max" else self.history[0].clone()
        new = (self.largest / most) / (2**self.recipe.margin)
        self.scale = torch.where(most > 0, new, self.scale)
        if len(self.history) > 1:
            self.history.copy_(torch.roll(self.history, -1, 0))
        self.history[0] = 0.0


def of_operation(recipe: Any, forward: Half, backward: Half) -> dict[str, Any]:
    extra = {"extra_fp8_variables": {"num_gemms": 1}}
    one = {"recipe": recipe, "scale_fwd": forward.scale, "amax_history_fwd": forward.history}
    two = {"recipe": recipe, "scale_bwd": backward.scale, "amax_history_bwd": backward.history}
    return {"forward": {**one, **extra}, "backward": {**two, **extra}}


def of_module(recipe: Any, forward: Half, backward: Half) -> dict[str, Any]:
    both = of_operation(recipe, forward, backward)
    return {**both["forward"], **both["backward"]}


def seen(calls: int, n: int, seed: int = 0) -> list[Tensor]:
    """The first is the largest one, so that it leaves the history as late as can be noticed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(n, generator=generator) * (9.0 if c == 0 else 1.0) for c in range(calls)]


def halves(recipe: Any, gemms: int, each: tuple[int, int], calls: int) -> tuple[Half, Half]:
    top = recipe.fp8_format.value
    forward = Half(gemms * each[0], [top.max_fwd] * gemms * each[0], recipe)
    backward = Half(gemms * each[1], [top.max_bwd] * gemms * each[1], recipe)
    for f, b in zip(seen(calls, gemms * each[0]), seen(calls, gemms * each[1], 1)):
        forward.see(f)
        backward.see(b)
    return forward, backward


def call_as(op: Any, recipe: DelayedScaling, amax: Tensor) -> list[float]:
    """The scales of a call of ours, which then sees the largest values given."""
    with of.autocast(recipe=recipe):
        state = state_of(op, recipe, None)
        scales = state.scale.tolist()
    assert state.known == [True] * 3
    state.amax.copy_(amax)
    return scales


@pytest.mark.parametrize("calls", [1, 3, 4, 5, 11])
@pytest.mark.parametrize(
    ("margin", "algo", "form", "length"),
    [(0, "max", "HYBRID", 4), (2, "max", "E4M3", 4), (0, "most_recent", "HYBRID", 4),
     (0, "max", "HYBRID", 1)],
)  # fmt: skip
def test_training_goes_on_with_the_scales_that_it_had(
    te: Any, calls: int, margin: int, algo: str, form: str, length: int
) -> None:
    recipe = te.DelayedScaling(margin, te.Format[form], length, algo)
    forward, backward = halves(recipe, 1, (2, 1), calls)
    seq = of.Sequential(of.Linear(32, 16), of.BasicLinear(16, 32))
    state = {
        "0.basic_ops.0.weight": torch.randn(16, 32),
        "0.basic_ops.0._extra_state": pickled(te, of_operation(recipe, forward, backward)),
        "0.basic_ops.1.bias": torch.randn(16),
        "0.basic_ops.1._extra_state": torch.empty(0, dtype=torch.uint8),
        "1.weight": torch.randn(32, 16),
        "1._extra_state": pickled(te, of_operation(recipe, forward, backward)),
    }
    result = seq.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    ours = DelayedScaling(
        margin=margin, amax_compute_algo=algo, amax_history_len=length, fp8_format=Format[form]
    )
    for f, b in zip(seen(6, 2, 7), seen(6, 1, 8)):
        wanted = [*forward.scale.tolist(), *backward.scale.tolist()]
        assert call_as(seq[0].basic_ops[0], ours, torch.cat([f, b])) == wanted
        assert call_as(seq[1], ours, torch.cat([f, b])) == wanted
        forward.see(f)
        backward.see(b)


def test_the_reference_rounds_as_scale_for_does(te: Any) -> None:
    half = Half(1, [448.0], te.DelayedScaling())
    half.see(torch.tensor([0.3]))
    assert torch.equal(half.scale, scale_for(torch.tensor([0.3]), DTYPES[0]))


def test_modules_have_scales_of_each_gemm(te: Any) -> None:
    recipe = te.DelayedScaling()
    forward, backward = halves(recipe, 2, (3, 2), 3)
    made = of.Sequential(
        LayerNormMLPOptions(hidden_size=16, ffn_hidden_size=32).build(),
        LinearOptions(in_features=16, out_features=16).build(),
        of.Linear(16, 16),
    )
    state: dict[str, Any] = {k: t.clone() for k, t in te_state_dict(made).items()}
    state["0._extra_state"] = pickled(te, of_module(recipe, forward, backward))
    one = halves(recipe, 1, (3, 2), 3)
    state["1._extra_state"] = pickled(te, of_module(recipe, *one))
    plain = halves(recipe, 1, (2, 1), 3)
    state["2.basic_ops.0._extra_state"] = pickled(te, of_operation(recipe, *plain))
    load_te_state_dict(made, state)
    expected = {
        made[0].fc1: [*forward.scale[:2], backward.scale[0]],
        made[0].fc2: [*forward.scale[3:5], backward.scale[2]],
        made[1].linear: [*one[0].scale[:2], one[1].scale[0]],
        made[2]: [*plain[0].scale, *plain[1].scale],
    }
    ours = DelayedScaling(amax_history_len=4)
    for op, scales in expected.items():
        assert call_as(op.basic_ops[0], ours, torch.ones(3)) == [s.item() for s in scales]


def test_a_file_in_memory_of_earlier_versions(te: Any) -> None:
    """They had neither recipes nor bytes in tensors."""
    forward, backward = halves(te.DelayedScaling(), 1, (3, 2), 2)
    entry = of_module(None, forward, backward)
    del entry["recipe"]
    entry |= {"scale_inv_fwd": 1 / forward.scale, "scale_inv_bwd": 1 / backward.scale}
    file = io.BytesIO()
    torch.save(entry, file)
    made = LinearOptions(in_features=16, out_features=16).build()
    load_te_state_dict(made, {**te_state_dict(made), "_extra_state": file})
    scales = call_as(made.linear.basic_ops[0], DelayedScaling(amax_history_len=4), torch.ones(3))
    assert scales == [*forward.scale[:2].tolist(), backward.scale[0].item()]


def test_entries_without_scales_load_silently(te: Any) -> None:
    stateless = te.Float8CurrentScaling()
    of_op = {"forward": {"recipe": stateless}, "backward": {"recipe": stateless}}
    for value in ({}, None, of_op, {"recipe": stateless, "extra_fp8_variables": {}}):
        seq = of.Sequential(of.Linear(16, 16))
        weights = {"0.weight": torch.ones(16, 16), "0.bias": torch.ones(16)}
        seq.load_state_dict({**weights, "0.basic_ops.0._extra_state": pickled(te, value)})
        load_te_state_dict(seq, {**weights, "0.basic_ops.0._extra_state": pickled(te, value)})
        assert list(seq.state_dict()) == ["0.weight", "0.bias"]


RAN: list[str] = []


class Hostile:
    def __reduce__(self) -> Any:
        return exec, ("from tests.integrations import test_te_scales as t; t.RAN.append('ran')",)


class Command:
    def __reduce__(self) -> Any:
        return getattr, (RAN, "append")


def grouped(te: Any) -> Any:
    return of_operation(te.DelayedScaling(), *halves(te.DelayedScaling(), 3, (2, 1), 2))


def one_pass(te: Any) -> Any:
    entry = grouped(te)
    del entry["backward"]
    return entry


def misshapen(te: Any) -> Any:
    entry = of_operation(te.DelayedScaling(), *halves(te.DelayedScaling(), 1, (2, 1), 2))
    entry["forward"]["scale_fwd"] = torch.ones(5)
    return entry


@pytest.mark.parametrize("load", ["state dict", "of te"])
@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (lambda te: Hostile(), "not unpickled: builtins.exec"),
        (lambda te: {"forward": Command()}, r"not unpickled: an attribute of \[\]"),
        (grouped, "those of 3 GEMMs for 1 operations"),
        (one_pass, "scales of one pass alone"),
        (misshapen, "no scales of delayed scaling"),
        (lambda te: [1], "a pickled list"),
        (lambda te: torch.full((9,), 0x80, dtype=torch.uint8), "9 bytes that are not unpickled"),
        (lambda te: "text", "a str"),
    ],
)
def test_what_is_not_kept_is_told(
    te: Any, entry: Callable[[Any], Any], reason: str, load: str
) -> None:
    value = entry(te)
    if not isinstance(value, (Tensor, str)):
        value = pickled(te, value)
    seq = of.Sequential(of.Linear(16, 16))
    key = "0.basic_ops.0._extra_state"
    state = {"0.weight": torch.ones(16, 16), "0.bias": torch.ones(16), key: value}
    told = rf"(?s)one GEMM.*\({key}\).*{reason}.*Leave the entry out"
    with pytest.warns(UserWarning, match=told):
        load_te_state_dict(seq, state) if load == "of te" else seq.load_state_dict(state)
    assert RAN == []
    assert list(seq.state_dict()) == ["0.weight", "0.bias"]
    assert torch.equal(seq[0].weight, state["0.weight"])


def test_scales_of_what_multiplies_nothing_are_told(te: Any) -> None:
    recipe = te.DelayedScaling()
    value = pickled(te, of_operation(recipe, *halves(recipe, 1, (2, 1), 2)))
    with pytest.warns(UserWarning, match=r"those of 1 GEMMs for 0 operations"):
        of.Sequential(of.GELU()).load_state_dict({"0._extra_state": value})
    with pytest.warns(UserWarning, match=r"other\._extra_state.*those of 1 GEMMs for 0 operations"):
        load_te_state_dict(of.Sequential(of.GELU()), {"other._extra_state": value})
