"""Docstrings of public names: every argument, every error that is raised, every method."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from docs.docstrings import separated
from opfuser.engine.plan import ReplayRecord
from opfuser.fusion import QuantizedEdge
from opfuser.fusion_config import EffectiveSetting, FusionConfig, Setting
from opfuser.op import GradNeeds, compute_dtype
from opfuser.plugins import PluginInfo
from opfuser.registry import FusionInfo, effective

griffe: Any = pytest.importorskip("griffe", reason="needs the packages that build the site")

MODULES = "basic fused recipe testing models optim events errors hf".split()
MODULES += "async_tensor_parallel deprecated gemm_providers".split()
# Of other modules, but shown: what pages of the docs import, and what public names return.
BESIDES = (
    GradNeeds,
    compute_dtype,
    FusionInfo,
    ReplayRecord,
    QuantizedEdge,
    FusionConfig,
    Setting,
    EffectiveSetting,
    effective,
    PluginInfo,
)


class Public(NamedTuple):
    path: str
    value: Any


def names(module: ModuleType) -> list[str]:
    """Those of ``__all__``, or what a module without one defines."""
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [n for n in own if not n.startswith("_")])


def public() -> Iterator[Public]:
    """Every public object once, under the path by which the site shows it."""
    seen = set()
    for name in [*(f"opfuser.{module}" for module in MODULES), "opfuser"]:
        module = importlib.import_module(name)
        for attribute in names(module):
            value = getattr(module, attribute)
            if id(value) not in seen and not isinstance(value, ModuleType):
                seen.add(id(value))
                path = f"{name}.{attribute}"
                # The site takes opfuser.fusion for the module of that name.
                hidden = path in sys.modules
                yield Public(f"{value.__module__}.{attribute}" if hidden else path, value)
    for value in BESIDES:
        yield Public(f"{value.__module__}.{value.__qualname__}", value)


PUBLIC = list(public())
CALLED = [p for p in PUBLIC if callable(p.value)]
CLASSES = [p.value for p in PUBLIC if inspect.isclass(p.value)]


def sections(text: str, *kinds: str) -> set[str]:
    """The names that the sections of these kinds explain."""
    found = set()
    for section in griffe.Docstring(separated(text)).parse("google", warnings=False):
        if section.kind.value in kinds:
            found.update(str(getattr(e, "name", e.annotation)).lstrip("*") for e in section.value)
    return found


def own(value: Any) -> str:
    """The docstring of ``value`` itself, of fields also that of the classes that it extends."""
    if not inspect.isclass(value):
        return inspect.getdoc(value) or ""
    extends = value.__mro__[1:] if dataclasses.is_dataclass(value) else ()
    texts = [vars(kind).get("__doc__") for kind in (value, *extends)]
    return "\n\n".join(inspect.cleandoc(text) for text in texts if text)


def arguments(value: Any) -> set[str]:
    """Those of a function, or of a constructor that is not the base's of torch or Python."""
    if inspect.isclass(value):
        for kind in value.__mro__:
            if "__init__" in vars(kind) or issubclass(kind, tuple):
                break
        if not kind.__module__.startswith("opfuser") or issubclass(value, Enum):
            return set()
    return set(inspect.signature(value).parameters)


@pytest.mark.parametrize(("path", "value"), CALLED, ids=[p.path for p in CALLED])
def test_docstring_explains_every_argument(path: str, value: Any) -> None:
    assert vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert arguments(value) <= sections(own(value), "parameters", "attributes")


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions and properties that a class of the library defines or inherits."""
    for name in dir(kind):
        owner = next((c for c in kind.__mro__ if name in vars(c)), object)
        if name.startswith("_") or not owner.__module__.startswith("opfuser"):
            continue
        value = inspect.unwrap(getattr(vars(owner)[name], "__func__", vars(owner)[name]))
        value = value.fget if isinstance(value, property) else value
        if inspect.isfunction(value):
            yield name, value


def documented_by(kind: type, name: str) -> tuple[type, str] | None:
    """The class whose docstring ``help`` shows of a method, and that docstring."""
    for owner in kind.__mro__:
        text = getattr(vars(owner).get(name), "__doc__", None)
        if text:
            return owner, text
    return None


# What torch.nn.Module says of these holds unchanged.
OF_TORCH = {"add_module", "extra_repr", "register_parameter", "train"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_public_method_has_a_docstring(kind: type) -> None:
    bare = set()
    for name, _ in methods(kind):
        found = documented_by(kind, name)
        if found is None or not found[0].__module__.startswith("opfuser"):
            bare.add(name)
    assert {n for n in bare if not re.fullmatch(r"register_\w*hook", n)} <= OF_TORCH


def raised(function: Callable[..., Any]) -> set[str]:
    """The classes of the errors that the code of a function raises itself."""
    if not function.__code__.co_filename.endswith(".py"):
        return set()  # made by dataclass
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    nodes = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc is not None]
    names = {ast.unparse(n.func) for n in nodes if isinstance(n, ast.Call)}
    return names - {"MissingImplementationError"}  # what an abstract method raises


def raising() -> Iterator[tuple[str, set[str], str]]:
    """Path, errors and docstring of every public function, constructor and method."""
    for path, value in CALLED:
        if not inspect.isclass(value):
            yield path, raised(value), own(value)
            continue
        makers = [vars(value).get(name) for name in ("__init__", "__post_init__")]
        yield path, set().union(*(raised(f) for f in makers if inspect.isfunction(f))), own(value)
        for name, function in methods(value):
            found = documented_by(value, name)
            if found is not None and name in vars(value):
                text = f"{inspect.cleandoc(found[1])}\n\n{own(value)}"
                yield f"{path}.{name}", raised(function), text


RAISING = [case for case in raising() if case[1]]


@pytest.mark.parametrize(("path", "errors", "text"), RAISING, ids=[case[0] for case in RAISING])
def test_docstring_names_the_errors_that_are_raised(path: str, errors: set[str], text: str) -> None:
    assert errors <= sections(text, "raises")
