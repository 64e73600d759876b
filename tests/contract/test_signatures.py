"""Names of the contract, and their arguments as code written for te.ops passes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import opfuser as of
from opfuser import basic, fused

_PARALLEL = (
    "tensor_parallel_mode=None, tensor_parallel_group=None, sequence_parallel=False, "
    "rng_state_tracker_function=None, accumulate_into_main_grad=False"
)
_NORM = "normalized_shape, *, eps=1e-5, device=None, dtype=None, zero_centered_gamma=False"
_ACTIVATION = "*, cache_quantized_input=False"
_CAPS = "beta1=4.0, beta2=25.0"
_CLAMP = "limit=7.0, alpha=1.702, glu_linear_offset=1.0"
_SCALED = "glu_interleave_size=None, *, activation_recompute_in_mlp=False"

CONSTRUCTORS = {
    "BasicLinear": "in_features, out_features, *, device=None, dtype=None, "
    f"{_PARALLEL}, userbuffers_options=None",
    "Linear": f"in_features, out_features, *, bias=True, device=None, dtype=None, {_PARALLEL}",
    "Bias": "size, *, device=None, dtype=None, tensor_parallel=False, tensor_parallel_group=None",
    "RMSNorm": f"{_NORM}, sm_margin=0",
    "LayerNorm": f"{_NORM}, sm_margin=0",
    "L2Normalization": "*, eps=1e-6, seq_length=None, micro_batch_size=None",
    **dict.fromkeys("GELU QGELU ReLU SReLU SiLU".split(), _ACTIVATION),
    **dict.fromkeys("GLU GEGLU QGEGLU ReGLU SReGLU".split(), _ACTIVATION),
    "SwiGLU": f"{_ACTIVATION}, glu_interleave_size=None",
    "SiTUGLU": f"*, {_CAPS}, cache_quantized_input=False, glu_interleave_size=None",
    "ClampedSwiGLU": f"*, {_CLAMP}, cache_quantized_input=False, glu_interleave_size=None",
    "ScaledSwiGLU": _SCALED,
    "ScaledSiTUGLU": f"{_SCALED}, {_CAPS}",
    "ScaledClampedQGeGLU": f"{_SCALED}, {_CLAMP}",
    "ScaledSReLU": "*, activation_recompute_in_mlp=False",
    "ScaledTanhSReLU": "*, tanh_clamp_scale, activation_recompute_in_mlp=False",
    "GroupedLinear": "num_groups, in_features, out_features, *, bias=True, device=None, "
    "dtype=None, rng_state_tracker_function=None, accumulate_into_main_grad=False, "
    "single_grouped_weight=False, single_grouped_bias=False, delay_wgrad_compute=False, "
    "scale_bias=False",
    "AddExtraInput": "*, in_place=False",
    "MakeExtraOutput": "*, in_place=False",
    "ConstantScale": "scale",
    "Dropout": "p",
    "Reshape": "shape",
    "Identity": "",
    "Quantize": "forward=True, backward=False",
    "AllReduce": "process_group=None, reduce_in_backward=True",
    "AllGather": "process_group=None",
    "ReduceScatter": "process_group=None",
}
FUSED_CONSTRUCTORS = {
    "ForwardLinearBiasActivation": "*, linear, bias, activation",
    "ForwardLinearBiasAdd": "*, linear, bias, add",
    "ForwardLinearScaleAdd": "*, linear, scale, add",
    "BackwardActivationBias": "*, bias, activation",
    "BackwardAddRMSNorm": "*, add, rmsnorm",
    "BackwardLinearAdd": "*, backward_add, linear",
    "BackwardLinearScale": "*, scale, linear",
}
METHODS = {
    "num_quantizers": "mode",
    "get_quantizer": "mode, index",
    "get_input_quantizer": "",
    "get_grad_output_quantizer": "",
    "op_forward": "ctx, input_, *, prev_op_grad_output_quantizer, "
    "next_op_input_quantizer, **kwargs",
    "op_backward": "ctx, grad_output",
    "fuser_forward": "basic_op_ctxs, input_, *, basic_op_extra_inputs, "
    "prev_op_grad_output_quantizer, next_op_input_quantizer, basic_op_kwargs",
    "fuser_backward": "basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs",
    "forward": "input, *extra_inputs, **kwargs",
    "pre_first_fuser_forward": "",
    "pre_fuser_forward": "*, requires_grad",
    "set_extra_input_channel": "index, channel",
    "set_extra_output_channel": "index, channel, *, output_to_caller=True",
}

Parameter = tuple[str, Any, Any]


def parameters(function: Callable[..., Any], *, skip: int = 0) -> list[Parameter]:
    found = list(inspect.signature(function).parameters.values())[skip:]
    return [(p.name, p.kind, p.default) for p in found]


def expected(text: str) -> list[Parameter]:
    return parameters(eval(f"lambda {text}: None"))


def agree(got: list[Parameter], want: list[Parameter]) -> None:
    """All of ``want`` in that order; what we add must be optional, so that no call breaks."""
    names = {name for name, _, _ in want}
    empty = inspect.Parameter.empty
    # A default where te.ops has none breaks no call either.
    relaxed = {name for name, _, default in want if default is empty}
    shared = [(n, k, empty if n in relaxed else d) for n, k, d in got if n in names]
    assert shared == want
    for name, kind, default in got:
        if name not in names:
            assert kind == inspect.Parameter.KEYWORD_ONLY or not _positional(want), name
            assert default is not inspect.Parameter.empty, name


def _positional(found: list[Parameter]) -> bool:
    return any(kind == inspect.Parameter.POSITIONAL_OR_KEYWORD for _, kind, _ in found)


def test_names() -> None:
    """Of classes: where they are imported from, and what they derive from."""
    for name in CONSTRUCTORS.keys() - {"Linear"}:
        cls = getattr(of, name)
        assert getattr(basic, name) is cls
        assert name in basic.__all__
        assert issubclass(cls, of.BasicOperation)
        assert cls.__name__ == name
    assert of.fused is fused, "reachable as an attribute, as te.ops.fused is"
    for name in FUSED_CONSTRUCTORS:
        cls = getattr(fused, name)
        assert issubclass(cls, of.FusedOperation)
        assert cls.__name__ == name
        own = f"fuser_{'forward' if name.startswith('Forward') else 'backward'}"
        assert getattr(cls, own) is not getattr(of.FusibleOperation, own), name
    assert issubclass(of.FusibleOperation, torch.nn.Module)
    assert issubclass(of.BasicOperation, of.FusibleOperation)
    assert issubclass(of.FusedOperation, of.FusibleOperation)
    assert issubclass(of.Linear, of.FusedOperation)
    assert issubclass(of.Sequential, torch.nn.Module)
    assert not issubclass(of.Sequential, of.FusibleOperation)
    assert inspect.isclass(of.OperationContext)
    linear = of.Linear(4, 3)
    assert linear.is_fused_op
    assert [op.is_fused_op for op in linear.basic_ops] == [False, False]


def test_constructors() -> None:
    for name, text in CONSTRUCTORS.items():
        agree(parameters(getattr(of, name)), expected(text))
    for name, text in FUSED_CONSTRUCTORS.items():
        agree(parameters(getattr(fused, name)), expected(text))
    ours = "*args, replay=None, recipe=None, fusion_config=None"
    assert parameters(of.Sequential) == expected(ours)
    assert parameters(of.FusedOperation) == expected("basic_ops")
    assert parameters(of.OperationFuser)[:1] == expected("ops")
    assert parameters(of.BasicOperation) == []


def test_methods() -> None:
    for name, text in METHODS.items():
        assert parameters(getattr(of.BasicOperation, name), skip=1) == expected(text)
        if name.startswith("fuser"):
            assert parameters(getattr(of.FusedOperation, name), skip=1) == expected(text)
    assert parameters(of.Sequential.forward, skip=1) == expected(
        "input, *extra_inputs, op_kwargs=None"
    )
    call = expected("input, *extra_inputs, basic_op_kwargs=None")
    assert parameters(of.OperationFuser.__call__, skip=1) == call
    assert parameters(of.FusedOperation.forward, skip=1) == call
    for function in (
        of.register_forward_fusion,
        of.register_backward_fusion,
        of.register_forward_backward_fusion,
    ):
        agree(parameters(function), expected("func, prepend=False, *, name=None"))


QUANTIzED_COMPUTE = {
    "autocast": "enabled=True, calibrating=False, recipe=None, amax_reduction_group=None",
    "fp8_autocast": "enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None",
    "quantized_model_init": "enabled=True, recipe=None, preserve_high_precision_init_val=False",
    "fp8_model_init": "enabled=True, recipe=None, preserve_high_precision_init_val=False",
}
RECIPES = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]


def test_quantized_compute() -> None:
    for name, text in QUANTIzED_COMPUTE.items():
        assert parameters(getattr(of, name)) == expected(text)
    assert set(RECIPES) <= set(of.recipe.__all__)
    assert (of.recipe.Format.HYBRID.value.max_fwd, of.recipe.Format.HYBRID.value.max_bwd) == (
        448,
        57344,
    )
    kinds = ["delayed", "float8_current_scaling", "float8_per_tensor_scaling"]
    kinds += ["float8_block_scaling", "mxfp8", "nvfp4"]
    found = {
        name: [kind for kind in kinds if getattr(getattr(of.recipe, name), kind)()]
        for name in RECIPES
        if name.endswith("Scaling")
    }
    assert found == {
        "DelayedScaling": ["delayed", "float8_per_tensor_scaling"],
        "Float8BlockScaling": ["float8_block_scaling"],
        "Float8CurrentScaling": ["float8_current_scaling", "float8_per_tensor_scaling"],
        "MXFP8BlockScaling": ["mxfp8"],
        "NVFP4BlockScaling": ["nvfp4"],
    }


def test_every_operation_can_be_called_as_its_base_class_says() -> None:
    """The engine passes quantizers by keyword; whoever calls an operation directly may too."""
    for name in CONSTRUCTORS:
        cls = getattr(of, name)
        if not issubclass(cls, of.BasicOperation):
            continue
        for method, names in (
            ("op_forward", ("prev_op_grad_output_quantizer", "next_op_input_quantizer")),
            ("op_backward", ()),
        ):
            call = inspect.signature(getattr(cls, method))
            call.bind(None, None, None, **dict.fromkeys(names))


UNSUPPORTED: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    ("BasicLinear", {"userbuffers_options": {}}, (4, 3)),
    ("AllReduce", {"reduce_in_backward": False}, ()),
    *(
        (name, {"sm_margin": margin}, (8,))
        for name in ("RMSNorm", "LayerNorm")
        for margin in (4, {"forward": 4})
    ),
    ("L2Normalization", {"seq_length": 16}, ()),
    ("L2Normalization", {"micro_batch_size": 16}, ()),
]


def test_what_is_accepted_but_not_supported_is_not_ignored() -> None:
    for name, kwargs, args in UNSUPPORTED:
        with pytest.raises(NotImplementedError) as error:
            getattr(of, name)(*args, **kwargs)
        assert isinstance(error.value, of.errors.NotSupportedError)
        text = str(error.value)
        (argument,) = kwargs
        assert name in text
        assert argument in text, "the text names the argument"
        assert len(text) > len(name) + len(argument) + 20, "and gives the reason"
    of.RMSNorm(8, sm_margin=0)
