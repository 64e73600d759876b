"""Programs can be read: as text, in tracebacks, debuggers and profiles."""

from __future__ import annotations

import cProfile
import io
import linecache
import pdb
import pstats
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser import GELU, BasicLinear, Identity, Linear, Residual, RMSNorm, Sequential, SiLU
from opfuser.errors import ContextError, InputError
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.op import BasicOperation, OperationContext
from tests.engine.toys import Mixed, Square, Times, randn, without_collector

NOTES = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from 3.11 on")
PREFIX = "<opfuser program "


def files() -> set[str]:
    """The programs that debuggers find a text of."""
    return {name for name in linecache.cache if name.startswith(PREFIX)}


class Fails(BasicOperation):
    """Fails in one pass."""

    def __init__(self, stage: str, error: Exception | None = None) -> None:
        super().__init__()
        self.stage, self.error = stage, error or ValueError("no luck")

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        if self.stage == "forward":
            raise self.error
        return input_ * 1

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        if self.stage == "backward":
            raise self.error
        return grad_output, ()


# The text.


def mlp() -> Sequential:
    layers = {"norm": RMSNorm(8), "up": Linear(8, 16), "act": GELU(), "down": Linear(16, 8)}
    return Sequential({"mlp": Residual(Sequential(layers))})


def lines_of(seq: Sequential, *inputs: Tensor) -> list[str]:
    return [line.strip() for line in seq.plan(*inputs).program.splitlines()]


@pytest.mark.parametrize(
    ("seq", "inputs", "expected"),
    [
        (Sequential(Times(), Square()), [randn(2, 3, grad=True)],
         ["# 0 Times: 0", "# 1 Square: 1", "return x, []",
          "# 1 Square: 1", "# 0 Times: 0", "return [dx, g0]"]),
        (mlp(), [torch.randn(2, 8, requires_grad=True)],
         ["# 0-2 norm_linear: mlp.0-1.up", "# 3-7 activation_linear_add: mlp.1.up-2",
          "# 3-7 activation_linear_add: mlp.1.up-2", "# 0-2 norm_linear: mlp.0-1.up"]),
        (Sequential(Square(), Mixed()), [randn(2, 3, grad=True) for _ in range(2)],
         ["(e0,) = extra_inputs", "# 1 Mixed: 1", "return x, [y1_0]",
          "(dy1_0,) = received", "# 1 Mixed: 1", "return [dx, de0]"]),
        (Residual(Square()), [randn(2, 3, grad=True)],
         ["# 0 MakeExtraOutput: 0", "# 2 AddExtraInput: 2", "y0_0 = None", "return x, []",
          "# 2 AddExtraInput: 2", "# 0 MakeExtraOutput: 0"]),
    ],
    ids=["plain", "fused", "extra tensors", "channel"],
)  # fmt: skip
def test_text(seq: Sequential, inputs: list[Tensor], expected: list[str]) -> None:
    """Steps of forward in order, those of backward in theirs, each below its name and place."""
    found = iter(lines_of(seq, *inputs))
    assert [line for line in expected if line not in found] == []  # each after the one before
    code = compile(seq.plan(*inputs).program, "text", "exec")
    assert {"forward", "backward"} <= set(code.co_names)


def test_the_text_is_what_runs() -> None:
    seq, x = mlp(), torch.randn(2, 8, requires_grad=True)
    before = files()
    seq(x).sum().backward()
    texts = {name: "".join(linecache.getlines(name)) for name in files() - before}
    assert len(texts) == 2
    assert seq.plan(x).program + "\n" == "\n".join(texts[name] for name in sorted(texts)[::-1])
    assert seq.last_plan.program == seq.plan(x).program


def test_without_gradients_there_is_no_backward() -> None:
    program = mlp().plan(torch.randn(2, 8, requires_grad=True)).program
    assert program.count("def ") == 2
    with torch.no_grad():
        program = mlp().plan(torch.randn(2, 8)).program
    assert program.startswith("def forward(")
    assert program.count("def ") == 1


