"""Configurations of fusions: what they state, where it holds, who states it, and their errors."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opfuser
from opfuser import Identity, Sequential
from opfuser.core.fusion import Fusion
from opfuser.errors import ConfigError
from opfuser.op import BasicOperation, OperationContext
from opfuser.registry import effective, registry
from opfuser.registry.configuration import FusionConfig, glob_names
from opfuser.registry.configuration_files import as_file
from opfuser.registry.handles import Registry
from tests.planning.toys import REGISTER, FusedForward, pattern

pytest.importorskip("yaml", reason="files of configurations are YAML")

ROOT = Path(__file__).parents[2]


class Add(BasicOperation):
    """y = x + b, with a parameter of ``size`` elements."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(size))

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **unused: Any) -> Any:
        return input_ + self.b.sum()

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output, [None]


class Cast(BasicOperation):
    """Returns bf16."""

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **unused: Any) -> Any:
        return input_.bfloat16()

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output.float(), []

    def output_dtype(self, dtypes: Any) -> torch.dtype:
        return torch.bfloat16


class Pair(FusedForward):
    def fuser_forward(self, ctxs: Any, input_: torch.Tensor, **unused: Any) -> Any:
        for ctx, op in zip(ctxs, self.basic_ops):
            input_ = op.op_forward(ctx, input_)
        return input_, [()] * len(self.basic_ops)


def pairs(name: str = "pairs", *types: type[BasicOperation], **kwargs: Any) -> Any:
    return REGISTER["forward"](
        Fusion(name, "forward", types or (Add, Add), Pair, **kwargs)  # type: ignore[arg-type]
    )


@pytest.fixture
def pairs_are_fused() -> Iterator[None]:
    with pairs():
        yield


X = torch.ones(4)


def four(**kwargs: Any) -> Sequential:
    """Two pairs: operations 0 and 1, and in a nested Sequential 2 and 3."""
    return Sequential(Add(), Add(), Sequential(Add(8), Add(8)), **kwargs)


def said(seq: Sequential, name: str = "pairs", x: torch.Tensor = X) -> tuple[list[int], list[str]]:
    """Where a fusion matched, and what kept it from matching elsewhere."""
    record = seq.plan(x).record(name)
    assert seq(x) is not None
    assert seq.last_plan == seq.plan(x)
    details = [f"{at} {why}" for at, why in record.refusals] or [record.detail]
    return [match[0] for match in record.matches], list(filter(None, details))


def write(folder: Path, text: str) -> str:
    file = folder / "fusions.yaml"
    file.write_text(f"schema: opfuser.fusions/1\n{text}", encoding="utf-8")
    return str(file)


# What settings do.

OFF = {"forward": {"pairs": {"enabled": False}}}


@pytest.mark.usefixtures("pairs_are_fused")
@pytest.mark.parametrize(
    ("config", "matches", "details"),
    [
        ({}, [0, 2], []),
        (OFF, [], ["FROM"]),
        ({"forward": {"pairs": {"dtypes": ["bfloat16", "float16"]}}}, [],
         [f"{at} DTYPE: it computes in float32: dtypes is [bfloat16, float16] (FROM)"
          for at in range(3)]),
        ({"forward": {"pairs": {"dtypes": [torch.float32]}}}, [0, 2], []),
        ({"forward": {"pairs": {"min_numel": 12}}}, [1],
         ["0 SHAPE: its parameters have 8 elements: min_numel is 12 (FROM)"]),
        ({"forward": {"pairs": {"min_numel": 16}}}, [2],
         ["0 SHAPE: its parameters have 8 elements: min_numel is 16 (FROM)",
          "1 SHAPE: its parameters have 12 elements: min_numel is 16 (FROM)"]),
        ({"overrides": {"2": {"pairs": {"enabled": False}}}}, [0],
         ["2 DISABLED: pairs is off here: override '2': enabled is false (FROM)"]),
        ({"overrides": {0: {"pairs": {"enabled": False}}}}, [1],
         ["0 DISABLED: pairs is off here: override '0': enabled is false (FROM)"]),
        (OFF | {"overrides": {"2.*": {"pairs": {"enabled": True}}}}, [2],
         ["0 DISABLED: pairs is off here: enabled is false (FROM)",
          "1 DISABLED: pairs is off here: enabled is false (FROM)"]),
        ({"overrides": {"*": {"pairs": {"enabled": False}}, "[01]": {"pairs": {"enabled": True}}}},
         [0], ["2 DISABLED: pairs is off here: override '*': enabled is false (FROM)"]),
    ],
    ids=range(10),
)  # fmt: skip
@pytest.mark.parametrize("way", ["block", "sequential"])
def test_what_a_setting_does(
    config: dict[str, Any], matches: list[int], details: list[str], way: str
) -> None:
    if way == "block":
        seq, origin = four(), "opfuser.fusion_config"
        with opfuser.fusion_config(config):
            found = said(seq)
        assert said(seq) == ([0, 2], [])
    else:
        seq, origin = four(fusion_config=config), "Sequential.fusion_config"
        found = said(seq)
        seq.fusion_config = None
        assert said(seq) == ([0, 2], [])
    assert found == (matches, [detail.replace("FROM", origin) for detail in details])


