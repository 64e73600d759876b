"""Weights of decoders from and to the checkpoints of Hugging Face's transformers.

Which parameters there are follows from the model. Of each the table of its family knows the names
there: several where it is packed here, as queries, keys and values are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from opfuser import (
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    Linear,
    QKNorm,
    RMSNorm,
    Sequential,
)
from opfuser.errors import ArgumentError

from .hf_names import (
    BERT,
    CLASS_TOKEN,
    EXPERTS,
    EXPERTS_4,
    GEMMA2,
    GPT2,
    HEAD,
    LLAMA,
    MIXTRAL_4,
    VIT,
    VIT_4,
    ExpertNames,
    Names,
)
from .vision_encoder import Patches


class _Entry(NamedTuple):
    """One parameter, and what it is called in a checkpoint.

    Attributes:
        module: that owns it.
        name: of the parameter in the module.
        parts: names there, and how many rows of the parameter each of them is.
        transposed: whether they have its two dimensions exchanged.
        shape: of each part in the checkpoint, where it has other dimensions.
    """

    module: nn.Module
    name: str
    parts: tuple[tuple[str, int], ...]
    transposed: bool = False
    shape: tuple[int, ...] | None = None

    def shape_of(self, rows: int) -> tuple[int, ...]:
        """In the checkpoint, of a part with these rows."""
        if self.shape is not None:
            return self.shape
        shape = (rows, *self.value.shape[1:])
        return shape[::-1] if self.transposed else shape

    @property
    def value(self) -> Tensor:
        """The parameter, in high precision where it is stored as codes."""
        if isinstance(self.module, Linear) and self.name == "weight":
            return self.module.read_weight()
        return cast(Tensor, getattr(self.module, self.name))


def load_hf(model: Sequential, state_dict: Mapping[str, Tensor]) -> None:
    """Loads a checkpoint of Hugging Face transformers into the parameters of a model.

    The model comes from :func:`decoder_lm` with ``DecoderConfig.from_hf(config)``, or from
    :func:`text_encoder` with ``EncoderConfig.from_hf(config)``. Values are copied to the dtype and
    device of the parameters. One parameter is packed at a time, so a checkpoint may be larger than
    the free memory.

    Args:
        model: with or without a loss.
        state_dict: with the names of the causal language model, or of its base model, without a
            prefix and a head. A tied head may be missing. Heads and poolers of encoders are
            ignored. Experts may be in one tensor, or in one tensor each, as in transformers 4.

    Raises:
        ArgumentError: a tensor is missing, unexpected or of another shape, a tied head differs from
            the token table, or the model is of another kind. Nothing is changed then.
    """
    names = _names(model)
    if names is VIT and any("encoder.layer." in key for key in state_dict):
        names = VIT_4
    of_experts = EXPERTS
    if any(".experts.0." in key for key in state_dict):
        mixtral = any(".block_sparse_moe." in key for key in state_dict)
        of_experts = MIXTRAL_4 if mixtral else EXPERTS_4
    prefixed = any(key.startswith(names.prefix) for key in state_dict)
    entries = list(_entries(model, names, names.prefix if prefixed else "", of_experts))
    given = {key: t for key, t in state_dict.items() if not re.search(names.ignored, key)}
    table, head = (entry.parts[0][0] for entry in (entries[0], entries[-1]))
    if _is_tied(model):
        _check_tied_head(given, table, head)
        del entries[-1]
        given.pop(head, None)
    _check(entries, given)
    for entry in entries:
        parts = [given[name].t() if entry.transposed else given[name] for name, _ in entry.parts]
        packed = torch.cat(parts)
        if entry.shape is not None:
            packed = packed.view_as(entry.value)
        entry.module.load_state_dict({entry.name: packed}, strict=False)


def hf_state_dict(model: Sequential) -> dict[str, Tensor]:
    """Copies of the parameters of a model, by their names in Hugging Face transformers.

    ``hf_model.load_state_dict(hf_state_dict(model))`` and ``hf_model.save_pretrained(path)`` write
    a checkpoint of the trained model.

    Args:
        model: from :func:`decoder_lm`, with or without a loss, or :func:`text_encoder`.

    Returns:
        Contiguous tensors by the names of the causal language model, or of the encoder without a
        head, with transformers' shapes and this model's dtypes; a tied head is the same object as
        the token table.

    Raises:
        ArgumentError: the model is of another kind.
    """
    names = _names(model)
    out: dict[str, Tensor] = {}
    # Of an encoder there is no model with a head that all have.
    prefix = names.prefix if "head" in model._modules else ""
    for entry in _entries(model, names, prefix):
        rows = [rows for _, rows in entry.parts]
        for (name, _), part in zip(entry.parts, entry.value.detach().split_with_sizes(rows)):
            copied = (part.t() if entry.transposed else part).clone(
                memory_format=torch.contiguous_format
            )
            out[name] = copied if entry.shape is None else copied.view(entry.shape)
    if _is_tied(model):
        out[f"{HEAD}.weight"] = out[f"{names.prefix}{names.embedding}.weight"]
    return out


def _named(model: Sequential, name: str) -> nn.Module:
    module = model._modules.get(name) if isinstance(model, Sequential) else None
    if module is None:
        raise ArgumentError.explained(
            "Weights are loaded into, and read from, models of decoder_lm and text_encoder",
            received=f"{type(model).__name__} without a module {name!r}",
        )
    return module


def _is_tied(model: Sequential) -> bool:
    head = model._modules.get("head")
    return head is not None and head.weight is _named(model, "embedding").weight


def _names(model: Sequential) -> Names:
    if "types" in model._modules:
        return BERT
    if "patches" in model._modules:
        return VIT
    if "positions" in model._modules:
        return GPT2
    layer = _blocks(_named(model, "layers"))[0]
    norms = [op for block in layer for op in _of(block, RMSNorm, LayerNorm)]
    return LLAMA if len(norms) == 2 else GEMMA2


def _blocks(layers: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The attention block and the feed-forward block of each layer."""
    return [(layer.attention, layer.mlp) for layer in layers.children()]  # type: ignore[misc]