def test_several_groups_stand_one_after_another() -> None:
    inner = Sequential(Square(), nn.Tanh(), Times())
    inner.register_forward_hook(lambda *_: None)
    seq = Sequential({"first": Times(), "inner": inner, "last": Times()})
    program = seq.plan(randn(2, 3, grad=True)).program
    comments = [line.strip() for line in program.splitlines() if "#" in line]
    assert comments == [
        "# operation 0", *["# 0 Times: first"] * 2,
        "# operation 1, counted from 0 below", *["# 0 Square: inner.0"] * 2,
        "# operation 2, counted from 0 below", *["# 0 Times: inner.2"] * 2,
        "# operation 3, counted from 0 below", *["# 0 Times: last"] * 2,
    ]  # fmt: skip
    assert program.count("\n\n\n# operation") == 3


def test_paths_are_those_of_today() -> None:
    """A plan that was made before its Sequential was put into another one."""
    inner, x = Sequential(Times()), randn(2, 3)
    inner.register_forward_hook(lambda *_: None)
    plan = inner.plan(x)
    assert "# 0 Times: 0\n" in plan.program
    Sequential({"block": inner})(x)
    inner(x)
    assert "# 0 Times: block.0\n" in plan.program


def test_lines_of_code_are_not_long() -> None:
    config = DecoderConfig(
        vocab_size=32, dim=16, num_layers=20, num_heads=2, num_kv_heads=1, ffn_dim=32
    )
    with torch.device("meta"):
        seq, tokens = decoder_lm(config), torch.zeros(2, 8, dtype=torch.long)
        lines = lines_of(seq, tokens, tokens)
    assert len(lines) > 1000
    assert max(len(line) for line in lines if not line.startswith("#")) <= 100


def test_a_plan_needs_no_sequence_and_keeps_none() -> None:
    op = Times()
    seq = Sequential(op)
    plan = seq.plan(randn(2, 3))
    kept = weakref.ref(seq), weakref.ref(op)
    with without_collector():
        del seq
        assert kept[0]() is None
        assert "# 0 Times: 0" in plan.program
        del op, plan
        assert kept[1]() is None


def test_programs_are_freed_with_their_texts() -> None:
    """Operations too, fused ones as well, without the garbage collector."""
    before = files()
    seq, x = Sequential(RMSNorm(3), BasicLinear(3, 3), Square()), torch.randn(2, 3)
    seq(x.requires_grad_()).sum().backward()
    seq(x).sum().backward()
    assert seq.last_plan.fused("forward") == {"norm_linear": 1}
    assert seq.last_plan.program
    assert len(files() - before) == 4  # the first call was verified
    kept = [weakref.ref(m) for m in seq.modules()]
    with without_collector():
        del seq
        assert [ref() for ref in kept if ref() is not None] == []
        assert files() <= before


# Names of a user's are text, never code.

ODD = [
    "x\nimport os #", 'x"""; raise SystemExit #', "x'", "{x}", "x\\", "x\r\nraise SystemExit",
    "x\u2028raise SystemExit", "x\x0craise SystemExit", "", "x" * 500,
]  # fmt: skip


def odd_sequence(name: str, path: str) -> Sequential:
    kind = type(name, (Times,), {})
    seq = Sequential(Square())
    nn.Module.add_module(seq, path, kind())
    return seq


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_names_of_classes_and_paths_never_become_code(odd: str) -> None:
    path = odd.replace(".", "") or "x"
    seq, x = odd_sequence(odd, path), randn(2, 3, grad=True)
    plain = odd_sequence("Plain", "plain").plan(x).program
    program = seq.plan(x).program
    statements = [line for line in program.splitlines() if not line.lstrip().startswith("#")]
    assert statements == [line for line in plain.splitlines() if not line.lstrip().startswith("#")]
    (shown,) = {line.strip() for line in program.splitlines() if "# 1 " in line}
    assert shown.isprintable()
    y = seq(x)
    assert torch.equal(y, x * x * seq[1].w)
    y.sum().backward()


