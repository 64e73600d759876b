"""``opfuser check``: lock files, what is lost and gained, and exit statuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import opfuser
from opfuser import LayerNorm, Linear, Residual, Sequential, SiLU
from opfuser.cli import main
from tests.checks.spoilt import operations, rule

yaml: Any = pytest.importorskip("yaml", reason="lock files are YAML")

Run = Callable[..., tuple[int, str]]


def block(linear: type[nn.Module] = Linear) -> Residual:
    return Residual(LayerNorm(8), linear(8, 8))


def layers() -> nn.Module:
    return nn.Sequential(*(block() for _ in range(3)))


def changed() -> nn.Module:
    """The last layer holds a module that no fusion takes, and there is one more layer."""
    return nn.Sequential(block(), block(), block(nn.Linear), block())


def without_the_last() -> nn.Module:
    return nn.Sequential(block(), block())


def with_an_activation() -> Sequential:
    return Sequential(Linear(8, 8), SiLU(), Linear(8, 8))


def plain() -> nn.Module:
    return nn.Linear(8, 8)


def alone() -> Sequential:
    return Sequential(SiLU())


def of_a_user() -> Sequential:
    return Sequential(Linear(8, 4), *operations())


SCHEMA = "schema: opfuser.lock/1\n"
CALL = "call: {device: cpu, inputs: []}, versions: {}"
COUNTS = f"models: {{a: {{{CALL}, sequences: {{'': {{joint: {{f: many}}}}}}}}}}"
LAYERS = f"{__name__}:layers"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "fusions.lock.yaml"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], lock: Path) -> Run:
    """The exit status of a check, and what it said."""

    def run(model: str, *more: str) -> tuple[int, str]:
        name = model if ":" in model else f"{__name__}:{model}"
        status = main(["check", name, "--lock", str(lock), "--input", "4x8:fp32", *more])
        printed = capsys.readouterr()
        assert (printed.err != "") == (status == 1)
        return status, (printed.out + printed.err).replace(str(lock), "LOCK").rstrip("\n")

    return run


def as_layers(lock: Path, model: str) -> None:
    """Gives the entry of ``layers`` to another model, as if that one had been it."""
    text = lock.read_text("utf-8")
    lock.write_text(text.replace(LAYERS, f"{__name__}:{model}"), encoding="utf-8")


def test_a_lock_file_says_what_matches_where(run: Run, lock: Path) -> None:
    assert run("layers", "--update") == (0, f"{LAYERS}: locked in LOCK; Sequentials: 3")
    document = yaml.safe_load(lock.read_text("utf-8"))
    assert document["schema"] == "opfuser.lock/1"
    entry = document["models"][LAYERS]
    assert entry["sequences"] == {path: {"joint": {"norm_linear": 1}} for path in "012"}
    assert entry["call"] == {"device": "meta", "inputs": ["4x8:float32, requires_grad"]}
    assert list(entry["versions"]) == ["opfuser", "torch", "triton"]
    assert entry["versions"]["opfuser"] == opfuser.__version__
    assert run("layers") == (0, f"{LAYERS}: no fusion is lost; fused steps: 3")


def test_writing_again_changes_nothing(run: Run, lock: Path) -> None:
    run("layers", "--update")
    before = lock.read_text("utf-8")
    run("layers", "--update")
    assert lock.read_text("utf-8") == before


def test_a_lost_fusion_fails_and_says_where_and_why(run: Run, lock: Path) -> None:
    run("layers", "--update")
    as_layers(lock, "changed")
    status, said = run("changed")
    assert status == 3
    assert said.startswith(f"""\
{__name__}:changed: fusions are lost
lost: norm_linear (joint) in 2: 1 -> 0
  norm_linear (joint): refused
    pattern: AddExtraInput?, MakeExtraOutput?, RMSNorm|LayerNorm|PointwiseNorm,
        BasicLinear|BasicMergedLinear|LoRALinear, Bias|MergedBias?
    refused at op 0 (0 MakeExtraOutput): GROUP_SPLIT: torch.nn.Linear stands where
        opfuser.Linear would fit (2)
