"""What is loaded when it is used is there for threads, forks, tracers, programs and pickles."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

import opfuser
from opfuser.core.fusion import Fusion
from opfuser.fused import FUSIONS, BuiltIn

from .test_import import run_bare

THREADS = """
import threading
import torch
import opfuser
gate, errors, outputs = threading.Barrier(4), [], []
def construct(makes):
    try:
        gate.wait()
        seq = opfuser.Sequential(*(make() for make in makes))
        x = torch.ones(3, 8, requires_grad=True)
        seq(x).sum().backward()
        outputs.append(x.grad)
    except BaseException as error:
        errors.append(error)
names = [lambda: opfuser.Linear(8, 8), lambda: opfuser.RMSNorm(8), lambda: opfuser.GELU()]
names += [lambda: opfuser.basic.SiLU()]
threads = [threading.Thread(target=construct, args=[names[n:] + names[:n]]) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(120)
assert not errors, errors
assert len(outputs) == 4
"""

# A module that takes long to load, as another thread forks.
FORKS = """
import os, sys, threading, time
import torch
import opfuser
from opfuser.runtime import later
begun = threading.Event()
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "opfuser.sequential":
            begun.set()
            time.sleep(1)
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=lambda: opfuser.Sequential)
thread.start()
begun.wait()
child = os.fork()
if child == 0:
    seq = opfuser.Sequential(opfuser.Linear(4, 2))
    os._exit(0 if seq(torch.ones(3, 4)).shape == (3, 2) else 1)
thread.join()
for _ in range(300):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
assert done and status == 0, status
"""

TRACED = """
import sys
import torch
import opfuser
torch._dynamo.config.error_on_recompile = True
def grads(call, x):
    x.grad = None
    call(x).square().sum().backward()
    return x.grad
x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
ops = [opfuser.Linear(8, 16), opfuser.RMSNorm(16), opfuser.SwiGLU()]
model = (opfuser.Sequential(*ops) if whole else opfuser.LayerNorm(8)).double()
traced = torch.compile(model, fullgraph=True, backend="aot_eager")
assert "opfuser.fused.norm_linear" not in sys.modules
first, second = grads(traced, x).clone(), grads(traced, x)
assert torch.equal(first, second)
torch.testing.assert_close(first, grads(model, x), rtol=1e-12, atol=1e-12)
"""

PROGRAM = """
import sys
import torch
import opfuser
assert "opfuser.gemm" not in sys.modules
x, weights = torch.randn(5, 3), [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
x.requires_grad_()
y = torch.ops.opfuser.grouped_mm(x, weights, torch.tensor([2, 3]), True)
torch.testing.assert_close(y, torch.cat([x[:2] @ weights[0].T, x[2:] @ weights[1].T]))
(grad,) = torch.autograd.grad(y.sum(), weights[:1])
torch.testing.assert_close(grad, x[:2].sum(0).expand(4, 3).detach())
sums = torch.ops.opfuser.grouped_sum(x.detach(), torch.tensor([2, 3]))
torch.testing.assert_close(sums, torch.stack([x[:2].sum(0), x[2:].sum(0)]).detach())
"""


def test_threads_construct_first_at_the_same_time() -> None:
    run_bare(THREADS)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_fork_waits_for_what_is_being_loaded() -> None:
    run_bare(FORKS)


@pytest.mark.parametrize("whole", [True, False], ids=["sequence", "operation"])
def test_a_first_call_can_be_traced_whole(whole: bool) -> None:
    run_bare(f"whole = {whole}\n{TRACED}")


def test_operators_of_programs_are_there() -> None:
    run_bare(PROGRAM)


def test_a_pickle_loads_what_it_needs(tmp_path: Path) -> None:
    op = opfuser.RMSNorm(4)
    (tmp_path / "op.pickle").write_bytes(pickle.dumps(op))
    code = f"""
import pickle, torch
op = pickle.load(open({str(tmp_path / "op.pickle")!r}, "rb"))
assert op(torch.ones(2, 4)).shape == (2, 4)
"""
    run_bare(code)


@pytest.mark.parametrize("rule", FUSIONS, ids=lambda rule: rule.name)
def test_rows_of_fusions_say_what_the_fusions_say(rule: Fusion) -> None:
    assert isinstance(rule, BuiltIn)
    for name in ("name", "stage", "requires", "enabled"):
        assert getattr(rule, name) == getattr(rule.loaded, name)
    begins = set()
    for element in rule.elements:
        if element.repeated is not None:
            assert not rule.begins
            return
        begins |= {kind.__module__.rpartition(".")[2] for kind in element.types}
        if not element.optional:
            break
    assert rule.begins == begins


def test_an_operation_that_begins_no_pattern_loads_no_fusion() -> None:
    code = """
import sys, torch, opfuser
seq = opfuser.Sequential(opfuser.Dropout(0.5), opfuser.Identity())
plan = seq.plan(torch.ones(2, 2))
assert [r.status for r in plan.history if r.name == "norm_linear"] == ["unmatched"]
assert not [name for name in sys.modules if name.startswith("opfuser.fused.back")]
assert len(opfuser.fusions()) == len(opfuser.fused.FUSIONS)
"""
    run_bare(code)
