"""``opfuser bench``: time and memory of a model with its fusions and without."""

from __future__ import annotations

import argparse
import json

from ..errors import counted
from ..report.bench import UNFUSED, Bench, Contestant, bench
from ..report.inputs import as_text
from ..report.machine import summary
from ..report.sizes import in_bytes, table
from ..report.target import Target
from .arguments import ERROR, FINE, Subparsers, add_command, add_model, add_output, target_of, write


def add(subparsers: Subparsers) -> None:
    """Adds the command to the parser of the command line."""
    parser = add_command(
        subparsers,
        "bench",
        "time a model with its fusions and without",
        """\
Times training steps (forward and backward, without an optimizer) of a model on
this device: with its fusions, without them, and with --compile compiled by
torch, in turns. Prints the median and quartiles of a step's time, the peak
device memory, what is saved for backward, the machine and the versions. A model
hf:NAME is also timed as transformers computes it; its weights are random.

Exit status: 0; 1 if one of them failed, while the others are shown.""",
        """\
  opfuser bench my_package.model:build --input 8x2048x4096:bf16 --compile
  opfuser bench hf:GPT2LMHeadModel --input 4x256:int64 --dtype bf16""",
    )
    add_model(parser, with_data=True)
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        metavar="N",
        help="samples of each variant; a sample is as many steps as take 20 ms, at least one "
        "(default: %(default)s)",
    )
    parser.add_argument("--compile", action="store_true", help="also time it with torch.compile")
    parser.add_argument(
        "--forward", action="store_true", help="time forward only, without recording gradients"
    )
    add_output(parser, "text", "json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what was measured; :data:`ERROR` if a contestant failed."""
    target = target_of(args)
    found = bench(target, args.steps, compiled=args.compile, forward_only=args.forward)
    write(_json(target, found) if args.format == "json" else _text(target, found), args.output)
    return ERROR if any(c.error for c in found.contestants) else FINE


def _inputs(target: Target) -> str:
    return ", ".join(map(as_text, target.inputs))


def _json(target: Target, found: Bench) -> str:
    rows = [
        {**c._asdict(), "seconds": None if c.seconds is None else c.seconds._asdict()}
        for c in found.contestants
    ]
    about = {"schema": "opfuser.bench/1", "model": target.name, "inputs": _inputs(target)}
    return json.dumps({**about, **found._asdict(), "contestants": rows}, indent=1)


def _text(target: Target, found: Bench) -> str:
    each = counted(found.steps, "step")
    passes = "forward and backward" if found.backward else "forward"
    lines = [
        f"{target.name}, inputs {_inputs(target)}",
        summary(),
        f"{passes}, {counted(found.samples, 'sample')} of {each} each, in turns",
        "",
    ]
    unfused = next(c.seconds for c in found.contestants if c.name == UNFUSED)
    rows: list[tuple[str, ...]] = [("", "ms per step", "quartiles", "of unfused", "peak", "saved")]
    for c in found.contestants:
        if c.seconds is not None:
            rows.append(_row(c, None if unfused is None else unfused.median))
    rows = [row[:4] + row[5:] for row in rows] if not any(row[4] for row in rows[1:]) else rows
    lines += table(rows, "<>>>>>")
    if not found.fused_steps:
        lines.append("Nothing is fused, so that there is nothing to compare.")
    lines += [f"{c.name} failed: {c.error}" for c in found.contestants if c.error]
    return "\n".join(lines)


def _row(found: Contestant, unfused: float | None) -> tuple[str, ...]:
    assert found.seconds is not None
    median, low, high = (f"{1e3 * s:.3f}" for s in found.seconds)
    return (
        found.name,
        median,
        f"{low} to {high}",
        "" if unfused is None else f"{found.seconds.median / unfused:.2f}",
        "" if found.peak is None else in_bytes(found.peak),
        "" if found.saved is None else in_bytes(found.saved),
    )
