"""opfuser.hf.apply: models of transformers compute the same, and stay what they were."""

from __future__ import annotations

import copy
import functools
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import opfuser.hf
from opfuser.errors import ArgumentTypeError, NotSupportedError
from tests.reading.tiny import CACHE

from .hf_models import (
    DECODER,
    LAYERED,
    MODELS,
    assert_close,
    assert_same,
    batch_of,
    calls,
    causal,
    layers,
    pair,
    reason,
    step,
    transformers,
)

# Modules of transformers 5.0 say so when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
# That of 5.0 replaces forwards for the time of a call.
COLLECTS_BY_HOOKS = importlib.util.find_spec("transformers.utils.output_capturing") is not None


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
    assert got.logits.dtype == torch.bfloat16
    pairs = [(got.logits, plain.logits, exact.logits)]
    pairs += [(got.grads[n], plain.grads[n], exact.grads[n]) for n in exact.grads]
    for mine, theirs, right in pairs:
        assert (mine - right).norm() <= 2 * (theirs - right).norm()


def test_autocast() -> None:
    model, untouched, _ = pair("llama")
    batch = batch_of("llama")
    exact = step(untouched, **batch)
    with torch.autocast("cpu", torch.bfloat16):
        got, plain = step(model, **batch), step(untouched, **batch)
    assert calls(model) == {"keeps torch.float32 under autocast after mul": 1}  # the last norm
    assert got.grads["model.norm.weight"].dtype == torch.float32
    for name, grad in got.grads.items():
        error = (grad - exact.grads[name]).norm()
        assert error <= 2 * (plain.grads[name] - exact.grads[name]).norm(), name


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_bigcode", "mixtral"]
)
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


def test_a_query_whose_keys_a_mask_hides_by_numbers() -> None:
    """Kernels recompute its weights from a log-sum-exp in which the scores are lost."""
    model, untouched, _ = pair("llama")
    for each in (model, untouched):
        each.set_attn_implementation("eager")
    batch = batch_of("llama", padded=False)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :4] = 0  # so that the first four queries see no key
    assert_same(step(model, **batch), step(untouched, **batch))
    why = "adds a mask that hides all keys of a query by large numbers, with gradients enabled"
    assert calls(model) == {why: 2}


def test_a_cache_in_training_is_filled() -> None:
    model, untouched, _ = pair("llama")
    batch = batch_of("llama", padded=False)
    kept = [each(**batch, use_cache=True).past_key_values for each in (model, untouched)]
    for mine, theirs in zip(kept[0].layers, kept[1].layers):
        torch.testing.assert_close(mine.keys, theirs.keys.detach())
        torch.testing.assert_close(mine.values, theirs.values.detach())
    more = batch["input_ids"][:, :2]
    got, want = (
        each(more, **{CACHE: cache}).logits for each, cache in zip((model, untouched), kept)
    )
    assert_close(got, want, 1e-5)
    assert calls(model) == {"reads keys of other calls, with gradients enabled": 2}
    with pytest.raises(NotSupportedError, match="Pass use_cache=False"):
        got.sum().backward()


def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    """Neither the first call nor a later one with a mask of another length stores keys."""
    model, untouched, _ = pair("llama")
    tokens = batch_of("llama")["input_ids"]
    cache, other = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad():
        for part in (tokens[:, :5], tokens[:, 5:]):
            before = cache.get_seq_length()
            with pytest.raises(RuntimeError, match=r"match|Long, Int"):
                model(tokens[:1] if before else part.float(), **{CACHE: cache})
            assert cache.get_seq_length() == before
            got = model(part, **{CACHE: cache}).logits
            want = untouched(part, **{CACHE: other}).logits
            assert_close(got, want, 1e-5)
    assert calls(model) == {}


def test_the_report() -> None:
    report = opfuser.hf.apply(MODELS["llama"](), fused_loss=True)
    assert str(report) == (
        "computed by opfuser:\n"
        "  model.layers.0, model.layers.1: 1 call each\n"
        "    x + (Norm, MergedLinear x3, Rotary, Attention, Linear), "
        "x + (Norm, MergedLinear x2, Gated, Linear)\n"
        "  model.norm: 1 call each\n"
        "    Norm\n"
        "  lm_head: 1 call each\n"
        "    Linear, CrossEntropy\n"
        "  and 22 modules inside of these\n"
        "kept as they are:\n"
        "  the model itself … model.embed_tokens (3): "
        "is called without a floating-point tensor of rows"
    )


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


