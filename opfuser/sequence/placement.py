"""Where the operations of a Sequential stand in a model, and what configurations hold there."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence

from torch import nn

from ..core.change_tracking import Clock
from ..core.op_base import FusedOperation, FusibleOperation
from ..core.op_base.kinds import has_called_parts
from ..engine.plan import expand
from ..fuser import OperationFuser
from ..op import fuser_alone
from ..registry.configuration import FusionConfig, Place, glob_names
from .groups import Group
from .module_sequence import ModuleSequence, Stands

logger = logging.getLogger("opfuser")


def standing(sequence: ModuleSequence) -> Stands:
    """The beginning of the paths of its operations, and the configurations that reach some.

    Both are those of the outermost Sequential that calls it, if one does.
    """
    above = ""
    around: tuple[tuple[str, FusionConfig], ...] = ()
    outer = None if sequence._within is None else sequence._within[0]()
    if sequence._within is not None and outer is not None:
        path = sequence._within[1]
        if module_at(outer, path) is sequence:  # it was not taken away since
            below, configs = outer._stands if outer._seen == Clock.now else standing(outer)
            above = f"{below}{path}."
            around = tuple(c for c in configs if above.startswith(c[0]))
    return above, (*around, *_configured(sequence, above))


def _configured(sequence: ModuleSequence, prefix: str) -> Iterator[tuple[str, FusionConfig]]:
    """The configurations of this Sequential and of those that it takes the operations of.

    Each with the beginning of the paths of their operations, the outer ones first.
    """
    if sequence.fusion_config is not None:
        yield prefix, sequence.fusion_config
    for name, module in sequence._modules.items():
        if isinstance(module, ModuleSequence) and module.joins_outer():
            yield from _configured(module, f"{prefix}{name}.")


def place_operations(
    sequence: ModuleSequence,
    groups: Sequence[Group],
    above: str,
    configs: Sequence[tuple[str, FusionConfig]],
) -> None:
    """Says to the groups where their operations stand, and what configurations hold there."""
    paths = paths_of(sequence)
    ops = [op for group in groups for op in group.ops]
    places = {id(op): _place(above + paths.get(id(op), ""), configs) for op in ops}
    reached = [place.path for place in places.values()]
    for group in groups:
        if isinstance(group.callee, OperationFuser):
            group.callee.stand(tuple(places[id(op)] for op in group.ops))
        elif isinstance(group.callee, FusibleOperation) and group.split == "HOOK":
            parts = expand(group.callee) if has_called_parts(group.callee) else [group.callee]
            for part in parts:  # each is called by itself
                fuser_alone(part).stand(tuple(places[id(op)] for op in expand(part)))
        elif isinstance(group.callee, ModuleSequence):
            path = paths[id(group.callee)]
            group.callee.__dict__.update(_within=(weakref.ref(sequence), path), _seen=-1)
            reached += [f"{above}{path}.{inner}" for inner in paths_of(group.callee).values()]
        elif configs and any(isinstance(m, ModuleSequence) for m in group.callee.modules()):
            logger.warning(
                "the fusion_config of a Sequential does not reach the Sequentials in %s, which "
                "is called as a module; give them their own",
                type(group.callee).__name__,
            )
    for prefix, config in configs:
        if not prefix.startswith(above):
            continue  # the outer one has looked
        inside = [path[len(prefix) :] for path in reached if path.startswith(prefix)]
        for glob in config.globs():
            if not any(glob_names(glob, path) for path in inside):
                logger.warning(
                    "%s: the override %r names no operation of its Sequential", config.source, glob
                )


def paths_of(sequence: ModuleSequence) -> dict[int, str]:
    """The path of each module and operation, by id."""
    paths = {id(module): path for path, module in sequence.named_modules()}
    for path, module in list(sequence.named_modules()):
        if isinstance(module, FusedOperation):
            paths.update({id(op): path for op in module.basic_ops if id(op) not in paths})
    return paths


def module_at(module: nn.Module | None, path: str) -> nn.Module | None:
    """The module at a path inside of another one; None if there is none."""
    for name in path.split("."):
        module = None if module is None else module._modules.get(name)
    return module


def _place(path: str, configs: Sequence[tuple[str, FusionConfig]]) -> Place:
    around = [(config, path[len(p) :]) for p, config in configs if path.startswith(p)]
    return Place(path, tuple(around))
