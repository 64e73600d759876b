"""``opfuser bisect``: which fusion makes a command fail."""

from __future__ import annotations

import argparse

from ..errors import TargetError, counted
from ..report.bisect import Command, Found, candidates, find
from .arguments import FINDINGS, FINE, Subparsers, add_command


def add(subparsers: Subparsers) -> None:
    """Adds the command to the parser of the command line."""
    parser = add_command(
        subparsers,
        "bisect",
        "find the fusion that makes a command fail",
        """\
Runs a command repeatedly with some fusions off (OPFUSER_DISABLE), and finds
the fusion, or the combination of fusions, with which it fails. The command
fails if its exit status is not 0. Runs with another exit status than the first
one, or without the text of --match in their output, do not count. Finding one
fusion of 20 takes about 10 runs.

Exit status: 0 if no fusion is the cause; 3 if one is.""",
        """\
  opfuser bisect -- python -m pytest tests/test_model.py -x
  opfuser bisect --match AssertionError -- python train.py --steps 20""",
    )
    parser.add_argument(
        "--match",
        default="",
        metavar="REGEX",
        help="count only failures whose output contains this",
    )
    parser.add_argument(
        "--fusion",
        action="append",
        default=[],
        metavar="NAME",
        help="a fusion that the command registers itself; once per fusion",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- command")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command until the cause is known; :data:`FINDINGS` if it is a fusion."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise TargetError.explained(
            "The command goes after two dashes", remedy="Write opfuser bisect -- python my_test.py"
        )
    command = Command(words, args.match)
    names = list(dict.fromkeys([*candidates(), *args.fusion]))
    found = find(names, command.run, lambda line: print(line, flush=True))
    print(_verdict(found, command))
    return FINDINGS if found.causes or found.unknown else FINE


def _verdict(found: Found, command: Command) -> str:
    if not found.fails:
        return "The command passes: there is no failure to look for."
    if found.without:
        return "The command fails in the same way without any fusion: no fusion is the cause."
    if found.unknown:
        return (
            "The cause is a fusion that the command registers itself: name those that it has with "
            "--fusion."
        )
    lines = []
    for cause in found.causes:
        if len(cause) == 1:
            lines.append(f"{cause[0]} causes the failure: the command fails with it alone.")
        else:
            names = ", ".join(cause)
            lines.append(
                f"No single fusion causes the failure; {names} do together: without one of them "
                "the others pass."
            )
    if found.others:
        lines.append(f"{counted(found.others, 'run')} failed in another way and did not count.")
    if found.remedy_passes:
        lines.append(f"It passes with {command.settings(found.names)}")
    else:
        lines.append("With these off and all others on it does not pass either.")
    return "\n".join(lines)
