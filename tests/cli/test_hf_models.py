"""Models of transformers by name: which are built, how, and what commands say about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opfuser.hf
from opfuser.report import hf_models
from opfuser.report.target import Target, load, plans

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
constants = pytest.importorskip("huggingface_hub.constants")

Command = Callable[..., Any]

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"vocab_size": 64, "max_position_embeddings": 24}
SMALL: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**LAYERS, **TOKENS, "intermediate_size": 48, "num_key_value_heads": 2},
    "GPT2LMHeadModel": {
        "vocab_size": 64, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4,
    },
    "BertForMaskedLM": {**LAYERS, **TOKENS, "intermediate_size": 48},
    "ViTForImageClassification": {
        **LAYERS, "intermediate_size": 48, "image_size": 16, "patch_size": 8, "num_labels": 3,
    },
}  # fmt: skip
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL["LlamaForCausalLM"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with configurations in files."""
    for name, settings in SMALL.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(settings))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**LLAMA, "use_cache": True}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(name: str, device: str = "meta", **more: Any) -> Target:
    return load(f"hf:{name}", (), device, config=Path(f"{name}.json"), **more)


@pytest.mark.parametrize("name", SMALL)
def test_the_plans_are_those_of_a_model_that_is_built_and_applied_by_hand(name: str) -> None:
    model = getattr(transformers, name)
    config = model.config_class(**SMALL[name], use_cache=False)
    with torch.device("meta"):
        model = model(config).train()
        x = torch.zeros((8, 3, 16, 16) if name.startswith("ViT") else (8, 24))
    x = x if name.startswith("ViT") else x.long()
    opfuser.hf.apply(model)
    found = plans(small(name))
    assert found == plans(Target("by hand", model, (x,)))
    assert sum(bool(plan.fused("forward")) for plan in found.values()) >= 2


@pytest.mark.parametrize("name", SMALL)
def test_explain_and_audit(opfuser_command: Command, name: str) -> None:
    argv = f"hf:{name}", "--config", f"{name}.json"
    done = opfuser_command("explain", *argv)
    assert (done.status, done.err) == (0, "")
    assert done.out.count("Plan for ") >= 2
    assert "whole model, on a GPU, a call and its backward:" in done.out
    done = opfuser_command("audit", *argv)
    assert (done.status, done.err) == (3, "")
    assert "use_existing_kernel" in done.out


def test_audit_looks_at_the_model_before_apply_or_after(opfuser_command: Command) -> None:
    argv = "hf:LlamaForCausalLM", "--config", "LlamaForCausalLM.json"
    assert "fused_op: norm_linear" in opfuser_command("audit", *argv).out
    assert "fused_op: norm_linear" not in opfuser_command("audit", *argv, "--applied").out


def test_weights_are_none_on_the_meta_device_and_random_elsewhere() -> None:
    target = small("LlamaForCausalLM")
    assert all(t.is_meta for t in (*target.model.parameters(), *target.inputs))
    assert target.untouched is None
    real = small("LlamaForCausalLM", "cpu", with_data=True)
    weights = dict(real.model.named_parameters())
    assert all(t.isfinite().all() and not t.is_meta for t in weights.values())
    assert weights["lm_head.weight"].std() > 0
    assert real.model.training
    assert not real.model.config.use_cache
    (tokens,) = real.inputs
    assert (tokens.shape, tokens.dtype, tokens.requires_grad) == ((8, 24), torch.int64, False)
    assert 0 <= int(tokens.min()) < int(tokens.max()) < 64
    (images,) = small("ViTForImageClassification", "cpu").inputs
    assert (images.shape, images.requires_grad) == ((8, 3, 16, 16), False)
    assert images.std() > 0.5


