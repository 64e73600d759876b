"""The notebook runs from its first cell to its last, and shows what it says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PATH = ROOT / "examples" / "tour.ipynb"

nbformat: Any = pytest.importorskip("nbformat", reason="needs nbformat, of the extra test")
nbclient: Any = pytest.importorskip("nbclient", reason="needs nbclient, of the extra test")
pytest.importorskip("ipykernel", reason="needs ipykernel, of the extra test")


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after all its cells, whose asserts held, without settings of the user."""
    home = tmp_path_factory.mktemp("jupyter")
    notebook = nbformat.read(PATH, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(home / name.lower()))
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
        client.execute(cwd=str(home))
    return notebook


def cell(notebook: Any, part: str) -> Any:
    """The cell with this code."""
    (found,) = [c for c in notebook.cells if c.cell_type == "code" and part in c.source]
    return found


def printed(notebook: Any, part: str) -> str:
    outputs = cell(notebook, part).outputs
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


@pytest.mark.parametrize("part", ["plan = model.plan(x)\nplan", "\nextended.last_plan"])
def test_plan_is_shown_as_a_picture(executed: Any, part: str) -> None:
    (output,) = cell(executed, part).outputs
    assert "<svg" in output["data"]["text/html"]


def test_fusion_is_explained_and_switched_off(executed: Any) -> None:
    explained = printed(executed, 'plan.why("norm_linear")')
    assert "'norm_linear': 2" in explained
    assert "norm_linear (joint): matched" in explained
    switched_off = printed(executed, 'opfuser.disable("norm_linear")')
    assert "activation_linear_add" in switched_off
    assert "norm_linear" not in switched_off


def test_training_is_shown(executed: Any) -> None:
    assert re.fullmatch(r"\d\.\d{4} -> 0\.\d{4}\n", printed(executed, "optimizer.step()"))


def test_nothing_warns(executed: Any) -> None:
    streams = [o for c in executed.cells for o in c.get("outputs", ())]
    assert [o["text"] for o in streams if o.get("name") == "stderr"] == []


def test_file_holds_no_outputs() -> None:
    cells = [c for c in nbformat.read(PATH, as_version=4).cells if c.cell_type == "code"]
    assert [c.source for c in cells if c.outputs or c.execution_count is not None] == []


def test_pages_that_it_names_exist() -> None:
    named = set(re.findall(r"`(docs/[\w./-]+)`", PATH.read_text("utf-8")))
    assert len(named) >= 3
    assert [name for name in named if not (ROOT / name).is_file()] == []
