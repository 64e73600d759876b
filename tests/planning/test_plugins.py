"""Fusions of other packages: found, named after their package, harmless where they are broken."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import opfuser
from opfuser.registry import registry
from tests.planning.toys import REGISTER, planned, rule

ROOT = Path(__file__).parents[2]

TOYS = """
import opfuser
from opfuser import Fusion, FusedOperation
from tests.planning.toys import A, B, FusedForward, rule

one = rule("A B", name="one")
"""


class Packages:
    """Installs packages with one entry each, from where entry points are read in this test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def install(self, name: str, code: str, value: str = "") -> None:
        """Package ``name`` 1.2, whose module has this code, with the entry ``module:value``."""
        module = name.replace("-", "_")
        (self.folder / f"{module}.py").write_text(TOYS + code)
        info = self.folder / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        entry = f"{module}:{value}" if value else module
        (info / "entry_points.txt").write_text(f"[opfuser.fusions]\nof_{module} = {entry}\n")
        self.modules.append(module)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """The plug-ins of a program that has not asked for any yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "plugins", registry.plugins)
    # They are loaded once in a process, and a process for each test would take minutes.
    monkeypatch.setattr(registry, "_plugins_are_loaded", False)
    before = set(registry.registered())
    made = Packages(tmp_path)
    yield made
    for handle in set(registry.registered()) - before:
        handle.remove()
    for module in made.modules:
        sys.modules.pop(module, None)


def origins() -> list[tuple[str, str]]:
    return [(i.name, i.origin) for i in opfuser.fusions() if i.origin != "opfuser"]


DECORATED = """
@opfuser.fusion(stage="forward", pattern=(A, B), name="decorated")
class Mine(FusedForward):
    pass
"""
KINDS = {
    "fusion": ("", "one", "one"),
    "class": (DECORATED, "Mine", "decorated"),
    "module": ("opfuser.register_forward_fusion(one)", "", "one"),
    "function": ("def register():\n    opfuser.register_forward_fusion(one)", "register", "one"),
    "function with defaults": (
        "def register(prepend=False):\n    opfuser.register_forward_fusion(one, prepend)",
        "register",
        "one",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_entry_may_name(kind: str, packages: Packages) -> None:
    code, value, name = KINDS[kind]
    packages.install("some-fusions", code, value)
    assert planned().record(name).status == "matched"
    assert origins() == [(name, "some-fusions")]
    entry = f"some_fusions:{value}" if value else "some_fusions"
    assert opfuser.plugins() == (("of_some_fusions", entry, "some-fusions", "1.2", (name,), ""),)


def test_plug_ins_run_behind_the_library_and_before_the_program(packages: Packages) -> None:
    """Whenever they are loaded: here after the program has registered its own."""
    packages.install("b-package", 'two = rule("A B", name="two")', "two")
    packages.install("a-package", "", "one")
    with (
        REGISTER["forward"](rule("A B", name="before")),
        REGISTER["forward"](rule("A B", name="first"), prepend=True),
    ):
        of_stage = [i for i in opfuser.fusions() if i.stage == "forward"]
        assert [i.name for i in of_stage if i.origin != "opfuser"] == [
            "first", "one", "two", "before",
        ]  # fmt: skip
        assert of_stage[1].origin == of_stage[-4].origin == "opfuser"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: opfuser.disable("one").__exit__(),
        lambda: opfuser.fusion_config({"forward": {"one": {}}}).__exit__(),
        opfuser.fusions,
        opfuser.plugins,
        lambda: opfuser.Sequential(opfuser.Identity())(torch.ones(2)),
    ],
    ids=["disable", "fusion_config", "fusions", "plugins", "call"],
)
def test_whoever_needs_the_fusions_loads_them(
    ask: Callable[[], object], packages: Packages
) -> None:
    packages.install("some-fusions", "", "one")
    assert len([h for h in registry.registered() if h.name == "one"]) == 0
    ask()
    assert [h.origin for h in registry.registered() if h.name == "one"] == ["some-fusions"]


def test_fusion_that_the_program_registered_itself_gets_its_origin(packages: Packages) -> None:
    packages.install("some-fusions", "opfuser.register_forward_fusion(one)", "one")
    __import__("some_fusions")
    assert origins() == [("one", "some-fusions")]
    assert opfuser.plugins()[0].fusions == ("one",)


BROKEN = {
    "import": ("import not_there", "", "ModuleNotFoundError: No module named 'not_there'"),
    "attribute": ("", "nothing", "AttributeError: .*nothing"),
    "syntax": ("def", "", "SyntaxError: "),
    "half": (
        "opfuser.register_forward_fusion(one)\nraise RuntimeError('too late')",
        "",
        "RuntimeError: too late",
    ),
    "name": ('taken = rule("A B", name="norm_linear")', "taken", "FusionError: Names of fus.*uniq"),
    "class": (
        "class Bare(FusedForward): pass",
        "Bare",
        "FusionError: A class that is a plug-in is decorated with opfuser.fusion.*broken:Bare",
    ),
    "function of operations": (
        "def function(ops, *, recipe): return ops",
        "function",
        "FusionError: A plug-in is a Fusion, a decorated class, a module, or a function without",
    ),
    "number": ("number = 3", "number", "FusionError: A plug-in is .*Received: 3"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_plug_in_is_reported_and_stops_nothing(
    fault: str, packages: Packages, caplog: pytest.LogCaptureFixture
) -> None:
    code, value, message = BROKEN[fault]
    packages.install("broken", code, value)
    packages.install("whole", 'good = rule("A B", name="good")', "good")
    assert planned().record("good").status == "matched"
    assert origins() == [("good", "whole")]
    broken, whole = opfuser.plugins()
    assert (broken.fusions, whole.fusions, whole.error) == ((), ("good",), "")
    assert re.match(message, broken.error)
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    entry = f"broken:{value}" if value else "broken"
    expected = f"the plug-in 'of_broken' of broken ({entry}) failed to load: {broken.error}"
    assert record.getMessage() == expected


@pytest.mark.parametrize("fails", [False, True])
def test_what_another_thread_registers_meanwhile_is_its_own(
    fails: bool, packages: Packages
) -> None:
    code = """