@pytest.mark.usefixtures("pairs_are_fused")
def test_override_of_a_fusion_that_is_off_by_default() -> None:
    with pairs("more", enabled=False), opfuser.disable("pairs"):
        seq = four(fusion_config={"overrides": {"2": {"more": {"enabled": True}}}})
        matches, details = said(seq, "more")
        assert matches == [2]
        assert details[0] == "0 DISABLED: more is off here: enabled is false (default)"


def test_dtypes_are_those_that_operations_compute_in() -> None:
    """Not that of the input of the group, nor that of indices; that of autocast, where it is on."""
    only_bf16 = {"forward": {"pairs": {"dtypes": ["bfloat16"]}}}
    seq = Sequential(Add(), Add(), Cast(), Add(), Add())
    with pairs(), opfuser.fusion_config(only_bf16):
        assert said(seq)[0] == [3]
        with torch.autocast("cpu", torch.bfloat16):
            assert seq.plan(X).record("pairs").matches == ((0, 1), (3, 4))
    seq = Sequential(opfuser.Embedding(9, 4, dtype=torch.bfloat16), Identity())
    with pairs("pairs", opfuser.Embedding, Identity), opfuser.fusion_config(only_bf16):
        assert seq.plan(torch.zeros(3, dtype=torch.int64)).record("pairs").matches == ((0, 1),)
        assert seq.to(torch.float32).plan(torch.zeros(3, dtype=torch.int64)).fused("forward") == {}


def test_function_is_not_called_for_operations_where_it_is_off() -> None:
    seen: list[int] = []

    def function(ops: Sequence[Any]) -> list[Any]:
        seen.append(len(ops))
        return [Pair(*ops)] if len(ops) == 2 else list(ops)

    off = {"overrides": {"2": {"function": {"enabled": False}}}}
    with REGISTER["forward"](function, name="function"):
        seq = four(fusion_config=off)
        assert seq.plan(X).record("function").matches == ((0, 1),)
        assert seen == [2]
        (why,) = said(seq, "function")[1]
        assert why.startswith("2 DISABLED: function is off here: override '2': enabled is false (")


@pytest.mark.parametrize(
    ("glob", "path", "holds"),
    [
        ("layers.1", "layers.1", True), ("layers.1", "layers.1.mlp.0", True),
        ("layers.1", "layers.10", False), ("layers.1*", "layers.10.0", True),
        ("*.mlp", "layers.3.mlp.2", True), ("mlp", "layers.3.mlp", False),
        ("layers.[02]", "layers.1", False), ("layers.1.mlp", "layers.1", False),
        ("*", "", True), ("0", "", False),
    ],
)  # fmt: skip
def test_globs_name_modules_and_what_is_in_them(glob: str, path: str, holds: bool) -> None:
    assert glob_names(glob, path) == holds


# Layers.


