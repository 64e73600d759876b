"""opfuser.hf.apply: models of transformers compute the same, and stay what they were."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser.hf
from opfuser.errors import NotSupportedError
from tests.applying.models import assert_as_exact
from tests.reading.tiny import CACHE

from .hf_models import (
    DECODER,
    LAYERED,
    MODELS,
    assert_close,
    assert_same,
    batch_of,
    calls,
    layers,
    pair,
    reason,
    step,
    transformers,
)

# Modules of transformers 5.0 say so when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")


def forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_every_gradient(name: str) -> None:
    model, untouched, report = pair(name)
    assert len(layers(report)) == (2 if name in LAYERED else 0)
    for padded in (True, False):
        batch = batch_of(name, padded=padded)
        assert_same(step(model, **batch), step(untouched, **batch))
    assert calls(model) == {}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "bert"])
def test_bf16(name: str) -> None:
    """Losses within 2e-3; no value further from fp32's than twice the untouched model's."""
    torch.manual_seed(3)
    model, untouched, _ = pair(name, dtype=torch.bfloat16)
    batch = batch_of(name)
    exact = step(copy.deepcopy(untouched).float(), **batch)
    got, plain = step(model, **batch), step(untouched, **batch)
    assert_close(got.loss, plain.loss, 2e-3)
    values = [[s.logits, *(s.grads[n] for n in exact.grads)] for s in (got, plain, exact)]
    assert_as_exact(*values, floor=0.0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_bigcode", "mixtral"])
def test_generates_the_same_tokens(name: str) -> None:
    model, untouched, _ = pair(name)
    tokens = batch_of(name)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    for given in (
        {},
        {"attention_mask": mask},
        {"attention_mask": mask, "num_beams": 3},
        {"do_sample": True, "attention_mask": mask},
        {"cache_implementation": "static"},
    ):
        made = []
        for each in (model.eval(), untouched.eval()):
            torch.manual_seed(1)
            how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, **given}
            made.append(each.generate(tokens, **how))
        assert torch.equal(*made), given
    update = transformers.cache_utils.StaticLayer.update
    if "cache_position" in update.__code__.co_consts:  # as in transformers 5.0
        assert calls(model) == {"updates its cache with more than keys and values": 16}
    else:
        assert calls(model) == {}


def test_a_mask_says_all_that_is_hidden() -> None:
    """Also where it shows later tokens, as to those of a prefix."""
    model, untouched, _ = pair("llama")
    batch = batch_of("llama")
    mask = torch.ones(9, 9).tril().bool()
    mask[:4, :4] = True
    batch["attention_mask"] = mask.expand(2, 1, 9, 9)
    got, want = step(model, **batch), step(untouched, **batch)
    assert_same(got, want)
    assert calls(model) == {}
    causal_logits = untouched(**batch_of("llama", padded=False)).logits
    assert not torch.allclose(causal_logits, want.logits, rtol=1e-3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_example_is_made_of_the_configuration(device: str) -> None:
    """On the device of the model, which is left as it was."""
    model = MODELS["vit"]().to(device)
    attributes = [dict(vars(m)) for m in model.modules()]
    assert len(layers(opfuser.hf.apply(model))) == 2
    opfuser.hf.revert(model)
    for module, before in zip(model.modules(), attributes):
        now = vars(module)
        assert [*now] == [*before]
        assert all(now[name] is value for name, value in before.items())


def _with_hook(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda *_: pytest.fail("a hook was called"))


def _with_parameter_elsewhere(model: Any) -> None:
    model.lm_head.to("meta")


def _refusing(model: Any) -> None:
    model.config.pad_token_id = None
    model.model.embed_tokens.padding_idx = None
    model.main_input_name = "inputs_embeds"


@pytest.mark.parametrize("change", [_with_hook, _with_parameter_elsewhere, _refusing])
def test_models_whose_calls_could_be_noticed_are_not_called(change: Any) -> None:
    model = MODELS["llama"]()
    change(model)
    report = opfuser.hf.apply(model)
    assert report.computed == ()
    assert {entry.reason for entry in report.kept} == {"has not been called since apply"}


def test_an_example_of_ones_own() -> None:
    model = MODELS["llama"]()
    batch = batch_of("llama")
    assert len(layers(opfuser.hf.apply(model, example=batch))) == 2
    opfuser.hf.revert(model)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        opfuser.hf.apply(model, example={})
    assert forwards(model) == []


def test_merged_storages(tmp_path: Path) -> None:
    model, untouched, _ = pair("llama")
    before = list(model.parameters())
    opfuser.hf.apply(model, merge_storages=True)
    assert all(now is then for now, then in zip(model.parameters(), before))
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for one, two in ((attention.q_proj, attention.k_proj), (mlp.gate_proj, mlp.up_proj)):
        storages = [m.weight.untyped_storage().data_ptr() for m in (one, two)]
        assert storages[0] == storages[1]
    batch = batch_of("llama")
    want = step(untouched, **batch)
    assert_same(step(model, **batch), want)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(step(loaded, **batch), want)


def test_transposed_weights_are_not_copied() -> None:
    """Gradients come in the layout of the weight, so that autograd takes them as they are."""
    model, *_ = pair("gpt2")
    given: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if "c_attn.weight" in name or "c_fc.weight" in name or "c_proj.weight" in name:
            p.register_hook(lambda grad, name=name: given.setdefault(name, grad))
    step(model, **batch_of("gpt2"))
    assert len(given) == 8
    assert all(grad.is_contiguous() for grad in given.values())


def test_modules_with_hooks_are_called() -> None:
    """From the sequence around them, which they are left out of."""
    model, untouched, _ = pair("llama")
    batch = batch_of("llama")
    want = step(untouched, **batch)
    step(model, **batch)
    layer = model.model.layers[0]
    seen: list[str] = []
    for name in ("self_attn.k_proj", "mlp.down_proj", "post_attention_layernorm", "self_attn"):
        module = layer.get_submodule(name)
        hook = module.register_forward_hook(lambda *_, name=name: seen.append(name))
        assert_same(step(model, **batch), want)
        assert seen == [name]
        report = opfuser.hf.report(model)
        assert [child for child, _ in report.computed[0].called] == [name]
        listed = [e.path for e in (*report.computed, *report.inside, *report.kept)]
        assert len(listed) == len(set(listed))
        hook.remove()
        seen.clear()
    step(model, **batch)
    assert opfuser.hf.report(model).computed[0].called == ()
    assert calls(model) == {}


def _events_of_attention(model: Any) -> list[Any]:
    """What hooks of the attention of its layers are called with from now on."""
    seen: list[Any] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append((args, {k: v for k, v in kwargs.items() if k != CACHE}))
        return args, {**kwargs, "hidden_states": 2 * kwargs["hidden_states"]}

    def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        seen.append((args, {k: v for k, v in kwargs.items() if k != CACHE}, out))
        return 3 * out[0], *out[1:]

    def backward(module: nn.Module, before: Any, grads: Any) -> None:
        seen.append((before, grads))

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(before, with_kwargs=True)
        layer.self_attn.register_forward_hook(after, with_kwargs=True)
        layer.self_attn.register_full_backward_hook(backward)
    return seen


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_hooks_get_and_change_what_they_do_on_an_untouched_model(implementation: str) -> None:
    model, untouched, _ = pair("llama", attn_implementation=implementation)
    batch = batch_of("llama")
    mine, theirs = _events_of_attention(model), _events_of_attention(untouched)
    assert_same(step(model, **batch), step(untouched, **batch))
    assert len(mine) == len(theirs) == 3 * 2
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    whole, kept = batch_of("llama", padded=False), []
    for each in (model, untouched):
        with torch.no_grad():
            kept.append(each(**whole, use_cache=True).past_key_values)
    # Keys of other calls, with gradients enabled: attention computes by its own forward.
    got, want = (step(m, **whole, **{CACHE: c}) for m, c in zip((model, untouched), kept))
    assert_same(got, want)
    report = opfuser.hf.report(model)
    assert report.computed[0].called == (("self_attn", "has hooks"),)
    assert "    self_attn is called: it has hooks" in str(report).splitlines()
    assert report.computed[0].fell_back == ()


@pytest.mark.parametrize("hook", [lambda m, a, out: out[0], lambda m, a, out: (out[0], out[0])])
def test_hooks_that_return_another_structure_beside_a_cache_are_refused(hook: Any) -> None:
    """The cache is extended by then, so that the own forward cannot take the call."""
    model, *_ = pair("llama")
    model.model.layers[0].self_attn.register_forward_hook(hook)
    tokens = batch_of("llama")["input_ids"]
    for _ in range(2):
        with pytest.raises(
            NotSupportedError, match="A child with hooks or tensors of its own returns"
        ):
            model(tokens, use_cache=True)


def test_experts_keep_the_noise_of_their_routers() -> None:
    model, untouched, report = pair("mixtral", router_jitter_noise=0.5)
    assert reason(report, "model.layers.0") == "has 'mlp' write to its arguments"
    batch = batch_of("mixtral")
    made = []
    for each, seed in ((model, 1), (untouched, 1), (untouched, 2)):
        torch.manual_seed(seed)
        made.append(step(each.train(), **batch))
    assert_same(*made[:2])
    assert not torch.allclose(made[1].logits, made[2].logits, rtol=1e-3)
    assert calls(model) == {}


def test_arguments_that_nothing_reads() -> None:
    model, untouched, _ = pair("llama")
    batch = batch_of("llama")
    assert_same(step(model, **batch, s_aux=torch.ones(1)), step(untouched, **batch))
    assert calls(model) == {}


DROPOUTS: dict[str, tuple[str, ...]] = {
    "bert": ("attention_probs_dropout_prob", "hidden_dropout_prob"),
    "vit": ("attention_probs_dropout_prob", "hidden_dropout_prob"),
    "llama": ("attention_dropout",),
    "distilbert": ("dropout", "attention_dropout"),
    "gpt2": ("attn_pdrop", "resid_pdrop"),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_follows_the_modes_of_modules(name: str) -> None:
    model, untouched, report = pair(name, **dict.fromkeys(DROPOUTS[name], 0.5))
    assert len(layers(report)) == 2
    batch = batch_of(name)
    for each in (model.train(), untouched):
        torch.manual_seed(0)
        losses = [each(**batch).loss.item() for _ in range(24)]
        assert len(set(losses)) == 24
        spread = torch.tensor(losses)
        each.spread = spread.mean(), spread.std()
    (mean, std), (plain_mean, plain_std) = model.spread, untouched.spread
    assert abs(mean - plain_mean) < 2 * plain_std
    assert plain_std / 3 < std < 3 * plain_std
    assert_same(step(model.eval(), **batch), step(untouched.eval(), **batch))
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name_of_it in vars(module).keys() & {"attention_dropout", "dropout_prob"}:
            setattr(module, name_of_it, 0.0)
    assert_same(step(model, **batch), step(untouched, **batch))


def test_a_model_without_memory() -> None:
    """Made on the meta device, as for sharded loading; memory comes later."""
    config = transformers.LlamaConfig(**{**DECODER, "num_hidden_layers": 1})
    untouched = transformers.LlamaForCausalLM(config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    computed = ["model.layers.0"]
    try:
        model(torch.zeros(1, 2, dtype=torch.int64, device="meta"))
    except RuntimeError:  # in transformers 5.0 autocast does not know the device
        computed = []
    assert layers(opfuser.hf.apply(model)) == computed
    model.to_empty(device="cpu")
    model.load_state_dict(untouched.state_dict())
    model.model.rotary_emb.inv_freq.copy_(untouched.model.rotary_emb.inv_freq)
    batch = batch_of("llama")
    assert_same(step(model, **batch), step(untouched, **batch))
    assert layers(opfuser.hf.report(model)) == ["model.layers.0"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "bert"])
def test_on_a_gpu(name: str) -> None:
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-3)):
        untouched = MODELS[name]().to("cuda", dtype)
        model = copy.deepcopy(untouched)
        assert len(layers(opfuser.hf.apply(model))) == 2
        batch = {k: v.cuda() for k, v in batch_of(name).items()}
        got, want = step(model, **batch), step(untouched, **batch)
        assert_close(got.loss, want.loss, rtol)
        if dtype == torch.float32:
            assert_same(got, want)
        assert calls(model) == {}
