"""``opfuser explain``: what is fused in a model, and why other things are not."""

from __future__ import annotations

import argparse
import importlib
import json
from textwrap import wrap
from typing import Any

from ..engine.folding import joined_names
from ..engine.plan import Plan
from ..errors import TargetError
from ..report.conversion import no_sequences
from ..report.diff import check_fusion_name
from ..report.inputs import did_you_mean
from ..report.picture import picture
from ..report.plan_json import Explained, document, equal_plans, explained
from ..report.traffic import Totals
from .arguments import FINE, Subparsers, add_command, add_model, add_output, target_of, write


def add(subparsers: Subparsers) -> None:
    """Adds the command to the parser of the command line."""
    parser = add_command(
        subparsers,
        "explain",
        "show what is fused, and why other things are not",
        """\
Shows the plan of every Sequential in a model: the steps of both passes, and
what became of each fusion; and what a call launches, reads, writes and saves
for backward on a GPU, which is counted without one. The model is called once,
without data on the meta device.

Models that hf:NAME names are shown as opfuser.hf.apply runs them.""",
        """\
  opfuser explain my_package.model:build --input 8x2048x4096:bf16
  opfuser explain my_package.model:build --why norm_linear --at 104
  opfuser explain my_package.model:build --program
  opfuser explain my_package.model:build --format html -o plan.html
  opfuser explain hf:LlamaForCausalLM --config small.json --dtype bf16""",
    )
    add_model(parser)
    parser.add_argument(
        "--sequence",
        default=None,
        metavar="PATH",
        help='only the Sequential with this path in the model; "" is the model itself',
    )
    parser.add_argument(
        "--why", default=None, metavar="NAME", help="say what became of this fusion, and why"
    )
    parser.add_argument(
        "--at",
        default=None,
        type=int,
        metavar="N",
        help="with --why: only at the basic operation with this number",
    )
    parser.add_argument(
        "--program",
        action="store_true",
        help="also show the program that each plan is executed as",
    )
    add_output(parser, "text", "json", "html", "svg")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plans, or what became of one fusion."""
    if args.program and (args.why is not None or args.format in ("html", "svg")):
        raise TargetError.explained(
            "--program goes with plans as text or JSON",
            received=f"--why {args.why}, --format {args.format}",
        )
    if args.why is not None or args.at is not None:
        write(_reasons(args), args.output)
        return FINE
    found = _chosen(explained(target_of(args)), args.sequence)
    if args.format == "json":
        shown = json.dumps(document(found, programs=args.program), indent=1)
    elif args.format == "html":
        shown = _optional("page").page(found.plans, found.target.name, found.traffic, found.missing)
    elif args.format == "svg":
        plan = _only(found.plans)
        counted = found.traffic
        own = counted and counted.sequences.get(next(iter(found.plans)))
        shown = picture(plan, own, counted and counted.totals)
    else:
        shown = _text(found, args.program)
    write(shown, args.output)
    return FINE


def _reasons(args: argparse.Namespace) -> str:
    if args.why is None or args.format != "text":
        raise TargetError.explained(
            "--at goes with --why, and both with text",
            received=f"--why {args.why}, --at {args.at}, --format {args.format}",
        )
    target = target_of(args)
    check_fusion_name(args.why)  # the module of the model may register some
    found = _chosen(explained(target, count=False), args.sequence)
    plans = {"": _only(found.plans)} if args.at is not None else found.plans
    for plan in plans.values():
        if args.at is not None and not 0 <= args.at < len(plan.basic_ops):
            raise TargetError.explained(
                f"The plan has operations 0 to {len(plan.basic_ops) - 1}",
                received=f"--at {args.at}",
            )
    return "\n\n".join(
        _titled(joined_names(paths), plans[paths[0]].why(args.why, args.at))
        for paths in equal_plans(plans)
    )


def _chosen(found: Explained, path: str | None) -> Explained:
    """Only the Sequential asked for, if one is."""
    if not found.plans:
        raise no_sequences(found.target)
    if path is None:
        return found
    if path not in found.plans:
        raise TargetError.explained(
            "No Sequential with that path has a plan of its own",
            received=repr(path),
            remedy=did_you_mean(path, found.plans) or f"There are {_paths(found.plans)}",
        )
    return found.only(path)


def _only(plans: dict[str, Plan]) -> Plan:
    if len(plans) > 1:
        raise TargetError.explained(
            "This is about one plan",
            received=f"a model with {len(plans)}",
            remedy=f"Choose one with --sequence: {_paths(plans)}",
        )
    return next(iter(plans.values()))


def _paths(plans: dict[str, Plan]) -> str:
    return ", ".join(path or '""' for path in plans)


def _optional(module: str) -> Any:
    """A module of ``opfuser.report`` that needs packages of the extra ``tools``."""
    try:
        return importlib.import_module(f"opfuser.report.{module}")
    except ModuleNotFoundError as error:
        raise TargetError.explained(
            f"This format needs the package {error.name}", remedy="pip install opfuser[tools]"
        ) from error


def _text(found: Explained, programs: bool) -> str:
    texts = []
    traffic = found.traffic
    one = len(found.plans) == 1
    for paths in equal_plans(found.plans):
        lines = [_titled(joined_names(paths), str(found.plans[paths[0]]))]
        if traffic is not None:
            each = "" if len(paths) == 1 else f", {len(paths)} of them"
            lines.append(_counted(each, (traffic if one else traffic.only(*paths)).totals))
        if programs:
            lines += ["", found.plans[paths[0]].program]
        texts.append("\n".join(lines))
    if found.missing:
        texts.append("\n".join(wrap(f"No launches and bytes: {found.missing}", 80)))
    elif traffic is not None and not one:
        texts.append("whole model, " + _counted("", traffic.totals))
    return "\n\n".join(texts)


def _counted(of: str, totals: Totals) -> str:
    launches, read, written, saved = map(" ".join, totals.figures)
    lines = [
        f"on a GPU, a call and its backward{of}:",
        launches,
        f"{read}, {written}",
        saved,
        *filter(None, [totals.outside]),
    ]
    return "\n  ".join(lines)


def _titled(path: str, text: str) -> str:
    return f"{path}\n{'-' * len(path)}\n{text}" if path else text
