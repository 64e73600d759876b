"""What cannot be converted from or to Transformer Engine, and says so.

The classes are stand-ins with the attributes that version 2.20 has: that its own modules are
converted rightly is in ``test_te_parity``.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from opfuser.errors import ArgumentTypeError, NotSupportedError
from opfuser.explain.plan_view import PlanView
from opfuser.integrations.te import LayerNormMLPOptions, TransformerLayerOptions, from_te, to_te


def stand_in(place: str, name: str, **attributes: Any) -> Any:
    """A module whose class says that Transformer Engine defines it."""
    module = type(name, (nn.Module,), {"__module__": f"transformer_engine.pytorch.{place}"})()
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    return module


def store(delayed: bool = False) -> Any:
    return SimpleNamespace(delay_wgrad_compute=lambda: delayed)


def te_linear(**changed: Any) -> Any:
    own = {
        "in_features": 4, "out_features": 2, "use_bias": True, "fuse_wgrad_accumulation": False,
        "return_bias": False, "tp_size": 1, "wgrad_store": store(), "weight_names": ["weight"],
        "weight": nn.Parameter(torch.randn(2, 4)), "bias": nn.Parameter(torch.randn(2)),
    }  # fmt: skip
    return stand_in("module.linear", "Linear", **{**own, **changed})


def te_op(name: str, **attributes: Any) -> Any:
    # Te's own names of attributes, which from_te has to read.
    channels: dict[str, Any] = {"_extra_input_channels": [], "_extra_output_channels": []}
    own = {**channels, "_extra_output_to_caller": [], **attributes}
    return stand_in("ops.basic.some", name, **own)


class Codes(Tensor):
    """A subclass of Tensor that Transformer Engine seems to define."""

    __module__ = "transformer_engine.pytorch.tensor"


def in_fp8() -> Any:
    linear = te_linear()
    linear._parameters["weight"] = torch.randn(2, 4).as_subclass(Codes)
    return linear


def hooked(module: Any) -> Any:
    module.register_forward_hook(lambda *_: None)
    return module


def derived() -> nn.Module:
    base = type(te_linear())
    return type("Mine", (base,), {})()


def test_parameters_and_flags_are_those_of_the_module() -> None:
    linear = te_linear().eval()
    norm = te_op("RMSNorm", weight=nn.Parameter(torch.randn(4)), eps=0.5, zero_centered_gamma=True)
    drop, tanh = te_op("Dropout", dropout_probability=0.25), nn.Tanh()
    sequence = from_te(nn.Sequential(norm, drop, linear, tanh))
    assert [type(m) for m in sequence] == [of.RMSNorm, of.Dropout, of.Sequential, nn.Tanh]
    assert (sequence[0].eps, sequence[0].zero_centered_gamma) == (0.5, True)
    assert sequence[1].dropout_probability == 0.25
    assert sequence[0].weight is norm.weight
    converted = from_te(linear)
    assert (converted.linear.weight, converted.linear.bias) == (linear.weight, linear.bias)
    assert not any(m.training for m in converted.modules())
    x = torch.randn(3, 4)
    assert torch.equal(converted(x), nn.functional.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (nn.Tanh, r"from_te converts AddExtraInput.*torch\.nn.*Tanh"),
        (derived, r"from_te converts .*\.Mine"),
        (lambda: nn.Sequential(derived()), r"from_te converts .*\.Mine"),
        (lambda: te_op("MadeLater"), "operation that opfuser lacks.*MadeLater"),
        (lambda: hooked(te_linear()), r"Hooks.*\(Linear\)"),
        (lambda: hooked(nn.Sequential(te_linear())), r"Hooks.*\(Sequential\)"),
        (in_fp8, r"plain tensors \(Linear\).*weight, a Codes.*quantized_model_init"),
        (lambda: te_linear(return_bias=True), "return_bias=True.*adds its own bias"),
        (lambda: te_linear(tp_size=2), "tp_size=2.*tensor_parallel_mode"),
        (lambda: te_linear(wgrad_store=store(True)), "delay_wgrad_compute=True.*GroupedLinear"),
        (lambda: te_op("AllReduce", process_group=None, _reduce_in_backward=False),
         r"\(AllReduce\).*reduce_in_backward=False"),
        (lambda: te_layer(layer_type="decoder"), r"\(TransformerLayer\).*layer_type='decoder'"),
        (lambda: te_layer(parallel_attention_mlp=True), "parallel_attention_mlp=True"),
        (lambda: te_layer(softmax_type="learnable"), "softmax_type='learnable'"),
        (lambda: te_layer(cp_group="ranks"), "context parallel group='ranks'"),
        (lambda: te_layer(proj_bias=False), "proj.bias=False, not True.*one by one"),
        (lambda: te_layer(qkv_eps=0.5), "qkv.eps=0.5, not 1e-05"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_here(make: Any, text: str) -> None:
    with pytest.raises(NotSupportedError, match=text):
        from_te(make())


def te_layer(
    cp_group: Any = None,
    proj_bias: bool = True,
    qkv_eps: float = 1e-5,
    **changed: Any,
) -> Any:
    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape))

    common: dict[str, Any] = {
        "normalization": "LayerNorm", "zero_centered_gamma": False, "return_bias": False,
        "return_layernorm_output": False, "tp_size": 1, "fuse_wgrad_accumulation": False,
        "use_bias": True, "wgrad_store": store(),
    }  # fmt: skip
    qkv = {**common, "weight_names": ["weight"], "in_features": 8, "out_features": 24}
    attention = stand_in(
        "attention.multi_head_attention", "MultiheadAttention", num_attention_heads=2,
        num_gqa_groups=2, hidden_size_per_attention_head=4, rotary_pos_interleaved=False,
        qkv_weight_interleaved=True, q_norm=None, k_norm=None, qk_norm_before_rope=False,
        core_attention=stand_in("attention", "Core", attention_dropout=0.0, cp_group=cp_group),
        layernorm_qkv=stand_in("module.layernorm_linear", "LayerNormLinear", eps=qkv_eps, **qkv),
        proj=stand_in("module.linear", "Linear", **{**common, "use_bias": proj_bias}),
    )  # fmt: skip
    mlp = stand_in(
        "module.layernorm_mlp", "LayerNormMLP", **common, eps=1e-5, activation="gelu",
        activation_params=None, checkpoint=False, fc1_weight=parameter(16, 8),
        fc2_weight=parameter(8, 16),
    )  # fmt: skip
    own = {
        "layer_type": "encoder", "parallel_attention_mlp": False, "drop_path": None,
        "softcap": 0.0, "softmax_type": "vanilla", "tp_size": 1, "hidden_dropout": 0.0,
        "self_attn_mask_type": "causal", "window_size": None, "output_layernorm": False,
        "apply_residual_connection_post_layernorm": False, "attn_input_format": "sbhd",
        "self_attention": attention, "layernorm_mlp": mlp,
    }  # fmt: skip
    return stand_in("transformer", "TransformerLayer", **{**own, **changed})


def test_the_stand_in_of_a_layer_is_read() -> None:
    """Else the refusals above could have other reasons."""
    read = TransformerLayerOptions.read(te_layer())
    assert read == TransformerLayerOptions(
        hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, num_gqa_groups=2, kv_channels=4,
        hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
    )  # fmt: skip


def test_a_scaled_activation_is_read() -> None:
    given = {"tanh_clamp_scale": 3.0, "activation_recompute_in_mlp": True}
    (made,) = from_te(nn.Sequential(te_op("ScaledTanhSReLU", **given)))
    assert type(made) is of.ScaledTanhSReLU
    assert {name: getattr(made, name) for name in given} == given


# ------------------------------------------------------------------------------ to_te


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What ``to_te`` imports: operations are opfuser's own, which have the same constructors."""
    engine, ops = (ModuleType(f"transformer_engine.pytorch{tail}") for tail in ("", ".ops"))
    vars(ops).update({name: getattr(of, name) for name in of.__all__})
    for module in (engine, ops):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    return engine