@pytest.mark.usefixtures("pairs_are_fused")
def test_later_layers_win_one_value_at_a_time() -> None:
    outer = {"forward": {"pairs": {"enabled": False, "min_numel": 12}}}
    seq = four()
    with opfuser.fusion_config(outer):
        assert said(seq)[0] == []
        with opfuser.fusion_config({"forward": {"pairs": {"enabled": True}}}):
            assert said(seq)[0] == [1]  # min_numel holds on
            seq.fusion_config = {"forward": {"pairs": {"min_numel": 0}}}
            assert said(seq)[0] == [0, 2]
        assert said(seq)[0] == []
        with opfuser.enable("pairs"):  # a switch has the last word on this
            assert said(seq)[0] == [0, 2]
    seq.fusion_config = {"forward": {"pairs": {"enabled": True}}}
    with opfuser.disable("pairs"):
        assert said(seq) == ([], ["opfuser.disable"])
    with opfuser.disable("*"):
        assert said(seq) == ([], ["opfuser.disable"])


def test_override_of_an_earlier_layer_gives_way_to_a_later_one() -> None:
    first = {"overrides": {"2": {"pairs": {"enabled": False}}}}
    with pairs(), opfuser.fusion_config(first):
        assert said(four())[0] == [0]
        with opfuser.fusion_config({"forward": {"pairs": {"enabled": True}}}):
            assert said(four())[0] == [0, 2]


@pytest.mark.usefixtures("pairs_are_fused")
def test_nested_sequence_has_precedence_for_its_operations() -> None:
    inner = Sequential(Add(), Add(), fusion_config={"forward": {"pairs": {"enabled": True}}})
    seq = Sequential(Add(), Add(), inner, fusion_config=OFF)
    assert said(seq)[0] == [2]
    off_at_1 = {"overrides": {"1": {"pairs": {"enabled": False}}}}
    inner.fusion_config = off_at_1  # the path is the one below it
    seq.fusion_config = None
    matches, (why,) = said(seq)
    assert matches == [0]
    assert why.startswith("2 DISABLED: pairs is off here: override '1': enabled is false (Seq")


@pytest.mark.usefixtures("pairs_are_fused")
def test_without_a_block_it_stays_and_does_not_pile_up() -> None:
    try:
        for least in (12, 16):
            for _ in range(5):
                opfuser.fusion_config({"forward": {"pairs": {"min_numel": least}}})
        assert said(four())[0] == [2]
        assert len(registry.configs) <= 2
        assert sum(len(config.settings) for config in registry.configs) <= 2
    finally:
        # What is for good cannot be taken back, and would hold for the tests that follow.
        registry._configs.__init__(FusionConfig.followed_by)  # type: ignore[misc]
        registry._apply()
    assert said(four())[0] == [0, 2]


def test_merged_configurations_say_what_they_said_one_after_the_other() -> None:
    def at_2(least: int) -> Any:
        return {"pairs": {"min_numel": least}}

    with pairs():
        config: Any = {"forward": {"pairs": {"min_numel": 1}}, "overrides": {"2": at_2(2)}}
        first = registry.read(config, "here")
        config = {"overrides": {"2": at_2(3), "1": {"pairs": {"dtypes": "any"}}}}
        second = registry.read(config, "here")
        third = registry.read({"forward": {"pairs": {"min_numel": 4}}}, "here")
    both = first.followed_by(second)
    assert [(s.key, s.glob, s.value) for s in both.settings] == [
        ("min_numel", "", 1), ("min_numel", "2", 3), ("dtypes", "1", ()),
    ]  # fmt: skip
    all_three = both.followed_by(third)
    assert [(s.key, s.glob) for s in all_three.settings] == [("dtypes", "1"), ("min_numel", "")]


# Order.


@pytest.fixture
def three_orders() -> Iterator[None]:
    with pairs("a"), pairs("b"), pairs("c"):
        yield


def mine(stage: str = "forward") -> list[str]:
    return [i.name for i in opfuser.fusions() if i.origin == "user" and i.stage == stage]


