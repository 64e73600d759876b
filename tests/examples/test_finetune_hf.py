"""The fine-tuning example end to end, at sizes that take seconds."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

ROOT = Path(__file__).parents[2]
TEXT = [str(ROOT / "opfuser" / "engine"), str(ROOT / "opfuser" / "basic")]
SMALL = ["--cpu", "--steps=8", "--batch=2", "--length=48", "--save-every=4", "--text", *TEXT]

# PEFT reads the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """finetune_hf.py as a module; its helpers lie beside it, as when it is run as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import finetune_hf  # noqa: PLC0415 - found only once the path is set

        yield finetune_hf


@pytest.fixture(scope="module")
def whole(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    runs = tmp_path_factory.mktemp("runs")
    assert example.main([*SMALL, f"--runs={runs}", "--name=whole", "--twin"]) == 0
    return runs / "whole"


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def test_losses_are_those_of_the_twin(whole: Path) -> None:
    ours, theirs = losses(whole), losses(whole / "transformers")
    assert list(ours) == list(theirs) == list(range(1, 9))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[8] < ours[1]
    results = json.loads((whole / "results.json").read_text())
    assert [r["label"] for r in results] == ["opfuser", "transformers"]
    assert all(r["milliseconds_per_step"] > 0 for r in results)
    assert results[0]["validation_loss"] == pytest.approx(results[1]["validation_loss"], rel=1e-5)


def test_a_resumed_run_has_the_losses_of_an_unbroken_one(
    whole: Path, example: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoint-8")
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(rows[:5]) + "\n")
    assert example.main([*SMALL, f"--runs={tmp_path}", "--name=broken", "--resume"]) == 0
    assert losses(folder) == losses(whole)


def test_adapters_of_a_model_that_was_trained(
    whole: Path, example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--runs={tmp_path}", "--name=lora", f"--model={whole / 'model'}", "--lora=4"]
    assert example.main([*SMALL, *options, "--bf16", "--tensorboard"]) == 0
    assert list((tmp_path / "lora").rglob("events.out.tfevents.*"))
    assert "LoRALinear x3" in capsys.readouterr().out  # the report of apply
    assert losses(tmp_path / "lora")[1] < losses(whole)[2]
    before, after = (path / "model" / "model.safetensors" for path in (whole, tmp_path / "lora"))
    assert before.stat().st_size == after.stat().st_size  # adapters are merged


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
def test_scales_of_fp8_are_resumed(example: ModuleType, tmp_path: Path) -> None:
    options = [*SMALL, f"--runs={tmp_path}", "--recipe=delayed"]
    assert example.main([*options, "--name=whole"]) == 0
    assert example.main([*options, "--name=broken"]) == 0
    broken = tmp_path / "broken"
    shutil.rmtree(broken / "checkpoint-8")
    rows = (broken / "metrics.jsonl").read_text().splitlines()
    (broken / "metrics.jsonl").write_text("\n".join(rows[:4]) + "\n")
    assert example.main([*options, "--name=broken", "--resume"]) == 0
    assert losses(broken) == losses(tmp_path / "whole")


def test_fp8_and_adapters_exclude_each_other(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.main(["--recipe=current", "--lora=4"])
    assert "with adapters are not computed in FP8" in capsys.readouterr().err


@pytest.mark.usefixtures("example")
def test_rows_are_packed() -> None:
    data = importlib.import_module("finetune_data")
    texts = ["a" * 3, "b" * 9, "c" * 2, "d" * 7]

    class Letters:
        eos_token_id = 0

        def __call__(self, texts: list[str], **unused: object) -> dict[str, list[list[int]]]:
            return {"input_ids": [[ord(letter) - 96 for letter in text] for text in texts]}

    rows = data.PackedRows(texts, Letters(), 8)
    assert rows.tokens.tolist() == [
        [1, 1, 1, 0, 2, 2, 2, 2],
        [2, 2, 2, 2, 2, 0, 3, 3],
        [0] + 7 * [4],
    ]
    assert rows.places.tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 0, 1],
        [0, *range(7)],
    ]
    labels = rows[0]["labels"].tolist()
    assert labels == [-100, 1, 1, 0, -100, 2, 2, 2]
    with pytest.raises(SystemExit, match="25 tokens of text do not fill one row of 40"):
        data.PackedRows(texts, Letters(), 40)
    with pytest.raises(SystemExit, match="--text: there are no files to train on in"):
        data.read_documents([ROOT / "not_there"])
    assert torch.equal(rows[0]["input_ids"], rows.tokens[0])
