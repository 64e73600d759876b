"""Puts a run's rows into a file of results: ``python -m benchmarks.gpu.merge RUN.json INTO.json``.

Contestants compare within a run: what a run measured replaces all rows of the same case, size and
dtype. The file keeps the machine and versions of every run, and rows of later ones their number.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.problem import OURS

Document = dict[str, Any]


def merged(into: Document, run: Document) -> Document:
    """The document with the rows of a run.

    Raises:
        ValueError: they are of different parts, or of different devices.
    """
    for name, first, second in (
        ("parts", into["part"], run["part"]),
        ("devices", *(d["machine"].get("device") for d in (into, run))),
    ):
        if first != second:
            raise ValueError(
                f"rows of different {name} do not belong in one file: it has {first}, "
                f"the run {second}; give the run a file of its own"
            )
    measured = {measurement(r) for r in run["rows"] if r["contestant"] == OURS and "median_us" in r}
    runs = [*into.get("runs", []), {k: v for k, v in run.items() if k not in ("part", "rows")}]
    new = [{**r, "run": len(runs)} for r in run["rows"] if measurement(r) in measured]
    kept = [r for r in into["rows"] if measurement(r) not in measured]
    return {**into, "runs": runs, "rows": [*kept, *new]}


def measurement(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["case"], tuple(sorted(row["size"].items())), row.get("dtype")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("into", type=Path)
    args = parser.parse_args()
    into, run = (json.loads(path.read_text()) for path in (args.into, args.run))
    args.into.write_text(json.dumps(merged(into, run), indent=1) + "\n")


if __name__ == "__main__":
    main()
