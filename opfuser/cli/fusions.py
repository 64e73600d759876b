"""``opfuser fusions``: the fusions that there are, in the order in which they run."""

from __future__ import annotations

import argparse
import inspect
import json
from textwrap import wrap

from ..core.fusion import Fusion, Requires
from ..registry import FusionHandle, effective, plugins, registry
from ..registry import fusions as registered_fusions
from ..report.diff import check_fusion_name
from .arguments import FINE, Subparsers, add_command, add_output, write


def add(subparsers: Subparsers) -> None:
    """Adds the command to the parser of the command line."""
    parser = add_command(
        subparsers,
        "fusions",
        "list the fusions, or show one",
        "Lists the fusions in the order in which they run: those of opfuser, and those\n"
        "of plug-ins.",
        "  opfuser fusions list\n  opfuser fusions show norm_linear",
    )
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    listing = add_command(
        commands,
        "list",
        "list all fusions",
        "Lists the fusions in the order in which they run, where they come from, and what\n"
        "switched them off; and plug-ins that could not be loaded.",
        "  OPFUSER_DISABLE=norm_linear opfuser fusions list",
    )
    add_output(listing, "text", "json")
    listing.set_defaults(run=run_list)
    show = add_command(
        commands,
        "show",
        "show one fusion",
        "Shows what a fusion replaces, what it requires, and which settings are in force\nfor it.",
        "  opfuser fusions show norm_linear",
    )
    show.add_argument("name", metavar="NAME", help="the name of a fusion")
    add_output(show)
    show.set_defaults(run=run_show)


def run_list(args: argparse.Namespace) -> int:
    """Lists the fusions and the plug-ins."""
    infos = registered_fusions()
    if args.format == "json":
        document = {
            "schema": "opfuser.fusion_list/1",
            "fusions": [{**info._asdict(), "requires": _required(info.requires)} for info in infos],
            "plugins": [plugin._asdict() for plugin in plugins()],
        }
        write(json.dumps(document, indent=1), args.output)
        return FINE
    overridden = {row.name for row in effective() if row.setting == "enabled" and row.glob}
    rows = [("fusion", "stage", "origin", "state")]
    for info in infos:
        state = "on" if info.enabled else f"off ({info.disabled_by})"
        if info.name in overridden:
            state += ", with overrides"
        rows.append((info.name, info.stage, info.origin, state))
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]])
        for row in rows
    ]
    lines += [
        f"plug-in {p.name} of {p.distribution} ({p.value}) failed to load: {p.error}"
        for p in plugins()
        if p.error
    ]
    write("\n".join(lines), args.output)
    return FINE


def run_show(args: argparse.Namespace) -> int:
    """Shows one fusion."""
    check_fusion_name(args.name)
    (handle,) = [handle for handle in registry if handle.name == args.name]
    lines = [f"{handle.name}: {handle.stage} fusion, origin {handle.origin}"]
    lines += ["", *_about(handle), ""]
    for title, texts in (
        ("replaces", _pattern(handle)),
        ("is in", [_named(handle.function)]),
        ("requires", [_required(handle.requires) or "nothing"]),
        ("runs", [_neighbours(handle)]),
        (
            "settings",
            [
                f"{f'{row.glob}: ' if row.glob else ''}{row.setting} {value} ({row.origin})"
                for row in effective()
                if row.name == handle.name
                for value in [_value(row.value)]
            ],
        ),
    ):
        for n, text in enumerate(texts):
            head = title if n == 0 else ""
            # Paths stay whole, so that they can be copied.
            lines += wrap(
                text,
                80,
                initial_indent=head.ljust(10),
                subsequent_indent=" " * 10,
                break_long_words=False,
                break_on_hyphens=False,
            )
    write("\n".join(lines), args.output)
    return FINE


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(dtype).removeprefix("torch.") for dtype in value) or "any"
    return str(value).lower()


def _about(handle: FusionHandle) -> list[str]:
    """What the fused operation, the function or their module says about itself, to begin with."""
    function = handle.function.build if isinstance(handle.function, Fusion) else handle.function
    text = inspect.getdoc(function)
    if text is None:
        text = inspect.getdoc(inspect.getmodule(function)) or ""
    return wrap(" ".join(text.partition("\n\n")[0].split()), 80)


def _pattern(handle: FusionHandle) -> list[str]:
    """The elements of the pattern, those in brackets where present."""
    if not isinstance(handle.function, Fusion):
        return ["what the function decides"]
    names = []
    for element in handle.function.elements:
        name = " | ".join(kind.__name__ for kind in element.types) or f"{element.name} ..."
        names.append(f"[{name}]" if element.optional else name)
    return names


def _named(function: object) -> str:
    maker = function.build if isinstance(function, Fusion) else function
    named = maker if hasattr(maker, "__qualname__") else type(maker)
    name = getattr(named, "__qualname__", "")
    where = str(named.__module__)
    return where if name.startswith(("_", "<")) else f"{where}:{name}"


def _required(requires: Requires) -> str:
    texts = []
    if requires.device is not None:
        texts.append(f"device {requires.device}")
    if requires.min_capability is not None:
        texts.append(f"sm_{requires.min_capability}")
    if requires.package is not None:
        texts.append(f"package {requires.package}")
    if requires.recipe:
        texts.append("a recipe of quantised compute")
    return ", ".join(texts)


def _neighbours(handle: FusionHandle) -> str:
    names = [other.name for other in registry if other.stage == handle.stage]
    at = names.index(handle.name)
    text = f"{at + 1} of {len(names)} {handle.stage} fusions"
    if at:
        text += f", after {names[at - 1]}"
    return text + (f", before {names[at + 1]}" if at + 1 < len(names) else "")