@pytest.mark.usefixtures("three_orders")
def test_order_is_changed_only_where_asked_for() -> None:
    listed: dict[str, Any] = {"forward": {"c": {}, "a": {"enabled": True}}}
    built_in = [i.name for i in opfuser.fusions() if i.origin != "user"]
    with opfuser.fusion_config(listed):
        assert mine() == ["a", "b", "c"]
    with opfuser.fusion_config(listed | {"order": "registered"}):
        assert mine() == ["a", "b", "c"]
    with opfuser.fusion_config(listed | {"order": "listed"}):
        assert mine() == ["c", "b", "a"]  # those listed, in the places that they had
        assert four().plan(X).fused("forward") == {"c": 2}
        assert [i.name for i in opfuser.fusions() if i.origin != "user"] == built_in
    assert four().plan(X).fused("forward") == {"a": 2}


@pytest.mark.usefixtures("three_orders")
def test_sequence_states_no_order() -> None:
    text = r"order of fusions is that of the program \(Sequential.fusion_config\).*OPFUSER_CONFIG"
    with pytest.raises(ConfigError, match=text):
        Sequential(Add(), fusion_config={"order": "listed", "forward": {"c": {}, "a": {}}})


# Files.


@pytest.mark.usefixtures("pairs_are_fused")
def test_file_of_a_block_and_of_a_sequence(tmp_path: Path) -> None:
    file = write(tmp_path, "forward:\n  pairs:\n    enabled: true\n    min_numel: 12\n"
                           "overrides:\n  '2': {pairs: {min_numel: 0}}\n")  # fmt: skip
    expected = [1], [f"0 SHAPE: its parameters have 8 elements: min_numel is 12 ({file}:5)"]
    with opfuser.fusion_config(file):
        assert said(four()) == expected
    with opfuser.fusion_config(Path(file)):
        assert said(four()) == expected
    assert said(four(fusion_config=file)) == expected


