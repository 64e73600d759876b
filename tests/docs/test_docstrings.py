"""Docstrings of public names: every argument, every error that is raised, every method."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from docs.docstrings import separated
from opfuser import errors
from opfuser.core.fusion import QuantizedEdge
from opfuser.engine.plan import ReplayRecord
from opfuser.op import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    GradNeeds,
    compute_dtype,
)
from opfuser.registry import FusionInfo, effective
from opfuser.registry.configuration import EffectiveSetting, FusionConfig, Setting
from opfuser.registry.entry_points import PluginInfo

griffe: Any = pytest.importorskip("griffe", reason="needs the packages that build the site")

MODULES = "basic fused recipe testing models optim events errors hf".split()
MODULES += "deprecated gemm_providers".split()
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


def test_docstrings_explain_every_argument() -> None:
    bare = [
        p for p, v in CALLED if not (vars(v).get("__doc__") if inspect.isclass(v) else v.__doc__)
    ]
    assert not bare
    left_out = {p: arguments(v) - sections(own(v), "parameters", "attributes") for p, v in CALLED}
    assert {path: names for path, names in left_out.items() if names} == {}


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


def test_every_public_method_has_a_docstring() -> None:
    bare = set()
    every = [(kind, name) for kind in CLASSES for name, _ in methods(kind)]
    for kind, name in every:
        found = documented_by(kind, name)
        if found is None or not found[0].__module__.startswith("opfuser"):
            bare.add(name)
    assert {n for n in bare if not re.fullmatch(r"register_\w*hook", n)} <= OF_TORCH


def raised(function: Callable[..., Any], kind: type | None = None) -> set[str]:
    """The classes of the errors that a function raises, or what it calls of the library itself."""
    tree = parsed(function)
    found = raised_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= raised_in(parsed(called(node.func, function, kind)))
    return found - caught_in(tree)


def parsed(function: Any) -> ast.AST:
    """The code of a function of the library; none of anything else.

    None of a class either: what makes an object has checked, or documents, what it gives to it.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    written = code is not None and code.co_filename.endswith(".py")  # else by dataclass
    if not written or not function.__module__.startswith("opfuser"):
        return ast.Module([], [])
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def raised_in(tree: ast.AST) -> set[str]:
    nodes = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc is not None]
    names = {ast.unparse(n.func) for n in nodes if isinstance(n, ast.Call)}
    names = {name.removesuffix(".explained").rpartition(".")[2] for name in names}
    # What an abstract method raises; and what a helper makes is found where the helper is called.
    return {n for n in names if n[0].isupper()} - {"MissingImplementationError"}


def caught_in(tree: ast.AST) -> set[str]:
    """The names of the errors that the code itself handles."""
    types = [n.type for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type]
    return {name.id for kind in types for name in ast.walk(kind) if isinstance(name, ast.Name)}


def called(name: ast.expr, function: Callable[..., Any], kind: type | None) -> Any:
    """What a call in a function, or in a method of ``kind``, is of; None if unknown."""
    names = inspect.unwrap(function).__globals__
    if isinstance(name, ast.Name):
        return names.get(name.id)
    if not isinstance(name, ast.Attribute):
        return None
    of = ast.unparse(name.value)
    if isinstance(names.get(of), ModuleType):
        return getattr(names[of], name.attr)
    if kind is None:
        return None
    if of in ("self", "cls"):
        return getattr(kind, name.attr, None)
    if of == "super()":
        owners = [c for c in kind.__mro__ if function in vars(c).values()]
        after = kind.__mro__[kind.__mro__.index(owners[0]) + 1 :] if owners else ()
        return next((vars(c)[name.attr] for c in after if name.attr in vars(c)), None)
    return None


ALSO = re.compile(r"errors\s(?:are\sthose\sof|as\sin|of)\s+:class:`(\w+)`")


def said(kind: type) -> str:
    """What is said of a class, with what it refers to for its errors, and of its public bases."""
    texts = [own(kind)]
    for name in ALSO.findall(texts[0]):
        texts.append(said(next(c for c in CLASSES if c.__name__ == name)))
    return "\n\n".join([*texts, *(own(c) for c in kind.__mro__[1:] if c in CLASSES)])


