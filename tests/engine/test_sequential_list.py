"""Sequential as a list."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import opfuser
from opfuser import ConstantScale
from opfuser.errors import ArgumentTypeError
from opfuser.recipe import DelayedScaling
from tests.engine.toys import F64, Square, Times, randn, same


def build(count: int = 4) -> tuple[opfuser.Sequential, list[nn.Module]]:
    modules = [ConstantScale(n + 2.0) for n in range(count)]
    return opfuser.Sequential(*modules), list(modules)


def check(seq: opfuser.Sequential, modules: list[nn.Module]) -> None:
    """``seq`` holds these modules and computes their product."""
    assert len(seq) == len(modules)
    assert [id(m) for m in seq] == [id(m) for m in modules]
    assert len(set(seq._modules)) == len(modules)
    expected = 1.0
    for module in modules:
        expected *= module.scale  # type: ignore[operator]
    assert seq(torch.ones(1, dtype=F64)).item() == expected


@pytest.mark.parametrize("index", [0, 2, -1, -4])
def test_single_elements(index: int) -> None:
    seq, modules = build()
    check(seq, modules)
    assert seq[index] is modules[index]
    seq[index] = modules[index] = ConstantScale(7.0)
    check(seq, modules)
    more = ConstantScale(8.0)
    assert seq.insert(index, more) is seq
    modules.insert(index, more)
    check(seq, modules)
    assert seq.pop(index) is modules.pop(index)
    check(seq, modules)
    del seq[index], modules[index]
    check(seq, modules)
    modules.insert(len(modules), more)
    seq.insert(len(seq), more)
    check(seq, modules)
    assert seq.pop() is modules.pop()
    check(seq, modules)


SLICES = [slice(None), slice(1, 3), slice(None, None, 2), slice(None, None, -1), slice(-2, None),
          slice(2, 1), slice(0, 100)]  # fmt: skip


@pytest.mark.parametrize("names", ["0 1 2 3", "a 0 b 1", "2 1 0 3"])
@pytest.mark.parametrize("index", SLICES, ids=str)
def test_slices(index: slice, names: str) -> None:
    """Members and their names are those of torch.nn.Sequential, also of what is left."""
    modules: list[nn.Module] = [ConstantScale(n + 2.0) for n in range(4)]
    seq = opfuser.Sequential(dict(zip(names.split(), modules)))
    again = opfuser.Sequential(dict(zip(names.split(), modules)))
    theirs = nn.Sequential(OrderedDict(zip(names.split(), modules)))
    part, left = seq[index], names.split()
    assert type(part) is opfuser.Sequential
    for found in (part, again.pop(index)):
        check(found, modules[index])
        assert list(found._modules) == list(theirs[index]._modules) == left[index]
    del seq[index], modules[index], left[index]
    for found in (seq, again):
        check(found, modules)
        if names != "0 1 2 3":  # those close up
            assert list(found._modules) == left


@pytest.mark.parametrize("value", [[ConstantScale(7.0), ConstantScale(8.0)], ConstantScale(7.0)])
def test_a_slice_is_not_set(value: Any) -> None:
    """As in torch.nn.Sequential; an error, never half of it in silence."""
    seq, modules = build()
    with pytest.raises(TypeError):
        seq[1:3] = value
    check(seq, modules)


def test_append_extend_and_add() -> None:
    seq, modules = build()
    more = [ConstantScale(3.0), ConstantScale(5.0)]
    assert seq.append(more[0]) is seq
    assert seq.extend(more[1:]) is seq
    modules += more
    check(seq, modules)
    check(seq + more, modules + more)
    check(seq + opfuser.Sequential(*more), modules + more)
    check(seq + seq, modules + modules)
    check(seq, modules)
    before = seq
    seq += opfuser.Sequential(*more)
    assert seq is before
    check(seq, modules + more)
    seq.extend(seq)
    check(seq, 2 * (modules + more))


def test_multiplication_repeats() -> None:
    """As in torch.nn.Sequential."""
    seq, modules = build(2)
    check(seq * 3, modules * 3)
    check(2 * seq, 2 * modules)
    seq *= 2
    check(seq, 2 * modules)


def test_construction() -> None:
    scale = ConstantScale(2.0)
    named = {"first": scale, "second": opfuser.Sequential({"inner": opfuser.Linear(3, 3)})}
    for mapping in (named, OrderedDict(named)):
        seq = opfuser.Sequential(mapping)
        assert list(dict(seq.named_children())) == ["first", "second"]
        assert list(seq.state_dict()) == ["second.inner.weight", "second.inner.bias"]
        assert seq.first is seq[0] is scale
        x = torch.randn(2, 3)
        same(seq(x), named["second"](2 * x))
    assert len(opfuser.Sequential()) == len(opfuser.Sequential({})) == 0


def test_an_empty_sequential_returns_its_input() -> None:
    x = randn(2, 3)
    assert opfuser.Sequential()(x) is x
    assert opfuser.Sequential(opfuser.Sequential())(x) is x


# Names: of parameters, and so of checkpoints.


def named(names: str) -> opfuser.Sequential:
    return opfuser.Sequential({name: Times() for name in names.split()})


def keys(seq: opfuser.Sequential) -> str:
    assert [key.partition(".")[0] for key in seq.state_dict()] == list(seq._modules)
    return " ".join(seq._modules)


@pytest.mark.parametrize(
    ("names", "index", "expected"),
    [
        ("a b", 0, "0 a b"),
        ("a b", 2, "a b 0"),
        ("a b", -1, "a 0 b"),
        ("a 3 b", 1, "a 4 3 b"),
        ("1 2", 0, "3 1 2"),
        ("1 0", 1, "1 2 0"),
        ("0 1", 0, "0 1 2"),
        ("0 1", 1, "0 1 2"),
        ("", 0, "0"),
    ],
)
def test_names_stay_with_their_members_on_insertion(names: str, index: int, expected: str) -> None:
    seq = named(names)
    before, new = dict(seq.named_children()), Times()
    seq.insert(index, new)
    assert keys(seq) == expected
    assert new in list(seq)
    if names != "0 1":
        assert all(seq.get_submodule(name) is member for name, member in before.items())


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_insertion_is_noted() -> None:
    """Also by what holds the sequence, and by code that was traced."""
    torch.compiler.reset()
    seq = named("a b")
    outer = opfuser.Sequential(seq, Square())
    compiled = torch.compile(outer, backend="eager", fullgraph=True)
    x = randn(2, 3)
    for call in (outer, compiled):
        call(x)
    seq.insert(1, ConstantScale(3.0))
    for call in (outer, compiled):
        same(call(x), (3 * seq.a.w * seq.b.w * x).square())


def test_other_edits_keep_names() -> None:
    seq, new = named("a 1 b"), Times()
    seq[1] = new
    assert keys(seq) == "a 1 b"
    assert seq[1] is seq.get_submodule("1") is new
    seq.append(Times())
    seq.extend([Times()])
    seq += named("b")
    assert keys(seq) == "a 1 b 2 3 4"
    seq *= 2
    assert keys(seq).startswith("a 1 b 2 3 4 5")
    part = seq[1:3]
    part.append(Times())
    assert keys(part) == "1 b 2"


# Errors, none of which changes anything.


@pytest.mark.parametrize("index", [4, -5])
def test_indices_out_of_range(index: int) -> None:
    seq, modules = build()
    for use in (
        lambda: seq[index],
        lambda: seq.__setitem__(index, modules[0]),
        lambda: seq.__delitem__(index),
        lambda: seq.pop(index),
    ):
        with pytest.raises(IndexError, match=f"Index {index} is out of range.*a Sequential of 4"):
            use()
    with pytest.raises(IndexError, match="out of range"):
        seq.insert(index + (1 if index > 0 else -1), modules[0])
    check(seq, modules)


@pytest.mark.parametrize("wrong", ["0", 1.0, None, torch.relu, [opfuser.Identity()]])
def test_arguments_of_another_type(wrong: Any) -> None:
    seq, modules = build()
    with pytest.raises(TypeError, match=r"indexed by int or slice\. Received: "):
        seq[wrong]
    for use in (
        lambda: opfuser.Sequential(wrong),
        lambda: seq.append(wrong),
        lambda: seq.extend([wrong]),
        lambda: seq.insert(0, wrong),
        lambda: seq.__setitem__(0, wrong),
    ):
        with pytest.raises(ArgumentTypeError, match=r"holds operations and modules\. Received: "):
            use()
    check(seq, modules)


def test_edits_take_effect_at_the_next_call() -> None:
    seq, modules = build()
    for _ in range(2):
        check(seq, modules)
        modules.insert(1, ConstantScale(3.0))
        seq.insert(1, modules[1])
        check(seq, modules)
        del seq[0], modules[0]
    nested = opfuser.Sequential(seq)
    check(seq, modules)
    x = torch.ones(1, dtype=F64)
    before = nested(x).item()
    seq.append(ConstantScale(10.0))
    assert nested(x).item() == 10 * before
    seq.scale = ConstantScale(10.0)  # also by attribute, as torch.nn registers it
    assert nested(x).item() == 100 * before


def test_parts_and_repetitions_keep_the_recipe() -> None:
    """Else they would silently compute otherwise than the sequence that they are taken from."""
    seq = opfuser.Sequential(opfuser.Linear(16, 16), opfuser.ReLU(), recipe=DelayedScaling())
    x = torch.randn(2, 16)
    for part in (seq[:1], seq[:-1], 2 * seq, seq * 2):
        assert part.recipe is seq.recipe
        assert part.plan(x).quantized
    seq.recipe = None
    assert seq[:1].recipe is None
    assert seq[:1].plan(x).quantized == ()