def test_the_untouched_model_has_the_same_parameters_and_results() -> None:
    target = small("LlamaForCausalLM", "cpu", with_data=True)
    assert isinstance(target.untouched, nn.Module)
    for name, t in target.model.named_parameters():
        assert target.untouched.get_parameter(name) is t
    assert opfuser.hf.report(target.model).computed
    assert not opfuser.hf.report(target.untouched).computed
    ours, theirs = (m(*target.inputs).logits for m in (target.model, target.untouched))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_dtype_is_that_of_the_weights_and_not_of_what_stays_in_fp32() -> None:
    model = small("LlamaForCausalLM", dtype=torch.bfloat16).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    Path("llama/config.json").write_text(json.dumps({**LLAMA, "dtype": "float16"}))
    (dtype,) = {p.dtype for p in load("hf:llama").model.parameters()}
    assert dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "config", "kind"),
    [
        ("llama", None, "LlamaForCausalLM"),  # the folder, not the type of models
        ("llama/config.json", None, "LlamaForCausalLM"),
        ("LlamaForSequenceClassification", "llama/config.json", "LlamaForSequenceClassification"),
        ("LlamaConfig", "LlamaForCausalLM.json", "LlamaModel"),
        ("LlamaConfig", "llama/config.json", "LlamaForCausalLM"),
        ("bert", "BertForMaskedLM.json", "BertModel"),
    ],
)
def test_names(name: str, config: str | None, kind: str) -> None:
    given = None if config is None else Path(config)
    model: Any = load(f"hf:{name}", config=given, applied=False).model
    assert (type(model).__name__, model.config.hidden_size) == (kind, 32)
    assert not opfuser.hf.report(model).computed


def test_settings_have_precedence_over_a_folder_one_by_one() -> None:
    rope = {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}
    Path("llama/config.json").write_text(json.dumps({**LLAMA, "rope_parameters": rope}))
    more = {"num_hidden_layers": 1, "rope_parameters": {"factor": 4.0}}
    Path("more.json").write_text(json.dumps(more))
    config: Any = load("hf:llama", config=Path("more.json")).model.config
    assert (config.num_hidden_layers, config.hidden_size) == (1, 32)
    assert config.rope_parameters == {**rope, "factor": 4.0}


def test_a_quantized_model_is_refused_or_built_without(
    opfuser_command: Command, folder: Path
) -> None:
    quantized = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    (folder / "llama" / "config.json").write_text(json.dumps(quantized))
    assert opfuser_command("explain", "hf:llama").err == (
        "opfuser: Quantized weights are read from files, and not built (hf:llama). Received: "
        "quantization_config. Set it to null in the file of --config to see the model without.\n"
    )
    (folder / "plain.json").write_text('{"quantization_config": null}')
    done = opfuser_command("explain", "hf:llama", "--config", "plain.json")
    assert (done.status, done.err) == (0, "")


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = []
    original = transformers.LlamaForCausalLM._from_config.__func__

    def noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        offline.append(constants.HF_HUB_OFFLINE)
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_from_config", classmethod(noted))
    small("LlamaForCausalLM")
    assert (offline, constants.HF_HUB_OFFLINE) == ([True], False)


def test_a_lock_has_an_entry_for_each_configuration(opfuser_command: Command, folder: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="lock files are YAML")
    other = "hf:LlamaForCausalLM", "--config", "llama/config.json"
    for argv in (("hf:llama",), other):
        assert opfuser_command("check", *argv, "--lock", "l.yaml", "--update").status == 0
        assert opfuser_command("check", *argv, "--lock", "l.yaml").status == 0
    models = yaml.safe_load((folder / "l.yaml").read_text())["models"]
    assert sorted(models) == ["hf:LlamaForCausalLM --config llama/config.json", "hf:llama"]


def test_diff_names_the_command_with_the_configuration(opfuser_command: Command) -> None:
    argv = "hf:GPT2LMHeadModel", "--config", "GPT2LMHeadModel.json"
    done = opfuser_command("diff", *argv, "--fusion", "norm_linear")
    assert (done.status, "norm_linear (joint)" in done.out) == (0, True)
    done = opfuser_command("diff", *argv, "--fusion", "grouped_mlp")
    command = f"opfuser explain {' '.join(argv)} --why grouped_mlp"
    assert done.err == f"grouped_mlp matches nowhere: {command} says why.\n"


def test_bench_times_the_untouched_model_too(opfuser_command: Command) -> None:
    argv = "hf:BertForMaskedLM", "--config", "BertForMaskedLM.json", "--input", "1x8:int64"
    more = "--device", "cpu", "--steps", "1", "--format", "json"
    done = opfuser_command("bench", *argv, *more)
    assert done.status == 0
    names = [row["name"] for row in json.loads(done.out)["contestants"]]
    assert names == ["fused", "unfused", "transformers"]