import threading
other = rule("B A", name="other")
thread = threading.Thread(target=opfuser.register_forward_fusion, args=(other,))
thread.start()
thread.join()
"""
    packages.install("some-fusions", f"{code}assert not {fails}", "one")
    mine = [] if fails else [("one", "some-fusions")]
    assert origins() == [*mine, ("other", "user")]
    assert opfuser.plugins()[0].fusions == tuple(name for name, _ in mine)


def test_interrupted_loading_begins_again(packages: Packages) -> None:
    packages.install("slow-fusions", "raise KeyboardInterrupt", "one")
    with pytest.raises(KeyboardInterrupt):
        opfuser.fusions()
    (packages.folder / "slow_fusions.py").write_text(TOYS)
    assert origins() == [("one", "slow-fusions")]


def test_plug_in_may_look_at_fusions_while_it_is_loaded(packages: Packages) -> None:
    code = "seen = [i.name for i in opfuser.fusions()]\nopfuser.register_forward_fusion(one)"
    packages.install("some-fusions", code)
    assert origins() == [("one", "some-fusions")]
    assert "norm_linear" in sys.modules["some_fusions"].seen


def test_threads_wait_until_all_is_loaded(packages: Packages) -> None:
    packages.install("slow-fusions", "import time; time.sleep(0.1)", "one")
    begin, seen = threading.Barrier(4), []

    def ask() -> None:
        begin.wait()
        seen.append([i.name for i in opfuser.fusions()].count("one"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 4


# The example.

IN_A_NEW_PROCESS = """
import sys, torch
import opfuser
from opfuser import ConstantScale, Linear, Sequential

assert "opfuser_merged_scales" not in sys.modules, "importing opfuser loads no plug-in"
model = Sequential(Linear(6, 6), ConstantScale(2.0), ConstantScale(0.3), ConstantScale(0.5))
x = torch.randn(5, 6)
print(model.plan(x).fused("forward"), model.plan(x).fused("backward"))
(info,) = [i for i in opfuser.fusions() if i.name == "merged_scales"]
print(info.origin, info.stage, info.enabled)
print(opfuser.plugins()[0][:3])
with opfuser.disable("merged_scales"):
    print("merged_scales" in model.plan(x).fused("forward"))
from opfuser.testing import check_fusion
check_fusion("merged_scales", [ConstantScale(2.0), ConstantScale(0.3)], x)
"""


def test_the_documentation_shows_the_entry_of_the_example() -> None:
    shown = (ROOT / "docs" / "snippets" / "plugin.toml").read_text("utf-8")
    assert shown in (ROOT / "examples" / "fusion_plugin" / "pyproject.toml").read_text("utf-8")
    assert shown in (ROOT / "examples" / "fusion_plugin" / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_the_example_is_installed_and_found(tmp_path: Path) -> None:
    try:  # not an import of it, after which setuptools cannot be imported before Python 3.12
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip installs the example")
    shutil.copytree(ROOT / "examples" / "fusion_plugin", tmp_path / "source")
    options = "--no-index --no-deps --no-build-isolation --no-compile --quiet".split()
    target = ["--target", str(tmp_path / "target"), str(tmp_path / "source")]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "--isolated", "install", *options, *target],
        capture_output=True,
        text=True,
        check=False,
    )
    assert pip.returncode == 0, pip.stderr
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IN_A_NEW_PROCESS],
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'target'}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "{'forward_linear_bias_activation': 1, 'merged_scales': 1} {'merged_scales': 1}",
        "opfuser-merged-scales joint True",
        "('merged_scales', 'opfuser_merged_scales:FUSION', 'opfuser-merged-scales')",
        "False",
    ]
