"""Modules for what is no operation of opfuser."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import Unpack

from ..attention.call import Heads
from ..basic._attention_inputs import cached_heads
from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..errors import NotSupportedError
from ..op import BasicOperation, Dtypes
from ..runtime.tracing import stands_in
from .dataflow import form_of, map_leaves, tensors_in
from .operations import Attention, Called, GivenCache, HeadNorm, Input


class Reorder(nn.Module):
    """Blocks of the last dimension in another order, some of them left out or repeated.

    Args:
        blocks: the number of each block in the input.
        size: of a block.
        count: of the blocks of the input.
    """

    def __init__(self, blocks: tuple[int, ...], size: int, count: int) -> None:
        super().__init__()
        self.blocks, self.size, self.count = blocks, size, count
        rows = max(1, blocks.index(1) if 1 in blocks else count)
        regular = count % rows == 0 and torch.arange(count).view(rows, -1).T.flatten().tolist()
        self.rows = rows if regular == [*blocks] else 0
        """Of the table of blocks whose columns stand one behind another in the output."""
        self._indices: dict[torch.device, _Indices] = {}

    def forward(self, x: Tensor) -> Tensor:
        """The input, copied in order."""
        if self.rows:
            table: Tensor = x.unflatten(-1, (self.rows, -1, self.size))
            return table.transpose(-3, -2).flatten(-3)
        first, end = self.blocks[0], self.blocks[-1] + 1
        if self.blocks == tuple(range(first, end)):
            return x[..., first * self.size : end * self.size]
        indices = self._indices.get(x.device)
        if indices is None or stands_in(x):
            indices = _indices_of(self.blocks, x.device)
            if not stands_in(x):
                self._indices[x.device] = indices
        take: Any = _Taken.apply
        y: Tensor = take(x.unflatten(-1, (self.count, self.size)), *indices)
        return y.flatten(-2)


# The number of each block, and of those that are there as often, the numbers and where they are.
_Indices = tuple[Tensor, list[tuple[Tensor, Tensor]]]


def _indices_of(blocks: tuple[int, ...], device: torch.device) -> _Indices:
    found: dict[int, list[int]] = {}
    for place, block in enumerate(blocks):
        found.setdefault(block, []).append(place)
    alike: dict[int, dict[int, list[int]]] = {}
    for block, where in found.items():
        alike.setdefault(len(where), {})[block] = where

    def index(numbers: Any) -> Tensor:
        return torch.tensor([*numbers], device=device)

    return index(blocks), [(index(each), index(each.values())) for each in alike.values()]


class _Taken(torch.autograd.Function):
    """Blocks of the last dimension but one; gradients of those that are repeated are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taken: Tensor, places: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.shape, ctx.places = x.shape, places
        return x.index_select(-2, taken)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx = dy.new_zeros(ctx.shape)
        for blocks, places in ctx.places:
            # At once, not one by one in the dtype of the tensor.
            dx.index_copy_(-2, blocks, dy[..., places, :].sum(-2))
        return dx, None, None


