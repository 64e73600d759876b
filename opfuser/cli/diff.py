"""``opfuser diff``: what one fusion, or an upgrade, changes in a model."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from ..errors import TargetError
from ..registry import fusions
from ..report.conversion import no_sequences
from ..report.diff import around, difference, is_empty, matches, text
from ..report.plan_json import read
from .arguments import (
    FINDINGS,
    FINE,
    MODEL,
    Subparsers,
    add_command,
    add_inputs,
    add_output,
    model_words,
    target_of,
    write,
)


def add(subparsers: Subparsers) -> None:
    """Adds the command to the parser of the command line."""
    parser = add_command(
        subparsers,
        "diff",
        "compare a model without and with a fusion, or two explanations",
        """\
Shows what a fusion changes: how often each fusion matches, steps, launches,
bytes read and written, bytes saved for backward, and the steps that differ.
Nothing is timed, and no GPU is needed: launches and bytes are counted without
data. Also compares two files that opfuser explain --format json has written,
for example before and after an upgrade.

Exit status: 0; 3 if the fusion matches nowhere, or if two files differ.""",
        """\
  opfuser diff my_package.model:build --fusion norm_linear
  opfuser diff my_package.model:build --fusion norm_linear --program
  opfuser diff before.json after.json""",
    )
    parser.add_argument(
        "model",
        nargs="+",
        metavar=f"{MODEL} | FILE FILE",
        help="a model, as in opfuser explain, or two files",
    )
    parser.add_argument(
        "--fusion",
        metavar="NAME",
        help='the fusion that is off on one side and on on the other; "*" for all',
    )
    parser.add_argument(
        "--program",
        action="store_true",
        help="also compare the plans' programs line by line; files must be written with "
        "opfuser explain --program",
    )
    add_inputs(parser)
    add_output(parser, "text", "json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the difference; :data:`FINDINGS` if two files differ, or a fusion matches nowhere."""
    if args.fusion is None:
        sides = _two_files(args.model)
        before, after = (read(Path(file)) for file in sides)
    else:
        args.model = _one_model(args.model)
        sides = ("without", "with")
        target = target_of(args)
        before, after = around(target, args.fusion, programs=args.program)
        if not after["sequences"]:
            raise no_sequences(target)
    found = difference(before, after, sides, programs=args.program)
    shown = json.dumps(found, indent=1) if args.format == "json" else text(found)
    write(shown, args.output)
    if args.fusion is None:
        return FINE if is_empty(found) else FINDINGS
    if matches(after, args.fusion):
        return FINE
    what = "Nothing is fused" if args.fusion == "*" else f"{args.fusion} matches nowhere"
    print(f"{what}: {_says_why(args)} says why.", file=sys.stderr)
    return FINDINGS


def _says_why(args: argparse.Namespace) -> str:
    """The command that says why the fusion does not match, which is on there as it was here."""
    words = ["opfuser", "explain", *model_words(args)]
    if args.fusion == "*":
        return shlex.join(words)
    off = any(info.name == args.fusion and not info.enabled for info in fusions())
    switch = f"OPFUSER_ENABLE={shlex.quote(args.fusion)} " if off else ""
    return switch + shlex.join([*words, "--why", args.fusion])


def _two_files(names: list[str]) -> tuple[str, str]:
    if len(names) != 2:
        raise TargetError.explained(
            "Without --fusion two files are compared",
            received=", ".join(names),
            remedy="Name a fusion, or two files that opfuser explain --format json has written",
        )
    return names[0], names[1]


def _one_model(names: list[str]) -> str:
    if len(names) != 1:
        raise TargetError.explained(
            "With --fusion one model is compared with itself", received=", ".join(names)
        )
    return names[0]
