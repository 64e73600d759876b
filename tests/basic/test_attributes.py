"""Attributes set after construction count or cannot be set; backward uses what forward used.

tests/kernels/test_interpreter.py runs this file with kernels too.
"""

from __future__ import annotations

import copy
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opfuser import ConstantScale, CrossEntropy, RotaryEmbedding, Sequential, basic
from opfuser.basic import BasicLinear, Dropout, Embedding, QKNorm, SiLU
from opfuser.errors import InputError, NotSupportedError, OpfuserError, ReadOnlyAttributeError
from opfuser.op import BasicOperation
from tests.basic.attributes import (
    CASES,
    Bad,
    Change,
    ReadOnly,
    attributes_of,
    make,
    outside,
    public,
    results,
    same,
)
from tests.basic.attributes_in_sequences import CHANGES, SEQUENCES, Sets, check_change, parts

SETTABLE = attributes_of(Change)
CHECKED = [
    pytest.param(name, attribute, bad, value, id=f"{name}-{attribute}-{value}")
    for name, attribute in SETTABLE
    for bad in outside(name, attribute)
    for value in bad.values
]


def on(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    return [t.to(device) for t in tensors]


def test_every_operation_is_in_the_table() -> None:
    assert set(CASES) == set(basic.__all__)


def test_every_attribute_is_in_the_table() -> None:
    assert {n: public(make(n)) for n in CASES} == {n: {*CASES[n].attributes} for n in CASES}


@pytest.mark.parametrize(("name", "attribute"), SETTABLE)
def test_backward_uses_what_forward_used_and_a_value_set_later_counts(
    name: str, attribute: str, device: torch.device
) -> None:
    """The first in a sequence; alone, check_op sees to it."""
    case, op = CASES[name], make(name).to(device)
    change: Any = case.attributes[attribute]
    other = make(name, **{change.argument or attribute: change.value}).to(device)
    other.load_state_dict(op.state_dict())
    module, inputs, alone = Sequential(op), on(device, case.inputs()), copy.deepcopy(op)
    wanted = results(module, inputs)
    results(alone, inputs)
    assert same(results(module, inputs, lambda: setattr(op, attribute, change.value)), wanted)
    setattr(alone, attribute, change.value)
    if change.inputs is None:
        assert same(results(module, inputs), wanted) == change.neutral
    inputs = on(device, (change.inputs or case.inputs)())
    wanted = results(other, inputs)
    assert same(results(module, inputs), wanted)
    assert same(results(alone, inputs), wanted)


def is_a_number(name: str, attribute: str) -> bool:
    return isinstance(CASES[name].attributes[attribute].value, float)


@pytest.mark.parametrize(("name", "attribute"), [pair for pair in SETTABLE if is_a_number(*pair)])
def test_a_number_of_any_kind_becomes_a_float(name: str, attribute: str) -> None:
    """As torch takes no other; the references, too, see floats."""
    change: Any = CASES[name].attributes[attribute]
    argument, inputs = change.argument or attribute, (change.inputs or CASES[name].inputs)()
    exact = make(name, **{argument: change.value})
    for number in (Fraction(change.value), np.float32(change.value), np.float64(change.value)):
        given, later = make(name, **{argument: number}), make(name)
        setattr(later, attribute, number)
        for op in (given, later):
            op.load_state_dict(exact.state_dict())
            assert isinstance(getattr(op, attribute), float)
            assert same(results(op, inputs), results(exact, inputs))


def test_flags_and_subclasses_of_numbers_stay_what_they_are() -> None:
    op = basic.Identity()
    op.flag, op.size = True, torch.Size([2])
    assert op.flag is True
    assert type(op.size) is torch.Size
    assert type(CrossEntropy(ignore_index=np.int64(-1)).ignore_index) is int


@pytest.mark.parametrize(("name", "attribute"), attributes_of(ReadOnly))
def test_a_value_that_cannot_be_set(name: str, attribute: str) -> None:
    case, op = CASES[name], make(name)
    for _ in range(2):
        before = getattr(op, attribute)
        with pytest.raises(ReadOnlyAttributeError, match=rf"^{attribute} is fixed when.*\({name}"):
            setattr(op, attribute, case.attributes[attribute].value)
        assert getattr(op, attribute) == before
        setattr(op, attribute, before)  # as code does that copies attributes
        results(op, case.inputs())


def test_the_text_about_a_value_that_cannot_be_set() -> None:
    with pytest.raises(AttributeError) as error:
        Embedding(7, 4).num_embeddings = 9
    assert str(error.value) == (
        "num_embeddings is fixed when the operation is made (Embedding). "
        "Received: num_embeddings=9 in place of 7. Make a new operation."
    )


@pytest.mark.parametrize(("name", "attribute", "bad", "value"), CHECKED)
def test_a_bad_value(name: str, attribute: str, bad: Bad, value: Any) -> None:
    """Passed to the constructor; or set later, alone and in a sequence that was called before."""
    case, ops = CASES[name], (make(name), make(name))
    change: Any = case.attributes[attribute]
    with pytest.raises(bad.error) as constructed:
        make(name, **{change.argument or attribute: value})
    text = str(constructed.value)
    where = "" if bad.text.endswith(".") else f" ({type(ops[0]).__name__})."
    received = "a tensor" if "tensor" in repr(value) else repr(value).strip("(),")
    assert re.match(rf"{re.escape(bad.text + where)} Received: .*{re.escape(received)}", text)
    modules, inputs = (ops[0], Sequential(ops[1])), case.inputs()
    results(modules[1], inputs)
    for op, module in zip(ops, modules):
        setattr(op, attribute, value)
        with pytest.raises(bad.error) as called:
            module(*inputs)
        assert str(called.value) == text


@pytest.mark.parametrize("name", [name for name, run in SEQUENCES.items() if run.fusions])
def test_the_sequences_are_fused(name: str) -> None:
    run = SEQUENCES[name]
    inputs = [t.requires_grad_(t.is_floating_point()) for t in run.inputs()]
    with run.switched():
        plan = run.make().plan(*inputs)
    assert {*plan.fused("forward"), *plan.fused("backward")} >= set(run.fusions)


@pytest.mark.parametrize(("name", "n", "attribute", "how"), CHANGES)
def test_in_a_fusion(name: str, n: int, attribute: str, how: Change, device: torch.device) -> None:
    check_change(name, n, attribute, how, device)
    bad = outside(SEQUENCES[name].ops[n][0], attribute)
    if bad:
        check_bad_value(name, n, attribute, how, bad[0].values[0])


def check_bad_value(name: str, n: int, attribute: str, how: Change, value: Any) -> None:
    """The error is that of the constructor."""
    run = SEQUENCES[name]
    seq, inputs = run.make(), run.inputs()
    with pytest.raises(OpfuserError) as constructed:
        run.make(n, **{how.argument or attribute: value})
    with run.switched():
        results(seq, inputs)
        setattr(parts(seq)[n], attribute, value)
        with pytest.raises(constructed.type) as called:
            results(seq, inputs)
    assert str(called.value) == str(constructed.value)


def test_a_factor_that_a_neighbor_sets(device: torch.device) -> None:
    """Where kernels run, it is a link of a chain."""
    scale, factors = ConstantScale(2.0), [3.0, 5.0, 5.0, 7.0, 3.0]
    x = torch.randn(3, 8, device=device)
    seq = Sequential(Sets(scale, "scale", *factors), scale, SiLU())
    for factor in factors:
        assert same(results(seq, [x]), results(Sequential(ConstantScale(factor), SiLU()), [x]))
    scale.scale = 4.0
    wanted = results(Sequential(ConstantScale(4.0), SiLU()), [x])
    assert same(results(Sequential(scale, SiLU()), [x]), wanted)


@pytest.mark.parametrize("behind", [[], [ConstantScale(2.0), SiLU()]], ids=["alone", "chain"])
def test_a_probability_that_a_neighbor_sets(
    behind: list[BasicOperation], device: torch.device
) -> None:
    dropout, values = Dropout(0.5), [0.9, 0.0, 0.3, 0.3, 0.5]
    x = torch.ones(9, 9, device=device)
    seq = Sequential(Sets(dropout, "dropout_probability", *values), dropout, *behind)
    for p in values:
        assert same(results(seq, [x]), results(Sequential(Dropout(p), *behind), [x]))


def test_what_a_fusion_does_not_compute_set_by_a_neighbor() -> None:
    """The plan was made before: it is not the wrong loss, or the wrong heads, that come out."""
    x, targets = torch.randn(5, 8, requires_grad=True), torch.tensor([0, 1, 2, 5, 3])
    linear, loss = BasicLinear(8, 7), CrossEntropy()
    seq = Sequential(Sets(loss, "reduction", "sum", "none"), linear, loss)
    assert same([seq(x, targets)], [Sequential(linear, CrossEntropy(reduction="sum"))(x, targets)])
    with pytest.raises(NotSupportedError, match='reduction="none"'):
        seq(x, targets)
    norm, rotary = QKNorm(2, 4, num_kv_heads=1), RotaryEmbedding(2, 4, num_kv_heads=1)
    heads = Sequential(Sets(rotary, "num_kv_heads", 1, 2), norm, rotary)
    heads(torch.randn(2, 5, 16, requires_grad=True))
    with pytest.raises(NotSupportedError, match="QKNorm has heads"):
        heads(torch.randn(2, 5, 16, requires_grad=True))


def test_a_sequence_longer_than_max_positions_set_later() -> None:
    op, x = make("RotaryEmbedding"), torch.randn(2, 5, 16)
    op(x)
    op.max_positions = 4
    with pytest.raises(InputError, match=r"longer than max_positions.*max_positions=4"):
        op(x)


# tests/fused/test_all.py compiles all fusions; here are those with most attributes.
COMPILED = ["chain and norm", "loss", "queries and keys"]
UNTRACED = {"dropout_probability"}  # it draws other numbers
if torch.__version__ < "2.12":
    UNTRACED.add("accumulate_into_main_grad")  # Dynamo does not set attributes of tensors


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    run = SEQUENCES[name]
    changes = [change for change in run.attributes() if change[1] not in UNTRACED]
    seq, inputs = run.make(), run.inputs()
    ops = parts(seq)
    for op in ops:
        if isinstance(op, Dropout):
            op.eval()
    torch.compiler.reset()
    compiled: Any = torch.compile(seq, fullgraph=True, backend="aot_eager")
    with run.switched():
        first = results(seq, inputs)
        assert same(results(compiled, inputs), first)
        for n, attribute, how in changes:
            setattr(ops[n], attribute, how.value)
        wanted = results(seq, inputs)
        assert not same(wanted, first)
        assert same(results(compiled, inputs), wanted)
    torch.compiler.reset()
