"""Benchmarks on a GPU: ``python benchmarks/gpu/run.py --out runs/gpu``, the repository on the path.

Parts: ``kernels``, ``sums``, ``blocks``, ``quantized``, ``experts``, ``model``, ``hugging_face``,
``hugging_face_layers``, ``small``, ``replay``, ``host``. Each writes ``<part>.json`` into the
output folder row by row, so that an interrupted run keeps its rows. A failure is a row with the
text of its error, and so is a contestant that takes longer than its limit, as some tune or compile
for minutes. torch.compile takes part only in the sizes that a case names, one or a few, since
it compiles for each of them.
``--device cpu`` rehearses with tiny sizes: its figures mean nothing. Nothing is replayed but where
the name of a contestant says so; mode "auto", the default, is that of the part ``replay``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import opfuser
from benchmarks import timing
from benchmarks.gpu import (
    blocks,
    experts,
    host,
    hugging_face,
    hugging_face_layers,
    kernels,
    model,
    peers,
    quantized,
    replay_modes,
    small,
    sums,
)
from benchmarks.gpu.compiled import COMPILED
from benchmarks.gpu.contest import COPY
from benchmarks.gpu.first_steps import FIRST_STEPS
from benchmarks.gpu.problem import OURS, REFERENCE, Options, Row
from benchmarks.machine import machine

PARTS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "kernels": kernels.rows,
    "sums": sums.rows,
    "blocks": blocks.rows,
    "quantized": quantized.rows,
    "experts": experts.rows,
    "model": model.rows,
    "hugging_face": hugging_face.rows,
    "hugging_face_layers": hugging_face_layers.rows,
    "small": small.rows,
    "replay": replay_modes.rows,
    "host": host.rows,
}
BUDGETS = {"small": 225.0, "replay": 200.0}  # seconds, of the parts that do not have BUDGET
BUDGET = 540.0
LIMITS = {"experts": 60.0}  # seconds, of a contestant of the parts that do not have LIMIT
LIMIT = 180.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("The GPU benchmarks were not run: there is no CUDA device.")
        return
    device = torch.device(args.device)
    peers.load_cudnn()
    args.out.mkdir(parents=True, exist_ok=True)
    measured_on = machine()
    print(", ".join(f"{key} {value}" for key, value in measured_on.items()), flush=True)
    documents = []
    with opfuser.replay("off"):
        for part in args.only or PARTS:
            options = Options(
                device,
                DTYPES[args.dtype],
                args.quick,
                args.seconds,
                () if args.no_compile else args.modes and tuple(args.modes),
                time.monotonic() + (args.budget or BUDGETS.get(part, BUDGET)),
                tuple(args.case),
                args.limit or LIMITS.get(part, LIMIT),
                tuple(args.without),
                dict(args.size),
            )
            documents.append(run(part, options, args.out, measured_on))
    for document in documents:
        print_summary(document)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run; all by default")
    parser.add_argument(
        "--case",
        nargs="+",
        default=("",),
        metavar="TEXT",
        help="parts of the names of the cases to run",
    )
    parser.add_argument(
        "--size",
        nargs="+",
        type=named_number,
        default=(),
        metavar="NAME=NUMBER",
        help="what the sizes to run have, such as tokens=8192",
    )
    parser.add_argument("--quick", action="store_true", help="one size per case")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seconds", type=float, default=0.5, help="of sampling per measurement")
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds per part; nothing is begun afterwards",
    )
    parser.add_argument(
        "--limit",
        type=float,
        help="seconds of a contestant for one size, to be checked and timed; more is a failure",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="parts of the names of contestants that are left out",
    )
    parser.add_argument("--modes", nargs="+", choices=COMPILED, help="of torch.compile")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    return parser.parse_args(argv)


def named_number(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    return name, int(number)


def run(part: str, options: Options, out: Path, measured_on: Row) -> dict[str, Any]:
    """Measures a part and keeps its file up to date; returns the content of the file."""
    copy = timing.copy_rate(options.device, options.seconds)
    document: dict[str, Any] = {
        "part": part,
        "machine": measured_on,
        "seconds": options.seconds,
        "copy_gb_per_s": copy * 1e-9,
        "rows": [],
    }
    print(f"\n{part}: a large copy moves {copy * 1e-9:.0f} GB/s", flush=True)
    for row in PARTS[part](options):
        if "gb_per_s" in row:
            row["share_of_copy"] = row["gb_per_s"] * 1e9 / copy
        document["rows"].append(row)
        (out / f"{part}.json").write_text(json.dumps(document, indent=1) + "\n")
        print(line(row), flush=True)
    return document


def line(row: Row) -> str:
    size = " ".join(str(value) for value in row["size"].values())
    start = f"{row['case']:<26}{size:<20}{row['pass']:<30}{row['contestant']:<30}"
    if "failure" in row:
        return start + row["failure"]
    if FIRST_STEPS in row:
        return start + " ".join(f"{time:.1f}" for time in row[FIRST_STEPS]) + " ms"
    low, high = row["quartiles_us"]
    text = f"{start}{row['median_us']:>11.1f} us{f'({low:.1f} - {high:.1f})':>24}"
    for key, unit, factor in COLUMNS:
        if row.get(key) is not None:
            text += f"  {row[key] * factor:.{2 if factor == 1 else 0}f} {unit}"
    return text


COLUMNS = (
    ("share_of_copy", "% of copy", 100),
    ("share_of_equal_copy", "% of equal copy", 100),
    ("tflops", "TF/s", 1),
    ("host_waits", "waits", 1),
    ("speedup", "x torch", 1),
    ("over_off", "x off", 1),
    ("over_floor", "x floor", 1),
    ("over_bare_us", "us over bare", 1),
    ("tokens_per_s", "k tokens/s", 1e-3),
    ("saved_bytes", "MB saved", 1e-6),
    ("extra_bytes", "MB extra", 1e-6),
    ("reserved_bytes", "MB reserved", 1e-6),
    ("captured_bytes", "MB captured", 1e-6),
)


def print_summary(document: dict[str, Any]) -> None:
    """Prints, per measurement, opfuser's time and the fastest of the others."""
    print(f"\n{document['part']}: opfuser, and times it is faster than torch and the best other")
    measurements: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in document["rows"]:
        if "median_us" in row:
            size = " ".join(str(value) for value in row["size"].values())
            measurements.setdefault((row["case"], size, row["pass"]), {})[row["contestant"]] = row
    for (case, size, passed), rows in measurements.items():
        ours = rows.get(OURS)
        if ours is None:
            print(f"{case:<26}{size:<20}{passed:<30}failed")
            continue
        time_us = ours["median_us"]
        share = f"{ours['share_of_copy']:.0%}" if "share_of_copy" in ours else ""
        floor = f"{ours['over_floor']:.2f} x floor" if "over_floor" in ours else ""
        others = [
            r
            for n, r in rows.items()
            if n not in (REFERENCE, COPY, "bare GEMMs", "bare")
            and not n.startswith((OURS, experts.ALONE))
        ]
        best = min(others, key=lambda r: r["median_us"], default=None)
        text = f"{case:<26}{size:<20}{passed:<30}{time_us:>11.1f} us {share:>5} {floor:<13}"
        if REFERENCE in rows:
            text += f"{rows[REFERENCE]['median_us'] / time_us:>7.2f}"
        if best is not None:
            text += f"{best['median_us'] / time_us:>7.2f}  {best['contestant']}"
        print(text)
    failures = {
        (r["case"], r["contestant"], r["failure"]) for r in document["rows"] if "failure" in r
    }
    for case, contestant, failure in sorted(failures):
        print(f"{case}, {contestant or 'all'}: {failure}")


if __name__ == "__main__":
    main()
