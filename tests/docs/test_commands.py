"""The reference of the commands is what their parsers say."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import write_commands
from opfuser.cli import parser


def test_page_is_of_the_commands_as_they_are() -> None:
    text = write_commands.PAGE.read_text("utf-8")
    assert text == write_commands.page(), "run python docs/write_commands.py"


def test_every_argument_of_every_command_is_there() -> None:
    text = write_commands.PAGE.read_text("utf-8")
    found = list(write_commands._commands(parser()))
    assert len(found) >= 4
    for made, _ in found:
        section = text.partition(f"\n## {made.prog}\n")[2].partition("\n## ")[0]
        options = [o for action in made._actions for o in action.option_strings]
        assert [o for o in options if f"`{o}" not in section and o not in ("-h", "--help")] == []
        assert made.prog in section.partition("```bash")[2]


def test_script_says_that_the_page_differs_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "commands.md"
    monkeypatch.setattr(write_commands, "PAGE", page)
    with pytest.raises(SystemExit, match=r"run python docs/write_commands.py"):
        write_commands.main(["--check"])
    write_commands.main([])
    write_commands.main(["--check"])
    assert page.read_text("utf-8") == write_commands.page()
