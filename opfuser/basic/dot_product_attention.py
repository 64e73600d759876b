"""Attention by the kernels that there are for it."""

# Longer than 500 lines: nearly all is one class, whose methods are the
# arguments, inputs and passes of one operation; kernels and their choice are in attention/.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import torch_internals as internals
from ..attention import context_parallel
from ..attention.call import Call, Heads, Request, Result, request_of
from ..attention.choice import (
    KERNELS,
    Choice,
    choose,
    choose_plain,
    expanded,
    explained,
    foreseen,
    happened,
)
from ..attention.exported import EXPORTED
from ..attention.reference import plain_attention
from ..attention.sinks import sinks_grad, with_sinks
from ..core.change_tracking import Note
from ..core.context import (
    COMPUTE_DTYPES,
    BackwardResult,
    Contexts,
    Extras,
    ForwardArguments,
    ForwardResult,
)
from ..errors import ArgumentError, OpKwargsError
from ..events.kinds import AttentionKernelTaken
from ..events.telling import emit, generation
from ..kernels.scalar import cast
from ..op import (
    BasicOperation,
    Dtypes,
    OperationContext,
    OperationGrads,
    compute_dtype,
    in_compute_dtype,
)
from ..runtime.recording import leave
from ..runtime.tracing import exporting, functional, joined_columns, stands_in, transforms_active
from . import _attention_inputs as inputs
from ._attention_inputs import AttentionSettings