def _of(block: nn.Module, *types: type[nn.Module]) -> list[nn.Module]:
    """The modules of one of these types, in order."""
    return [module for module in block.children() if isinstance(module, types)]


def _entries(
    model: Sequential, names: Names, prefix: str, of_experts: ExpertNames = EXPERTS
) -> Iterator[_Entry]:
    """All parameters; the token table comes first, and the head last."""
    if names.prefix == VIT.prefix:
        yield from _of_images(model, names, prefix)
    else:
        yield from _whole(_named(model, "embedding"), prefix + names.embedding)
        for own, name in (
            ("types", names.types),
            ("positions", names.positions),
            ("embedding_norm", names.embedding_norm),
        ):
            yield from _whole(model._modules.get(own), prefix + name)
    for n, blocks in enumerate(_blocks(_named(model, "layers"))):
        here = prefix + names.layer.format(n)
        norms = [op for block in blocks for op in _of(block, RMSNorm, LayerNorm)]
        for norm, name in zip(norms, names.norms):
            yield from _whole(norm, here + name)
        yield from _attention(blocks[0], names, here)
        mixture = _of(blocks[1], Sequential)
        if mixture:
            yield from _of_experts(mixture[0], of_experts, here)
            continue
        up, down = _of(blocks[1], Linear)
        yield from _linear(up, names.up, here, names.transposed)
        yield from _linear(down, (names.down,), here, names.transposed)
    yield from _whole(model._modules.get("norm"), prefix + names.norm)
    yield from _whole(model._modules.get("head"), HEAD)


def _of_images(model: Sequential, names: Names, prefix: str) -> Iterator[_Entry]:
    """What stands before the layers of an encoder of images, where most has more dimensions."""
    patches, embedding = _named(model, "patches"), _named(model, "embedding")
    token, positions = _named(model, "class_token"), _named(model, "positions")
    assert isinstance(patches, Patches)
    assert isinstance(embedding, Linear)
    dim = embedding.out_features
    for entry in _whole(embedding, prefix + names.embedding):
        if entry.name == "weight":  # of a convolution
            rows, cols = patches.patch_size
            channels = embedding.in_features // (rows * cols)
            yield entry._replace(shape=(dim, channels, rows, cols))
        else:
            yield entry
    yield _Entry(token, "weight", ((prefix + CLASS_TOKEN, dim),), shape=(1, 1, dim))
    count = len(cast(Tensor, positions.weight))
    name = prefix + names.positions
    yield _Entry(positions, "weight", ((name, count),), shape=(1, count, dim))


