"""The texts of programs: their files, names, lines and emissions, and what they keep alive."""

from __future__ import annotations

import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import profiler

import opfuser
from opfuser import ConstantScale, Sequential
from opfuser.engine import program as programs
from opfuser.engine.program import Program
from opfuser.op import BasicOperation
from tests.engine.emission_toys import KEYWORDS, KeywordTap, Scaled, ScaledTap, with_keywords
from tests.engine.toys import Power, RowSum, Square, Times, grads, randn, same


def program_of(ops: list[Any], x: Tensor) -> Program:
    """That of calls of these operations with tensors like ``x``."""
    return Program(opfuser.OperationFuser(ops).plan(x))


# Memory.


class Keeps(BasicOperation):
    """Saves a tensor of its own, without being asked; knows which of those are alive."""

    def __init__(self, refs: list[Any], alive: list[Any]) -> None:
        super().__init__()
        self.__dict__.update(refs=refs, alive=alive)

    def keep(self, ctx: Any, x: Tensor) -> Tensor:
        self.alive.append([ref() is not None for ref in self.refs])
        ctx.save_for_backward(x + 1)
        self.refs.append(weakref.ref(ctx.to_save[0]))
        return x * 1

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return self.keep(ctx, input_)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        self.alive.append([ref() is not None for ref in self.refs])
        return grad_output, ()


class KeepsAndTaps(Keeps):
    """The same with an extra output."""

    num_extra_outputs = 1

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        return self.keep(ctxs[0], input_), [(input_,)]

    def fuser_backward(
        self, ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        return self.op_backward(ctxs[0], grad_output)[0], [()], [()]


KINDS = {
    "plain": (Keeps, Keeps, Keeps),
    "general": (KeepsAndTaps, KeepsAndTaps, KeepsAndTaps),
    "one after the other": (Keeps, KeepsAndTaps, Keeps),
}


@pytest.mark.parametrize("kinds", KINDS)
def test_a_forward_without_gradients_frees_what_operations_save(kinds: str) -> None:
    refs: list[Any] = []
    alive: list[Any] = []
    seq = Sequential(*[kind(refs, alive) for kind in KINDS[kinds]], ConstantScale(2.0))
    with torch.no_grad():
        seq(randn(2, 3))
    assert alive == [[], [False], [False, False]]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
def test_what_was_saved_is_freed_step_by_step_in_backward(kinds: str, keep: bool) -> None:
    """Hazard 25; unless the graph is kept."""
    refs: list[Any] = []
    alive: list[Any] = []
    seq = Sequential(*[kind(refs, alive) for kind in KINDS[kinds]])
    y = seq(randn(2, 3, grad=True))
    y = y if isinstance(y, Tensor) else y[0]
    alive.clear()
    y.sum().backward(retain_graph=keep)
    assert alive == [[True] * 3, [True, True, keep], [True, keep, keep]]
    assert [ref() is not None for ref in refs] == [keep] * 3, "though the output is still there"


# Texts, files and emissions.


class Files(BasicOperation):
    """Notes the files of the programs that call it; raises if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(noted=[], raises="")

    def note(self, stage: str) -> None:
        frame: Any = sys._getframe(2)
        while not frame.f_code.co_filename.startswith("<opfuser program"):
            frame = frame.f_back
        self.noted.append(frame.f_code.co_filename.split(": ")[-1].rstrip(">"))
        if self.raises == stage:
            raise ZeroDivisionError

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        self.note("forward")
        return input_ * 1

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        self.note("backward")
        return grad_output, ()


def test_programs_do_besides_what_a_call_asks_for() -> None:
    files = Files()
    seq, x = Sequential(files, Power()), randn(2, 3, grad=True)

    def noted(**kwargs: Any) -> list[str]:
        files.noted.clear()
        seq(x, **kwargs).sum().backward()
        return list(files.noted)

    keywords = {"op_kwargs": {1: {"power": 2}}}
    assert noted() == ["forward verified", "backward verified"]
    assert noted() == ["forward", "backward"]
    assert noted(**keywords) == ["forward", "backward"]
    with profiler.profile():
        assert noted() == ["forward ranged", "backward ranged"]
        assert noted(**keywords) == ["forward ranged", "backward ranged"]
    assert noted() == ["forward", "backward"]


class Refuses(Times):
    """Reads in backward what was not kept."""

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return ctx.parameters[0], ()


class RefusesTap(Refuses):
    """The same with an extra output, by a call of several lines."""

    num_extra_outputs = 1

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        return input_ * 1, [(input_,)]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        return self.op_backward(ctxs[0], grad_output)


@pytest.mark.parametrize("kind", [Refuses, RefusesTap])
def test_errors_name_the_step_of_their_line(kind: type[Refuses]) -> None:
    seq, x = Sequential(Times(), kind(), Times(), RowSum()), randn(2, 3, grad=True)
    y = seq(x)[0]
    with pytest.raises(opfuser.errors.ContextError) as caught:
        y.sum().backward()
    assert f"in the backward of op 1 ({kind.__name__})" in str(caught.value)


class Watcher:
    """Stands for an operation, and counts its calls."""

    def __init__(self, op: Any, calls: list[str], stage: str) -> None:
        self.op, self.calls, self.stage = op, calls, stage

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("op_", "fuser_")):
            self.calls.append(self.stage)
        return getattr(self.op, name)


def test_programs_call_watchers_while_these_watch() -> None:
    x, calls = randn(2, 3), list[str]()
    program = program_of([Scaled(2.0), ScaledTap(3.0)], x)

    def call() -> None:
        y, extras = program.function("forward")(x, (), [{}, {}], None, None)
        same([y, *extras], [6 * x, 6 * x])

    call()
    with program.watched(lambda step, stage: Watcher(step.op, calls, stage)):
        call()
        call()
    assert calls == ["forward", "forward"] * 2
    call()
    assert len(calls) == 4


# Threads.


def test_threads_compile_a_program_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, x = [Times(), Square(), Times()], randn(2, 3)
    with torch.no_grad():
        expected = Sequential(*ops)(x)
        fresh_program = program_of(ops, x)
    both, emit = Barrier(2, timeout=30), programs.emit_forward

    def together(*args: Any) -> Any:
        text = emit(*args)
        both.wait()
        return text

    monkeypatch.setattr(programs, "emit_forward", together)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(fresh_program.function, "forward") for _ in range(2)]
        functions = [future.result() for future in futures]
    for function in functions:
        with torch.no_grad():
            y, extras = function(x, (), [{}, {}, {}], None, None)
        assert torch.equal(y, expected)
        assert extras == []
    assert fresh_program.function("forward") in functions


# torch.compile.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_traced_programs_have_keywords_and_current_settings() -> None:
    torch._dynamo.reset()
    seq = Sequential(Power(), KeywordTap(), Scaled(2.0), Power())
    x = randn(2, 3, grad=True)

    def call(x: Tensor) -> Any:
        return seq(x, op_kwargs=KEYWORDS)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    found, expected = compiled(x), with_keywords(x)
    same(found, expected)
    same(grads(found, [x]), grads(expected, [x]))
    seq[2].factor = 3.0
    same(compiled(x), call(x))
    torch._dynamo.reset()
