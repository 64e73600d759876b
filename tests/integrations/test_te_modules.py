"""Sequences that stand for modules of Transformer Engine: formulas, and keys of its state dicts.

Transformer Engine itself is not needed: formulas are in ``te_layers``, keys as version 2.20 writes
them. That its modules agree is in ``test_te_parity``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser as of
from opfuser.errors import ArgumentError, InputError, NotSupportedError
from opfuser.integrations.te import (
    GroupedLinearOptions,
    LayerNormLinearOptions,
    LayerNormMLPOptions,
    LinearOptions,
    Options,
    TransformerLayerOptions,
    load_te_state_dict,
    te_state_dict,
)
from opfuser.integrations.te.packing import DeinterleaveHeads, SwapSequenceAndBatch
from opfuser.testing import check_op
from tests.contract.tensors import F64, against, close, fill, rand
from tests.integrations import te_layers


def layer(**options: Any) -> TransformerLayerOptions:
    sizes: dict[str, Any] = {"hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4}
    off = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return TransformerLayerOptions(**{**sizes, **off, **options})


# Pairs of what interacts.
LAYERS = {
    "default": layer(),
    "packed": layer(fuse_qkv_params=True, num_gqa_groups=2, attn_input_format="bshd"),
    "post-norm": layer(output_layernorm=True, self_attn_mask_type="no_mask", activation="silu"),
    "residual of norm": layer(
        apply_residual_connection_post_layernorm=True, qkv_weight_interleaved=False,
        fuse_qkv_params=True, num_gqa_groups=2, zero_centered_gamma=True, layernorm_epsilon=1e-2,
    ),
    "llama": layer(
        normalization="RMSNorm", bias=False, activation="swiglu", num_gqa_groups=2,
        rotary_base=100.0, kv_channels=6, window_size=(-1, 0),
    ),
    "window": layer(window_size=(2, 0), softcap=2.0),
    "window on both sides": layer(
        window_size=(1, 1), self_attn_mask_type="no_mask", attn_input_format="bshd"
    ),
    "qk norm": layer(qk_norm_type="RMSNorm", qk_norm_eps=1e-2, rotary_base=50.0),
    "qk norm first": layer(
        qk_norm_type="RMSNorm", qk_norm_before_rope=True, rotary_base=50.0, output_layernorm=True,
        apply_residual_connection_post_layernorm=True,
    ),
}  # fmt: skip


def tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if not name.endswith("_extra_state")}


def holds(options: Options, formula: Any, *inputs: Tensor) -> of.Sequential:
    """Checks outputs and gradients of the sequence of ``options`` against a formula of its keys."""
    sequence = fill(options.build(**F64))
    with torch.no_grad():
        for p in sequence.parameters():  # large scores would leave one key to each query
            p.mul_(0.3)
    names = te_state_dict(sequence)
    by_pointer = {t.data_ptr(): name for name, t in tensors(names).items()}
    parameters = [(by_pointer[p.data_ptr()], p) for p in sequence.parameters()]
    against(sequence, formula, *inputs, parameters=parameters)
    return sequence


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_its_options_say(name: str) -> None:
    options = LAYERS[name]
    x = rand(5, 3, 16, grad=True)
    holds(options, lambda p, x: te_layers.transformer_layer(options, p, x), x)


@pytest.mark.parametrize("activation", te_layers.ACTIVATIONS)
def test_a_feed_forward_block_has_every_activation(activation: str) -> None:
    options = LayerNormMLPOptions(hidden_size=8, ffn_hidden_size=6, activation=activation)
    formula = te_layers.layer_norm_mlp
    holds(options, lambda p, x: formula(options, p, x), rand(4, 8, grad=True))


def test_options_of_a_feed_forward_block() -> None:
    options = LayerNormMLPOptions(
        hidden_size=8, ffn_hidden_size=6, activation="clamped_swiglu", bias=False, eps=1e-2,
        activation_params={"limit": 0.5}, normalization="RMSNorm", zero_centered_gamma=True,
        return_layernorm_output=True, checkpoint=True, fuse_wgrad_accumulation=True,
    )  # fmt: skip
    sequence = fill(options.build(**F64))
    assert sequence.activation.recompute_mlp
    for linear in (sequence.fc1, sequence.fc2):
        linear.weight.main_grad = torch.ones_like(linear.weight)
    x = rand(4, 8, grad=True)
    y, normalized = sequence(x)
    state = te_state_dict(sequence)
    close(normalized, te_layers.layer_norm_of(options, state, x, ""))
    close(y, te_layers.layer_norm_mlp(options, state, x))
    y.sum().backward()
    (dw,) = torch.autograd.grad(
        te_layers.layer_norm_mlp(options, {**state, "fc2_weight": sequence.fc2.weight}, x).sum(),
        sequence.fc2.weight,
    )
    close(sequence.fc2.weight.main_grad, dw + 1)


def test_a_linear_that_follows_a_norm_in_pieces() -> None:
    split = ("left", 4), ("right", 2)
    options = LayerNormLinearOptions(
        in_features=8, out_features=6, parameters_split=split, return_layernorm_output=True
    )

    def formula(p: Any, x: Tensor) -> Any:
        z = te_layers.layer_norm_of(options, p, x, "")
        return torch.cat([te_layers.linear(p, z, f"{n}_") for n in ("left", "right")], -1), z

    holds(options, formula, rand(4, 8, grad=True))


def test_dropouts() -> None:
    """Of attention weights, and in front of both sums."""
    sequence = layer(hidden_dropout=0.25, attention_dropout=0.125).build()
    assert sequence.attention.attention.dropout_p == 0.125
    for block in (sequence.attention, sequence.mlp):
        assert list(block._modules)[-2:] == ["dropout", "add"]
        assert block.dropout.dropout_probability == 0.25
    x = torch.randn(4, 2, 16)
    assert not torch.equal(sequence(x), sequence(x))
    assert torch.equal(sequence.eval()(x), sequence(x))


# As te.Linear and so on write them, version 2.20.
KEYS: dict[str, tuple[Options, list[str]]] = {
    "Linear": (
        LinearOptions(in_features=4, out_features=2),
        ["weight", "bias", "_extra_state"],
    ),
    "Linear, split": (
        LinearOptions(in_features=4, out_features=2, parameters_split=(("a", 1), ("b", 1))),
        ["a_weight", "b_weight", "a_bias", "b_bias", "_extra_state"],
    ),
    "LayerNormLinear": (
        LayerNormLinearOptions(in_features=4, out_features=2, normalization="RMSNorm"),
        ["layer_norm_weight", "weight", "bias", "_extra_state"],
    ),
    "LayerNormMLP": (
        LayerNormMLPOptions(hidden_size=4, ffn_hidden_size=2),
        [
            "layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight",
            "fc2_bias", "_extra_state",
        ],
    ),
    "GroupedLinear": (
        GroupedLinearOptions(num_gemms=2, in_features=4, out_features=2),
        ["weight0", "weight1", "bias0", "bias1", "_extra_state"],
    ),
    "TransformerLayer": (
        LAYERS["default"],
        [
            "self_attention.layernorm_qkv.layer_norm_weight",
            "self_attention.layernorm_qkv.layer_norm_bias",
            "self_attention.layernorm_qkv.query_weight",
            "self_attention.layernorm_qkv.key_weight",
            "self_attention.layernorm_qkv.value_weight",
            "self_attention.layernorm_qkv.query_bias",
            "self_attention.layernorm_qkv.key_bias",
            "self_attention.layernorm_qkv.value_bias",
            "self_attention.layernorm_qkv._extra_state",
            "self_attention.core_attention._extra_state",
            "self_attention.proj.weight", "self_attention.proj.bias",
            "self_attention.proj._extra_state",
            "layernorm_mlp.layer_norm_weight", "layernorm_mlp.layer_norm_bias",
            "layernorm_mlp.fc1_weight", "layernorm_mlp.fc1_bias",
            "layernorm_mlp.fc2_weight", "layernorm_mlp.fc2_bias", "layernorm_mlp._extra_state",
        ],
    ),
    "TransformerLayer, output norm": (
        layer(
            fuse_qkv_params=True, output_layernorm=True, bias=False, normalization="RMSNorm",
            qk_norm_type="RMSNorm",
        ),
        [
            "self_attention.q_norm.weight", "self_attention.q_norm._extra_state",
            "self_attention.k_norm.weight", "self_attention.k_norm._extra_state",
            "self_attention.qkv.weight", "self_attention.qkv._extra_state",
            "self_attention.core_attention._extra_state",
            "self_attention.proj.weight", "self_attention.proj._extra_state",
            "layernorm_mlp.layer_norm_weight", "layernorm_mlp.fc1_weight",
            "layernorm_mlp.fc2_weight", "layernorm_mlp._extra_state",
            "layernorm.weight", "layernorm._extra_state",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_checkpoints_have_the_keys_of_the_module(name: str) -> None:
    options, keys = KEYS[name]
    source, target = fill(options.build()), options.build()
    state = te_state_dict(source)
    assert sorted(state) == sorted(keys)
    result = load_te_state_dict(target, state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert sorted(state) == sorted(keys), "the caller's dict is left alone"
    for (key, p), q in zip(source.named_parameters(), target.parameters()):
        assert torch.equal(p, q), key


def test_checkpoints_of_a_whole_model() -> None:
    """Operations beside modules, plain modules and containers; codes of scales stay unread."""
    mlp = LayerNormMLPOptions(hidden_size=4, ffn_hidden_size=2, bias=False)

    def model() -> of.Sequential:
        inner = of.Sequential(of.GELU(), of.ScaledClampedQGeGLU())
        grouped = of.GroupedLinear(1, 4, 4, bias=False)
        parts = of.LayerNorm(4), of.Linear(4, 4), mlp.build(), inner, torch.nn.Linear(4, 4), grouped
        return of.Sequential(*parts)

    source = fill(model())
    state = te_state_dict(source)
    assert list(state) == [
        "0.weight", "0.bias", "0._extra_state",
        "1.basic_ops.0.weight", "1.basic_ops.0._extra_state",
        "1.basic_ops.1.bias", "1.basic_ops.1._extra_state",
        "2.layer_norm_weight", "2.layer_norm_bias", "2.fc1_weight", "2.fc2_weight",
        "2._extra_state",
        "3.0._extra_state", "3.1._extra_state", "3.1._clamped._extra_state",
        "4.weight", "4.bias", "5.weight0", "5._extra_state",
    ]  # fmt: skip
    assert all(t.numel() == 0 for name, t in state.items() if name.endswith("_extra_state"))
    empty = torch.empty(0, dtype=torch.uint8)
    state = {n: empty if n.endswith("_extra_state") else t for n, t in state.items()}
    for given in (state, source.state_dict()):
        target = model()
        load_te_state_dict(target, given)
        for (key, p), q in zip(source.named_parameters(), target.parameters()):
            assert torch.equal(p, q), key
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*2\.fc1\.weight.*Unexpected.*2\.fc3"):
        load_te_state_dict(model(), {**{k: v for k, v in state.items() if "fc1" not in k},
                                     "2.fc3": empty})  # fmt: skip
    assigned = model()
    load_te_state_dict(assigned, state, assign=True)
    assert assigned[2].fc1.weight.data_ptr() == source[2].fc1.weight.data_ptr()


@pytest.mark.parametrize("kind", ["linear", "basic", "module"])
def test_codes_of_weights_are_not_written(kind: str) -> None:
    options = LayerNormMLPOptions(hidden_size=16, ffn_hidden_size=16)
    with of.quantized_model_init(recipe=of.recipe.Float8CurrentScaling()):
        parts = {"linear": of.Linear(16, 16), "basic": of.BasicLinear(16, 16)}
        stored = of.Sequential(parts[kind] if kind in parts else options.build())
    with pytest.raises(NotSupportedError, match=r"stored as codes.*\(0(\.fc1)?\).*read_weight"):
        te_state_dict(stored)


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
def test_scales_are_neither_written_nor_asked_for() -> None:
    mlp = LayerNormMLPOptions(hidden_size=16, ffn_hidden_size=16).build()
    model = of.Sequential(mlp, of.BasicLinear(16, 16), of.Linear(16, 16))
    fresh = te_state_dict(model)
    with of.autocast(recipe=of.recipe.DelayedScaling()):
        model(torch.randn(16, 16)).sum().backward()
    scales = {n: t.clone() for n, t in model.state_dict().items() if "quantization" in n}
    assert scales
    assert te_state_dict(model).keys() == fresh.keys()
    result = load_te_state_dict(model, fresh)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for name, t in scales.items():
        assert torch.equal(model.state_dict()[name], t)


def test_what_a_sequence_stands_for_is_copied_with_it() -> None:
    sequence = copy.deepcopy(KEYS["LayerNormMLP"][0].build())
    assert "fc1_weight" in te_state_dict(sequence)
    assert "fc1.weight" not in te_state_dict(sequence)
    parts = of.Sequential(dict(sequence.named_children()))
    assert "fc1.basic_ops.0.weight" in te_state_dict(parts), "without options: its operations"


# ------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (4, 1)])
def test_heads_of_groups_are_sorted(heads: int, groups: int) -> None:
    op = DeinterleaveHeads(heads, groups)
    check_op(op, rand(3, 2, (heads + 2 * groups) * 4), dtypes=[torch.float64, torch.bfloat16])
    each = heads // groups
    names = [
        name
        for g in range(groups)
        for name in (*(f"q{g * each + n}" for n in range(each)), f"k{g}", f"v{g}")
    ]
    order = op(torch.arange(heads + 2 * groups).double().view(1, 1, -1)).flatten().int().tolist()
    want = [f"{kind}{n}" for kind, n in zip("qkv", (heads, groups, groups)) for n in range(n)]
    assert [names[n] for n in order] == want


def test_sequence_and_batch_change_places() -> None:
    check_op(SwapSequenceAndBatch(), rand(3, 2, 4))
    x = rand(3, 2, 4)
    assert torch.equal(of.Sequential(SwapSequenceAndBatch())(x), x.transpose(0, 1))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: DeinterleaveHeads(4, 3), ArgumentError, "multiple of num_kv_heads.*num_heads=4"),
        (
            lambda: DeinterleaveHeads(4, 2)(rand(2, 12)),
            InputError,
            r"heads of one size.*12\) for 8",
        ),
        (lambda: SwapSequenceAndBatch()(rand(3)), InputError, r"sequence and batch.*\(3,\)"),
    ],
)
def test_what_layouts_refuse(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"self_attn_mask_type": "padding"}, "self_attn_mask_type='padding'.*mask= to DotProd"),
        ({"window_size": (128, 0), "self_attn_mask_type": "no_mask"}, r"window_size=\(128, 0\)"),
        ({"attn_input_format": "thd"}, "attn_input_format='thd'"),
        ({"qk_norm_type": "L2Normalization"}, "qk_norm_type='L2Normalization'.*QKNorm"),
    ],
)
def test_options_of_layers_without_counterpart(options: dict[str, Any], text: str) -> None:
    with pytest.raises(NotSupportedError, match=rf"TransformerLayerOptions\).*{text}"):
        layer(**options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"activation": "gelu_exact"}, ArgumentError, "activation is one of swiglu, .*_exact"),
        ({"normalization": "BatchNorm"}, ArgumentError, "one of LayerNorm, RMSNorm.*BatchNorm"),
        ({"activation_params": {"limit": 1.0}}, NotSupportedError, "activation_params={'limit'"),
    ],
)
def test_options_of_feed_forward_blocks(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        LayerNormMLPOptions(hidden_size=4, ffn_hidden_size=2, **options).build()
