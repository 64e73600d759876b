"""torchtitan's layers with fused operations: overrides of its configurations, by name.

torchtitan imports an override when it is told to, and replaces the configurations that it is
about before the model is built. No file of torchtitan changes.

torchtitan is not installed with this package, and importing this module needs it. Written for
torchtitan 0.3; before, there were no overrides.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.common.nn_modules import RMSNorm as TitanRMSNorm
from torchtitan.models.llama3.model import Llama3TransformerBlock

from opfuser import (
    AddExtraInput,
    Linear,
    MakeExtraOutput,
    MergedLinear,
    Residual,
    RMSNorm,
    Sequential,
    SwiGLU,
)
from opfuser.core.change_tracking import has_hooks

_logger = logging.getLogger("opfuser")

_KINDS = FeedForward, FusedQKVLinear, GQAttention, QKVLinear, TitanLinear, TitanRMSNorm


_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


class _Read:
    """What modules are, and whether they are as they were: compared at every call, in C."""

    def __init__(self) -> None:
        self._children: list[tuple[nn.Module, dict[str, Any]]] = []
        self._inner: list[tuple[nn.Module, list[Any]]] = []

    def children(self, module: nn.Module) -> None:
        """Remembers the children of a module."""
        self._children.append((module, dict(module._modules)))

    def inner(self, module: nn.Module) -> None:
        """Remembers the type, the hooks, the forward and the parameters of a module inside."""
        self._inner.append((module, _facts(module)))

    def is_current(self) -> bool:
        """Whether all is as it was read."""
        return all(m._modules == before for m, before in self._children) and all(
            _facts(m) == before for m, before in self._inner
        )


def _facts(module: nn.Module) -> list[Any]:
    present = [name for name, p in module._parameters.items() if p is not None]
    hooks = [len(getattr(module, name)) for name in _HOOKS]
    return [type(module), module.__dict__.get("forward"), hooks, present]


class _Built(NamedTuple):
    """The sequences of a module, or why there are none, and what both were found from."""

    sequences: tuple[Sequential, ...]
    why: str
    read: _Read


class _Fused:
    """What both modules have in common: their sequences, and when these compute a call.

    A sequence reads the parameters of the modules at every call, and is no submodule: names in
    state dicts, initialisation and sharding are torchtitan's.
    """

    __dict__: dict[str, Any]

    def parallelize(self, parallel_dims: Any) -> None:
        """Remembers whether there is more than data parallelism."""
        super().parallelize(parallel_dims)  # type: ignore[misc]
        self.__dict__["_sharded"] = parallel_dims.tp_enabled or parallel_dims.cp_enabled

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_built"}

    def _sequences(self, x: Tensor) -> tuple[Sequential, ...]:
        """The sequences that compute a call with ``x``; none if torchtitan's own forward does."""
        if torch.compiler.is_compiling():
            return ()
        built: _Built | None = self.__dict__.get("_built")
        if built is None or not built.read.is_current():
            built = self.__dict__["_built"] = self._build()
            if built.why:
                _logger.warning("%s: %s; its own forward runs", type(self).__name__, built.why)
        return () if isinstance(x, DTensor) else built.sequences

    def _build(self) -> _Built:
        read = _Read()
        why = _refusal(read, self)  # type: ignore[arg-type]
        if self.__dict__.get("_sharded"):
            why = "tensor and context parallelism are torchtitan's"
        return _Built(() if why else tuple(self._made()), why, read)

    def _made(self) -> Iterator[Sequential]:
        raise NotImplementedError


def _refusal(read: _Read, root: nn.Module) -> str:
    """Why a module inside has to be called as it is; empty if the operations say all it does."""
    for path, module in root.named_modules():
        read.children(module)
        if module is root or _by_itself(path):
            continue
        read.inner(module)
        if type(module) not in _KINDS:
            return f"{path} is {type(module).__name__}"
        if "forward" in module.__dict__ and not module._parallelized:
            return f"{path} has a forward of its own"
        if has_hooks(module):
            return f"{path} carries hooks"
    return ""


def _by_itself(path: str) -> bool:
    """Whether a module of attention is called, whatever it is."""
    names = path.split(".")
    return len(names) > 1 and names[1] in ("inner_attention", "k_norm", "q_norm", "rope")


def _share(op: nn.Module, source: nn.Module) -> None:
    """Makes an operation read the parameters of ``source``, whatever is set there later."""
    op.__dict__["_parameters"] = source._parameters
    for part in getattr(op, "basic_ops", ()):
        part.__dict__["_parameters"] = source._parameters


def _linear(module: nn.Linear) -> Linear:
    sizes = module.in_features, module.out_features
    op = Linear(*sizes, bias=module.bias is not None, device="meta")
    _share(op, module)
    return op


def _merged(modules: dict[str, nn.Linear]) -> MergedLinear:
    sizes = {name: module.out_features for name, module in modules.items()}
    bias = [name for name, module in modules.items() if module.bias is not None]
    (features,) = {module.in_features for module in modules.values()}
    op = MergedLinear(features, sizes, bias=bias, device="meta")
    for name, module in modules.items():
        _share(op.get_submodule(name), module)
    return op