""")
    assert "\ngained: norm_linear (joint) in 3: 0 -> 1\n" in said
    assert said.endswith("\n--update locks what there is now.")
    run("changed", "--update")
    assert run("changed")[0] == 0


def test_equal_losses_are_told_once(run: Run) -> None:
    run("layers", "--update")
    with opfuser.disable("norm_linear"):
        status, said = run("layers")
    assert status == 3
    assert said.count("lost:") == 1
    assert (
        "lost: norm_linear (joint) in 0-2: 1 -> 0 each\n  norm_linear (joint): disabled (" in said
    )


def test_gains_do_not_fail(run: Run) -> None:
    with opfuser.disable("*"):
        run("with_an_activation", "--update", "--allow-none")
    status, said = run("with_an_activation", "--allow-none")
    head, *gained, last = said.splitlines()
    assert (status, head[-33:]) == (0, "no fusion is lost; fused steps: 1")
    assert gained[0] == "gained: activation_linear (joint): 0 -> 1"
    assert len(gained) == 1
    assert last == "--update locks what there is now."


PLAIN = (
    f"opfuser: The model holds no opfuser.Sequential that it calls ({__name__}:plain). Neither "
    "opfuser.from_torch nor opfuser.hf.apply makes it call one. Write operations of its forward as "
    "an opfuser.Sequential: opfuser audit names those that would fuse, or pass --allow-none if "
    "there is nothing to check."
)
ALONE = (
    f"opfuser: There is nothing to check in a model without fusions ({__name__}:alone). Received: "
    "1 Sequential, in which nothing is fused. opfuser explain says why; convert the model, or "
    "pass --allow-none if there is nothing to check."
)


@pytest.mark.parametrize(("model", "says", "count"), [("plain", PLAIN, 0), ("alone", ALONE, 1)])
def test_nothing_to_check_is_an_error(
    run: Run, lock: Path, model: str, says: str, count: int
) -> None:
    assert run(model, "--update") == (1, says)
    assert not lock.exists()
    locked = f"{__name__}:{model}: locked in LOCK; Sequentials: {count}"
    assert run(model, "--update", "--allow-none") == (0, locked)
    assert run(model) == (1, says)
    passes = f"{__name__}:{model}: no fusion is lost; fused steps: 0"
    assert run(model, "--allow-none") == (0, passes)


def test_an_entry_without_fusions_checks_nothing(run: Run) -> None:
    with opfuser.disable("*"):
        run("layers", "--update", "--allow-none")
    status, said = run("layers")
    assert status == 1
    assert said == (
        "opfuser: Fusions that are locked can be checked, and the entry has none "
        f"(LOCK: {LAYERS}). Write it again with --update, or pass --allow-none if there is nothing "
        "to check."
    )


def test_a_model_that_is_no_longer_converted_has_lost_its_fusions(run: Run, lock: Path) -> None:
    run("layers", "--update")
    as_layers(lock, "plain")
    assert run("plain")[0] == 3
    assert run("plain", "--allow-none")[0] == 3


@pytest.mark.parametrize("text", ["4x7", "4x8:int64"])
def test_nothing_is_locked_of_a_call_that_fails(lock: Path, text: str) -> None:
    assert main(["check", LAYERS, "--lock", str(lock), "--input", text, "--update"]) == 1
    model = f"{__name__}:with_an_activation"
    assert main(["check", model, "--lock", str(lock), "--input", text, "--update"]) == 1
    assert not lock.exists()


def test_a_sequence_that_is_gone_has_lost_its_fusions(run: Run, lock: Path) -> None:
    run("layers", "--update")
    as_layers(lock, "without_the_last")
    status, said = run("without_the_last")
    assert status == 3
    gone = "  the model calls no Sequential with this path any more"
    assert f"lost: norm_linear (joint) in 2: 1 -> 0\n{gone}" in said


def test_a_fusion_that_is_not_registered_any_more(run: Run) -> None:
    with opfuser.register_forward_fusion(rule()):
        run("of_a_user", "--update")
        assert run("of_a_user")[0] == 0
    status, said = run("of_a_user")
    gone = "  no fusion named mine is registered any more"
    assert (status, f"lost: mine (forward): 1 -> 0\n{gone}\n" in said) == (3, True)


def test_versions_are_told_where_something_changed(run: Run, lock: Path) -> None:
    run("layers", "--update")
    text = lock.read_text("utf-8")
    lock.write_text(text.replace("opfuser: 0.1.0", "opfuser: 0.0.9"), encoding="utf-8")
    assert "since" not in run("layers")[1]
    with opfuser.disable("norm_linear"):
        assert "since the lock: opfuser 0.0.9 -> 0.1.0\n" in run("layers")[1]


def test_a_file_holds_several_models(run: Run, lock: Path) -> None:
    run("layers", "--update")
    run("with_an_activation", "--update")
    with opfuser.disable("norm_linear"):
        assert run("with_an_activation")[0] == 0
        assert run("layers")[0] == 3
    assert len(yaml.safe_load(lock.read_text("utf-8"))["models"]) == 2


def test_as_data(run: Run) -> None:
    run("layers", "--update")
    with opfuser.disable("norm_linear"):
        status, said = run("layers", "--format", "json")
    found = json.loads(said)
    assert (status, found["schema"], found["name"]) == (3, "opfuser.check/1", LAYERS)
    (lost,) = found["lost"]
    assert lost["fusion"] == "norm_linear"
    assert (lost["paths"], lost["before"], lost["now"]) == (["0", "1", "2"], 1, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "There is no lock file yet. Received: LOCK. opfuser check with --update writes it."),
        ("models: {", "A lock file is YAML (LOCK:1)."),
        ("models: {}", "A lock file has the schema opfuser.lock/1 (LOCK). Received: none."),
        ("schema: opfuser.lock/2", "(LOCK). Received: schema 'opfuser.lock/2'."),
        ("schema: opfuser.lock/1\nmodels: []", "(LOCK). Received: models: []. Restore it, or"),
        ("schema: opfuser.lock/1\nmodels: {a: 1}", "Received: a: 1."),
        ("schema: opfuser.lock/1\nmodels: {a: {call: {}}}", "Received: a: versions: None."),
        (
            "schema: opfuser.lock/1\nmodels: {a: {call: {}, versions: {}, sequences: {}}}",
            "Received: a: call: {}.",
        ),
        (
            SCHEMA + COUNTS,
            "Received: a: sequences: '': {'joint': {'f': 'many'}}.",
        ),
        (
            "schema: opfuser.lock/1\nmodels: {}",
            f"no entry of this model (LOCK). Received: {LAYERS}. There are none; --update adds",
        ),
    ],
)
def test_files_that_cannot_be_used(run: Run, lock: Path, text: str | None, said: str) -> None:
    if text is not None:
        lock.write_text(text, encoding="utf-8")
    status, printed = run("layers")
    assert status == 1
    assert said in printed


def test_a_file_that_cannot_be_read_or_written(run: Run, lock: Path) -> None:
    lock.mkdir()
    assert run("layers") == (
        1,
        "opfuser: The lock file cannot be read. Received: LOCK: Is a directory.",
    )


def test_an_entry_of_another_call_is_not_compared(run: Run) -> None:
    run("layers", "--update")
    status, said = run("layers", "--dtype", "bf16")
    assert status == 1
    assert "The entry is of a call with 4x8:float32, requires_grad on meta (LOCK" in said
    assert "Received: 4x8:bfloat16, requires_grad on meta. Pass the same --input" in said


def test_without_yaml_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    status, said = run("layers", "--update")
    assert (status, said[-49:]) == (1, "is not installed. Run pip install opfuser[tools].")
