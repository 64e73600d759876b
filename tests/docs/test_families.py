"""The table of families is what the reader finds in them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from docs import write_families

FAMILIES = "bart falcon gpt2 llama4_text t5 vit".split()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_is_read_now(family: str) -> None:
    """Those of a few; make sweep compares the page."""
    lines = write_families.PAGE.read_text("utf-8").splitlines()
    now = write_families.line(family, write_families.row(family))
    assert now in lines, "run python docs/write_families.py"


def test_script_says_that_the_page_differs_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "families.md"
    page.touch()
    monkeypatch.setattr(write_families, "PAGE", page)
    monkeypatch.setattr(write_families, "FAMILIES", ["gpt2", "no such family"])
    with pytest.raises(SystemExit, match=r"run python docs/write_families.py"):
        write_families.main(["--check"])
    write_families.main([])
    write_families.main(["--check"])
    lines = page.read_text("utf-8").splitlines()
    assert (
        "Out of 1 families, opfuser computes the layers of 1, the attention of 1, the MLP of 1."
        in lines
    )
    assert "| gpt2 | yes | yes | yes |  | yes | yes | yes |  |" in lines
