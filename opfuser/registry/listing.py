"""The fusions, settings and plug-ins that there are, as data."""

from __future__ import annotations

from typing import NamedTuple

from ..core.fusion import Requires, Stage
from .configuration import EffectiveSetting, FusionConfig, Setting
from .entry_points import PluginInfo
from .handles import registry


class FusionInfo(NamedTuple):
    """One registered fusion, as listed by :func:`fusions`.

    Attributes:
        name: by which it is switched.
        stage: ``"forward"``, ``"backward"`` or ``"joint"``.
        origin: ``"opfuser"``, the name of the installed package that it is a plug-in of, or
            ``"user"``.
        requires: what the machine and the call must have.
        enabled: whether it is on, but for overrides of a configuration.
        disabled_by: what switched it off; empty if it is on.
    """

    name: str
    stage: Stage
    origin: str
    requires: Requires
    enabled: bool
    disabled_by: str


def effective(config: FusionConfig | None = None) -> list[EffectiveSetting]:
    """Every value that is in force, with what states it, for the fusions in the order they run.

    Args:
        config: that of a Sequential (``seq.fusion_config``), for what is in force in it.
    """
    handles = list(registry)
    configs = (*registry.configs, *([] if config is None else [config]))
    out = []
    for handle in handles:
        stated = [s for c in configs for s in c.by_fusion.get(handle.name, ())]
        switched = handle.switched()
        default = Setting(handle.name, "enabled", handle.by_default, "", "default")
        stated = [default, *stated]
        if switched is not None:
            stated = [*(s for s in stated if s.key != "enabled"), switched]
        in_force: dict[tuple[str, str], Setting] = {}
        for setting in stated:
            if not setting.glob:  # takes the place of what came before it
                in_force = {at: s for at, s in in_force.items() if at[0] != setting.key}
            in_force[setting.key, setting.glob] = setting
        for s in in_force.values():
            out.append(
                EffectiveSetting(handle.name, handle.stage, s.key, s.value, s.origin, s.glob)
            )
    return out


def plugins() -> tuple[PluginInfo, ...]:
    """The plug-ins that were found, and what each registered, or why it could not be loaded."""
    registry.stages()
    return registry.plugins


def fusions() -> list[FusionInfo]:
    """All registered fusions in the order in which they are applied."""
    return [
        FusionInfo(h.name, h.stage, h.origin, h.requires, not h.disabled_by(), h.disabled_by())
        for h in registry
    ]
