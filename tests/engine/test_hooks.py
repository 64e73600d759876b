"""Hooks on operations inside a Sequential fire as those of torch.nn modules do (hazard 16)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

import opfuser
from opfuser import ConstantScale
from opfuser.errors import ChannelError, ExtraInputCountError
from opfuser.op import FusedOperation
from tests.engine.toys import (
    F64,
    Mixed,
    Power,
    Square,
    SquareModule,
    Times,
    TimesModule,
    consumer,
    grads,
    ignore,
    producer,
    randn,
    run,
    same,
)
from tests.planning.toys import FusedForward


def models() -> tuple[opfuser.Sequential, nn.Sequential]:
    ours = opfuser.Sequential(Times(), opfuser.Linear(3, 3, dtype=F64), Square(), Times())
    twin = nn.Linear(3, 3, dtype=F64)
    twin.load_state_dict(ours[1].state_dict())
    return ours, nn.Sequential(TimesModule(), twin, SquareModule(), TimesModule())


def short(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(short, value))
    return None if value is None else value.detach().clone()


KINDS = ["forward_pre", "forward", "full_backward_pre", "full_backward"]


def listen(model: nn.Module, index: int, kind: str, log: list[Any]) -> Any:
    def hook(module: nn.Module, *args: Any) -> None:
        assert module is model[index]
        log.append((kind, index, short(args)))

    return getattr(model[index], f"register_{kind}_hook")(hook)


def same_logs(ours: list[Any], theirs: list[Any], count: int) -> None:
    assert len(ours) == count
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
    same([entry[2] for entry in ours], [entry[2] for entry in theirs])


@pytest.mark.parametrize(
    ("kind", "index"), [*zip(KINDS, range(4)), *zip(KINDS, (1, 2, 3, 0)), ("forward", 3)]
)
def test_a_hook_sees_what_it_sees_in_torch(kind: str, index: int) -> None:
    ours, theirs = models()
    x = randn(2, 3, grad=True)
    run(ours, x)  # planned before there is a hook
    logs: tuple[list[Any], list[Any]] = ([], [])
    handles = [listen(m, index, kind, log) for m, log in zip((ours, theirs), logs)]
    for _ in range(2):
        same(run(ours, x), run(theirs, x))
    same_logs(*logs, 2)
    for handle in handles:
        handle.remove()
    same(run(ours, x), run(theirs, x))
    assert len(logs[0]) == 2


def test_all_hooks_at_once_fire_in_order() -> None:
    ours, theirs = models()
    logs: tuple[list[Any], list[Any]] = ([], [])
    for model, log in zip((ours, theirs), logs):
        for index in range(4):
            for kind in KINDS:
                listen(model, index, kind, log)
    x = randn(2, 3, grad=True)
    same(run(ours, x), run(theirs, x))
    same_logs(*logs, 16)


def test_hooks_that_replace_tensors() -> None:
    ours, theirs = models()
    for model in (ours, theirs):
        model[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        model[1].register_forward_hook(lambda m, args, y: y * 2)
        model[2].register_full_backward_hook(lambda m, dx, dy: (dx[0] * 3,))
        model[3].register_full_backward_pre_hook(lambda m, dy: (dy[0] * 5,))
    x = randn(2, 3, grad=True)
    same(run(ours, x), run(theirs, x))


@pytest.mark.parametrize(("with_kwargs", "always_call"), [(True, False), (False, True)])
def test_options_of_hooks(with_kwargs: bool, always_call: bool) -> None:
    ours, theirs = models()
    logs: tuple[list[Any], list[Any]] = ([], [])
    for model, log in zip((ours, theirs), logs):
        for n in range(2):
            model[1].register_forward_hook(
                lambda m, *args, n=n, log=log: log.append((n, len(args))),
                prepend=True, with_kwargs=with_kwargs, always_call=always_call,
            )  # fmt: skip
        model(randn(2, 3))
    assert logs[0] == logs[1]


def test_a_part_of_linear() -> None:
    linear = opfuser.Linear(3, 3, dtype=F64)
    seq, x = opfuser.Sequential(Times(), linear, Square()), randn(2, 3, grad=True)
    expected = run(seq, x)
    log: list[Any] = []
    handle = linear.basic_ops[1].register_forward_hook(lambda m, args, y: log.append(short(y)))
    same(run(seq, x), expected)
    same(log, [(x * seq[0].w) @ linear.weight.t() + linear.bias])
    same(linear(x), x @ linear.weight.t() + linear.bias)
    assert len(log) == 2
    handle.remove()
    same(run(seq, x), expected)
    assert len(log) == 2


class ScaleAndAdd(FusedOperation):
    """A compound with an extra input."""

    def __init__(self) -> None:
        super().__init__([ConstantScale(2.0), opfuser.AddExtraInput()])


@pytest.mark.parametrize("part", [0, 1])
def test_a_compound_with_a_hooked_part_alone(part: int) -> None:
    compound, x, z = ScaleAndAdd(), randn(2, 3), randn(2, 3)
    seen: list[int] = []
    compound.basic_ops[part].register_forward_hook(lambda *_: seen.append(1))
    same(compound(x, z), 2 * x + z)
    assert seen == [1]
    for extras in ((), (z, z)):
        text = f"Expected 1 extra input but got {len(extras)}"
        with pytest.raises(ExtraInputCountError, match=text):
            compound(x, *extras)


def test_an_operation_with_extra_tensors() -> None:
    seq = opfuser.Sequential(Times(), Mixed(), Times())
    seen: list[Any] = []
    seq[1].register_forward_pre_hook(lambda m, args: seen.append(len(args)))
    seq[1].register_forward_hook(lambda m, args, out: seen.append(len(out)))
    x, e = randn(2, 3, grad=True), randn(2, 3, grad=True)
    y, extra = seq(x, e)
    assert seen == [2, 2]
    wrt = [x, e, *seq.parameters()]
    base = x * seq[0].w
    same(grads((y, extra), wrt), grads((base * e * seq[2].w, base + e), wrt))


def test_a_channel_leaves_and_enters_an_operation_with_hooks() -> None:
    residual = opfuser.Residual(Times())
    x = randn(2, 3, grad=True)
    expected = run(residual, x)
    y = x + x * residual[1].w
    same(expected, [y.detach(), *grads(y, [x, residual[1].w])])
    for op in residual:
        op.register_forward_hook(ignore)
        same(run(residual, x), expected)


def test_op_kwargs_reach_operations_with_hooks() -> None:
    """Also into a nested sequence that carries one."""
    power, x = Power(), randn(2, 3)
    seq = opfuser.Sequential(opfuser.Sequential(power), ConstantScale(2.0))
    for hooked in (power, seq[0]):
        hooked.register_forward_hook(ignore)
        same(seq(x, op_kwargs={power: {"power": 3}}), 2 * x**3)


def silent(channel: str = "skip") -> opfuser.MakeExtraOutput:
    return producer(channel, output_to_caller=False)


CROSSING: dict[str, Any] = {
    "out": lambda: [opfuser.Sequential(Times(), silent(), Times()), Square(), consumer()],
    "in": lambda: [silent(), Times(), opfuser.Sequential(Square(), consumer(), Times())],
    "from one to others": lambda: [
        opfuser.Sequential(Times(), silent()),
        opfuser.Sequential(Square(), consumer()),
        opfuser.Sequential(Times(), consumer(), Times(), consumer()),
    ],
    "out of and into inner ones": lambda: [
        opfuser.Sequential(Times(), opfuser.Sequential(Times(), silent(), Times())),
        opfuser.Sequential(Square(), opfuser.Sequential(consumer(), Times())),
    ],
    "past one that has its own": lambda: [
        silent("outer"),
        opfuser.Sequential(silent(), Times(), consumer()),
        opfuser.Sequential(silent(), Square(), consumer(), consumer("outer")),
        Times(),
    ],
}


@pytest.mark.parametrize("kind", CROSSING)
def test_channels_into_and_out_of_nested_sequences_with_hooks(kind: str) -> None:
    """As of the units of ``fully_shard``; equal names inside of several are no conflict."""
    seq, x = opfuser.Sequential(*CROSSING[kind]()), randn(2, 3, grad=True)
    if kind == "past one that has its own":  # two producers, were they in one group
        y = x * seq[1][1].w + x
        y = (y**2 + y + x) * seq[3].w
        expected = [y.detach(), *grads(y, [x, *seq.parameters()])]
    else:
        expected = run(seq, x)
    nested = [m for m in seq.modules() if isinstance(m, opfuser.Sequential) and m is not seq]
    for module in nested:
        module.register_forward_hook(ignore)
    planned = seq.plan(x)
    same(run(seq, x), expected)
    assert planned == seq.last_plan
    same(run(copy.deepcopy(seq), x), expected)
    assert seq.num_extra_outputs == seq.num_extra_inputs == 0


def test_a_nested_sequence_in_two_others() -> None:
    """Each of them gets from it what it reads; alone it is as if it was in none."""
    inner = opfuser.Sequential(Times(), silent(), Times())
    inner.register_forward_hook(ignore)
    seq, x = opfuser.Sequential(inner, consumer()), randn(2, 3, grad=True)
    h = x * inner[0].w
    y = h * inner[2].w
    for _ in range(2):
        same(seq(x), y + h)
        same(seq[:1](x), y)
    seq(x)
    del seq[0]
    same(inner(x), y)
    with pytest.raises(ChannelError, match="has no producer"):
        seq(x)


class PassesOn(opfuser.Sequential):
    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return super().forward(x)


def test_a_channel_does_not_leave_a_forward_of_the_user() -> None:
    seq = opfuser.Sequential(PassesOn(silent()), consumer())
    with pytest.raises(ChannelError) as error:
        seq(randn(2, 3))
    assert "has no producer" in str(error.value)
    assert "do not reach into a nested PassesOn" in str(error.value)
    seq = opfuser.Sequential(silent("other"), PassesOn(consumer()))
    with pytest.raises(ChannelError, match=r"no producer \(read by op 0"):
        seq(randn(2, 3))


def test_a_channel_into_a_nested_sequence_that_nothing_produces() -> None:
    seq = opfuser.Sequential(Times(), opfuser.Sequential(consumer()))
    seq[1].register_forward_hook(ignore)
    with pytest.raises(ChannelError, match="read by a nested Sequential that carries hooks"):
        seq(randn(2, 3))


@pytest.mark.parametrize("where", ["in front", "behind", "itself"])
def test_hooks_of_a_sequential(where: str) -> None:
    """A nested one is in no group of its parent any more, but works as before."""
    inner = opfuser.Sequential(Times(), Square())
    seq = opfuser.Sequential(*((Times(), inner) if where == "behind" else (inner, Times())))
    hooked = seq if where == "itself" else inner
    crossing = opfuser.Fusion("crossing", "forward", ((Times, Square), Times), FusedForward)
    x = randn(2, 3, grad=True)
    expected = run(seq, x)
    seen: list[str] = []

    def fused() -> int:
        with opfuser.register_forward_fusion(crossing, prepend=True):
            return seq.plan(x).fused("forward").get("crossing", 0)

    assert fused() == 1
    handles = [
        hooked.register_forward_hook(lambda *_: seen.append("forward")),
        hooked.register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    assert fused() == (where == "itself")
    same(run(seq, x), expected)
    assert seen == ["forward", "backward"]
    for handle in handles:
        handle.remove()
    assert fused() == 1
    same(run(seq, x), expected)
    assert len(seen) == 2