class _Scaled(nn.Module):
    """As a norm looks, with another formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight


class _Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


def _with_another_sum(model: Any) -> None:
    layer = model.model.layers[0]
    own = type(layer)

    class Halving(own):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) / 2

    layer.__class__ = Halving


def _with_scaled(model: Any) -> None:
    model.model.layers[0].input_layernorm = _Scaled()


def _with_one_norm(model: Any) -> None:
    model.model.layers[0].input_layernorm = nn.Identity()


def _with_cubed(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = _Cubed()


def _with_parameter(model: Any) -> None:
    model.model.layers[0].register_parameter("gate", nn.Parameter(torch.ones(1)))


def _with_dropout(model: Any) -> None:
    model.model.layers[0].mlp.activation_dropout = 0.5
    own = type(model.model.layers[0].mlp)

    class Dropping(own):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            p = self.activation_dropout
            return super().forward(nn.functional.dropout(x, p, self.training))

    model.model.layers[0].mlp.__class__ = Dropping


def _wrapped(model: Any) -> None:
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = functools.partial(own)


def _with_noise(model: Any) -> None:
    own = type(model.model.layers[0].mlp)

    class Noisy(own):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.empty_like(x).uniform_(0.9, 1.1))

    model.model.layers[0].mlp.__class__ = Noisy


REFUSALS = {
    "another norm": (_with_scaled, "computes div in 'input_layernorm'"),
    "another activation": (_with_cubed, "'mlp.act_fn', \"computes pow in 'mlp.act_fn'\""),
    "noise": (_with_noise, "computes mul in 'mlp'"),
    "another forward": (_wrapped, "has a forward of its own, functools.partial"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_layers_that_compute_something_else_are_kept(case: str) -> None:
    change, why = REFUSALS[case]
    model = causal("Llama").train()
    change(model)
    opfuser.hf.apply(model)
    model(**batch_of("llama"))
    report = opfuser.hf.report(model)
    found = [e for e in (*report.computed, *report.kept) if e.path == "model.layers.0"]
    assert why in str(found)


COMPUTED = {
    "another sum": _with_another_sum,
    "one norm": _with_one_norm,
    "dropout elsewhere": _with_dropout,
    "a parameter": _with_parameter,
}


@pytest.mark.parametrize("case", COMPUTED)
def test_layers_that_compute_something_else_are_computed_so(case: str) -> None:
    model = causal("Llama").eval()
    COMPUTED[case](model)
    untouched = copy.deepcopy(model)
    assert len(layers(opfuser.hf.apply(model))) == 2
    batch = batch_of("llama")
    assert_same(step(model, **batch), step(untouched, **batch))
    assert calls(model) == {}


def test_attention_that_ignores_its_cap_is_computed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that by ``sdpa`` of transformers up to 5.17."""
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    sdpa = importlib.import_module("transformers.integrations.sdpa_attention")

    def ignoring(*args: Any, softcap: float, **kwargs: Any) -> Any:
        return sdpa.sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(functions, "sdpa", ignoring)
    model, untouched, _ = pair("gemma2")
    for each in (model, untouched):
        each.config._attn_implementation = "sdpa"
    batch = batch_of("gemma2")
    assert_same(step(model, **batch), step(untouched, **batch))
    assert len(layers(opfuser.hf.report(model))) == 2


def test_dry_run_changes_nothing() -> None:
    model = MODELS["llama"]()
    report = opfuser.hf.apply(model, dry_run=True)
    assert forwards(model) == []
    assert report == opfuser.hf.apply(model)
    assert len(layers(report)) == 2


