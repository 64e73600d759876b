"""What switches and configures fusions, for good or until a block ends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import Self

from .configuration import FusionConfig
from .handles import registry


class _Block:
    """Takes effect when made; as a context manager, until the block ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        registry.take_back(self)


class _Switch(_Block):
    def __init__(self, names: Sequence[str], on: bool, by: str) -> None:
        registry.switch(self, names, on, by)


def disable(*names: str) -> _Switch:
    """Switches fusions off; inside ``with``, until the block ends.

    Args:
        *names: of fusions; ``"*"`` for all but those that are switched by their names.

    Raises:
        UnknownFusionError: no fusion has that name.
    """
    return _Switch(names, False, "opfuser.disable")


def enable(*names: str) -> _Switch:
    """Switches fusions on; inside ``with``, until the block ends.

    Args:
        *names: of fusions, as of :func:`disable`.

    Raises:
        UnknownFusionError: no fusion has that name.
    """
    return _Switch(names, True, "opfuser.enable")


class fusion_config(_Block):  # noqa: N801 - used as a function
    """Applies a configuration of fusions; inside ``with``, until the block ends.

    A later configuration has precedence over an earlier one and over the file of
    ``OPFUSER_CONFIG``; that of a Sequential has precedence over all of them. Switches
    (:func:`disable`, :func:`enable`, their variables and ``handle.enabled``) have the last word on
    whether a fusion is on.

    Args:
        config: a mapping in the schema ``opfuser.fusions/1``, or the path of a YAML file in it.

    Raises:
        ConfigError: the file cannot be read; a key, a name, a type or a value is not of the schema.
    """

    def __init__(self, config: FusionConfig | Mapping[str, Any] | str | os.PathLike[str]) -> None:
        self.config = registry.read(config, "opfuser.fusion_config")
        registry.configure(self, self.config)
