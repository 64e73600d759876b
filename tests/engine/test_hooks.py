"""Hooks on operations inside a Sequential fire as those of torch.nn modules do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.testing import assert_fused, assert_not_fused
from tests.engine.toys import Mixed, Square, SquareModule, Times, TimesModule, grads, randn, same


def linear_twin(linear: opfuser.Linear) -> nn.Linear:
    twin = nn.Linear(3, 3, dtype=torch.float64)
    twin.load_state_dict(linear.state_dict())
    return twin


def models() -> tuple[opfuser.Sequential, nn.Sequential]:
    ours = opfuser.Sequential(Times(), opfuser.Linear(3, 3, dtype=torch.float64), Square(), Times())
    theirs = nn.Sequential(TimesModule(), linear_twin(ours[1]), SquareModule(), TimesModule())
    return ours, theirs


def short(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(short, value))
    return None if value is None else value.detach().clone()


KINDS = {
    "forward pre": "register_forward_pre_hook",
    "forward": "register_forward_hook",
    "full backward pre": "register_full_backward_pre_hook",
    "full backward": "register_full_backward_hook",
}


def listen(model: nn.Module, index: int, kind: str, log: list[Any]) -> Any:
    def hook(module: nn.Module, *args: Any) -> None:
        assert module is model[index]
        log.append((kind, index, short(args)))

    return getattr(model[index], KINDS[kind])(hook)


def same_logs(ours: list[Any], theirs: list[Any]) -> None:
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
    same([entry[2] for entry in ours], [entry[2] for entry in theirs])


def run(model: nn.Module, x: Tensor) -> list[Any]:
    y = model(x)
    return [y.detach(), *grads(y, [x, *model.parameters()])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(4))
def test_a_hook_sees_what_it_sees_in_torch(kind: str, index: int) -> None:
    ours, theirs = models()
    x = randn(2, 3, grad=True)
    run(ours, x)  # planned before there is a hook
    logs: tuple[list[Any], list[Any]] = ([], [])
    handles = [listen(m, index, kind, log) for m, log in zip((ours, theirs), logs)]
    for _ in range(2):
        same(run(ours, x), run(theirs, x))
    assert len(logs[0]) == 2
    same_logs(*logs)
    for handle in handles:
        handle.remove()
    same(run(ours, x), run(theirs, x))
    assert len(logs[0]) == 2


def test_all_hooks_at_once_fire_in_order() -> None:
    ours, theirs = models()
    logs: tuple[list[Any], list[Any]] = ([], [])
    for index in range(4):
        for kind in KINDS:
            for model, log in zip((ours, theirs), logs):
                listen(model, index, kind, log)
    x = randn(2, 3, grad=True)
    same(run(ours, x), run(theirs, x))
    same_logs(*logs)


def test_hooks_that_replace_tensors() -> None:
    ours, theirs = models()
    for model in (ours, theirs):
        model[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        model[1].register_forward_hook(lambda m, args, y: y * 2)
        model[2].register_full_backward_hook(lambda m, dx, dy: (dx[0] * 3,))
        model[3].register_full_backward_pre_hook(lambda m, dy: (dy[0] * 5,))
    x = randn(2, 3, grad=True)
    same(run(ours, x), run(theirs, x))


@pytest.mark.parametrize("with_kwargs", [False, True])
@pytest.mark.parametrize("always_call", [False, True])
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
    linear = opfuser.Linear(3, 3, dtype=torch.float64)
    seq = opfuser.Sequential(Times(), linear, Square())
    x = randn(2, 3, grad=True)
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
    for op in residual:
        op.register_forward_hook(lambda *_: None)
        same(run(residual, x), [*run_reference(x, residual[1].w)])


def run_reference(x: Tensor, w: Tensor) -> list[Any]:
    y = x + x * w
    return [y.detach(), *grads(y, [x, w])]


@pytest.mark.parametrize("index", [0, 1])
def test_hooks_of_a_nested_sequential(index: int) -> None:
    """It is not part of its parent's runs any more, but works as before."""
    inner = opfuser.Sequential(Times(), Square())
    seq = opfuser.Sequential(inner, Times()) if index == 0 else opfuser.Sequential(Times(), inner)
    x = randn(2, 3, grad=True)
    expected = run(seq, x)
    seen: list[Any] = []
    handle = inner.register_forward_hook(lambda m, args, y: seen.append(short(y)))
    same(run(seq, x), expected)
    assert len(seen) == 1
    assert len(seq._module_groups) == 2
    handle.remove()
    same(run(seq, x), expected)
    assert len(seen) == 1
    assert len(seq._module_groups) == 1