def test_revert() -> None:
    model, untouched, _ = pair("llama")
    wrapper = model.model.layers[0]
    wrapper._old_forward = wrapper.forward
    opfuser.hf.revert(model)
    assert forwards(model) == []
    assert wrapper._old_forward.__func__ is type(wrapper).forward
    del wrapper._old_forward
    batch = batch_of("llama")
    for got, want in zip(step(model, **batch)[:2], step(untouched, **batch)[:2]):
        assert torch.equal(got, want)
    report = opfuser.hf.report(model)
    assert (report.computed, report.inside) == ((), ())
    assert {entry.reason for entry in report.kept} == {"was not there when apply was called"}


@pytest.mark.parametrize("function", [opfuser.hf.apply, opfuser.hf.revert, opfuser.hf.report])
def test_refuses_what_is_no_module(function: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"A model is a torch.nn.Module.*Received: str\."):
        function("meta-llama/Llama-3.2-1B")


def test_names_and_files(tmp_path: Path) -> None:
    model, untouched, _ = pair("llama")
    before = dict(untouched.named_parameters())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in untouched.named_modules()]
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert list(dict(model.named_parameters())) == list(before)
    batch = batch_of("llama")
    want = step(model, **batch)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(step(loaded, **batch), want)
    opfuser.hf.apply(loaded)
    assert_same(step(loaded, **batch), want)
    model.load_state_dict(causal("Llama").state_dict())
    untouched.load_state_dict(model.state_dict())
    assert_same(step(model, **batch), step(untouched, **batch))


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


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_parameters_of_their_own(way: str) -> None:
    model, untouched, _ = pair("llama")
    batch = batch_of("llama")
    step(model, **batch)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_same(step(other, **batch), step(untouched, **batch))
    assert len(layers(opfuser.hf.report(other))) == (2 if way == "deepcopy" else 0)


def test_parameters_are_read_at_every_call() -> None:
    """Set anew, cast, tied, or given for one call."""
    model, untouched, _ = pair("qwen3")
    batch = batch_of("qwen3")
    step(model, **batch)
    attention = "self_attn.q_proj.weight self_attn.q_norm.weight input_layernorm.weight".split()
    for each in (model, untouched):
        torch.manual_seed(5)
        layer = each.model.layers[1]
        for name in (*attention, "mlp.up_proj.weight"):
            module, _, leaf = name.rpartition(".")
            old = layer.get_parameter(name)
            setattr(layer.get_submodule(module), leaf, nn.Parameter(torch.randn_like(old)))
    assert_same(step(model, **batch), step(untouched, **batch))
    given = {n: torch.randn_like(p) for n, p in untouched.named_parameters()}
    with torch.no_grad():
        got, want = (functional_call(m, given, (), batch) for m in (model, untouched))
    assert_close(got.logits, want.logits, 1e-5)
    for each in (model, untouched):
        each.double()
    assert_same(step(model, **batch), step(untouched, **batch), 1e-6)
    assert calls(model) == {}


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


def test_frozen_parameters_get_no_gradient() -> None:
    model, untouched, _ = pair("llama")
    for each in (model, untouched):
        for name, p in each.named_parameters():
            p.requires_grad_("k_proj" in name or "up_proj" in name)
    batch = batch_of("llama")
    got = step(model, **batch)
    assert len(got.grads) == 4
    assert_same(got, step(untouched, **batch))


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


def test_collected_outputs() -> None:
    """Weights of attention, by hooks of transformers, and hidden states."""
    model, untouched, _ = pair("llama", attn_implementation="eager")
    batch = batch_of("llama")
    got, want = (m(**batch, output_hidden_states=True) for m in (model, untouched))
    for mine, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        assert_close(mine, theirs, 1e-5)
    everything = {"output_attentions": True, "output_hidden_states": True}
    got, want = (m(**batch, **everything) for m in (model, untouched))
    for name in ("attentions", "hidden_states"):
        for mine, theirs in zip(got[name], want[name], strict=True):
            assert_close(mine, theirs, 1e-5)
    if COLLECTS_BY_HOOKS:
        layer = opfuser.hf.report(model).computed[0]
        assert layer.called == (("self_attn", "has hooks"),)
    # A loss of the weights, and of the output so that all parameters have gradients.
    grads = []
    for m, out in ((model, got), (untouched, want)):
        loss = sum(each.square().sum() for each in out.attentions) + out.loss
        grads.append(torch.autograd.grad(loss, [*m.parameters()]))
    for mine, theirs in zip(*grads, strict=True):
        assert_close(mine, theirs, 1e-4)
    for each in (model, untouched):
        each.config.output_attentions = True
    got, want = (m(**batch) for m in (model, untouched))
    for mine, theirs in zip(got.attentions, want.attentions, strict=True):
        assert_close(mine, theirs, 1e-5)
    assert calls(model) == ({} if COLLECTS_BY_HOOKS else {"writes to attributes": 4})


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