def changed_mlp() -> of.Sequential:
    sequence = LayerNormMLPOptions(hidden_size=4, ffn_hidden_size=2).build()
    sequence.norm.eps = 0.5
    sequence.insert(1, of.GELU())
    return sequence


class Mine(of.Sequential):
    """A sequence that may compute what it likes."""


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (of.GELU, ArgumentTypeError, r"converts a Sequential.*GELU.*Sequential\(op"),
        (lambda: Mine(of.GELU()), NotSupportedError, "Mine with subclass"),
        (lambda: of.Sequential(of.GELU(), recipe=of.recipe.DelayedScaling()), NotSupportedError,
         r"counterpart of a recipe \(to_te\)"),
        (lambda: hooked(of.Sequential(of.GELU())), NotSupportedError, "counterpart of a hook "),
        (lambda: of.Sequential(hooked(of.GELU())), NotSupportedError, r"Hooks.*\(GELU\)"),
        (lambda: of.Sequential(of.Tanh()), NotSupportedError, "te.ops has no such.*Tanh"),
        (lambda: of.Sequential(of.GELU("none")), NotSupportedError, "approximate='none'"),
        (lambda: of.Sequential(of.GroupedLinear(2, 4, 4, single_grouped_weight=True)),
         NotSupportedError, "single_grouped_weight=True"),
        (lambda: of.Sequential(of.AllGather(dim=1)), NotSupportedError, "dim=1"),
        (lambda: of.Sequential(of.Linear(4, 4, weight_transposed=True)), NotSupportedError,
         "weight_transposed=True"),
        (changed_mlp, NotSupportedError,
         r"\(LayerNormMLP\).*norm \(LayerNorm\), 0 \(GELU\).*one by one"),
        (lambda: of.Sequential(TransformerLayerOptions(
            hidden_size=4, ffn_hidden_size=2, num_attention_heads=1, attention_dropout=0.0,
            rotary_base=10.0).build()),
         NotSupportedError, "rotary positions.*rotary_base=10.0.*rotary_pos_emb"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_there(
    make: Any, error: type[Exception], text: str, engine: ModuleType
) -> None:
    with pytest.raises(error, match=text):
        to_te(make())


def test_an_operation_that_their_version_lacks(engine: ModuleType) -> None:
    sequence = of.Sequential(of.GroupedLinear(1, 4, 4), of.ScaledTanhSReLU(tanh_clamp_scale=3.0))
    assert to_te(sequence)[1].tanh_clamp_scale == 3.0
    del sys.modules["transformer_engine.pytorch.ops"].ScaledTanhSReLU
    with pytest.raises(NotSupportedError, match=r"te\.ops has no such.*ScaledTanhSReLU"):
        to_te(sequence)


def test_channels_keep_apart_there(engine: ModuleType) -> None:
    """Those of two residuals have one name here, private to each."""
    first, second = of.Residual(of.GELU()), of.Residual(of.SiLU())
    shared = of.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False)
    add = of.AddExtraInput().set_extra_input_channel(0, "skip")
    sequence = of.Sequential(shared, first, second, add)
    made = to_te(sequence)
    x = torch.randn(2, 4)
    names = [name for name, *_ in PlanView(made.plan(x)).channels]
    assert len(set(names)) == 3
    assert names[-1] == "skip"
    assert torch.equal(made(x), sequence(x))


def test_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(ImportError, match="transformer_engine"):
        to_te(of.Sequential(of.GELU()))
