"""A public name that is renamed works for one minor version, warns, and then goes."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import opfuser
from opfuser import deprecated
from opfuser.deprecated import DeprecatedNameWarning, Renamed

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def faults(names: dict[str, Renamed], version: str, changelog: str) -> Iterator[str]:
    """What is wrong with a list of renamed names, in a version of the library."""
    for path, renamed in names.items():
        if numbers(renamed.removed_in) <= numbers(version):
            yield f"{path} goes in {renamed.removed_in}"
        if not re.search(rf"\b{path.rpartition('.')[2]}\b", changelog):
            yield f"{path} is not in the changelog"
        if renamed.to in names:
            yield f"{path} is called by a name that goes too"
        module, _, name = renamed.to.rpartition(".")
        if not hasattr(import_module(module), name):
            yield f"{renamed.to} is not there"
        module, _, name = path.rpartition(".")
        if name in vars(import_module(module)):
            yield f"{path} is still there itself"


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(deprecated.NAMES, "opfuser.use", Renamed("opfuser.apply", "0.2"))
    monkeypatch.setitem(deprecated.NAMES, "opfuser.FP8", Renamed("opfuser.recipe.Recipe", "0.2"))


@pytest.mark.usefixtures("old")
def test_an_old_name_is_the_new_one_and_warns_where_it_is_used() -> None:
    said = (
        r"^opfuser\.use is called opfuser\.apply since opfuser 0\.2, and goes in 0\.3\. "
        r"Use opfuser\.apply\.$"
    )
    with pytest.warns(DeprecatedNameWarning, match=said) as caught:
        assert opfuser.use is opfuser.apply
    assert [w.filename for w in caught] == [__file__]
    with pytest.warns(DeprecatedNameWarning, match=r"Use opfuser\.recipe\.Recipe\.") as caught:
        from opfuser import FP8  # noqa: PLC0415 - what warns is the import
    assert FP8 is opfuser.recipe.Recipe
    assert {w.filename for w in caught} == {__file__}


@pytest.mark.usefixtures("old")
def test_every_use_warns_and_completion_offers_no_old_name() -> None:
    for _ in range(2):
        with pytest.warns(DeprecatedNameWarning):
            _ = opfuser.use
    assert "use" not in dir(opfuser)
    assert "use" not in opfuser.__all__


def test_other_modules_look_names_up_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("opfuser.some")
    exec("from opfuser import deprecated\ndef __getattr__(name): "
         "return deprecated.value(f'opfuser.some.{name}')", vars(module))  # fmt: skip
    monkeypatch.setitem(sys.modules, "opfuser.some", module)
    monkeypatch.setitem(deprecated.NAMES, "opfuser.some.old", Renamed("opfuser.Linear", "0.2"))
    with pytest.warns(DeprecatedNameWarning, match=r"opfuser\.some\.old is called"):
        assert module.old is opfuser.Linear
    with pytest.raises(AttributeError, match=r"module 'opfuser\.some' has no attribute 'other'"):
        _ = module.other


def test_a_name_goes_in_the_version_that_removes_it() -> None:
    names = {
        "opfuser.a": Renamed("opfuser.apply", "0.9"),
        "opfuser.b": Renamed("opfuser.apply", "1.2"),
    }
    assert list(faults(names, "0.9.3", "a b")) == []
    assert list(faults(names, "0.10.0", "a b")) == ["opfuser.a goes in 0.10"]
    assert list(faults(names, "1.0.0", "a b")) == ["opfuser.a goes in 0.10"]
    assert len(list(faults(names, "1.3.0", "a b"))) == 2


def test_entries_are_whole() -> None:
    names = {
        "opfuser.a": Renamed("opfuser.gone", "0.2"),
        "opfuser.Linear": Renamed("opfuser.a", "0.2"),
    }
    assert list(faults(names, "0.2.0", "Linear")) == [
        "opfuser.a is not in the changelog",
        "opfuser.gone is not there",
        "opfuser.Linear is called by a name that goes too",
        "opfuser.a is not there",
        "opfuser.Linear is still there itself",
    ]


def test_nothing_is_wrong_with_the_names_of_this_version() -> None:
    assert list(faults(deprecated.NAMES, opfuser.__version__, CHANGELOG.read_text("utf-8"))) == []