@pytest.mark.usefixtures("pairs_are_fused")
def test_file_of_the_environment_is_read_before_the_first_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at import: it may name fusions of the program. Read once, unless it is wrong."""
    file = write(tmp_path, "forward: {late: {enabled: false}}\n")
    monkeypatch.setenv("OPFUSER_CONFIG", file)
    fresh = Registry()
    with pytest.raises(ConfigError, match="not the name of a fusion"):
        list(fresh)
    fresh.add(Fusion("late", "forward", pattern("A B"), FusedForward), "forward")
    for config in ("", "late: {enabled: false"):
        Path(file).write_text(config)
        with pytest.raises(ConfigError):
            list(fresh)
    write(tmp_path, "forward: {late: {enabled: false}}\n")
    assert [handle.name for handle in fresh][-1] == "late"
    (config,) = fresh.configs
    assert [str(s) for s in config.settings] == [f"enabled is false ({file}:2)"]
    Path(file).unlink()
    assert len(list(fresh)) == len(fresh)


def test_the_environment_of_a_program(tmp_path: Path) -> None:
    """A file relative to where it started, of which nothing is imported before; and switches."""
    off = "{enabled: false}"
    write(tmp_path, f"forward: {{forward_linear_bias_add: {off}}}\njoint: {{norm_linear: {off}}}\n")
    (tmp_path / "elsewhere").mkdir()
    code = (
        "import os, sys, opfuser, torch; os.chdir('elsewhere'); assert 'yaml' not in sys.modules\n"
        "plan = opfuser.Residual(opfuser.Linear(4, 4)).plan(torch.ones(2, 4))\n"
        "for name in ('forward_linear_bias_add', 'norm_linear', 'activation_linear'):\n"
        "    print(plan.record(name).summary())"
    )
    variables = {
        "OPFUSER_CONFIG": "fusions.yaml",
        "OPFUSER_ENABLE": "norm_linear",
        "OPFUSER_DISABLE": "activation_linear",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    by_file, enabled, disabled = done.stdout.splitlines() or [done.stderr] * 3
    assert by_file.endswith(f"disabled ({tmp_path}/fusions.yaml:2)")
    assert "matches=0" in enabled
    assert disabled.endswith("disabled (OPFUSER_DISABLE)")


def test_a_missing_library_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"PyYAML.*Run pip install opfuser\[tools\]"):
        opfuser.fusion_config(write(tmp_path, ""))
    with opfuser.fusion_config({}):  # a mapping needs none
        pass


# Errors.

IN_FILE: dict[str, tuple[str, str]] = {
    "key": ("joints: {}", r"not a key \(FILE:2, the config.*'joints'. Did you mean 'joint'"),
    "key of a fusion": ("forward:\n  pairs: {enable: true}",
                        r"not a key \(FILE:3, pairs\).*Received: 'enable'. Did you mean 'enabled'"),
    "name": ("forward:\n  pair: {enabled: true}",
             r"not the name of a fusion \(FILE:3, forward\).*'pair'. Did you mean 'pairs'"),
    "name in an override": ("overrides:\n  a.*: {zzz: {}}",
                            r"not the name of a fusion \(FILE:3, overrides, a\.\*\).*Choose among"),
    "stage": ("joint:\n  pairs: {}",
              r"listed under its stage \(FILE:3, joint\).*pairs. Move it to forward"),
    "place": ("pairs: {enabled: true}",
              r"listed under its stage \(FILE:2\).*pairs at the top. Move it to forward"),
    "twice": ("forward: {pairs: {}}\nforward: {}", r"stands once.*\(FILE:3\).*'forward'"),
    "flag": ("forward:\n  pairs: {enabled: 'no'}",
             r"enabled is true or false \(FILE:3, pairs, enabled\).*'no'"),
    "number": ("forward:\n  pairs:\n    min_numel: 1e6",
               r"min_numel is a number of elements.*\(FILE:4, pairs, min_numel\).*'1e6'"),
    "negative": ("forward: {pairs: {min_numel: -1}}", r"0 or more \(FILE:2.*Received: -1"),
    "true number": ("forward: {pairs: {min_numel: true}}", r"0 or more.*Received: True"),
    "dtypes": ("forward: {pairs: {dtypes: bfloat16}}",
               r"dtypes is a list of dtypes, or any \(FILE:2.*'bfloat16'"),
    "no dtype": ("forward: {pairs: {dtypes: []}}", r"dtypes is a list of dtypes.*a list"),
    "dtype": ("forward:\n  pairs:\n    dtypes:\n    - float32\n    - bf16",
              r"No operation computes in this dtype \(FILE:6, .*'bf16'. Did you mean 'bfloat16'"),
    "another dtype": ("forward: {pairs: {dtypes: [xyz]}}", r"'xyz'. Choose among: float64, "),
    "no mapping": ("forward: [pairs]", r"Settings stand in mappings \(FILE:2, forward\).*a list"),
    "nothing": ("forward:\n  pairs:", r"Settings stand in mappings \(FILE:3, pairs\).*nothing"),
    "order": ("order: mine", r"'registered', or 'listed'.*\(FILE:2\).*'mine'"),
    "order of fusions": ("order: [pairs]", r"or 'listed'.*\(FILE:2\). Received: a list\."),
    "dtypes in a list": ("forward: {pairs: {dtypes: [[float32]]}}",
                         r"in this dtype.*Received: a list. Choose among: float64, "),
    "yaml": ("forward: {", r"is YAML \(FILE:\d\)"),
    "date": ("forward:\n  pairs: {enabled: 2026-13-01}", r"is YAML \(FILE:3\).*month must be"),
    "tag": ("forward: !!python/name:os.system ''", r"is YAML \(FILE:2\).*python/name"),
    "endless": ("forward: &a\n  pairs: *a", r"not a key|in mappings"),
}  # fmt: skip


@pytest.mark.usefixtures("pairs_are_fused")
@pytest.mark.parametrize("fault", IN_FILE)
def test_errors_in_a_file_name_the_line(tmp_path: Path, fault: str) -> None:
    text, message = IN_FILE[fault]
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message.replace("FILE", file)) as error:
        opfuser.fusion_config(file)
    assert isinstance(error.value, ValueError)
    assert registry.configs == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"forward: {}", r"states its schema .*Begin it with the line 'schema: opfuser.fusions/1'"),
        (b"", r"states its schema"),
        (b"schema: [1]", r"is opfuser.fusions/1 \(.*:1\). Received: a list\."),
        (b"schema: opfuser.fusions/2", r"is opfuser.fusions/1 \(.*:1\).*'opfuser.fusions/2'"),
        (b"schema: \xff", r"cannot be read|is YAML"),
        (None, r"cannot be read \(.*fusions.yaml\).*No such file"),
    ],
)
def test_errors_of_a_whole_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "fusions.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        opfuser.fusion_config(file)


@pytest.mark.usefixtures("pairs_are_fused")
@pytest.mark.parametrize(
    "apply", [opfuser.fusion_config, lambda config: Sequential(fusion_config=config)]
)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"forward": {"pair": {}}}, r"\((opfuser|Sequential)\.fusion_config, forward\).*'pairs'"),
        ({"forward": {"pairs": {"enabled": 1}}}, r"true or false.*pairs, enabled.*Received: 1"),
        ({"forward": {"pairs": {"dtypes": [torch.int64]}}}, r"in this dtype.*int64"),
        ({"forward": {3: {}}}, r"not the name of a fusion.*'3'"),
        ({"overrides": {"": {}}}, r"not the name|not a key"),
        ({"schema": "other"}, r"is opfuser.fusions/1"),
        (3, r"a mapping or the path of a file.*int"),
    ],
)
def test_errors_in_a_mapping(apply: Callable[[Any], Any], config: Any, message: str) -> None:
    version = registry.version
    with pytest.raises(ConfigError, match=message):
        apply(config)
    assert registry.version == version


def test_name_that_is_gone_by_the_time_of_a_plan_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pairs("gone"):
        block = opfuser.fusion_config({"forward": {"gone": {"enabled": False}}})
    with block:
        for _ in range(2):
            Sequential(Identity())(X)
    texts = [r.getMessage() for r in caplog.records if "gone" in r.getMessage()]
    assert texts == ["opfuser.fusion_config names 'gone', but no fusion has that name"]


@pytest.mark.usefixtures("pairs_are_fused")
def test_override_that_names_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    seq = four(fusion_config={"overrides": {"7": {"pairs": {}}, "2": {"pairs": {"min_numel": 0}}}})
    seq.plan(X)
    assert [r.getMessage() for r in caplog.records] == []  # an override without settings is none
    seq.fusion_config = {"overrides": {"7": {"pairs": {"min_numel": 0}}}}
    seq.plan(X)
    (record,) = caplog.records
    assert record.getMessage() == (
        "Sequential.fusion_config: the override '7' names no operation of its Sequential"
    )


@pytest.mark.usefixtures("pairs_are_fused")
def test_sequence_that_the_configuration_does_not_reach_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Sequential(Add(), Add())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x)

    seq = Sequential(Add(), Add(), Called(), fusion_config=OFF)
    seq(X)
    assert seq[2].inside.last_plan.fused("forward") == {"pairs": 1}
    (record,) = caplog.records
    assert record.getMessage() == (
        "the fusion_config of a Sequential does not reach the Sequentials in Called, which is "
        "called as a module; give them their own"
    )


# Plans, copies, traced code.


@pytest.mark.usefixtures("pairs_are_fused")
def test_plans_of_equal_configurations_are_shared(plans: list[Any]) -> None:
    seq = four()
    seq(X)
    for _ in range(3):
        with opfuser.fusion_config({"forward": {"pairs": {"min_numel": 12}}}):
            seq(X)
        seq(X)
    assert len(plans) == 2
    seq.fusion_config = {"forward": {"pairs": {"min_numel": 12}}}
    seq(X)
    assert len(plans) == 3


@pytest.mark.usefixtures("pairs_are_fused")
def test_copies_keep_the_configuration() -> None:
    seq = four(fusion_config={"overrides": {"2": {"pairs": {"enabled": False}}}})
    for copied in (copy.deepcopy(seq), pickle.loads(pickle.dumps(seq)), seq[1:]):
        assert copied.fusion_config == seq.fusion_config
    assert said(copy.deepcopy(seq))[0] == [0]
    assert said(seq[1:])[0] == []
    assert (seq * 2).fusion_config == seq.fusion_config
    assert isinstance(seq.fusion_config, FusionConfig)
    assert Sequential(fusion_config=seq.fusion_config).fusion_config == seq.fusion_config


@pytest.mark.usefixtures("pairs_are_fused")
def test_changed_structure_is_placed_anew() -> None:
    seq = four(fusion_config={"overrides": {"0": {"pairs": {"enabled": False}}}})
    assert said(seq)[0] == [1]
    del seq[0]
    seq.insert(0, Identity())
    assert said(seq)[0] == [1]
    del seq[0]
    assert said(seq)[0] == [1]
    assert seq.plan(X).names == ("0", "1.0", "1.1")


@pytest.mark.usefixtures("pairs_are_fused")
def test_boundary_is_no_reason_where_the_fusion_is_off() -> None:
    seq = Sequential(Add(), nn.Softsign(), Add())
    assert seq.plan(X).record("pairs").status == "refused"
    seq.fusion_config = OFF
    assert seq.plan(X).record("pairs").summary().endswith("disabled (Sequential.fusion_config)")
    assert seq.plan(X).record("pairs").refusals == ()


class Derived(Sequential):
    """Is called as a module."""


@pytest.mark.usefixtures("pairs_are_fused")
@pytest.mark.parametrize("called", ["hook", "subclass", "both"])
def test_sequence_that_is_called_keeps_its_place(called: str) -> None:
    off = {"overrides": {"2.1": {"pairs": {"enabled": False}}}}
    inner = (Sequential if called == "hook" else Derived)(Identity(), Sequential(Add(), Add()))
    seq = Sequential(Add(), Add(), inner)
    assert said(seq)[0] == [0, 3]
    with opfuser.fusion_config(off):
        if called != "subclass":
            inner.register_forward_hook(lambda *args: None)
        if called == "both":
            inner[1].register_forward_hook(lambda *args: None)
        assert said(seq)[0] == [0]
        assert said(inner)[0] == []
    seq.fusion_config = off
    assert said(seq)[0] == [0]
    assert said(inner)[0] == []
    inner.fusion_config = {"overrides": {"1": {"pairs": {"enabled": True}}}}
    assert said(seq)[0] == [0, 3]
    inner.fusion_config = None
    seq.insert(0, Identity())  # it has another path now
    assert said(seq)[0] == [1, 4]
    seq.pop(0)
    assert said(seq)[0] == [0]
    assert said(copy.deepcopy(seq))[0] == [0]
    seq.pop(2)
    assert said(inner)[0] == [1]  # it is in none any more


def test_operation_that_a_hook_makes_a_module_keeps_its_place() -> None:
    with pairs("one", Add):
        off_at_1 = {"overrides": {"1": {"one": {"enabled": False}}}}
        seq = Sequential(Identity(), Add(), Add(), fusion_config=off_at_1)
        for hook in (None, seq[1].register_forward_hook(lambda *args: None)):
            assert said(seq, "one")[0] == [2]
            if hook is not None:
                seq.fusion_config = None
                assert said(seq, "one")[0] == [1, 2]
                with opfuser.fusion_config(off_at_1):
                    assert said(seq, "one")[0] == [2]


def test_operation_called_alone_follows_what_holds_everywhere() -> None:
    op, fused = Add(), []

    class Noted(Pair):
        def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
            fused.append(self)
            return super().fuser_forward(*args, **kwargs)

    with REGISTER["forward"](Fusion("one", "forward", (Add,), Noted)):
        with opfuser.fusion_config({"overrides": {"0": {"one": {"enabled": False}}}}):
            op(X)
            assert len(fused) == 1
        with opfuser.fusion_config({"forward": {"one": {"enabled": False}}}):
            op(X)
            assert len(fused) == 1


# The origin of every value.


def rows(name: str, config: FusionConfig | None = None) -> list[tuple[str, Any, str, str]]:
    found = [row for row in effective(config) if row.name == name]
    assert {row.stage for row in found} == {"forward"}
    return [(row.setting, row.value, row.origin, row.glob) for row in found]


def test_effective_values_say_what_states_them(tmp_path: Path) -> None:
    with pairs() as handle, pairs("off", enabled=False):
        assert rows("pairs") == [("enabled", True, "default", "")]
        assert rows("off") == [("enabled", False, "default", "")]
        text = """forward:
  pairs: {min_numel: 7, dtypes: [float32]}