def llama() -> nn.Module:
    """Of a user, with a cache or without."""
    config = transformers.LlamaConfig(**SMALL["LlamaForCausalLM"], use_cache=False)
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made


def test_models_that_a_function_builds_need_no_values_either(opfuser_command: Command) -> None:
    done = opfuser_command("audit", f"{__name__}:llama", "--input", "2x8:int64")
    assert (done.status, done.err) == (3, "")
    find = transformers.masking_utils.find_packed_sequence_indices
    assert find(torch.empty(1, 4, device="meta", dtype=torch.int64)) is None
    assert find(torch.tensor([[0, 1, 2, 3]])) is None
    assert find(torch.tensor([[0, 1, 0, 1]])).tolist() == [[0, 0, 1, 1]]


FOLLOWED = "opfuser: hf: is followed by a class or a model type of transformers, or by a local"
NOT_RUN = "Code beside a configuration is not run: build the model in a function of yours."


@pytest.mark.parametrize(
    ("argv", "settings", "says"),
    [
        (["hf:meta-llama/Llama-3.2-1B"], None, "are not looked up: nothing is downloaded."),
        (["hf:"], None, FOLLOWED),
        (["hf:bert-base-uncased"], None, FOLLOWED),
        (["hf:LlamaForCausalLn"], None, "Did you mean LlamaForCausalLM"),
        (["hf:LlamaTokenizer"], None, FOLLOWED),
        (["hf:PreTrainedModel"], None, "An abstract class builds no model"),
        (["hf:BertModel"], {"num_layers": 3}, "BertConfig has no setting of this name (hf:BertM"),
        (["hf:llama"], {"hiden_size": 3}, "Received: 'hiden_size'. Did you mean hidden_size or "),
        (["hf:BertModel"], LLAMA, "is of the type bert. Received: model_type 'llama'."),
        (["hf:llama"], {"model_type": "bert"}, "of the type llama. Received: model_type 'bert'."),
        (["hf:llama"], {"hidden_size": 30}, "hf:llama has to be built from its configuration (s"),
        (["hf:llama"], {"architectures": ["MyLlama"]}, f"Received: MyLlama. {NOT_RUN}"),
        (["hf:llama"], [1], "A configuration is an object of JSON. Received: settings.json: list."),
        (["hf:llama", "--config", "nowhere"], None, "Received: nowhere: No such file"),
        (["hf:llama", "--config", "."], None, "Received: .: Is a directory"),
        (["hf:own"], None, f"Received: 'my_own'. {NOT_RUN}"),
        (["hf:no_json"], None, "A configuration is JSON. Received: no_json: Expecting value"),
        (["hf:empty"], None, "Received: empty/config.json: No such file"),
        (["hf:resnet"], {"depths": [1, 1]}, "Received: ResNetModel, whose forward takes pixel_val"),
        (
            ["hf:resnet", "--input", "2x3x32x32"],
            {"hidden_sizes": [8, 8], "embedding_size": 8, "depths": [1, 1]},
            "opfuser.hf.apply replaces nothing in this model (hf:resnet --config settings.json).",
        ),
        (["hf:llama", "--input", "2x8x3"], None, "opfuser: The model has to run with inputs (2"),
        (["tests.cli.models:mlp"], {}, "is a configuration of a model of transformers. Received:"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    opfuser_command: Command, folder: Path, argv: list[str], settings: Any, says: str
) -> None:
    for name in ("own", "empty"):
        (folder / name).mkdir()
    own = {"model_type": "my_own", "auto_map": {"AutoModel": "modeling.MyModel"}}
    (folder / "own" / "config.json").write_text(json.dumps(own))
    (folder / "no_json").write_text("nothing")
    if settings is not None:
        (folder / "settings.json").write_text(json.dumps(settings))
        argv = [*argv, "--config", "settings.json"]
    done = opfuser_command("explain", *argv)
    assert (done.status, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert says in done.err
    assert ".." not in done.err.replace("...", "")


def test_without_transformers_it_says_what_to_install(
    opfuser_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_models, "imported", lambda name: f"{name} cannot be imported: gone")
    assert opfuser_command("explain", "hf:llama").err == (
        "opfuser: hf: names a model of transformers. Received: transformers cannot be imported: "
        "gone. Run pip install opfuser[hf].\n"
    )
