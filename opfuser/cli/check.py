"""``opfuser check``: whether a model still has the fusions that a lock file says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import TargetError
from ..report.lock import ALLOW_NONE, compared, read, refuse_nothing, text, updated
from ..report.target import plans
from .arguments import (
    FINDINGS,
    FINE,
    Subparsers,
    add_command,
    add_model,
    add_output,
    target_of,
    write,
)


def add(subparsers: Subparsers) -> None:
    """Adds the command to the parser of the command line."""
    parser = add_command(
        subparsers,
        "check",
        "fail when a model has lost a fusion since it was locked",
        """\
Compares how often each fusion matches in a model with a lock file, for example
after an upgrade or a change of the model. Says which fusion is lost, in which
Sequential, and why. Additional matches are reported and do not fail. One lock
file can hold many models. A model without a locked fusion is an error, because
such a check would always pass.

Exit status: 0; 3 if a fusion matches less often than is locked.""",
        """\
  opfuser check my_package.model:build --lock fusions.lock.yaml --update
  opfuser check my_package.model:build --lock fusions.lock.yaml""",
    )
    add_model(parser)
    parser.add_argument(
        "--lock", required=True, type=Path, metavar="FILE", help="the lock file, in YAML"
    )
    parser.add_argument(
        "--update", action="store_true", help="write the current matches instead of failing"
    )
    parser.add_argument(
        "--allow-none",
        action="store_true",
        help="pass a model with nothing to check: without fusions, or without Sequentials",
    )
    add_output(parser, "text", "json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compares or writes; :data:`FINDINGS` if a fusion is lost."""
    entries = {} if args.update and not args.lock.exists() else read(args.lock)
    target = target_of(args)
    now = plans(target)
    if args.update:
        if not args.allow_none:
            refuse_nothing(target, now)
        write(updated(entries, target, now).rstrip("\n"), args.lock)
        write(f"{target.name}: locked in {args.lock}; Sequentials: {len(now)}", args.output)
        return FINE
    found = compared(entries, target, now, args.lock)
    if not (found["locked"] or args.allow_none):
        refuse_nothing(target, now)
        raise TargetError.explained(
            "Fusions that are locked can be checked, and the entry has none",
            where=f"{args.lock}: {target.name}",
            remedy=f"Write it again with --update, {ALLOW_NONE}",
        )
    shown = json.dumps(found, indent=1) if args.format == "json" else text(found)
    write(shown, args.output)
    return FINDINGS if found["lost"] else FINE
