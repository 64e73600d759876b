"""Time of ``import opfuser`` without that of torch, and of a first step; what both load."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from time import process_time as now

def loaded():
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "opfuser"]
    return len(modules), sum(open(m.__file__, "rb").read().count(b"\\n") for m in modules)

a = now()
import torch
b = now()
import opfuser
c = now()
imported = loaded()
x = torch.ones(3, 8)
d = now()
seq = opfuser.Sequential(opfuser.Linear(8, 16), opfuser.RMSNorm(16), opfuser.SwiGLU())
seq(x).sum().backward()
e = now()
print(b - a, c - b, *imported, e - d, *loaded())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="new interpreters to start")
    parser.add_argument("--json", type=Path, default=Path("runs/import_time.json"))
    args = parser.parse_args()

    # Installed packages have bytecode, whatever the environment says of writing it.
    env = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = [
        [float(n) for n in subprocess.check_output([sys.executable, "-c", CODE], env=env).split()]
        for _ in range(args.repeats + 1)
    ][1:]  # the first one reads the files from disk, and compiles them
    names = ("torch", "opfuser", "modules", "lines", "step", "step_modules", "step_lines")
    result = dict(zip(names, map(statistics.median, zip(*runs, strict=True)), strict=True))

    print(f"{'import':<10}{'median s':>10}   of {args.repeats} runs, time of this process")
    print(f"{'torch':<10}{result['torch']:>10.3f}")
    loaded = f"{result['modules']:.0f} modules, {result['lines']:.0f} lines"
    print(f"{'opfuser':<10}{result['opfuser']:>10.3f}   {loaded}")
    loaded = f"{result['step_modules']:.0f} modules, {result['step_lines']:.0f} lines in all"
    print(f"{'a step':<10}{result['step']:>10.3f}   {loaded}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
