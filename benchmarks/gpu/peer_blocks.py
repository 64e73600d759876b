"""Contestants from other libraries: GEMMs with what stands around them, and blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.peers import (
    FLEX_GEMM,
    LIGER,
    PEERS,
    QUACK,
    QUACK_IN_TORCH,
    TE,
    Functions,
    attribute,
    engine,
    engine_ops,
    liger,
    liger_layer_norm,
    liger_loss,
    peer,
    quack,
    quack_loss,
)
from benchmarks.gpu.problem import Function
from benchmarks.gpu.torch_models import Parts, swiglu


def with_parts(build: Callable[[Parts], Function], *names: str) -> Functions:
    """A torch.nn model in which each library, or each one named, replaces some modules."""
    offers = {
        LIGER: Parts(
            rms_norm=lambda x, w, eps: liger("RMSNorm")(x, w, eps, 0.0, "llama", False),
            # Its backward returns the gradient of a matrix.
            swiglu=lambda x: liger("FusedGateUpSiLUMul")(x.flatten(0, -2), False).unflatten(
                0, x.shape[:-1]
            ),
            layer_norm=liger_layer_norm,
            linear_cross_entropy=liger_loss,
        ),
        QUACK: Parts(
            rms_norm=lambda x, w, eps: attribute("quack.rmsnorm:rmsnorm")(x, w, eps=eps),
            linear_cross_entropy=quack_loss,
        ),
    }
    functions: Functions = {}
    for name in names or offers:
        functions |= peer(name, lambda parts=offers[name]: build(parts))
    return functions


def norm_linear(norm: nn.Parameter, w: nn.Parameter, eps: float) -> Functions:
    """``rms_norm(x) Wᵀ``."""

    def for_liger() -> Function:
        apply = liger("RMSNorm")
        return lambda x: nn.functional.linear(apply(x, norm, eps, 0.0, "llama", False), w)

    def for_quack(tuned: bool) -> Function:
        normed, linear = attribute("quack.rmsnorm:rmsnorm"), attribute("quack.linear:linear_func")
        return lambda x: linear(normed(x, norm, eps=eps), w, tuned=tuned)

    def for_te() -> Function:
        module = engine("LayerNormLinear")(
            w.shape[1], w.shape[0], eps=eps, bias=False, normalization="RMSNorm",
            params_dtype=w.dtype, device=w.device,
        )  # fmt: skip
        module.layer_norm_weight, module.weight = norm, w
        built: Function = module
        return built

    return {**peer(LIGER, for_liger), **quack(for_quack), **peer(TE, for_te)}


def linear_swiglu(w: nn.Parameter) -> Functions:
    """``silu(g) u`` of ``x Wᵀ = [g, u]``, forward alone: what quack returns has no gradient."""

    def for_liger() -> Function:
        apply = liger("FusedGateUpSiLUMul")
        return lambda x: apply(nn.functional.linear(x, w), False)

    def gemm_gated(found: str, tuned: bool) -> Function:
        gemm = attribute(f"{found}:gemm_gated")
        how: Any = {"activation": "swiglu", "store_preact": False, "concat_layout": ("B",)}
        return lambda x: gemm(x, w.T, tuned=tuned, **how)[1]

    def for_flex_gemm() -> Function:
        gemm = attribute("torch._higher_order_ops.flex_gemm:flex_gemm")
        how: Any = {"kernel_options": {"backend": "QUACK"}}
        function: Function = torch.compile(
            lambda x: gemm(torch.mm, (x, w.T), swiglu, **how), dynamic=False, fullgraph=True
        )
        return function

    def for_te() -> Function:
        linear = ("Linear", (w.shape[1], w.shape[0]), {"weight": w})
        return engine_ops(linear, ("SwiGLU", (), {}))

    return {
        **peer(LIGER, for_liger),
        **peer(TE, for_te),
        **quack(lambda tuned: gemm_gated(PEERS[QUACK].found, tuned)),
        **peer(QUACK_IN_TORCH, lambda: gemm_gated(PEERS[QUACK_IN_TORCH].found, True)),
        **peer(FLEX_GEMM, for_flex_gemm),
    }


def swiglu_block(norm: nn.Parameter, fc1: nn.Parameter, fc2: nn.Parameter, eps: float) -> Functions:
    """``x + fc2(swiglu(fc1(rms_norm(x))))`` of modules that fuse more than single operations."""

    def for_quack(tuned: bool) -> Function:
        normed, mlp = attribute("quack.rmsnorm:rmsnorm"), attribute("quack.mlp:mlp_func")
        how: Any = {"tuned": tuned, "concat_layout": True}
        return lambda x: x + mlp(normed(x, norm, eps=eps), fc1, fc2, "swiglu", **how)

    return {
        **quack(for_quack),
        **peer(TE, lambda: engine_swiglu_block(norm, fc1, fc2, eps)),
    }


def decoder_layer(source: Any, eps: float) -> Functions:
    """``torch_models.decoder_layer`` of quack's pieces, around torch's attention."""
    _, _, rotary, attention, _ = source[0]
    norm, qkv, out, second, fc1, fc2 = source.parameters()
    cos, sin = rotary.cos.squeeze(1), rotary.sin.squeeze(1)
    (*turned, _), functional = attention.sizes, nn.functional

    def for_quack(tuned: bool) -> Function:
        normed, mlp = attribute("quack.rmsnorm:rmsnorm"), attribute("quack.mlp:mlp_func")
        linear = attribute("quack.linear:linear_func")
        # The one that works in place takes no output of its linear.
        turn = attribute("quack.rotary:apply_rotary_emb")
        how: Any = {"tuned": tuned, "concat_layout": True}

        def attend(packed: Tensor) -> Tensor:
            heads = packed.unflatten(-1, (-1, rotary.head_dim))
            qk, v = heads.tensor_split([rotary.turned], dim=2)
            parts = (*turn(qk, cos, sin).split(turned, dim=2), v)
            q, k, v = (t.transpose(1, 2) for t in parts)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2).flatten(2)

        def layer(x: Tensor) -> Any:
            packed = linear(normed(x, norm, eps=eps), qkv, tuned=tuned)
            x = x + linear(attend(packed), out, tuned=tuned)
            return x + mlp(normed(x, second, eps=eps), fc1, fc2, "swiglu", **how)

        return layer

    return quack(for_quack)


def engine_swiglu_block(
    norm: nn.Parameter, fc1: nn.Parameter, fc2: nn.Parameter, eps: float
) -> Function:
    mlp = engine("LayerNormMLP")(
        fc2.shape[0],
        fc2.shape[1],
        eps=eps,
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        params_dtype=norm.dtype,
        device=norm.device,
    )
    mlp.layer_norm_weight, mlp.fc1_weight, mlp.fc2_weight = norm, fc1, fc2
    return lambda x: x + mlp(x)


def gpt_block(parameters: tuple[nn.Parameter, ...], eps: float) -> Functions:
    """``x + fc2(gelu(fc1(layer_norm(x))))`` with biases; the order is that of use."""
    norm, norm_bias, fc1, fc1_bias, fc2, fc2_bias = parameters

    def for_liger() -> Function:
        normed = liger("LayerNorm")
        functional = nn.functional

        def block(x: Tensor) -> Any:
            h = functional.linear(normed(x, norm, norm_bias, eps), fc1, fc1_bias)
            return x + functional.linear(functional.gelu(h, approximate="tanh"), fc2, fc2_bias)

        return block

    def for_quack(tuned: bool) -> Function:
        mlp = attribute("quack.mlp:mlp_func")
        how: Any = {"bias1": fc1_bias, "bias2": fc2_bias, "tuned": tuned}

        def block(x: Tensor) -> Any:
            # Its LayerNorm has no gradient.
            h = nn.functional.layer_norm(x, norm.shape, norm, norm_bias, eps)
            return x + mlp(h, fc1, fc2, "gelu_tanh_approx", **how)

        return block

    return {
        **peer(LIGER, for_liger),
        **quack(for_quack),
        **peer(TE, lambda: engine_gpt_block(parameters, eps)),
    }


def engine_gpt_block(parameters: tuple[nn.Parameter, ...], eps: float) -> Function:
    norm, norm_bias, fc1, fc1_bias, fc2, fc2_bias = parameters
    mlp = engine("LayerNormMLP")(
        fc2.shape[0],
        fc2.shape[1],
        eps=eps,
        normalization="LayerNorm",
        activation="gelu",
        params_dtype=norm.dtype,
        device=norm.device,
    )
    mlp.layer_norm_weight, mlp.layer_norm_bias = norm, norm_bias
    mlp.fc1_weight, mlp.fc1_bias, mlp.fc2_weight, mlp.fc2_bias = fc1, fc1_bias, fc2, fc2_bias
    return lambda x: x + mlp(x)