class _Fused(opfuser.FusedOperation):
    def __init__(self, op: BasicOperation) -> None:
        super().__init__([op])

    def fuser_forward(self, ctxs: Any, x: Tensor, **kwargs: Any) -> Any:
        return self.basic_ops[0].fuser_forward(ctxs, x, **kwargs)

    def fuser_backward(self, ctxs: Any, dy: Tensor, **kwargs: Any) -> Any:
        return self.basic_ops[0].fuser_backward(ctxs, dy, **kwargs)


def test_names_of_fusions_never_become_code() -> None:
    odd = "x\nraise SystemExit #"
    rule = opfuser.Fusion(odd, "joint", (Times,), build=_Fused)
    seq, x = Sequential(Times()), randn(2, 3, grad=True)
    with opfuser.register_forward_backward_fusion(rule):
        assert seq.plan(x).fused("forward") == {odd: 1}
        seq(x).sum().backward()
        assert seq.plan(x).program.count("# 0 x?raise SystemExit #: 0\n") == 2


# Exceptions.


def notes_of(call: Callable[[], Any], kind: type[Exception] = ValueError) -> list[str]:
    with pytest.raises(kind) as raised:
        call()
    return getattr(raised.value, "__notes__", [])


def fails(*_: Any, **__: Any) -> Any:
    raise ValueError("no luck")


def passes(seq: nn.Module, *inputs: Tensor) -> Callable[[], Any]:
    return lambda: seq(*inputs).sum().backward()


@NOTES
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_notes_name_pass_step_and_path(stage: str) -> None:
    x = randn(2, 3, grad=True)
    seq = Sequential({"first": Times(), "block": Sequential({"bad": Fails(stage)})})
    assert notes_of(passes(seq, x)) == [f"opfuser: in the {stage} of op 1 (Fails) at block.bad"]
    fuser = opfuser.OperationFuser([Times(), Fails(stage)])
    assert notes_of(passes(fuser, x)) == [f"opfuser: in the {stage} of op 1 (Fails)"]


@NOTES
def test_notes_of_a_fused_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seq, x = mlp(), torch.randn(2, 8, requires_grad=True)
    step = seq.plan(x).backward[1]
    y = seq(x)
    monkeypatch.setattr(type(step.op), "fuser_backward", fails)
    name = f"op 3-7 ({type(step.op).__name__})"
    assert notes_of(y.sum().backward) == [f"opfuser: in the backward of {name} at mlp.1.up-2"]


