"""``opfuser audit``: what could be fused in a model and is not."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import counted
from ..report.audit import audit
from .arguments import FINDINGS, FINE, Subparsers, add_command, add_model, target_of, write


def add(subparsers: Subparsers) -> None:
    """Adds the command to the parser of the command line."""
    parser = add_command(
        subparsers,
        "audit",
        "list what could be fused and is not",
        "Lists what could be fused in a model and is not, as YAML: registered fusions that\n"
        "something blocks, and formulas for which a kernel is known. A model of torch.nn or of\n"
        "Hugging Face is fine. What saves most comes first. Exit status 3 if there is something;\n"
        "if not, nothing is printed or written.\n\n"
        "Models that hf:NAME names are audited as transformers computes them.",
        "  opfuser audit my_package.model:build --input 8x2048x4096:bf16 --write fusion_todo.yml\n"
        "  opfuser audit hf:LlamaForCausalLM --config small.json",
    )
    add_model(parser)
    parser.add_argument(
        "--write", type=Path, default=None, metavar="FILE", help="write to a file, and print a line"
    )
    parser.add_argument(
        "--applied",
        action="store_true",
        help="with hf:NAME, audit what opfuser.hf.apply makes of the model",
    )
    parser.set_defaults(run=run, applied=False)


def run(args: argparse.Namespace) -> int:
    """Prints or writes the audit."""
    target = target_of(args)
    todo = audit(target.model, target.inputs, target.name)
    if not todo.missed_fusions:
        return FINE
    write(todo.as_yaml().rstrip("\n"), args.write)
    if args.write is not None:
        sites = sum(len(missed.instances) for missed in todo.missed_fusions)
        operations = counted(len(todo.missed_fusions), "fused operation")
        print(f"{args.write}: {operations}, {counted(sites, 'site')}")
    return FINDINGS