def test_the_auxiliary_loss_is_that_of_untouched_layers() -> None:
    model, untouched, _ = pair("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    batch = batch_of("mixtral")
    got, want = step(model, **batch), step(untouched, **batch)
    assert_same(got, want)
    plain = step(untouched, **batch, output_router_logits=False)
    assert want.loss > plain.loss + 0.1
    assert calls(model) == {}


def test_experts_that_a_sequence_does_not_compute() -> None:
    """Logits of routers are asked for; hooks, other activations, a weight that is no parameter."""
    model, untouched, _ = pair("mixtral")
    batch = batch_of("mixtral")
    got, want = (m(**batch, output_router_logits=True) for m in (model, untouched))
    for mine, theirs in zip(got.router_logits, want.router_logits, strict=True):
        assert_close(mine, theirs, 1e-5)
    assert_close(got.loss, want.loss, 1e-5)
    seen: list[Tensor] = []
    block = model.model.layers[0].mlp
    hook = block.gate.register_forward_hook(lambda *args: seen.append(args[1]))
    assert_same(step(model, **batch), step(untouched, **batch))
    assert len(seen) == 1
    hook.remove()
    for each in (model, untouched):
        each.model.layers[0].mlp.gate.top_k = 3
        each.model.layers[1].mlp.experts.act_fn = nn.ReLU()
    assert_same(step(model, **batch), step(untouched, **batch))
    for each in (model, untouched):
        part = each.model.layers[0].mlp.experts
        part.register_parameter("down_proj", nn.Parameter(part.down_proj.detach() * 2))
    assert_same(step(model, **batch), step(untouched, **batch))
    for each in (model, untouched):
        part = each.model.layers[0].mlp.experts
        down = part.down_proj.detach()
        del part.down_proj
        part.down_proj = down
    assert_close(step(model, **batch).loss, step(untouched, **batch).loss, 1e-5)


def test_arguments_that_nothing_reads() -> None:
    model, untouched, _ = pair("llama")
    batch = batch_of("llama")
    assert_same(step(model, **batch, s_aux=torch.ones(1)), step(untouched, **batch))
    assert calls(model) == {}


def test_children_that_are_replaced_later_count() -> None:
    model, untouched, _ = pair("llama")
    batch = batch_of("llama")
    step(model, **batch)
    for each in (model, untouched):
        each.model.layers[1].mlp.act_fn = nn.GELU(approximate="tanh")
    assert_same(step(model, **batch), step(untouched, **batch))
    assert calls(model) == {}
    for each in (model, untouched):
        each.model.layers[1].mlp.act_fn = _Cubed()
    assert_same(step(model, **batch), step(untouched, **batch))
    assert calls(model) == {}
    assert "computes pow in 'mlp.act_fn'" in str(opfuser.hf.report(model))
    for each in (model, untouched):
        each.model.layers[0].self_attn.scaling = 2.0
        each.model.layers[0].input_layernorm.variance_epsilon = 0.5
    assert_same(step(model, **batch), step(untouched, **batch))


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


def test_nothing_random_is_disturbed() -> None:
    model = MODELS["qwen3"]()
    state = torch.get_rng_state()
    opfuser.hf.apply(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_compiled_layers_with_a_cache_take_the_untouched_forwards() -> None:
    model, untouched, _ = pair("llama")
    batch = batch_of("llama")
    torch.compiler.reset()  # Dynamo counts what other tests compiled
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.warns(UserWarning, match="The first one is given a cache or other objects"):
        found = compiled(**batch, use_cache=True).logits
    assert_close(found, untouched(**batch).logits, 1e-5)


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
