"""Scaled frequencies: what the papers say of them, and that Hugging Face computes the same."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from opfuser import RopeScaling, RotaryEmbedding
from opfuser.core.change_tracking import signature
from opfuser.errors import ArgumentError, ArgumentTypeError

F64 = torch.float64
SIZE, BASE = 32, 10000.0
LONG = {"factor": 8.0, "original_max_position_embeddings": 256}
SHORT_FACTORS = [1 + 0.01 * i for i in range(SIZE // 2)]
LONG_FACTORS = [1 + 0.3 * i for i in range(SIZE // 2)]
LLAMA3 = {**LONG, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {**LONG, "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": LONG,
    "yarn": LONG,
    "yarn, all of it": {
        **LONG, "rope_type": "yarn", "beta_fast": 20, "beta_slow": 2.0, "mscale": 0.7,
        "mscale_all_dim": 1.1, "truncate": False,
    },
    "yarn, attention factor": {**LONG, "rope_type": "yarn", "attention_factor": 1.25},
    "llama3": LLAMA3,
    "longrope": LONGROPE,
    "longrope, attention factor": {**LONGROPE, "rope_type": "longrope", "attention_factor": 0.5},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.25},
}  # fmt: skip


def scaling(name: str, **others: Any) -> RopeScaling:
    return RopeScaling(**{"rope_type": name, **SCALINGS[name], **others})


def frequencies(of: RopeScaling | None, length: int | None = None) -> Tensor:
    op = RotaryEmbedding(2, SIZE, base=BASE, scaling=of)
    return op.inverse_frequencies(length, dtype=F64)


PLAIN = BASE ** (-torch.arange(0, SIZE, 2, dtype=F64) / SIZE)


def test_without_scaling() -> None:
    for none in (None, RopeScaling()):
        torch.testing.assert_close(frequencies(none), PLAIN)


def test_linear_positions_are_interpolated() -> None:
    torch.testing.assert_close(frequencies(scaling("linear")), PLAIN / 4)


def test_dynamic_stretches_from_the_length_of_training_on() -> None:
    """The slowest pair is interpolated as needed for the length, the fastest not at all."""
    for length in (None, 1, 256):
        torch.testing.assert_close(frequencies(scaling("dynamic"), length), PLAIN)
    for length in (257, 1000):
        found = frequencies(scaling("dynamic"), length)
        stretch = 8 * length / 256 - 7
        torch.testing.assert_close(found[-1], PLAIN[-1] / stretch)
        assert found[0] == 1
        assert (found[1:] < PLAIN[1:]).all()


def test_yarn_interpolates_slow_pairs_alone() -> None:
    turns = PLAIN * 256 / (2 * math.pi)
    for truncate in (True, False):
        found = frequencies(scaling("yarn", truncate=truncate))
        share = found / PLAIN
        assert torch.equal(share[turns > 64], torch.ones_like(share[turns > 64]))
        torch.testing.assert_close(share[turns < 0.5], torch.full_like(share[turns < 0.5], 1 / 8))
        assert (share.diff() <= 1e-12).all()
        mixed = share[(turns < 32) & (turns > 1)]
        if not truncate:
            assert ((mixed < 1) & (mixed > 1 / 8)).all()
    # Equation 22 of the paper.
    assert scaling("yarn").attention_scaling == pytest.approx(0.1 * math.log(8) + 1)


def test_llama3_by_wavelength() -> None:
    found, waves = frequencies(scaling("llama3")), 2 * math.pi / PLAIN
    fast, slow = waves < 256 / 4, waves > 256 / 1
    torch.testing.assert_close(found[fast], PLAIN[fast])
    torch.testing.assert_close(found[slow], PLAIN[slow] / 8)
    between = ~fast & ~slow
    kept = (256 / waves[between] - 1) / 3
    torch.testing.assert_close(found[between], PLAIN[between] * (kept + (1 - kept) / 8))
    assert between.any()


def test_longrope_has_two_sets_of_factors() -> None:
    for length, factors in ((None, SHORT_FACTORS), (256, SHORT_FACTORS), (257, LONG_FACTORS)):
        found = frequencies(scaling("longrope"), length)
        torch.testing.assert_close(found, PLAIN / torch.tensor(factors, dtype=F64))
    # Section 3.4 of the paper on Phi-3.
    assert scaling("longrope").attention_scaling == pytest.approx(
        math.sqrt(1 + math.log(8) / math.log(256))
    )


def test_proportional_turns_the_first_pairs() -> None:
    found = frequencies(scaling("proportional"))
    torch.testing.assert_close(found[:4], PLAIN[:4] / 2)
    assert not found[4:].any()


def test_axial_has_frequencies_for_each_section() -> None:
    op = RotaryEmbedding(1, 16, sections=(4, 2, 2), scaling=RopeScaling(rope_type="axial"))
    wanted = [RotaryEmbedding(1, size).inverse_frequencies() for size in (8, 4, 4)]
    assert torch.equal(op.inverse_frequencies(), torch.cat(wanted))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_frequencies_of_ones_own(kind: Any) -> None:
    own = kind([0.5, -1.0, 0.0])
    op = RotaryEmbedding(2, 6, scaling=RopeScaling(rope_type="custom", frequencies=own))
    assert op.inverse_frequencies().tolist() == [0.5, -1.0, 0.0]
    assert op.attention_scaling == 1.0
    assert replace(op.scaling, attention_factor=2.0).attention_scaling == 2.0


@pytest.mark.parametrize("name", [*SCALINGS])
def test_the_frequencies_of_a_call_are_those_of_a_cpu(name: str, device: torch.device) -> None:
    """At far positions the last bits of a frequency count."""
    op = RotaryEmbedding(1, SIZE, num_kv_heads=0, base=5e5, scaling=scaling(name))
    op(torch.randn(1, 3, SIZE, device=device))
    (kept,) = [t for t in op.cached_tensors() if t.dim() == 1]
    assert torch.equal(kept.cpu(), op.inverse_frequencies(device="cpu"))
    angles = op.settings.angles.of_length(3)
    assert torch.equal(angles.tensor_of_host(torch.empty((), device=device)), kept)


def test_equal_by_value() -> None:
    longrope = scaling("longrope")
    for twin in (
        scaling("longrope"),
        copy.deepcopy(longrope),
        pickle.loads(pickle.dumps(longrope)),
    ):
        assert twin == longrope
        assert hash(twin) == hash(longrope)
    other = scaling("longrope", short_factor=LONG_FACTORS)
    assert longrope != other
    # As are the keys of plans, and the guards of compiled code, which no identity must stand for.
    ops = [RotaryEmbedding(1, SIZE, scaling=of) for of in (longrope, twin, other)]
    keys: list[Any] = [dict(signature(op)[1])["scaling"] for op in ops]  # type: ignore[index]
    assert [repr(key) == repr(keys[0]) for key in keys] == [True, True, False]


YARN = {"rope_type": "yarn", **LONG}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "yarm"}, r"a known one \(RopeScaling\). Received: 'yarm'. Did you mean 'yarn'"),
    ({"rope_type": "q"}, "Types are default, linear, dynamic"),
    (
        {"rope_type": "dynamic", "factor": 2.0},
        r"tion_embeddings must be given \(RopeScaling dyn.*or",
    ),
    (
        {"rope_type": "linear", **LLAMA3, "low_freq_factor": None},
        r"It takes factor \(RopeScaling linear\). Received: high_freq_factor, orig.* Leave out",
    ),
    ({"rope_type": "linear", "factor": 0.0}, "factor must be finite and positive .*0.0"),
    ({"rope_type": "linear", "factor": math.inf}, "factor must be finite and positive .*inf"),
    ({**YARN, "original_max_position_embeddings": 1.5}, "must be an integer above 1 .*1.5"),
    (
        {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0},
        r"high_freq_factor must be above low_freq_factor \(RopeScaling llama3\). .*: 4.0, 4.0",
    ),
    ({"rope_type": "longrope", **LONGROPE, "factor": None}, "factor or attention_factor must be g"),
    ({"rope_type": "proportional", "partial_rotary_factor": 1.5}, "positive and at most 1 .*1.5"),
    ({**YARN, "mscale": -1.0}, "mscale must be finite and not negative .*-1"),
    ({"rope_type": "custom", "frequencies": [1.0, math.nan]}, "frequencies must be finite .*nan"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED)
def test_refuses(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        RopeScaling(**arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rope_type": "linear", "factor": "2"}, r"factor must be a number \(RopeScaling linear\)"),
        ({"rope_type": "custom", "frequencies": "0.5"}, "must be a sequence of numbers .*'0.5'"),
        (
            {"rope_type": "custom", "frequencies": torch.ones(2, device="meta")},
            r"frequencies must be a sequence .*a tensor \(2,\) on meta",
        ),
    ],
)
def test_refuses_what_is_no_number(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        RopeScaling(**arguments)


CONFIG = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 512}


def test_old_and_new_configurations() -> None:
    """``rope_scaling`` of transformers 4, ``rope_parameters`` of 5; ``type`` or ``rope_type``."""
    yarn = {"factor": 2.0, "original_max_position_embeddings": 256}
    wanted = RopeScaling(rope_type="yarn", **yarn)
    forms: list[Any] = [
        {"type": "yarn", **yarn},
        {"rope_type": "yarn", "type": "other", **yarn, "mscale": None},
        {**CONFIG, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **yarn}},
        SimpleNamespace(**CONFIG, rope_theta=5e5, rope_scaling={"rope_type": "yarn", **yarn}),
        {**CONFIG, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **yarn}},
        # The lengths outside, the factor their ratio.
        {**CONFIG, "original_max_position_embeddings": 256, "rope_parameters": {"type": "yarn"}},
    ]
    for form in forms:
        before = copy.deepcopy(form)
        assert RopeScaling.from_hf(form) == wanted
        assert form == before
    assert RopeScaling.from_hf({**CONFIG, "rope_scaling": None}) == RopeScaling()
    dynamic = RopeScaling.from_hf({"type": "dynamic", "factor": 2, "max_position_embeddings": 64})
    assert dynamic.original_max_position_embeddings == 64
    # What a type does not use, transformers leaves out too.
    assert RopeScaling.from_hf({"type": "linear", **yarn}) == RopeScaling(
        rope_type="linear", factor=2.0
    )


def test_the_whole_embedding_of_a_configuration() -> None:
    llama = {**CONFIG, "num_key_value_heads": 2, "rope_theta": 5e5, "rope_scaling": None}
    op = RotaryEmbedding.from_hf(llama)
    assert (op.heads, op.base, op.rotary_dim, op.scaling) == ((4, 2, 32), 5e5, 32, None)
    neox = {**CONFIG, "rotary_pct": 0.25, "rotary_emb_base": 50.0}
    op = RotaryEmbedding.from_hf(neox, interleaved=True, num_kv_heads=0)
    assert (op.heads, op.base, op.rotary_dim) == ((4, 0, 32), 50.0, 8)
    assert op.interleaved
    gptj = SimpleNamespace(num_attention_heads=2, head_dim=None, hidden_size=64, rotary_dim=16)
    assert RotaryEmbedding.from_hf(gptj).rotary_dim == 16
    gptj.rope_parameters = {"rope_type": "default", "partial_rotary_factor": 0.25}
    assert RotaryEmbedding.from_hf(gptj).rotary_dim == 8
    mrope = {"type": "mrope", "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    op = RotaryEmbedding.from_hf({**CONFIG, "head_dim": 32, "rope_scaling": mrope})
    assert (op.sections, op.interleave_sections, op.scaling) == ((8, 4, 4), True, None)
    op = RotaryEmbedding.from_hf(
        {**CONFIG, "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}
    )
    assert op.rotary_dim == 32
    assert op.inverse_frequencies().count_nonzero() == 8


def test_layers_with_parameters_of_their_own() -> None:
    of_types = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old = {
        **CONFIG, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    for config in ({**CONFIG, "rope_parameters": of_types}, old):
        ops = {kind: RotaryEmbedding.from_hf(config, layer_type=kind) for kind in of_types}
        full, sliding = ops.values()
        assert (full.base, full.scaling) == (1e6, RopeScaling(rope_type="linear", factor=8.0))
        assert (sliding.base, sliding.scaling) == (1e4, None)
        for wrong in (None, "chunked"):
            with pytest.raises(ArgumentError) as error:
                RopeScaling.from_hf(config, layer_type=wrong)
            assert str(error.value) == (
                f"The types of layers have rotary embeddings of their own (from_hf). Received: "
                f"layer_type={wrong!r}. Pass layer_type: one of 'full_attention', "
                f"'sliding_attention'."
            )


def test_the_length_of_training_of_types_of_layers_stands_with_them() -> None:
    """A field of the whole configuration counts where types do not differ, as in transformers."""
    rope = {"rope_type": "yarn", "factor": 2.0}
    config = {"original_max_position_embeddings": 8, "max_position_embeddings": 64}
    flat = RopeScaling.from_hf({**config, "rope_parameters": rope})
    of_types = {**config, "rope_parameters": {"full_attention": rope, "other": rope}}
    nested = RopeScaling.from_hf(of_types, layer_type="full_attention")
    lengths = [scaling.original_max_position_embeddings for scaling in (flat, nested)]
    assert lengths == [8, 64]


def test_refuses_configurations() -> None:
    with pytest.raises(ArgumentError, match=r"known ones .*'beta_fat'. Did you mean 'beta_fast'"):
        RopeScaling.from_hf({"type": "yarn", **LONG, "beta_fat": 3})
    with pytest.raises(ArgumentError, match=r"'q'. Known are attention_factor, beta_fast, "):
        RopeScaling.from_hf({"type": "yarn", **LONG, "q": 3})
    with pytest.raises(ArgumentError, match="original_max_position_embeddings must be given"):
        RopeScaling.from_hf({"type": "dynamic", "factor": 2.0})
    with pytest.raises(ArgumentError, match=r"num_attention_heads, and head_dim .*from_hf.*dict"):
        RotaryEmbedding.from_hf({"model_type": "gptj", "n_head": 4})
    op = RotaryEmbedding.from_hf({"model_type": "gptj", "n_head": 4}, num_heads=4, head_dim=8)
    assert op.heads == (4, 4, 8)


class Theirs(NamedTuple):
    """A model of transformers, and the name of its parts.

    Attributes:
        module: such as "llama".
        prefix: of the configuration and of the embedding.
        arguments: of the configuration.
        ours: arguments of RotaryEmbedding that no configuration holds.
        whole_heads: whether the function that turns takes heads that turn in part.
    """

    module: str
    prefix: str
    arguments: dict[str, Any]
    ours: dict[str, Any]
    whole_heads: bool = False


def of_llama(name: str) -> Theirs:
    parameters = {"rope_type": name, "rope_theta": 5e5, **SCALINGS[name]}
    return Theirs("llama", "Llama", {"rope_parameters": parameters}, {})


MROPE = {"rope_theta": 1e4, "mrope_section": [8, 4, 4]}
MODELS = {
    **{f"llama {name}": of_llama(name) for name in SCALINGS},
    "neox": Theirs("gpt_neox", "GPTNeoX", {"rotary_pct": 0.25}, {}, whole_heads=True),
    "phi": Theirs("phi", "Phi", {"partial_rotary_factor": 0.5}, {}),
    "cohere": Theirs("cohere", "Cohere", {}, {"interleaved": True}),
    "qwen2-vl": Theirs("qwen2_vl", "Qwen2VLText", {"rope_parameters": MROPE}, {}),
    "qwen3-vl": Theirs(
        "qwen3_vl",
        "Qwen3VLText",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": SIZE},
        {},
    ),
}


class Pair(NamedTuple):
    config: Any
    embedding: Any
    module: Any
    op: RotaryEmbedding


def both(name: str) -> Pair:
    pytest.importorskip("transformers", reason="compares with transformers")
    model = MODELS[name]
    path = f"transformers.models.{model.module}"
    module = importlib.import_module(f"{path}.modeling_{model.module}")
    config_class = getattr(
        importlib.import_module(f"{path}.configuration_{model.module}"), f"{model.prefix}Config"
    )
    sizes = {
        "hidden_size": 4 * SIZE, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }  # fmt: skip
    config = config_class(**sizes, **copy.deepcopy(model.arguments))
    prefix = model.prefix.replace("Qwen2VLText", "Qwen2VL")
    embedding = getattr(module, f"{prefix}RotaryEmbedding")(config)
    kv_heads = getattr(config, "num_key_value_heads", None)
    op = RotaryEmbedding.from_hf(config, **model.ours)
    assert op.heads == (4, kv_heads or 4, SIZE)
    return Pair(config, embedding, module, op)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers_to_the_last_bit(name: str) -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils", reason="compares with it")
    config, embedding, _, op = both(f"llama {name}")
    kind = config.rope_parameters["rope_type"]
    lengths = [None, 10, 256, 257, 300, 999]
    for length in lengths if kind != "default" else []:
        wanted, factor = rope.ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
        assert torch.equal(op.inverse_frequencies(length, device="cpu"), wanted)
        assert op.attention_scaling == pytest.approx(factor, rel=1e-15)
    assert torch.equal(op.inverse_frequencies(device="cpu"), embedding.inv_freq)


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_turned_as_by_transformers(name: str, device: torch.device) -> None:
    _, embedding, module, op = both(name)
    x = torch.randn(2, 11, (op.num_heads + 2 * op.num_kv_heads) * SIZE, device=device)
    positions = torch.randint(250, (3, 2, 11) if op.sections else (2, 11), device=device)
    q, k, v = x.unflatten(2, (-1, SIZE)).split([op.num_heads, op.num_kv_heads, op.num_kv_heads], 2)
    cos, sin = embedding.to(device)(x, positions)
    size = SIZE if MODELS[name].whole_heads else cos.shape[-1]
    turned = module.apply_rotary_pos_emb(q[..., :size], k[..., :size], cos, sin, unsqueeze_dim=2)
    heads = [torch.cat([new, old[..., size:]], -1) for new, old in zip(turned, (q, k))]
    wanted = torch.cat([*heads, v], 2).flatten(2)
    y = op(x, positions=positions)
    torch.testing.assert_close(y, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))
    assert not torch.equal(y, x)


def test_places_in_an_image_are_those_of_transformers(device: torch.device) -> None:
    """The vision tower of Qwen3-VL: frequencies for the row, and the same ones for the column."""
    module = pytest.importorskip(
        "transformers.models.qwen3_vl.modeling_qwen3_vl", reason="compares with transformers"
    )
    config = module.Qwen3VLVisionConfig(hidden_size=2 * SIZE, num_heads=2)
    assert RopeScaling.from_hf(config) == RopeScaling(rope_type="axial")
    op = RotaryEmbedding.from_hf(config, sections=(SIZE // 4, SIZE // 4))
    q, k, v = torch.randn(3, 1, 6, 2, SIZE, device=device)
    places = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]], device=device)
    cos, sin = module.Qwen3VLVisionRotaryEmbedding(config).to(device)(q, places.t())
    y = op(torch.cat([q, k, v], 2).flatten(2), positions=places[:, None])
    turned = module.apply_rotary_pos_emb_vision(q, k, cos, sin)
    torch.testing.assert_close(y, torch.cat([*turned, v], 2).flatten(2), rtol=1e-6, atol=1e-6)
