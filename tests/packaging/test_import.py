"""``import opfuser`` brings in nothing heavy, and needs neither a GPU, a compiler nor triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

NEW_MODULES = """
import json, sys
import torch
before = set(sys.modules)
import opfuser
print(json.dumps(sorted(set(sys.modules) - before)))
"""

RUN_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
import opfuser
x = torch.ones(3, 4, requires_grad=True)
class Cube(opfuser.PointwiseOperation):
    device_function = "not_there:cube"
    def value(self, x):
        return x**3
ops = opfuser.Linear(4, 2), opfuser.GELU(), Cube(), opfuser.SiLU(), opfuser.Dropout(0.1)
opfuser.Sequential(*ops)(x).sum().backward()
assert x.grad is not None and x.grad.isfinite().all()
"""


def run_bare(code: str) -> str:
    """Runs ``code`` in a new interpreter that sees no GPU and no program, warnings as errors."""
    env = {**os.environ, "PATH": "", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_adds_only_torch_modules_that_are_light() -> None:
    new = json.loads(run_bare(NEW_MODULES))
    packages = {name.partition(".")[0] for name in new}
    assert packages <= {"opfuser", "torch", "typing_extensions"} | sys.stdlib_module_names
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx")
    assert [name for name in new if name.startswith(heavy)] == []


def test_runs_without_triton_gpu_and_compiler() -> None:
    run_bare(RUN_WITHOUT_TRITON)