@NOTES
def test_notes_of_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of a step that fails stands right before the next step."""
    seq = Sequential({"first": GELU(), "second": SiLU(), "third": GELU()})
    y = seq(torch.randn(2, 8, requires_grad=True))
    monkeypatch.setattr(SiLU, "op_backward", fails)
    assert notes_of(y.sum().backward) == ["opfuser: in the backward of op 1 (SiLU) at second"]


@NOTES
def test_errors_of_the_library_have_notes_too() -> None:
    seq = Sequential({"norm": RMSNorm(4)})
    assert notes_of(lambda: seq(torch.ones(2, 3)), InputError) == [
        "opfuser: in the forward of op 0 (RMSNorm) at norm"
    ]
    seq = Sequential({"act": GELU(), "norm": RMSNorm(4)})
    assert notes_of(lambda: seq(torch.ones(2, 3)), InputError) == [
        "opfuser: in the forward of op 1 (RMSNorm) at norm"
    ]
    seq = Sequential({"act": Square(), "bad": Fails("forward", ContextError("No."))})
    assert notes_of(lambda: seq(randn(2, 3)), ContextError) == [
        "opfuser: in the forward of op 1 (Fails) at bad"
    ]


@NOTES
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_an_operation_alone_has_none(stage: str) -> None:
    """It stands nowhere, and the traceback names it."""
    assert notes_of(passes(Fails(stage), randn(2, 3, grad=True))) == []


@NOTES
def test_a_checkpoint_notes_the_pass_that_failed() -> None:
    """It is that of the second forward, which runs within a backward."""
    bad = Fails("backward")
    seq, x = Sequential(Square(), bad), randn(2, 3, grad=True)
    y = checkpoint(seq, x, use_reentrant=False)
    bad.stage = "forward"
    assert notes_of(y.sum().backward) == ["opfuser: in the forward of op 1 (Fails) at 1"]


@NOTES
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("op_pass", ["op_forward", "op_backward"])
def test_what_is_traced_notes_nothing(monkeypatch: pytest.MonkeyPatch, op_pass: str) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(GELU, op_pass, fails)
    seq, x = Sequential(GELU(), GELU()), torch.randn(2, 3, requires_grad=True)
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="no luck") as raised:
        compiled(x)
    notes = [note for error in chain_of(raised.value) for note in getattr(error, "__notes__", [])]
    assert [note for note in notes if note.startswith("opfuser")] == []


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_traceback_shows_the_line(stage: str) -> None:
    seq = Sequential(Times(), Fails(stage))
    with pytest.raises(ValueError, match="no luck") as raised:
        passes(seq, randn(2, 3, grad=True))()
    shown = traceback.extract_tb(raised.value.__traceback__)
    (before, at), *_ = [pair for pair in pairwise(shown) if pair[0].filename.startswith(PREFIX)]
    assert before.name == stage
    assert f"op1.op_{stage}(" in (before.line or "")
    assert at.name == f"op_{stage}"
    assert f'{before.filename}", line {before.lineno}, in {stage}\n    ' in "".join(shown.format())


def test_an_exception_keeps_nothing_in_cycles() -> None:
    """Once it is dropped, what the passes held is freed."""
    for error in (ValueError("no"), InputError("No."), ContextError("No.")):
        with without_collector():
            seq, x = Sequential(Square(), Fails("forward", error)), randn(2, 3, grad=True)
            kept = weakref.ref(x)
            try:
                seq(x)
            except type(error):
                pass
            error.__traceback__ = None
            del seq, x
            assert kept() is None, error


# Debuggers and profilers.


def test_pdb_shows_the_program() -> None:
    """``breakpoint()`` in an operation: one frame up is its line."""
    out = io.StringIO()
    commands = io.StringIO("up\nlist\np op1\nwhere\ncontinue\n")

    class Stops(Square):
        def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
            pdb.Pdb(stdin=commands, stdout=out, nosigint=True, readrc=False).set_trace()
            return super().op_forward(ctx, input_, **kwargs)

    seq = Sequential({"first": Times(), "second": Stops()})
    with torch.no_grad():
        seq(randn(2, 3))
    shown = out.getvalue()
    assert "# 1 Stops: second" in shown
    assert "->" in shown[shown.index("op1.op_forward(") - 20 : shown.index("op1.op_forward(")]
    assert "Stops()" in shown
    assert PREFIX in shown


def test_a_profile_names_file_and_function() -> None:
    seq, x = Sequential(Times(), Square()), randn(2, 3, grad=True)
    seq(x).sum().backward()
    y = seq(x)
    with cProfile.Profile() as profile:
        seq(x)
        y.sum().backward()
    names = {(file, name) for file, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    (forward,) = {file for file, name in names if file.startswith(PREFIX) and name == "forward"}
    (backward,) = {file for file, name in names if file.startswith(PREFIX) and name == "backward"}
    assert forward.removesuffix("forward>") == backward.removesuffix("backward>")


# Host overhead.


class Depth(BasicOperation):
    """Counts the frames between that of ``Sequential.forward`` and its own."""

    frames = 0

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        frame, self.frames = sys._getframe(1), 0
        while frame.f_code is not Sequential.forward.__code__:
            self.frames += 1
            assert frame.f_back is not None
            frame = frame.f_back
        return input_ * 1

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        return grad_output, ()


@pytest.mark.parametrize(("grad", "most"), [(True, 6), (False, 5)])
def test_frames_above_an_operation(grad: bool, most: int) -> None:
    """Two of the fuser, one or two of autograd, that of both passes, and the program's."""
    seq, x = Sequential(Identity(), Depth()), randn(2, 3, grad=grad)
    seq(x)
    seq(x)
    assert seq[1].frames <= most
