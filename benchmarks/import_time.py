"""Time of ``import opfuser`` beyond that of ``import torch``."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

CODE = """
from time import perf_counter as now
a = now()
import torch
b = now()
import opfuser
c = now()
print(b - a, c - b)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="new interpreters to start")
    parser.add_argument("--json", type=Path, default=Path("runs/import_time.json"))
    args = parser.parse_args()

    runs = [
        [
            float(seconds)
            for seconds in subprocess.check_output([sys.executable, "-c", CODE]).split()
        ]
        for _ in range(args.repeats + 1)
    ][1:]  # the first one reads the files from disk
    result = {
        name: statistics.median(column)
        for name, column in zip(("torch", "opfuser"), zip(*runs, strict=True), strict=True)
    }

    print(f"{'import':<10}{'median s':>10}   of {args.repeats} runs")
    for name, seconds in result.items():
        print(f"{name:<10}{seconds:>10.3f}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