overrides:
  'a.*': {pairs: {enabled: false, min_numel: 9}}
"""
        file = write(tmp_path, text)
        with opfuser.fusion_config(file):
            assert rows("pairs") == [
                ("enabled", True, "default", ""),
                ("min_numel", 7, f"{file}:3", ""),
                ("dtypes", (torch.float32,), f"{file}:3", ""),
                ("enabled", False, f"{file}:5", "a.*"),
                ("min_numel", 9, f"{file}:5", "a.*"),
            ]
            with opfuser.fusion_config({"forward": {"pairs": {"min_numel": 1}}}):
                assert rows("pairs") == [
                    ("enabled", True, "default", ""),
                    ("dtypes", (torch.float32,), f"{file}:3", ""),
                    ("enabled", False, f"{file}:5", "a.*"),
                    ("min_numel", 1, "opfuser.fusion_config", ""),
                ]
            seq = Sequential(Add(), fusion_config={"forward": {"pairs": {"dtypes": "any"}}})
            found = rows("pairs", seq.fusion_config)
            assert ("dtypes", (), "Sequential.fusion_config", "") in found
            handle.enabled = False
            assert rows("pairs")[-1] == ("enabled", False, "handle", "")
            with opfuser.enable("pairs"):
                assert rows("pairs")[-1] == ("enabled", True, "opfuser.enable", "")
                assert [row[0] for row in rows("pairs")].count("enabled") == 1


@pytest.mark.usefixtures("pairs_are_fused")
@pytest.mark.parametrize("origins", [False, True])
def test_what_is_in_force_can_be_written_and_read_again(tmp_path: Path, origins: bool) -> None:
    config = {
        "forward": {"pairs": {"min_numel": 12, "dtypes": ["float32", "bfloat16"]}},
        "overrides": {"2.*": {"pairs": {"min_numel": 0, "dtypes": "any"}}},
    }
    with opfuser.fusion_config(config):
        before = [(r.name, r.setting, r.value, r.glob) for r in effective()]
        file = tmp_path / "fusions.yaml"
        file.write_text(as_file(effective(), origins=origins), encoding="utf-8")
    with opfuser.fusion_config(file):
        assert [(r.name, r.setting, r.value, r.glob) for r in effective()] == before
        if origins:
            assert "min_numel: 12  # opfuser.fusion_config" in file.read_text()
            assert "enabled: true  # default" in file.read_text()


def test_names_that_yaml_would_misread_are_quoted(tmp_path: Path) -> None:
    names = ("a b", "m:f", "m:<locals>.f", "m:f#2", "on", "1.5", "a:", "x: y", "null")
    handles = [pairs(name) for name in names]
    try:
        file = tmp_path / "fusions.yaml"
        file.write_text(as_file(effective()), encoding="utf-8")
        with opfuser.fusion_config(file) as read:
            assert set(names) <= read.config.names
    finally:
        for handle in handles:
            handle.remove()


SHOWN = sorted((ROOT / "docs" / "snippets").glob("*.yaml"))


@pytest.mark.parametrize("file", SHOWN, ids=lambda f: f.stem)
def test_files_that_the_documentation_shows_are_configurations(file: Path) -> None:
    with opfuser.fusion_config(file) as read:
        assert read.config.names