Documented = tuple[str, Callable[..., Any], "type | None", str]


@functools.cache  # not while tests are collected, which every process does
def documented() -> list[Documented]:
    """Path, function, class and docstring of every public function, constructor and method."""
    return list(_documented())


def _documented() -> Iterator[Documented]:
    for path, value in CALLED:
        if not inspect.isclass(value):
            yield path, value, None, own(value)
            continue
        for name in ("__init__", "__post_init__"):
            if inspect.isfunction(maker := getattr(value, name, None)):
                yield path, maker, value, said(value)
        for name, function in methods(value):
            owner = next(c for c in value.__mro__ if name in vars(c))
            found = documented_by(value, name)
            if found is not None and (owner is value or owner not in CLASSES):
                text = f"{inspect.cleandoc(found[1])}\n\n{said(value)}"
                yield f"{path}.{name}", function, value, text


def bases(error: str) -> set[str]:
    """The names of an error and of those that it is a kind of."""
    kind = getattr(errors, error, None) or getattr(builtins, error, None)
    return {error} if kind is None else {c.__name__ for c in kind.__mro__} - OF_ALL


OF_ALL = {"Exception", "BaseException", "object", "OpfuserError"}
# What these call would refuse an index that they have looked up.
NEVER = {f"get_{what}_quantizer" for what in ("input", "grad_output")}


def test_docstrings_name_the_errors_that_are_raised() -> None:
    raising = [
        (path, raises, text)
        for path, function, kind, text in documented()
        if path.rpartition(".")[2] not in NEVER and (raises := raised(function, kind))
    ]
    assert len(raising) > 400, "the scan finds nothing"
    left_out = set()
    for path, raises, text in raising:
        named = sections(text, "raises")
        left_out |= {(path, error) for error in raises if named.isdisjoint(bases(error))}
    assert left_out == set()


OPERATIONS = [
    p for p in PUBLIC if inspect.isclass(p.value) and issubclass(p.value, FusibleOperation)
]
BASES = FusibleOperation, BasicOperation, FusedOperation
FUSED = [p.path for p in OPERATIONS if p.path.startswith("opfuser.fused.")]


def of_tensors(function: Callable[..., Any]) -> bool:
    """Whether a function takes or returns a tensor, by its annotations, and is not torch's."""
    if function.__module__.startswith("torch."):
        return False
    signature = inspect.signature(function)
    kinds = [p.annotation for p in signature.parameters.values()] + [signature.return_annotation]
    return any(re.search(r"\bTensor\b", str(kind)) for kind in kinds)


@pytest.mark.parametrize("word", ["shape", "dtype"])
def test_what_takes_or_returns_tensors_says_their_shapes_and_dtypes(word: str) -> None:
    """Fused operations have those of what they replace, as their page says once."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "api" / "fused.md"
    assert len(FUSED) > 10
    tensors = {path: text for path, function, _, text in documented() if of_tensors(function)}
    assert len(tensors) > 60
    assert re.search(rf"\b{word}s\b.* are those of the operations", page.read_text("utf-8"), re.I)
    texts = tensors | {p.path: own(p.value) for p in OPERATIONS if p.value not in BASES}
    said = rf"\b{word}s?\b|\bas (of|for|in) :func:"
    bare = [path for path, text in texts.items() if not re.search(said, text, re.I)]
    assert [path for path in bare if not path.startswith(tuple(FUSED))] == []


UNITS = r"bytes|seconds|fraction|MiB|GiB|milliseconds|microseconds"


def quantities() -> Iterator[tuple[str, str, str]]:
    """Path, name and explanation of what is measured, by its name."""
    for path, value in CALLED:
        for section in griffe.Docstring(separated(own(value))).parse("google", warnings=False):
            if section.kind.value in ("parameters", "attributes"):
                for entry in section.value:
                    if re.search(r"bytes|seconds|elapsed|duration|time\b|memory$", entry.name):
                        yield path, entry.name, entry.description


def test_quantities_have_units() -> None:
    found = list(quantities())
    names = {name for _, name, _ in found}
    assert {"bytes", "elapsed", "memory", "seconds"} <= names
    assert [(p, n) for p, n, said in found if not re.search(UNITS, f"{n} {said}")] == []