def test_a_hook_on_the_sequential_itself() -> None:
    seq = opfuser.Sequential(opfuser.Linear(3, 3), Square())
    seen: list[Any] = []
    seq.register_forward_hook(lambda *_: seen.append(1))
    seq.register_full_backward_hook(lambda *_: seen.append(2))
    seq(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert seen == [1, 2]
    assert len(seq._module_groups) == 1


def test_a_subclass_is_called_as_a_module() -> None:
    calls: list[int] = []

    class Block(opfuser.Sequential):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return 2 * super().forward(*args, **kwargs)

    x = randn(2, 3)
    seq = opfuser.Sequential(Times(), Block(Square()), Square())
    same(seq(x), (2 * (x * seq[0].w) ** 2) ** 2)
    assert calls == [1]


class Pair(opfuser.FusedOperation):
    def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
        return input_ * 4, [(), ()]


@pytest.fixture
def pair() -> Iterator[str]:
    pattern = (opfuser.ConstantScale, opfuser.ConstantScale)
    rule = opfuser.Fusion("pair", "forward", pattern, lambda *ops: Pair(ops))
    with opfuser.register_forward_fusion(rule, prepend=True):
        yield rule.name


def test_the_record_says_that_a_hook_prevented_a_fusion(pair: str) -> None:
    seq = opfuser.Sequential(Square(), opfuser.ConstantScale(2.0), opfuser.ConstantScale(2.0))
    x = torch.randn(2, 3)
    assert_fused(seq, x, forward={pair: 1})
    handle = seq[2].register_forward_hook(lambda *_: None)
    assert_not_fused(seq, pair, x, code="HOOK")
    ((at, why),) = seq.plan(x).record(pair).refusals
    assert (at, why.detail) == (1, "ConstantScale carries hooks")
    handle.remove()
    assert_fused(seq, x, forward={pair: 1})


def test_the_record_says_that_a_module_stands_between(pair: str) -> None:
    seq = opfuser.Sequential(opfuser.ConstantScale(2.0), nn.Tanh(), opfuser.ConstantScale(2.0))
    x = torch.randn(2, 3)
    assert_not_fused(seq, pair, x, code="GROUP_SPLIT")
    plan = seq.plan(x)
    ((at, why),) = plan.record(pair).refusals
    assert (at, str(why)) == (0, "GROUP_SPLIT: Tanh stands between")
    assert [type(s.op).__name__ for s in plan.forward if not s.indices] == ["Tanh"]
    assert "Tanh (plain module)" in str(plan)


def test_planning_across_plain_modules_computes_and_changes_nothing() -> None:
    """Neither statistics, nor random numbers, nor hooks notice."""
    norm = nn.BatchNorm1d(3)
    seq = opfuser.Sequential(
        opfuser.Linear(3, 3), norm, nn.Dropout(0.5), opfuser.Linear(3, 3), opfuser.Dropout(0.5)
    )
    seen: list[Any] = []
    seq[3].register_forward_hook(lambda *_: seen.append(1))
    norm.register_forward_hook(lambda *_: seen.append(2))
    x = torch.randn(4, 3)
    state, buffers = torch.random.get_rng_state(), [b.clone() for b in norm.buffers()]
    plan = seq.plan(x)
    assert len(plan.basic_ops) == 5
    assert torch.equal(torch.random.get_rng_state(), state)
    for before, after in zip(buffers, norm.buffers()):
        assert torch.equal(before, after)
    assert seen == []
    seq(x)
    assert sorted(seen) == [1, 2]