def _norm(module: nn.RMSNorm) -> RMSNorm:
    assert module.eps is not None
    op = RMSNorm(module.normalized_shape, eps=module.eps, device="meta")
    _share(op, module)
    return op


def _feed_forward(module: Any) -> list[nn.Module]:
    return [_merged({"gate": module.w1, "up": module.w3}), SwiGLU(), _linear(module.w2)]


class FusedFeedForward(_Fused, FeedForward):  # type: ignore[misc]
    """``FeedForward`` of torchtitan, of any of its models: ``w2(silu(w1(x)) * w3(x))``.

    As :class:`FusedTransformerBlock`, with less to fuse: the norm in front and the sum behind are
    the block's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):  # type: ignore[misc]
        """Configuration of ``FeedForward``."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the module does; x is (..., dim)."""
        for sequence in self._sequences(x):
            return sequence(x)  # type: ignore[no-any-return]
        return super().forward(x)  # type: ignore[no-any-return]

    def _made(self) -> Iterator[Sequential]:
        yield Sequential(*_feed_forward(self))


class FusedTransformerBlock(_Fused, Llama3TransformerBlock):  # type: ignore[misc]
    """The layer of torchtitan's Llama 3: attention and feed-forward block, with their residuals.

    Two sequences compute it but for what stands between them, the rotary embedding and the inner
    attention, which are torchtitan's: norm and projection of queries, keys and values; and the
    output projection, its residual sum, and the feed-forward block with norm and sum.

    torchtitan's own forward takes calls under ``torch.compile``, with tensor or context
    parallelism, with DTensors as input, and where a linear module or norm inside is of another
    class than torchtitan's (LoRA, quantisation) or carries hooks. A warning of the logger
    ``opfuser`` says so, but for the first.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3TransformerBlock.Config):  # type: ignore[misc]
        """Configuration of ``Llama3TransformerBlock``."""

    def forward(self, x: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        """Returns what the layer does; x is (batch, sequence, dim)."""
        sequences = self._sequences(x)
        if not sequences:
            return super().forward(x, attention_masks, positions)  # type: ignore[no-any-return]
        before, behind = sequences
        qkv, residual = before(x)
        given = _attended(self.attention, qkv, attention_masks, positions)
        return behind(given, residual)  # type: ignore[no-any-return]

    def _made(self) -> Iterator[Sequential]:
        projections = self.attention.qkv_linear
        if isinstance(projections, FusedQKVLinear):
            qkv: nn.Module = _linear(projections.wqkv)
        else:
            qkv = _merged({"q": projections.wq, "k": projections.wk, "v": projections.wv})
        yield Sequential(MakeExtraOutput(), _norm(self.attention_norm), qkv)
        feed_forward = Residual(_norm(self.ffn_norm), *_feed_forward(self.feed_forward))
        yield Sequential(_linear(self.attention.wo), AddExtraInput(), feed_forward)


def _attended(attention: Any, qkv: Tensor, masks: Any, positions: Tensor | None) -> Tensor:
    """What attention gives to its output projection, of the projections (batch, sequence, ...)."""
    q, k, v = (t.contiguous() for t in _heads(attention, qkv))
    if attention.q_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = attention.rope(q, k, positions)
    y: Tensor = attention.inner_attention(
        q, k, v, attention_masks=masks, scale=attention.scaling, enable_gqa=attention.enable_gqa
    )
    return y.flatten(2)


def _heads(attention: Any, qkv: Tensor) -> Sequence[Tensor]:
    """Queries, keys and values, each (batch, sequence, heads, head_dim)."""
    size, groups = attention.head_dim, attention.n_kv_heads
    each = attention.n_heads // groups
    if isinstance(attention.qkv_linear, FusedQKVLinear):
        # Those of a group of queries stand side by side: its queries, its key, its value.
        by_group = qkv.unflatten(2, (groups, each + 2, size))
        return [t.flatten(2, 3) for t in by_group.split([each, 1, 1], 3)]
    heads = qkv.unflatten(2, (each * groups + 2 * groups, size))
    q, k, v = heads.split([each * groups, groups, groups], 2)
    return q, k, v


@override(  # type: ignore[untyped-decorator]
    target=Llama3TransformerBlock.Config,
    exact=True,
    description="Llama 3 layers with fused operations of opfuser",
)
def transformer_block(cfg: Llama3TransformerBlock.Config) -> FusedTransformerBlock.Config:
    """The configuration of :class:`FusedTransformerBlock` in place of a layer's of torchtitan."""
    return derive(cfg, FusedTransformerBlock.Config)  # type: ignore[no-any-return]


@override(  # type: ignore[untyped-decorator]
    target=FeedForward.Config,
    exact=True,
    description="Feed-forward blocks with fused operations of opfuser",
)
def feed_forward(cfg: FeedForward.Config) -> FusedFeedForward.Config:
    """The configuration of :class:`FusedFeedForward` in place of that of ``FeedForward``."""
    return derive(cfg, FusedFeedForward.Config)  # type: ignore[no-any-return]