class ColumnScale(nn.Module):
    """The product with a parameter that has a number for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """The input, scaled."""
        return x * self.weight.to(x.dtype)


class HeadLayerNorm(nn.Module):
    """LayerNorm of every query and every key head of packed queries, keys and values.

    Args:
        op: whose heads they are.
    """

    def __init__(self, op: HeadNorm) -> None:
        super().__init__()
        self.heads, self.eps = op.heads, op.eps
        for name in ("q_weight", "q_bias", "k_weight", "k_bias"):
            self.register_parameter(name, None)

    def forward(self, x: Tensor) -> Tensor:
        """The input, its queries and keys normalised."""
        heads = self.heads
        counts = heads.queries * heads.size, heads.keys * heads.size
        q, k, values = x.split((*counts, heads.keys * heads.value_size), -1)
        normed = []
        for rows, name in ((q, "q"), (k, "k")):
            weight, bias = self._parameters[f"{name}_weight"], self._parameters[f"{name}_bias"]
            each = rows.unflatten(-1, (-1, heads.size))
            if weight is not None:  # which may be in fp32 beside rows in half precision
                each = each.to(torch.promote_types(each.dtype, weight.dtype))
            y = functional.layer_norm(each, (heads.size,), weight, bias, self.eps)
            normed.append(y.flatten(-2).to(x.dtype))
        return torch.cat([*normed, values], -1)


class Multiply(BasicOperation):
    """The product with an extra input of the same shape or one column; both are saved."""

    num_extra_inputs: int = 1

    class Saved(NamedTuple):
        input: Tensor
        extra: Tensor

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return torch.promote_types(dtypes.input, dtypes.extra_inputs[0])

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        extra, ctx = given["basic_op_extra_inputs"][0][0], basic_op_ctxs[0]
        assert extra is not None
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(input_, extra))
        return input_ * extra, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> BackwardResult:
        x, extra = basic_op_ctxs[0].saved_tensors
        dx, dextra = grad_output * extra, (grad_output * x).sum_to_size(extra.shape)
        return dx.to(x.dtype), [()], [(dextra.to(extra.dtype),)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_ * extra_inputs[0]


class CachedRows(BasicOperation):
    """An extra input and the input, side by side, as a cache returns them with those of before.

    The cache keeps each as one head: the extra input for keys, the input for values. Where
    gradients are needed, nothing may have been kept before.

    Args:
        causal: whether rows of the call alone are seen where the cache begins with it.
    """

    num_extra_inputs: int = 1
    stores_last: ClassVar[bool] = True

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.input

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        extra, ctx = given["basic_op_extra_inputs"][0][0], basic_op_ctxs[0]
        assert extra is not None
        if ctx.requires_grad:
            ctx.width = extra.shape[-1]
        return self._rows(input_, extra, ctx.requires_grad, **given["basic_op_kwargs"][0]), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> BackwardResult:
        width = basic_op_ctxs[0].width
        return grad_output[..., width:], [()], [(grad_output[..., :width],)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self._rows(input_, extra_inputs[0], False, **kwargs)

    def _rows(self, input_: Tensor, extra: Tensor, differentiable: bool, *, cache: Any) -> Tensor:
        keys, values = extra.unsqueeze(1), input_.unsqueeze(1)
        heads, _, keep = cached_heads(Heads(keys, keys, values), cache, differentiable)
        keep()
        return torch.cat([heads.k, heads.v], -1).squeeze(1)


class Transpose(nn.Module):
    """The first two dimensions exchanged."""

    def forward(self, x: Tensor) -> Tensor:
        """The input, in another order."""
        return x.transpose(0, 1).contiguous()


class Routed(nn.Module):
    """Experts, and the router that chooses them.

    Args:
        router: returns weights and experts of rows, among other tensors.
        experts: a sequence that takes rows, the experts of each, and their weights.
        weights, indices: their places among the tensors that the router returns.
        flat: whether the router takes a matrix of rows.
    """

    def __init__(
        self, router: nn.Module, experts: nn.Module, weights: int, indices: int, flat: bool
    ) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.weights, self.indices, self.flat = weights, indices, flat

    def forward(self, x: Tensor) -> Tensor:
        """What the experts of each row compute, weighted and summed."""
        rows = x.reshape(-1, x.shape[-1])
        found = tensors_in(self.router(rows if self.flat else x))
        weights, indices = (found[n].reshape(len(rows), -1) for n in (self.weights, self.indices))
        y: Tensor = self.experts(rows, indices, weights)
        return y.view(x.shape)


class Around(threading.local):
    """The call of a module, around the calls of its children.

    Attributes:
        inputs: its tensors.
        cache: that it was given.
        returned: the outputs, by their numbers, that children have returned so far.
    """

    inputs: Sequence[Any] = ()
    cache: Any = None
    returned: dict[int, Tensor]


class Child(nn.Module):
    """A child that is called as it is, and returns rows as its forward has in the trace.

    Rows that are not all that it returns may have lost the shape of the input.

    Args:
        child: which.
        called: with what, and what it returns.
        around: the call of the module that holds it.

    Raises:
        NotSupportedError: hooks, or subclasses of tensors, make something else of that.
    """

    def __init__(self, child: nn.Module, called: Called, around: Around) -> None:
        super().__init__()
        self.child, self.called, self.around = child, called, around

    def forward(self, x: Tensor) -> Tensor:
        """What the child returns."""
        y, shape = self.result(x), (*x.shape[:-1], self.called.out_features)
        if self.called.item is not None:
            found = tensors_in(y)
            y = found[self.called.item] if form_of(y) == self.called.form else None
            y = y.reshape(shape) if y is not None and y.numel() == math.prod(shape) else y
            for place, number in self.called.returned if y is not None else ():
                self.around.returned[number] = found[place]
        if type(y) is not Tensor or y.shape != shape:
            got = type(y).__name__ + (f" of {tuple(y.shape)}" if isinstance(y, Tensor) else "")
            raise NotSupportedError.explained(
                "A child with hooks or tensors of its own returns what its forward would",
                where=f"a {type(self.child).__name__}, in a model after opfuser.apply",
                received=f"{got} for an input of {tuple(x.shape)}",
                remedy="Apply after hooks are registered, or call opfuser.revert(model)",
            )
        return y

    def result(self, x: Tensor) -> Any:
        """What the child returns for a stream and the inputs of the call."""
        if self.called.arguments is None:
            return self.child(x)

        def argument(leaf: Any) -> Any:
            if type(leaf) is Input:
                return self.around.inputs[leaf.number]
            if type(leaf) is GivenCache:
                return self.around.cache
            return x if leaf is ... else leaf

        args, kwargs = map_leaves(argument, self.called.arguments)
        return self.child(*args, **dict(kwargs))


class Beside(nn.Module):
    """What several modules compute, side by side in the last dimension."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Their results for an input."""
        return torch.cat([branch(x) for branch in self.branches], -1)


def weights_of(op: Attention, packed: Tensor, mask: Tensor | None) -> dict[int, Tensor]:
    """The weights of attention, as the module returns them, by the number of the output.

    Args:
        op: attention without a cache, to the tokens of its own input.
        packed: queries, keys and values.
        mask: of bool, True where a key is seen, or added to the scores.
    """
    assert op.weights is not None
    heads = op.heads
    wide = packed.to(torch.promote_types(packed.dtype, torch.float32))
    counts = heads.queries * heads.size, heads.keys * heads.size
    q, k = (
        rows.unflatten(-1, (-1, heads.size)).transpose(1, 2)
        for rows in wide[..., : sum(counts)].split(counts, -1)
    )
    with torch.autocast(packed.device.type, enabled=False):
        scores = op.scale * q @ k.repeat_interleave(heads.queries // heads.keys, 1).mT
    if op.softcap is not None:
        scores = op.softcap * torch.tanh(scores / op.softcap)
    if op.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return {op.weights.output: scores.softmax(-1).to(op.weights.dtype)}
