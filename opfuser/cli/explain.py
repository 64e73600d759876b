"""``opfuser explain``: what is fused in a model, and why other things are not."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..report.target import plans
from .arguments import Subparsers, add_command, add_model, target_of, write

__all__ = ["add"]


def add(subparsers: Subparsers) -> None:
    """Adds the command to the parser of the command line."""
    parser = add_command(
        subparsers,
        "explain",
        "show what is fused, and why other things are not",
        "Shows the plan of every Sequential in a model: the steps of both passes, and what became "
        "of each fusion.",
        "  opfuser explain my_package.model:build --input 8x2048x4096:bf16",
    )
    add_model(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=None, metavar="FILE", help="write to a file"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plans."""
    target = target_of(args)
    texts = [
        f"{path or target.name}\n{plan}" if path else str(plan)
        for path, plan in plans(target).items()
    ]
    write("\n\n".join(texts), args.output)
    return 0
