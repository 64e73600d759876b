"""``opfuser doctor``: versions, device, which kernels are active, and what is wrong."""

from __future__ import annotations

import argparse
import json
from textwrap import wrap

from ..report.doctor import Examination, examine
from .arguments import FINDINGS, FINE, Subparsers, add_command, add_output, write


def add(subparsers: Subparsers) -> None:
    """Adds the command to the parser of the command line."""
    parser = add_command(
        subparsers,
        "doctor",
        "show versions, device and active kernels, and what is wrong",
        """\
Shows the versions, the device, which kernels run on it and why others do not,
the packages of extras, plug-ins, which fusions are off and by what, and the
environment variables that matter; then what is wrong. Include its output in
every bug report.

Exit status: 0; 3 if something is wrong.""",
        "  opfuser doctor",
    )
    add_output(parser, "text", "json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what was found; :data:`FINDINGS` if something is wrong."""
    found = examine()
    write(_json(found) if args.format == "json" else _text(found), args.output)
    return FINDINGS if found.problems else FINE


def _json(found: Examination) -> str:
    sections = {title: [row._asdict() for row in rows] for title, rows in found.sections}
    problems = list(found.problems)
    schema = "opfuser.doctor/1"
    return json.dumps({"schema": schema, "sections": sections, "problems": problems}, indent=1)


def _text(found: Examination) -> str:
    lines: list[str] = []
    width = max(len(row.name) for _, rows in found.sections for row in rows)
    for title, rows in found.sections:
        lines += [f"{title}:"]
        for row in rows:
            head = f"  {row.name:<{width}}  "
            lines += wrap(row.value, 80, initial_indent=head, subsequent_indent=" " * len(head))
    lines.append("")
    for problem in found.problems:
        # Commands in it are to be copied.
        lines += wrap(f"! {problem}", 80, subsequent_indent="  ", break_on_hyphens=False)
    if not found.problems:
        lines.append("Nothing is wrong.")
    return "\n".join(lines)
