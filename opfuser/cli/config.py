"""``opfuser config``: the configuration of fusions that ships, that is in force, or in a file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ..engine.plan import Plan
from ..errors import TargetError, counted
from ..registry import effective, registry
from ..registry.configuration import EffectiveSetting, FusionConfig, glob_names, in_order
from ..registry.configuration_files import as_file
from ..report.target import plans
from .arguments import (
    FINDINGS,
    FINE,
    MODEL,
    MODEL_HELP,
    Subparsers,
    add_command,
    add_inputs,
    add_output,
    target_of,
    write,
)


def add(subparsers: Subparsers) -> None:
    """Adds the command to the parser of the command line."""
    parser = add_command(
        subparsers,
        "config",
        "show or check the configuration of fusions",
        "Shows or checks configurations of fusions, which are files in the schema\n"
        "opfuser.fusions/1.",
        "  opfuser config show > fusions.yaml\n"
        "  OPFUSER_CONFIG=fusions.yaml opfuser config show --effective\n"
        "  opfuser config check fusions.yaml",
    )
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    show = add_command(
        commands,
        "show",
        "print the defaults, or what is in force",
        "Prints the defaults of the fusions, in the order in which they run, as a file\n"
        "that can be edited.",
        "  opfuser config show --effective",
    )
    show.add_argument(
        "--effective",
        action="store_true",
        help="the settings in force in this environment, each with its origin",
    )
    add_output(show)
    show.set_defaults(run=run_show)
    check = add_command(
        commands,
        "check",
        "check a file",
        "Checks a configuration file. With a model, also checks that every override matches\n"
        "operations of the model: exit status 3 if one matches none.",
        "  opfuser config check fusions.yaml\n"
        "  opfuser config check fusions.yaml my_package.model:build --input 8x64:fp32",
    )
    check.add_argument("file", metavar="FILE", help="a configuration, in YAML")
    check.add_argument("model", metavar=MODEL, nargs="?", help=MODEL_HELP)
    add_inputs(check)
    check.set_defaults(run=run_check)


def run_show(args: argparse.Namespace) -> int:
    """Prints the defaults, or what is in force."""
    if not args.effective:
        registry.stages()  # with plug-ins
        defaults = [
            EffectiveSetting(h.name, h.stage, "enabled", h.by_default, "default")
            for h in registry.registered()
        ]
        write(as_file(defaults), args.output)
        return FINE
    rows = effective()
    by = [config.source for config in registry.configs if config.orders]
    write(as_file(rows, origins=True, ordered_by=", ".join(by)), args.output)
    return FINE


def run_check(args: argparse.Namespace) -> int:
    """Says what a file states, and which of its overrides name nothing."""
    # A model may bring fusions, which the file may name.
    target = None if args.model is None else target_of(args)
    config = registry.read(args.file, "")
    globs = config.globs()
    print(
        f"{args.file}: {counted(len(config.settings), 'setting')} of "
        f"{counted(len({s.fusion for s in config.settings}), 'fusion')}, "
        f"{counted(len(globs), 'override')}"
    )
    for text in _moved(config):
        print(f"  order: {text}")
    if target is None:
        if args.input:
            raise TargetError.explained(
                "Inputs are those of a model",
                received="--input without a model",
                remedy="Name the model behind the file",
            )
        return FINE
    found = plans(target)
    counts = {glob: _reached(glob, found.values()) for glob in globs}
    for glob, count in counts.items():
        print(f"  override {glob!r}: {counted(count, 'operation')} of {args.model}")
    return FINE if all(counts.values()) else FINDINGS


def _moved(config: FusionConfig) -> Iterable[str]:
    """How ``order: listed`` changes the order of the fusions."""
    for order in config.orders:
        names = [handle.name for handle in registry.registered()]
        for stage in dict.fromkeys(registry.stages().values()):
            before = [name for name in names if registry.stages()[name] == stage]
            after = in_order(before, order)
            if after != before:
                yield f"{stage} fusions run as {', '.join(n for n in after if n in order)}"


def _reached(glob: str, found: Iterable[Plan]) -> int:
    return sum(glob_names(glob, name) for plan in found for name in plan.names)
