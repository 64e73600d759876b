"""Configurations of fusions as text: files in the schema ``opfuser.fusions/1``."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..core.fusion import STAGES, Stage
from ..errors import ConfigError, explain
from .configuration import EffectiveSetting, FusionConfig, Setting, as_yaml

SCHEMA = "opfuser.fusions/1"
KEYS = ("enabled", "min_numel", "dtypes")
_TOP = ("schema", "order", *STAGES, "overrides")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
_DEPTH = 8  # a YAML alias may contain itself


class _Node(NamedTuple):
    """A scalar, a list of nodes, or a dict of nodes, and the place where it stands."""

    value: Any
    where: str

    def at(self, key: str) -> str:
        return f"{self.where}, {key}"


def read(
    source: FusionConfig | Mapping[str, Any] | str | os.PathLike[str],
    known: Mapping[str, Stage],
    given_to: str,
) -> FusionConfig:
    """The configuration that a file or a mapping states.

    Args:
        source: a mapping, or the path of a YAML file.
        known: the stage of each registered fusion.
        given_to: the origin of the values of a mapping.

    Raises:
        ConfigError: the file cannot be read; a key, a name, a type or a value is not of the schema.
    """
    if isinstance(source, FusionConfig):
        return source
    if isinstance(source, Mapping):
        return _parsed(_from_objects(source, given_to), known, given_to)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError.explained(
            "A configuration is a mapping or the path of a file",
            where=given_to,
            received=type(source).__name__,
        )
    file = os.fspath(source)
    root = _from_yaml(file)
    if not isinstance(root.value, dict) or "schema" not in root.value:
        raise ConfigError.explained(
            "A configuration file states its schema",
            where=file,
            remedy=f"Begin it with the line 'schema: {SCHEMA}'",
        )
    return _parsed(root, known, file)


def _from_objects(value: Any, where: str, depth: int = 0) -> _Node:
    if depth > _DEPTH:
        return _Node("...", where)
    if isinstance(value, Mapping):
        inside = {
            str(key) if isinstance(key, int) else key: _from_objects(item, where, depth + 1)
            for key, item in value.items()
        }
        return _Node(inside, where)
    if isinstance(value, (list, tuple)):
        return _Node([_from_objects(item, where, depth + 1) for item in value], where)
    return _Node(value, where)


def _from_yaml(file: str) -> _Node:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError.explained(
            "A configuration file is read with PyYAML, which is not installed",
            where=file,
            remedy="Run pip install opfuser[tools]",
        ) from error
    try:
        with open(file, encoding="utf-8") as opened:
            loader = yaml.SafeLoader(opened)
            root = loader.get_single_node()
            return _from_node(loader, root, file, 1)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError.explained(
            "The configuration file cannot be read", where=file, received=why
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = file if mark is None else f"{file}:{mark.line + 1}"
        why = getattr(error, "problem", None) or str(error)
        raise ConfigError.explained(
            "A configuration file is YAML", where=where, received=why
        ) from error


def _from_node(loader: Any, node: Any, file: str, line: int, depth: int = 0) -> _Node:
    """A node of PyYAML with its lines; keys are read as text, so that ``0`` names a module."""
    where = f"{file}:{line}"
    if depth > _DEPTH or node is None:
        return _Node("..." if node is not None else None, where)
    if node.id == "sequence":
        lines = [item.start_mark.line + 1 for item in node.value]
        items = [_from_node(loader, i, file, n, depth + 1) for i, n in zip(node.value, lines)]
        return _Node(items, where)
    if node.id == "scalar":
        return _Node(_scalar(loader, node, where), where)
    out: dict[str, _Node] = {}
    for key, item in node.value:
        at = key.start_mark.line + 1
        if not isinstance(key.value, str) or key.value in out:
            name = key.value if isinstance(key.value, str) else key.id
            raise ConfigError.explained(
                "A key is a word that stands once in its mapping",
                where=f"{file}:{at}",
                received=repr(name),
            )
        out[key.value] = _from_node(loader, item, file, at, depth + 1)
    return _Node(out, where)


def _scalar(loader: Any, node: Any, where: str) -> Any:
    try:
        return loader.construct_object(node)
    except ValueError as error:  # of Python, for a date or a tagged number that is none
        raise ConfigError.explained(
            "A configuration file is YAML", where=where, received=str(error)
        ) from error


def _parsed(root: _Node, known: Mapping[str, Stage], source: str) -> FusionConfig:
    misplaced = [key for key in root.value if key in known] if isinstance(root.value, dict) else []
    if misplaced:
        raise ConfigError.explained(
            "A fusion is listed under its stage",
            where=root.value[misplaced[0]].where,
            received=f"{misplaced[0]} at the top",
            remedy=f"Move it to {known[misplaced[0]]}",
        )
    top = _mapping(root, "the configuration", _TOP)
    if "schema" in top and top["schema"].value != SCHEMA:
        raise ConfigError.explained(
            f"The schema of a configuration is {SCHEMA}",
            where=top["schema"].where,
            received=_shown(top["schema"]),
        )
    settings: list[Setting] = []
    listed: list[str] = []
    for stage in STAGES:
        if stage in top:
            names = _mapping(top[stage], stage, known)
            for name, node in names.items():
                if known[name] != stage:
                    raise ConfigError.explained(
                        "A fusion is listed under its stage",
                        where=node.at(stage),
                        received=name,
                        remedy=f"Move it to {known[name]}",
                    )
                settings += _settings(node, name, "")
            listed += names
    overrides = _mapping(top["overrides"], "overrides") if "overrides" in top else {}
    for glob, node in overrides.items():
        for name, inside in _mapping(node, f"overrides, {glob}", known).items():
            settings += _settings(inside, name, glob)
    orders = (tuple(listed),) if _is_listed(top.get("order")) and listed else ()
    return FusionConfig(source, tuple(settings), orders)


def _is_listed(order: _Node | None) -> bool:
    if order is None or order.value == "registered":
        return False
    if order.value != "listed":
        raise ConfigError.explained(
            "The order is 'registered', or 'listed' for that of the configuration",
            where=order.where,
            received=_shown(order),
        )
    return True


def _mapping(node: _Node, what: str, keys: Iterable[str] | None = None) -> dict[str, _Node]:
    """The items of a mapping, whose keys are among ``keys``."""
    if not isinstance(node.value, dict):
        raise ConfigError.explained(
            "Settings stand in mappings",
            where=node.at(what),
            received=_shown(node),
            remedy="Write settings below the name, as 'enabled: false'",
        )
    for key, item in node.value.items():
        if not isinstance(key, str) or not key or (keys is not None and key not in keys):
            raise ConfigError(_unknown(key, item.at(what), () if keys is None else keys))
    return node.value


def _unknown(key: Any, where: str, keys: Iterable[str]) -> str:
    choices = sorted(keys)
    what = "key" if keys in (_TOP, KEYS, ()) else "name of a fusion"
    close = difflib.get_close_matches(str(key), choices, n=1)
    remedy = f"Did you mean {close[0]!r}?" if close else f"Choose among: {', '.join(choices)}"
    text = explain(f"This is no {what}", where=where, received=repr(key))
    return f"{text} {remedy}" if choices else text


def _settings(node: _Node, fusion: str, glob: str) -> list[Setting]:
    what = f"override {glob!r}, {fusion}" if glob else fusion
    return [
        Setting(fusion, key, _value(key, item, f"{what}, {key}"), glob, item.where)
        for key, item in _mapping(node, what, KEYS).items()
    ]


def _value(key: str, node: _Node, what: str) -> Any:
    value = node.value
    if key == "enabled" and isinstance(value, bool):
        return value
    if key == "min_numel" and type(value) is int and value >= 0:
        return value
    if key == "dtypes":
        if value == "any":
            return ()
        if isinstance(value, list) and value:
            return tuple(_dtype(item, what) for item in value)
    wanted = {
        "enabled": "true or false",
        "min_numel": "a number of elements, 0 or more",
        "dtypes": "a list of dtypes, or any",
    }
    raise ConfigError.explained(
        f"{key} is {wanted[key]}", where=node.at(what), received=_shown(node)
    )


def _dtype(node: _Node, what: str) -> torch.dtype:
    name = str(node.value).removeprefix("torch.")
    if name not in _DTYPES:
        close = difflib.get_close_matches(name, _DTYPES, n=1, cutoff=0.4)
        remedy = f"Did you mean {close[0]!r}?" if close else f"Choose among: {', '.join(_DTYPES)}"
        text = explain(
            "This is no dtype that is computed in", where=node.at(what), received=_shown(node)
        )
        raise ConfigError(f"{text} {remedy}")
    return _DTYPES[name]


def _shown(node: _Node) -> str:
    kinds = {dict: "a mapping", list: "a list", type(None): "nothing"}
    return kinds.get(type(node.value), repr(node.value))


def _word(text: str) -> str:
    """A key as YAML has it, in quotes where it is more than a name."""
    return text if re.fullmatch(r"[A-Za-z_][\w.:]*\w", text) else json.dumps(text)


def as_file(
    rows: Iterable[EffectiveSetting], *, origins: bool = False, ordered_by: str = ""
) -> str:
    """The text of a configuration file that states these settings.

    Args:
        origins: whether a comment behind each value says what stated it.
        ordered_by: what stated the order of the fusions; empty if they are in that of registration.
    """
    rows = list(rows)
    lines = [f"schema: {SCHEMA}"]
    lines += [f"order: listed  # {ordered_by}"] if ordered_by else []
    for stage in STAGES:
        own = [row for row in rows if row.stage == stage and not row.glob]
        lines += [f"{stage}:", *_written(own, origins, "  ")] if own else []
    globs = dict.fromkeys(row.glob for row in rows if row.glob)
    lines += ["overrides:"] if globs else []
    for glob in globs:
        inside = [row for row in rows if row.glob == glob]
        lines += [f"  {json.dumps(glob)}:", *_written(inside, origins, "    ")]
    return "\n".join(lines)


def _written(rows: list[EffectiveSetting], origins: bool, indent: str) -> list[str]:
    lines = []
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        if not origins or len(own) == 1:
            inside = ", ".join(f"{row.setting}: {as_yaml(row.value)}" for row in own)
            by = f"  # {own[0].origin}" if origins else ""
            lines.append(f"{indent}{_word(name)}: {{{inside}}}{by}")
            continue
        lines.append(f"{indent}{_word(name)}:")
        lines += [f"{indent}  {row.setting}: {as_yaml(row.value)}  # {row.origin}" for row in own]
    return lines
