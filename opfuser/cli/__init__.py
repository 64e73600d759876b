"""The command ``opfuser``: each module here is one of its commands.

A module of a command has ``add(subparsers)``, which adds its parser and sets ``run``, a function of
the parsed arguments that returns the exit status, as the parser's default. What a command says goes
to the standard output; a mistake of the caller is an :class:`opfuser.errors.OpfuserError`, whose
text goes to the standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import OpfuserError
from . import audit, bench, bisect, check, config, diff, doctor, explain, fusions
from .arguments import ERROR, FINE

__all__ = ["COMMANDS", "main", "parser"]

COMMANDS = (explain, diff, fusions, config, audit, check, bisect, bench, doctor)
"""In the order in which help lists them."""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors like all others."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(ERROR, f"{self.prog}: {message}. See {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line, with those of all commands."""
    top = _Parser(
        prog="opfuser",
        description="Shows what opfuser fuses in a model, why it does not, and what that gains.",
        epilog="Exit status: 0 fine, 1 error, 3 findings.",
    )
    top.add_argument("--version", action="version", version=f"opfuser {__version__}")
    subparsers = top.add_subparsers(title="commands", metavar="command", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 fine, 1 error, 3 findings.

    Args:
        argv: the command line without the program's name; None is that of the process.
    """
    # As of `python -m`: a model is usually in the folder in which one works.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else ERROR
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except OpfuserError as error:
        print(f"opfuser: {' '.join(str(error).split())}", file=sys.stderr)
        return ERROR
    except BrokenPipeError:  # the reader, such as head, has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    return status
