"""Generated tokens are those of Hugging Face's transformers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import opfuser
from opfuser.errors import ArgumentError, InputError
from opfuser.models import DecoderConfig, decoder_lm, generate
from opfuser.recipe import Float8CurrentScaling
from tests.models.hf import CONFIGS, GPT2, SIZES, hf_model, same_model

PROMPT, NEW = 9, 15
# With a tied head, random models would repeat the last token of the prompt.
FAMILIES = {
    name: (CONFIGS[name][0], {**CONFIGS[name][1], "tie_word_embeddings": False})
    for name in ("llama 3", "mistral, window", "qwen3", "gemma 2", "gemma 3")
}
# Transformers computes the loss of the routers in generation too, and fails at a mask.
FAMILIES["mixtral"] = (
    "Mixtral",
    {**CONFIGS["mixtral"][1], "output_router_logits": False, "tie_word_embeddings": False},
)
FAMILIES["gpt2"] = (
    "GPT2",
    {**GPT2, "n_positions": PROMPT + NEW - 1, "tie_word_embeddings": False},
)
FAMILIES["llama, frequencies by length"] = (
    "Llama",
    {
        **SIZES,
        "max_position_embeddings": 12,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    },
)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "temperature": {"temperature": 0.6},
    "top k": {"top_k": 4},
    "top k, more than there are": {"top_k": 99},
    "top p": {"top_p": 0.6},
    "in order": {"temperature": 1.7, "top_k": 11, "top_p": 0.7},
}
STATIC = pytest.mark.parametrize("static", [False, True], ids=["growing", "preallocated"])
TINY: dict[str, Any] = {
    "vocab_size": 37, "dim": 24, "num_layers": 2, "num_heads": 4, "tied_head": False,
}  # fmt: skip


def prompts(padding: tuple[int, ...] = (4, 0, 1)) -> tuple[Tensor, Tensor]:
    """Tokens with so much padding each, and the mask."""
    tokens = torch.randint(1, 37, (len(padding), PROMPT))
    mask = torch.arange(PROMPT) >= torch.tensor(padding)[:, None]
    return tokens.masked_fill(~mask, 0), mask


def of_hf(model: Any, tokens: Tensor, mask: Tensor | None = None, **arguments: Any) -> Tensor:
    torch.manual_seed(3)
    mask = torch.ones_like(tokens) if mask is None else mask.long()
    given = {"max_new_tokens": NEW, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    out: Tensor = model.generate(tokens, attention_mask=mask, **{**given, **arguments})
    return out


def of_ours(model: opfuser.Sequential, tokens: Tensor, **arguments: Any) -> Tensor:
    torch.manual_seed(3)
    return generate(model, tokens, NEW, **arguments)


def small(**changes: Any) -> opfuser.Sequential:
    """With weights large enough that not every token is the same."""
    model = decoder_lm(DecoderConfig(**{**TINY, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0) if p.dim() > 1 else p.uniform_(0.5, 1.5)
    return model


def differ(tokens: Tensor) -> bool:
    """Whether what was generated is no mere repetition, which says little when it is equal."""
    return len(tokens[:, PROMPT:].unique()) > 6


@STATIC
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, static: bool) -> None:
    """Greedy, and drawn, which notices what changes no largest logit."""
    theirs = hf_model(*FAMILIES[name]).eval()
    model = same_model(theirs).eval()
    tokens, mask = prompts()
    for given in (None, mask):
        for how in ({}, {"do_sample": True, "temperature": 1.5}):
            # Copied, since frequencies that follow the length are kept in it.
            want = of_hf(copy.deepcopy(theirs), tokens, given, **how)
            got = of_ours(model, tokens, mask=given, static_cache=static, **how)
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert differ(want)


@STATIC
def test_padding_of_all_prompts_counts_for_no_frequencies(static: bool) -> None:
    """They follow the longest sequence, of which padding is no part."""
    theirs = hf_model(*FAMILIES["llama, frequencies by length"]).eval()
    model = same_model(theirs).eval()
    tokens, mask = prompts((4, 2, 3))
    want = of_hf(copy.deepcopy(theirs), tokens, mask, do_sample=True)
    got = of_ours(model, tokens, mask=mask, static_cache=static, do_sample=True)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert generate(model, tokens[:0], 2, mask=mask[:0]).shape[0] == 0


@pytest.mark.parametrize("name", SAMPLINGS)
def test_samples_with_the_same_seed(name: str) -> None:
    theirs = hf_model(*CONFIGS["qwen3"]).eval()
    model = same_model(theirs).eval()
    tokens, mask = prompts()
    want = of_hf(theirs, tokens, mask, do_sample=True, **SAMPLINGS[name])
    assert not torch.equal(want, of_hf(theirs, tokens, mask))
    got = of_ours(model, tokens, mask=mask, do_sample=True, **SAMPLINGS[name])
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_generator_is_drawn_from() -> None:
    model, (tokens, _) = small(), prompts()
    want = of_ours(model, tokens, do_sample=True)
    torch.manual_seed(4)
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    got = generate(model, tokens, NEW, do_sample=True, generator=generator)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@STATIC
@pytest.mark.parametrize("ends", ["one", "several, another padding"])
def test_sequences_end(ends: str, static: bool) -> None:
    theirs = hf_model(*CONFIGS["llama 2"]).eval()
    model = same_model(theirs).eval()
    tokens, mask = prompts()
    # Tokens that appear at different places of the sequences, so that one waits for the others.
    whole = of_hf(theirs, tokens, mask)[:, PROMPT:]
    ids = [int(row[n]) for n, row in zip((2, 5, 8), whole)]
    given: dict[str, Any] = {"eos_token_id": ids}
    given |= {"pad_token_id": 5} if ends != "one" else {"eos_token_id": ids[0]}
    want = of_hf(theirs, tokens, mask, **{"pad_token_id": ids[0], **given})
    if ends != "one":
        assert want.shape[1] < PROMPT + NEW
        assert (want[:, -1] == 5).any()
    else:
        assert (want[0, -3:] == ids[0]).all()
    got = of_ours(model, tokens, mask=mask, static_cache=static, **given)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_with_a_loss_or_without_one_in_either_mode() -> None:
    """int32 tokens give int32 tokens; no gradient is recorded, and none is in the way."""
    model, (tokens, mask) = small(logit_softcap=3.0), prompts()
    want = of_ours(model, tokens, mask=mask)
    assert differ(want)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    got = of_ours(model[:-1].train(), tokens.int(), mask=mask)
    assert (got.dtype, got.requires_grad) == (torch.int32, False)
    torch.testing.assert_close(got.long(), want, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(of_ours(model, tokens, mask=mask), want, rtol=0, atol=0)
    assert torch.equal(generate(model, tokens[:0], 2, eos_token_id=1)[:, :PROMPT], tokens[:0])


def test_a_model_that_was_changed() -> None:
    """Its parts are kept from call to call, as long as it is made of the same."""
    model, (tokens, _) = decoder_lm(DecoderConfig(**TINY)), prompts()
    before = of_ours(model, tokens)
    model[list(model._modules).index("head")] = opfuser.Linear(24, 37, bias=False)
    after = of_ours(model, tokens)
    assert torch.equal(after, of_ours(copy.deepcopy(model), tokens))
    assert not torch.equal(after, before)


def test_each_token_is_the_most_likely_one_after_those_before_it_in_fp64() -> None:
    """Without transformers, and by a pass over the whole sequence instead of caches."""
    model, (tokens, _) = small(num_kv_heads=2, window=(None, 5), qk_norm=True).double(), prompts()
    got = of_ours(model, tokens)
    with torch.no_grad():
        logits = model[:-1](got[:, :-1])
    torch.testing.assert_close(got[:, PROMPT:], logits[:, PROMPT - 1 :].argmax(2), rtol=0, atol=0)
    assert differ(got)


def test_prompts_do_not_pay_for_logits_that_nobody_reads() -> None:
    model, (tokens, _) = small(), prompts()
    shapes = []
    model.head.register_forward_hook(lambda head, inputs, y: shapes.append(tuple(y.shape)))
    generate(model, tokens, 3)
    assert shapes == [(3, 1, 37)] * 3


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
def test_a_model_with_a_recipe() -> None:
    model = decoder_lm(
        DecoderConfig(37, 128, 1, 2, ffn_dim=128, tied_head=False, recipe=Float8CurrentScaling())
    )
    tokens, _ = prompts()
    got = of_ours(model, tokens)
    assert differ(got)
    with torch.no_grad():
        logits = model[:-1](got[:, :PROMPT])
    torch.testing.assert_close(got[:, PROMPT], logits[:, -1].argmax(1), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True, "window": (None, 5), "attention_softcap": 2.0},
        {"learned_positions": PROMPT + NEW, "norm": "layer", "activation": "gelu"},
    ],
    ids=["rotary", "learned positions"],
)
def test_a_compiled_step_is_one_graph_for_all_tokens(changes: dict[str, Any]) -> None:
    """And for all prompts of the same shape."""
    torch.compiler.reset()
    model = small(**changes)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step: Any = torch.compile(model[:-1], backend=counter, fullgraph=True)
    for padding in ((4, 0), (0, 2)):
        tokens, mask = prompts(padding)
        want = of_ours(model, tokens, mask=mask, do_sample=True)
        given: dict[str, Any] = {"mask": mask, "do_sample": True, "static_cache": True}
        got = of_ours(model, tokens, **given, step=step)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert differ(want)
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_on_a_gpu_samples_are_the_same_and_nothing_waits(no_waiting: Any) -> None:
    theirs = hf_model(*CONFIGS["qwen3"]).eval().cuda()
    model = same_model(theirs, device="cuda").eval()
    tokens = prompts()[0].cuda()
    given: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9}
    want = of_hf(theirs, tokens, **given)
    for static in (False, True):
        generate(model, tokens, NEW, static_cache=static, **given)  # kernels are compiled
        torch.manual_seed(3)
        torch.cuda.synchronize()
        with no_waiting():
            got = generate(model, tokens, NEW, static_cache=static, **given)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


TOKENS = torch.ones(2, 5, dtype=torch.int64)
BIDIRECTIONAL = DecoderConfig(**TINY, causal=False)
POSITIONS = DecoderConfig(**TINY, learned_positions=8)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": nn.Linear(2, 2)}, ArgumentError, r"one of decoder_lm .*\. Received: Linear\. P"),
        ({"model": decoder_lm(BIDIRECTIONAL)}, ArgumentError, "must be causal.*causal=False"),
        (
            {"model": decoder_lm(POSITIONS), "max_new_tokens": 5},
            ArgumentError,
            r"than the table of positions .* 9 positions to read, 8 learned ones\. Shorten the",
        ),
        ({"tokens": TOKENS[0]}, InputError, r"\(batch, prompt\) of int32.*\(5,\) of torch.int64"),
        ({"tokens": TOKENS[:, :0]}, InputError, r"prompts not empty .*\(2, 0\)"),
        ({"tokens": TOKENS.float()}, InputError, "int32 or int64.*of torch.float32"),
        ({"max_new_tokens": 0}, ArgumentError, r"must be positive .*max_new_tokens=0"),
        ({"top_k": 2}, ArgumentError, r"for sampling .*top_k=2, top_p=None\. Pass do_sample=True"),
        (
            {"do_sample": True, "temperature": 0.0},
            ArgumentError,
            r"temperature and top_k must be positive \(generate\)\. Received: temperature=0.0",
        ),
        ({"do_sample": True, "temperature": math.nan}, ArgumentError, "temperature=nan"),
        ({"do_sample": True, "top_k": 0}, ArgumentError, "must be positive.*top_k=0"),
        ({"do_sample": True, "top_p": 0.0}, ArgumentError, "top_p must be above 0 .*top_p=0.0"),
        ({"do_sample": True, "top_p": 1.1}, ArgumentError, "at most 1 .*top_p=1.1"),
        ({"pad_token_id": 3}, ArgumentError, "for what follows eos_token_id .*pad_token_id=3"),
        (
            {"mask": TOKENS},
            InputError,
            r"mask is bool.*mask \(2, 5\) of torch.int64, tokens \(2, 5\)\. Pass mask.bool",
        ),
        ({"mask": TOKENS[:, 1:].bool()}, InputError, r"shape of tokens .*mask \(2, 4\)"),
        (
            {"mask": TOKENS.cumsum(1) < 4},
            InputError,
            "must not be padding .*a mask that ends with False. Move the padding to the left",
        ),
    ],
    ids=lambda value: str(*value) if isinstance(value, dict) and len(value) == 1 else "",
)
def test_refuses(change: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"model": decoder_lm(DecoderConfig(**TINY)), "tokens": TOKENS, "max_new_tokens": 4}
    with pytest.raises(error, match=text):
        generate(**{**given, **change})
