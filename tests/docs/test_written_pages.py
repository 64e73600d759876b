"""Pages that scripts write are what the scripts write now."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")

from docs import write_commands, write_compatibility, write_families
from opfuser.cli import parser

SCRIPTS = {"commands": write_commands, "compatibility": write_compatibility}


@pytest.mark.parametrize("name", SCRIPTS)
def test_page_is_as_written_now(name: str) -> None:
    script = SCRIPTS[name]
    text = script.PAGE.read_text("utf-8")
    assert text == script.page(), f"run python docs/write_{name}.py"


@pytest.mark.parametrize("family", "bart falcon gpt2 llama4_text t5 vit".split())
def test_rows_of_families_are_what_is_read_now(family: str) -> None:
    """Those of a few; make sweep compares the page."""
    lines = write_families.PAGE.read_text("utf-8").splitlines()
    now = write_families.line(family, write_families.row(family))
    assert now in lines, "run python docs/write_families.py"


def test_every_argument_of_every_command_is_there() -> None:
    text = write_commands.PAGE.read_text("utf-8")
    found = list(write_commands._commands(parser()))
    assert len(found) >= 4
    for made, _ in found:
        section = text.partition(f"\n## {made.prog}\n")[2].partition("\n## ")[0]
        options = [o for action in made._actions for o in action.option_strings]
        assert [o for o in options if f"`{o}" not in section and o not in ("-h", "--help")] == []
        assert made.prog in section.partition("```bash")[2]


OF_ONE_FAMILY = """
Out of 1 families, opfuser computes the layers of 1, the attention of 1, the MLP of 1.
| gpt2 | yes | yes | yes |  | yes | yes | yes |  |
"""


@pytest.mark.parametrize("name", [*SCRIPTS, "families"])
def test_script_says_that_the_page_differs_and_writes_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: ModuleType = {**SCRIPTS, "families": write_families}[name]
    page = tmp_path / "page.md"
    page.touch()
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(write_families, "FAMILIES", ["gpt2", "no such family"])
    with pytest.raises(SystemExit, match=f"run python docs/write_{name}.py"):
        script.main(["--check"])
    script.main([])
    script.main(["--check"])
    lines = page.read_text("utf-8").splitlines()
    assert name != "families" or {*OF_ONE_FAMILY.strip().splitlines()} <= {*lines}
    assert name == "families" or lines == script.page().splitlines()
