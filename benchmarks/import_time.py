"""Time of ``import opfuser`` beyond that of ``import torch``, and what it loads."""

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
a = now()
import torch
b = now()
import opfuser
c = now()
files = [m.__file__ for name, m in sys.modules.items() if name.partition(".")[0] == "opfuser"]
print(b - a, c - b, len(files), sum(open(file, "rb").read().count(b"\\n") for file in files))
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
    torch, opfuser, modules, lines = map(statistics.median, zip(*runs, strict=True))
    result = {"torch": torch, "opfuser": opfuser, "modules": modules, "lines": lines}

    print(f"{'import':<10}{'median s':>10}   of {args.repeats} runs, time of this process")
    print(f"{'torch':<10}{torch:>10.3f}")
    print(f"{'opfuser':<10}{opfuser:>10.3f}   {modules:.0f} modules, {lines:.0f} lines")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