class DotProductAttention(BasicOperation):
    r"""Multi-head attention: per head, :math:`y_i = \sum_j \mathrm{softmax}_j(s_{ij})\, v_j`.

    A score is :math:`s_{ij} = c \tanh(s\, q_i k_j / c) - m_h |i - j| + b_{hij}`, plus an additive
    mask; the cap c, the ALiBi slopes m and the bias b are there only where they are asked for. Keys
    that causality, a window or a mask hide have no weight. A query that sees no key has output and
    gradients 0. Queries are aligned to the end of the keys: with fewer queries than keys, they are
    the last positions; with more, the first ones lie before the first key.

    Every mode is computed by a kernel that exists: torch's for cuDNN, flash and memory-efficient
    attention and for CPUs, flash-attn's where it is installed, those that torch compiles for
    flex_attention, and where none of these takes a call, plain torch for a block of queries at a
    time, and again in backward. No attention matrix is stored. The first call that flex_attention
    takes compiles its kernels, for every batch and length.
    Within torch's ``context_parallel``, torch's function computes attention across processes.
    :attr:`last_choice` says which kernel the last call took and why not another one; a plan says
    what is known before. ``docs/attention.md`` has the table.

    Shapes, packed: input ``(batch, sequence, (num_heads + num_kv_heads) * head_dim +
    num_kv_heads * v_head_dim)``: the heads of the queries, then of the keys, then of the values;
    the head size follows from the shape. Separate: input ``(batch, queries, num_heads *
    head_dim)``, extra inputs: the keys ``(batch, keys, num_kv_heads * head_dim)`` and the values
    ``(batch, keys, num_kv_heads * v_head_dim)``, whose head size follows from the shape. Output
    ``(batch, queries, num_heads * v_head_dim)``, in the autocast dtype if autocast is active,
    else the input's. With ``core_attention_bias`` the last extra input is the bias, of a shape that
    broadcasts to ``(batch, num_heads, queries, keys)``; its gradient is summed to it. Query head h
    attends to key head ``h // (num_heads / num_kv_heads)``.

    Saved: the inputs, the output if the kernel's backward reads it, per query and head the
    log-sum-exp of the scores, and what the call was given besides.
    Sources: Vaswani et al., "Attention Is All You Need", 2017; Dao et al., "FlashAttention", 2022;
    soft-capping: Gemma Team, "Gemma 2", 2024; sinks: Xiao et al., "Efficient Streaming Language
    Models with Attention Sinks", 2023; ALiBi: Press et al., "Train Short, Test Long", 2022.

    Args:
        num_heads: query heads.
        num_kv_heads: key heads, and as many value heads; None is ``num_heads``.
        causal: whether a position attends only to itself and to earlier ones.
        scale: s; None is ``head_dim ** -0.5``.
        layout: ``"packed"`` or ``"separate"``.
        window: a position attends to this many positions: itself and those before it, and without
            causality as many behind it. None is all.
        dropout_p: probability of zeroing a weight in training; the others are divided by
            ``1 - dropout_p``. The mask is drawn from the device's generator and not stored.
        softcap: c, positive; None is no cap.
        sinks: whether each head has a learned logit that takes part in the softmax without a
            value: parameter ``sinks`` of shape (num_heads,), which starts at 0.
        alibi: whether scores fall with the distance, by a slope per head.
        core_attention_bias: whether there is one more extra input b, floating point, which is added
            to the scores and has a gradient, as te's ``core_attention_bias`` after the scale.
        kernel: name of the kernel to take: ``"cudnn"``, ``"flash"``, ``"efficient"``, ``"cpu"``,
            ``"flash_attn"``, ``"flex"`` or ``"blockwise"``; a call that it does not take is an
            error. None chooses.
        v_head_dim: entries of a value head in a packed input; None is as many as of a key head.
        device, dtype: of the parameter.

    Keywords of a call (through ``op_kwargs``), constants without gradients:
        mask: bool, True where a key is attended to, or floating point, added to the scores;
            ``(batch, keys)``, or of 3 or 4 dimensions that broadcast to
            (batch, num_heads, queries, keys). A query all of whose keys are hidden by large finite
            numbers has wrong gradients, as in torch's: hide them by False, or by -inf.
        cu_seqlens: int32, (number of sequences + 1,), on the device of the input: where the
            sequences begin that one row (batch 1) holds, and the end of the last one.
        max_seqlen: an int not below the length of the longest of them.
        cache: an object whose ``update(k, v)`` takes and returns keys and values of shape
            (batch, num_kv_heads, sequence, head size), such as :class:`opfuser.KVCache`. A call
            that raises stores nothing there, nor in a dynamic layer of Hugging Face's; another
            object is asked last but for what depends on the keys that it returns.

    Raises:
        ArgumentError: if an argument is outside its domain.
        ArgumentTypeError: if ``scale``, ``window``, ``softcap``, ``v_head_dim`` or ``dropout_p`` is
            no real number.
        InputError: in forward, if a shape or dtype is not as above.
        NotSupportedError: in forward, if ``kernel`` does not take the call, the mask requires grad,
            gradients are needed of keys that a cache kept from earlier calls, or a cache returns
            positions that are not filled and has no ``start``, as Hugging Face's static layers;
            within torch's ``context_parallel``, for anything but causality and scale.
        OpKwargsError: in forward, for other keywords.
    """

    read_only: ClassVar[frozenset[str]] = frozenset(
        {"core_attention_bias", "layout", "num_extra_inputs"}
    )
    stores_last: ClassVar[bool] = True

    class Saved(NamedTuple):
        input: Tensor
        k: Tensor | None
        v: Tensor | None
        output: Tensor | None
        logsumexp: Tensor | None
        seed: Tensor | None
        offset: Tensor | None
        mask: Tensor | None
        cu_seqlens: Tensor | None
        sinks: Tensor | None
        bias: Tensor | None

    Settings = AttentionSettings

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        *,
        layout: str = "packed",
        window: int | None = None,
        dropout_p: float = 0.0,
        softcap: float | None = None,
        sinks: bool = False,
        alibi: bool = False,
        core_attention_bias: bool = False,
        kernel: str | None = None,
        v_head_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        extra_inputs = 2 * (layout == "separate") + bool(core_attention_bias)
        if extra_inputs:
            self.num_extra_inputs = extra_inputs
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.causal = causal
        self.scale = scale
        self.layout = layout
        self.window = window
        self.dropout_p = dropout_p
        self.softcap = softcap
        self.alibi = alibi
        self.core_attention_bias = core_attention_bias
        self.kernel = kernel
        self.v_head_dim = v_head_dim
        self._last = _Last()
        self._has_sinks = bool(sinks)
        self.make_settings()
        parameter = None
        if sinks:
            dtype = dtype or torch.get_default_dtype()
            if dtype not in COMPUTE_DTYPES:
                raise ArgumentError.explained(
                    "Sinks are float16, bfloat16, float32 or float64",
                    where="DotProductAttention",
                    received=f"dtype={dtype}",
                )
            parameter = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.register_parameter("sinks", parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the sinks, if there are any, to 0."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def make_settings(self) -> AttentionSettings:
        return inputs.settings_of(self, list(KERNELS))

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.compute

    @property
    def last_choice(self) -> Choice | None:
        """The kernel of the last call that ran in eager mode, and why not another; None: no call.

        The reasons are looked up when this is read, which takes longer than a call.
        """
        return self._last.choice()

    def plan_note(self, env: Any) -> str:
        settings: AttentionSettings = self.settings
        request = inputs.request_before(settings, env)
        return foreseen(request, settings.kernel)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Any | None = None,
    ) -> Tensor:
        settings: AttentionSettings = self.frozen_settings(ctx)
        inputs.check_packed(input_, settings)
        qkv = _aligned(in_compute_dtype(input_).contiguous())
        x = inputs.split(qkv, settings)
        given = mask is not None or cu_seqlens is not None or cache is not None
        if given or max_seqlen is not None or not settings.is_plain:
            keywords = inputs.Keywords(mask, cu_seqlens, max_seqlen, cache)
            return self._general_forward(ctx, settings, (qkv, None, None), x, keywords, None)
        call = Call(settings.causal, _scale_of(x, settings))
        if context_parallel.is_active():
            request = request_of(x, call, ctx.requires_grad)
            return self._parallel_forward(ctx, (qkv, None, None), x, call, request)
        if exporting():
            kernel, chosen = "", EXPORTED
        else:
            kernel = choose_plain(x, call, ctx.requires_grad)
            chosen = KERNELS[kernel]
        if not stands_in(x.q):
            facts = qkv.shape, qkv.dtype, qkv.device, ctx.requires_grad, settings
            leave(self._last, "call", (kernel, facts))
            if AttentionKernelTaken.wanted:
                self._last.tell(self)
        result = chosen.forward(x if chosen.grouped else expanded(x), call)
        if ctx.requires_grad:
            ctx.kernel = kernel
            output = result.output if chosen.reads_output else None
            ctx.save_for_backward(qkv, None, None, output, *result[1:], *(None,) * 4)
        return result.output.transpose(1, 2).flatten(2)

    def _general_forward(
        self,
        ctx: OperationContext,
        settings: AttentionSettings,
        saved: inputs.Inputs,
        x: Heads,
        keywords: inputs.Keywords,
        bias: Tensor | None,
    ) -> Tensor:
        """The output of a call with anything that a plain one does not have."""
        differentiable = ctx.requires_grad
        scale = _scale_of(x, settings)
        bias_grad = bias is not None and differentiable and ctx.needs.extra_inputs[-1]
        given = inputs.Additions(sinks=self.sinks, bias=bias, bias_grad=bias_grad)
        prepared = inputs.prepare(x, settings, keywords, given, scale, differentiable)
        x, call, keep = prepared
        if context_parallel.is_active():
            request = request_of(x, call, differentiable)
            return self._parallel_forward(ctx, saved, x, call, request)
        request = request_of(x, call, differentiable)
        if settings.kernel is None and exporting():
            kernel, chosen = "", EXPORTED
        else:
            kernel = choose(x, call, request, settings.kernel)
            chosen = KERNELS[kernel]
        if not request.traced:
            leave(self._last, "call", (kernel, request))
            if AttentionKernelTaken.wanted:
                self._last.tell(self)
        result = chosen.forward(x if chosen.grouped else expanded(x), call)
        if call.sinks is not None and not chosen.has_sinks:
            result = with_sinks(result, call.sinks)
        if differentiable:
            ctx.kernel, ctx.max_seqlen = kernel, call.max_seqlen
            output = result.output if chosen.reads_output else None
            others = call.mask, call.cu_seqlens, call.sinks, call.bias
            ctx.bias_shape = None if bias is None else bias.shape
            ctx.save_for_backward(*saved, output, *result[1:], *others)
        if keep is not None:
            keep()
        return result.output.transpose(1, 2).flatten(2)

    def _parallel_forward(
        self, ctx: OperationContext, saved: inputs.Inputs, x: Heads, call: Call, request: Request
    ) -> Tensor:
        """The output within torch's ``context_parallel``."""
        context_parallel.refuse(request, call.sinks, self.kernel)
        self._last.call = context_parallel.NAME, request
        if AttentionKernelTaken.wanted:
            self._last.tell(self)
        attended = context_parallel.attend(x, call, ctx.requires_grad)
        if ctx.requires_grad:
            ctx.kernel, ctx.attended = context_parallel.NAME, None
            kept: tuple[Tensor | None, ...] = (attended.output, *attended.heads)
            if internals.saved_tensors_hooks(False) is not None:
                # They may return tensors without their graph, as those of a checkpoint do.
                ctx.attended, kept = attended, (None,) * 4
            ctx.save_for_backward(*saved, *kept, *(None,) * 4)
        return attended.output.detach().transpose(1, 2).flatten(2)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        settings: AttentionSettings = self.frozen_settings(ctx)
        nothing = (None,) * settings.has_sinks
        if not ctx.needs.input and not any(ctx.needs.parameters):
            return None, nothing
        heads, sinks, _ = self._packed_backward(ctx, grad_output)
        return heads, sinks

    def _packed_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...], Tensor | None]:
        """Gradients of the packed heads, of the sinks and of the bias."""
        settings: AttentionSettings = ctx.settings
        x = inputs.split(ctx.saved_tensors[0], settings)
        heads, sinks, dbias = self._backward(ctx, grad_output, x)
        if not ctx.needs.input:
            return None, sinks, dbias
        if settings.v_head_dim is None and not functional():
            return torch.cat(heads, 2).flatten(2), sinks, dbias
        return joined_columns(grad.flatten(2) for grad in heads), sinks, dbias

    def _backward(
        self, ctx: OperationContext, grad_output: Tensor, x: Heads
    ) -> tuple[Heads, tuple[Tensor | None, ...], Tensor | None]:
        """Gradients of the heads, (batch, sequence, heads, size), of the sinks and of the bias."""
        settings: AttentionSettings = ctx.settings
        _, _, _, *rest, mask, cu_seqlens, sinks, bias = ctx.saved_tensors
        result = Result(*rest)
        call = Call(settings.causal, _scale_of(x, settings))
        dsinks: tuple[Tensor | None, ...] = ()
        dy = _aligned(cast(grad_output, x.q.dtype).contiguous())
        batch, queries, _ = dy.shape  # integers, as torch takes longer to unpack a torch.Size
        dy = dy.view(batch, queries, settings.num_heads, x.v.shape[3]).transpose(1, 2)
        name = ctx.kernel
        if name == context_parallel.NAME:
            attended = ctx.attended or context_parallel.Attended(rest[0], Heads(*rest[1:]))
            return Heads(*[t.transpose(1, 2) for t in attended.gradients(dy)]), (), None
        if mask is not None or cu_seqlens is not None or not settings.is_plain:
            bias_grad = bias is not None and ctx.needs.extra_inputs[-1]
            given = mask, cu_seqlens, sinks, ctx.max_seqlen, bias, bias_grad
            call = inputs.call_of(x, settings, call.scale, inputs.Additions(*given))
        kernel = KERNELS[name]
        grads = kernel.backward(dy, x if kernel.grouped else expanded(x), result, call)
        if sinks is not None:
            dsinks = (None,)
            if any(ctx.needs.parameters):
                own = grads[3] if kernel.has_sinks else sinks_grad(dy, result, sinks)
                dsinks = (cast(own, sinks.dtype),)
        dbias = None
        if bias is not None and call.bias_grad:
            dbias = cast(grads.bias.sum_to_size(bias.shape), bias.dtype).view(ctx.bias_shape)
        dq, dk, dv = [grad.transpose(1, 2) for grad in grads[:3]]
        if not kernel.grouped:
            groups = settings.num_kv_heads, -1
            dk, dv = [grad.unflatten(2, groups).sum(3) for grad in (dk, dv)]
        return Heads(dq, dk, dv), dsinks, dbias

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        keywords = given["basic_op_kwargs"][0]
        unknown = sorted(set(keywords) - set(inputs.Keywords._fields))
        if unknown:
            raise OpKwargsError.explained(
                "op_kwargs may only hold keywords that the operation's forward takes",
                where="DotProductAttention",
                received=", ".join(unknown),
            )
        if not self.num_extra_inputs:
            return super().fuser_forward(basic_op_ctxs, input_, **given)
        ctx = basic_op_ctxs[0]
        settings: AttentionSettings = self.frozen_settings(ctx)
        tensors: Any = input_, *given["basic_op_extra_inputs"][0]
        bias = None
        if settings.has_bias:
            *tensors, bias = tensors
        x, saved = self._heads_of(tensors, settings)
        words = inputs.Keywords(**keywords)
        return self._general_forward(ctx, settings, saved, x, words, bias), [()]

    @staticmethod
    def _heads_of(
        tensors: Sequence[Tensor], settings: AttentionSettings
    ) -> tuple[Heads, inputs.Inputs]:
        """The heads of a packed input or of three, and the tensors that they are views of."""
        dtype = compute_dtype(tensors[0])
        if len(tensors) == 1:
            inputs.check_packed(tensors[0], settings)
            qkv = _aligned(cast(tensors[0], dtype).contiguous())
            return inputs.split(qkv, settings), (qkv, None, None)
        q, k, v = tensors
        inputs.check_separate(q, k, v, settings)
        q, k, v = [_aligned(cast(t, dtype).contiguous()) for t in (q, k, v)]
        return inputs.heads_of(q, k, v, settings), (q, k, v)

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        if not self.num_extra_inputs:
            given: Any = {"basic_op_grad_extra_outputs": basic_op_grad_extra_outputs}
            return super().fuser_backward(basic_op_ctxs, grad_output, **given)
        ctx = basic_op_ctxs[0]
        q, k, v, *_ = ctx.saved_tensors
        needs = ctx.needs
        settings: AttentionSettings = self.frozen_settings(ctx)
        if not any((needs.input, *needs.parameters, *needs.extra_inputs)):
            return None, [(None,) * settings.has_sinks], [(None,) * self.num_extra_inputs]
        if k is None:
            dx, sinks, dbias = self._packed_backward(ctx, grad_output)
            return dx, [sinks], [(dbias,)]
        heads = inputs.heads_of(q, k, v, settings)
        grads, sinks, dbias = self._backward(ctx, grad_output, heads)
        wanted = needs.input, *needs.extra_inputs
        dq, dk, dv = [grad.flatten(2) if w else None for grad, w in zip(grads, wanted)]
        return dq, [sinks], [(dk, dv, dbias) if settings.has_bias else (dk, dv)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        settings = self.make_settings()
        bias = None
        if settings.has_bias:
            *extra_inputs, bias = extra_inputs  # type: ignore[assignment]
        if extra_inputs:
            k, v = extra_inputs
            inputs.check_separate(input_, k, v, settings)
            x = inputs.heads_of(input_, k, v, settings)
        else:
            inputs.check_packed(input_, settings)
            x = inputs.split(input_, settings)
        keywords = inputs.Keywords(**kwargs)
        scale = _scale_of(x, settings)
        given = inputs.Additions(sinks=self.sinks, bias=bias)
        x, call, keep = inputs.prepare(x, settings, keywords, given, scale, False)
        y = plain_attention(expanded(x), call)
        if keep is not None:
            keep()
        return y.transpose(1, 2).flatten(2)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_last": _Last()}

    def extra_repr(self) -> str:
        text = f"{self.num_heads}, {self.num_kv_heads}, causal={self.causal}, scale={self.scale}"
        others = {
            "layout": (self.layout, "packed"),
            "window": (self.window, None),
            "dropout_p": (self.dropout_p, 0.0),
            "softcap": (self.softcap, None),
            "sinks": (self._has_sinks, False),
            "alibi": (self.alibi, False),
            "core_attention_bias": (bool(self.core_attention_bias), False),
            "kernel": (self.kernel, None),
            "v_head_dim": (self.v_head_dim, None),
        }
        return text + "".join(f", {n}={v!r}" for n, (v, default) in others.items() if v != default)


class _Last(Note):
    """The kernel of the last call, and its request or what that follows from."""

    call: tuple[str, Any] | None = None
    told: tuple[int, Any] | None = None
    told_request: tuple[int, str, Request] | None = None

    def choice(self) -> Choice | None:
        return None if self.call is None else explained(self._request(), self.call[0])

    def _request(self) -> Request:
        assert self.call is not None
        request = self.call[1]
        if isinstance(request, Request):
            return request
        shape, dtype, device, differentiable, settings = request
        x = inputs.split(torch.empty(shape, dtype=dtype, device="meta"), settings)
        call = Call(settings.causal, _scale_of(x, settings))
        return request_of(x, call, differentiable)._replace(device=device)

    def tell(self, op: DotProductAttention) -> None:
        """Tells subscribers of the last call, unless they know of one like it."""
        now = generation()
        if self.told == (now, self.call):
            return
        assert self.call is not None
        self.told = now, self.call
        kernel, request = self.call[0], self._request()
        if self.told_request != (now, kernel, request):  # reasons take longer to find
            self.told_request = now, kernel, request
            name = f"{type(op).__name__}({op.extra_repr()})"
            for event in happened(name, request, kernel, op.kernel):
                emit(event)


def _aligned(x: Tensor) -> Tensor:
    """``x``, or a copy of one that begins at an odd address: torch's kernels read 16 bytes."""
    if x.is_cuda and not stands_in(x):
        return x.clone() if not transforms_active() and x.data_ptr() % 16 else x
    return x


def _scale_of(x: Heads, settings: AttentionSettings) -> float:
    return x.q.shape[-1] ** -0.5 if settings.scale is None else settings.scale