def _attention(block: nn.Module, names: Names, here: str) -> Iterator[_Entry]:
    (qkv, out), (attention,) = _of(block, Linear), _of(block, DotProductAttention)
    assert isinstance(attention, DotProductAttention)
    heads = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
    yield from _linear(qkv, names.qkv, here, names.transposed, heads)
    yield from _linear(out, (names.out,), here, names.transposed)
    for norm in _of(block, QKNorm):
        assert isinstance(norm, QKNorm)
        for own, name in zip(("q_weight", "k_weight"), names.qk_norms):
            yield _Entry(norm, own, ((f"{here}{name}.weight", norm.head_dim),))


def _of_experts(mixture: nn.Module, names: ExpertNames, here: str) -> Iterator[_Entry]:
    parts = dict(mixture.named_children())
    yield from _whole(parts["router"], here + names.router)
    for own, there in (("gate_up", names.gate_up), ("down", (names.down,))):
        linear = parts[own]
        assert isinstance(linear, GroupedLinear)
        if "{}" not in there[0]:
            yield _Entry(linear, "weight", ((here + there[0], linear.num_groups),))
            continue
        shape = linear.out_features // len(there), linear.in_features
        of_each = [here + name.format(n) for n in range(linear.num_groups) for name in there]
        yield _Entry(linear, "weight", tuple((name, shape[0]) for name in of_each), shape=shape)
    if "shared_gate_up" in parts:
        *up, down = names.shared
        yield from _linear(parts["shared_gate_up"], tuple(up), here, transposed=False)
        yield from _whole(parts["shared_down"], here + down)
        yield from _whole(parts.get("shared_gate"), here + names.shared_gate)


def _whole(module: nn.Module | None, name: str) -> Iterator[_Entry]:
    """The parameters of a module that is one there too, or of none."""
    if module is not None:
        for own, parameter in module.named_parameters(recurse=False):
            yield _Entry(module, own, ((f"{name}.{own}", len(parameter)),))


def _linear(
    linear: nn.Module,
    names: tuple[str, ...],
    here: str,
    transposed: bool,
    shares: list[int] | None = None,
) -> Iterator[_Entry]:
    """The parameters of a linear that is several there, with so many shares of its rows each."""
    assert isinstance(linear, Linear)
    shares = [1] * len(names) if len(names) == 1 or shares is None else shares
    rows = [share * linear.out_features // sum(shares) for share in shares]
    for own, _ in linear.named_parameters(recurse=False):
        parts = tuple((f"{here}{name}.{own}", n) for name, n in zip(names, rows))
        yield _Entry(linear, own, parts, transposed and own == "weight")


def _check_tied_head(given: Mapping[str, Tensor], table: str, head: str) -> None:
    if table in given and head in given and not torch.equal(given[table], given[head]):
        raise ArgumentError.explained(
            "The head of a model with tied_head has the weight of its token table",
            where="load_hf",
            received=f"{head}, which differs from {table}",
            remedy="Make the model with tied_head=False",
        )


def _check(entries: list[_Entry], given: Mapping[str, Tensor]) -> None:
    """Raises ArgumentError unless the tensors are those of the entries, and of their shapes."""
    expected = {name: entry.shape_of(rows) for entry in entries for name, rows in entry.parts}
    problems = [f"no {name}" for name in expected if name not in given]
    problems += [name for name in given if name not in expected]
    problems += [
        f"{name} of shape {tuple(given[name].shape)} in place of {shape}"
        for name, shape in expected.items()
        if name in given and tuple(given[name].shape) != shape
    ]
    if problems:
        shown = ", ".join(problems[:5])
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ArgumentError.explained(
            "A checkpoint holds exactly the parameters of the model",
            where="load_hf",
            received=shown + more,
            remedy="Make the model with DecoderConfig.from_hf of its configuration",
        )
