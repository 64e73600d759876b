"""Which kernel computes attention, and why not another one."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.backends.cuda import SDPAParams

from .. import torch_internals as internals
from ..errors import NotSupportedError
from ..events.kinds import AttentionKernelTaken, Event, FallbackTaken
from ..runtime.recording import unseen
from ..runtime.tracing import stands_in, transforms_active
from . import context_parallel, cudnn_versions
from .blockwise import BLOCKWISE
from .call import Call, Heads, Kernel, Request, request_of
from .flash_attn import FLASH_ATTN
from .flex_kernel import FLEX
from .sdpa import CPU, CUDNN, EFFICIENT, FLASH, HALF

# In order of preference. Among cuDNN, flash and efficient torch has one of its own, which counts
# where its scaled_dot_product_attention could be called.
KERNELS: dict[str, Kernel] = {
    "cudnn": CUDNN,
    "flash": FLASH,
    "efficient": EFFICIENT,
    "cpu": CPU,
    "flash_attn": FLASH_ATTN,
    "flex": FLEX,
    "blockwise": BLOCKWISE,
}
_BY_CHOICE = {1: "flash", 2: "efficient", 3: "cudnn"}  # torch.nn.attention.SDPBackend


class Choice(NamedTuple):
    """The kernel of a call of :class:`opfuser.DotProductAttention`.

    Attributes:
        kernel: its name.
        passed_over: every kernel before it in order of preference, and why it was not taken.
        note: what is wrong with this process, if something keeps a faster kernel away.
    """

    kernel: str
    passed_over: tuple[tuple[str, str], ...] = ()
    note: str = ""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.passed_over)
        text = f"{self.kernel} (not {reasons})" if reasons else self.kernel
        return f"{text}. {self.note}" if self.note else text


def choose_plain(x: Heads, call: Call, differentiable: bool) -> str:
    """Names the kernel that torch's own function would take on a GPU; on a CPU, the CPU's."""
    q = x.q
    if q.is_cpu and q.numel():
        return "cpu"
    # torch's flash and cuDNN kernels expect other head sizes to be padded.
    if q.device.type != "cuda" or q.shape[-1] % 8 or x.v.shape[-1] % 8 or not q.numel():
        return "blockwise"
    if stands_in(q):
        return _choose_for_tracer(*request_of(x, call, differentiable))
    if transforms_active():  # of whose tensors torch cannot tell which kernel takes them
        return "blockwise"
    return _choice_of_torch(x, call, differentiable)


def choose(x: Heads, call: Call, request: Request, forced: str | None) -> str:
    """Names the kernel of any call.

    Raises:
        NotSupportedError: the forced kernel does not take it.
    """
    without: tuple[str, ...] = ()
    if forced is None and request.device.type == "cuda":
        if request.is_plain:
            return choose_plain(x, call, request.differentiable)
        if transforms_active():
            return "blockwise"
        if request.mask and not request.additive:  # torch knows whether cuDNN is the fastest
            cudnn = choose_plain(x, call, request.differentiable) == "cudnn"
            without = () if cudnn else ("cudnn",)
    while True:
        name = _chosen(forced, without, *request)
        prepare = KERNELS[name].prepare
        reason = None if prepare is None else prepare(x, call, request.differentiable)
        if reason is None:
            return name
        if forced is not None:
            raise _refused(forced, reason)
        if not request.traced:
            _unprepared[name, request] = reason
        without = (*without, name)


# Why calls of a kind were not prepared for a kernel that would take them; for what is told of them.
_unprepared: dict[tuple[str, Request], str] = {}


@functools.lru_cache(1024)
def _find(request: Request, forced: str | None, without: tuple[str, ...] = ()) -> str:
    if forced is not None:
        reason = _refusal(forced, request)
        if reason is None:
            return forced
        raise _refused(forced, reason)
    left = [name for name in KERNELS if name not in without]
    return next(name for name in left if KERNELS[name].refusal(request) is None)


def _refused(forced: str, reason: str) -> NotSupportedError:
    return NotSupportedError.explained(
        f"The kernel {forced!r} does not take this call: {reason}",
        where="DotProductAttention",
        remedy="With kernel=None one that takes it is chosen",
    )


@internals.constant_result
def _chosen(forced: str | None, without: tuple[str, ...], *fields: Any) -> str:
    """As :func:`_find`. The fields of the request come apart, as Dynamo takes constants."""
    return _find(Request(*fields), forced, without)


@unseen
def _choice_of_torch(x: Heads, call: Call, differentiable: bool) -> str:
    """The kernel that torch would take for real tensors."""
    q, k, v = x
    grouped = q.shape[1] != k.shape[1]
    how: Any = {"dropout_p": call.dropout_p, "is_causal": call.causal, "scale": call.scale}
    before = torch.is_grad_enabled()
    # Some kernels have no backward on some GPUs. Without the microsecond of set_grad_enabled.
    internals.set_grad_enabled(differentiable)
    try:
        q = q.detach().requires_grad_(differentiable)
        choice = internals.sdp_choice(q, k, v, call.mask, **how, enable_gqa=grouped)
        if grouped and choice not in _BY_CHOICE:
            choice = internals.sdp_choice(q, *expanded(x)[1:], call.mask, **how)
    finally:
        internals.set_grad_enabled(before)
    name = _BY_CHOICE.get(choice, "blockwise")
    if name != "cudnn" and q.dtype in HALF and torch.backends.cuda.cudnn_sdp_enabled():
        cudnn_versions.warn_once(q.device)
    return name


def like(request: Request) -> tuple[Heads, Call]:
    """Heads and call of the request's kind, of no meaning; a mask is bool."""
    r = request
    where: Any = {"dtype": r.dtype, "device": r.device}
    heads = [
        torch.empty(1, length, number, size, **where).transpose(1, 2)
        for length, number, size in (
            (r.queries, r.heads, r.head_dim),
            (r.keys, r.kv_heads, r.head_dim),
            (r.keys, r.kv_heads, r.v_head_dim),
        )
    ]
    mask = torch.ones(1, 1, r.queries, r.keys, device=r.device).bool() if r.mask else None
    return Heads(*heads), Call(r.causal, 1.0, dropout_p=0.5 if r.dropout else 0.0, mask=mask)


@internals.constant_result
def _choose_for_tracer(*fields: Any) -> str:
    """The choice for such a request. torch looks at real tensors, which a tracer does not have."""
    request = Request(*fields)
    with internals.without_modes():
        return _choice_of_torch(*like(request), request.differentiable)


def expanded(x: Heads) -> Heads:
    """Repeats each of the K key and value heads for its G queries: copies, as (B, T, H, D)."""
    group = x.q.shape[1] // x.k.shape[1]
    # Next to D, where strides are numbers: of strides that hold a length, torch 2.11 exports which
    # one is the smaller as if that fixed the length.
    rows = [heads.transpose(1, 2).repeat_interleave(group, dim=2) for heads in x[1:]]
    return Heads(x.q, *(heads.transpose(1, 2) for heads in rows))


def _refusal(name: str, request: Request) -> str | None:
    """Why a kernel does not take a request, asked of torch too where it can tell."""
    reason = KERNELS[name].refusal(request)
    plain = request.is_plain or name == "cudnn"  # which takes what torch's function can express
    if reason is None and plain and request.device.type == "cuda":
        return _refusal_of_torch(name, request)
    return reason


def _refusal_of_torch(name: str, request: Request) -> str | None:
    """What torch says against one of its kernels; None if nothing, or if it was not asked."""
    ask = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
    }.get(name)
    if ask is None or not torch.cuda.is_available():
        return None
    with warnings.catch_warnings(record=True) as told, torch.set_grad_enabled(True):
        warnings.simplefilter("always")
        x, call = like(request)
        x = x if KERNELS[name].grouped else expanded(x)
        q = x.q.requires_grad_(request.differentiable)
        grouped = q.shape[1] != x.k.shape[1]
        given = q, x.k, x.v, call.mask, call.dropout_p, call.causal, grouped
        if ask(SDPAParams(*given), True):
            return None
    texts = [re.sub(r"\s*\(Triggered internally.*", "", str(w.message)).strip() for w in told]
    return " ".join(texts) or "torch does not say why"


def explained(request: Request, kernel: str) -> Choice:
    """The choice with its reasons, which are looked up only now."""
    if kernel == context_parallel.NAME:
        return Choice(kernel)
    passed: list[tuple[str, str]] = []
    for name in KERNELS:
        if name == kernel:
            break
        reason = _refusal(name, request) or _unprepared.get((name, request))
        if reason is None and name in _BY_CHOICE.values():
            reason = f"torch prefers {kernel}"
        passed.append((name, reason or "torch chooses where it has a kernel of its own"))
    note = ""
    if request.device.type == "cuda" and kernel not in ("cudnn", "blockwise"):
        note = cudnn_versions.trouble() or ""
    return Choice(kernel, tuple(passed), note)


# Kernels that are better than plain torch, by the type of the device.
_BETTER = {"cuda": ("cudnn", "flash", "efficient", "flex"), "cpu": ("cpu",)}


def happened(operation: str, request: Request, kernel: str, forced: str | None) -> Iterator[Event]:
    """The events of a call: its kernel, and the fallback if that is one.

    Args:
        operation: with its arguments.
        forced: the name of the kernel that was asked for, or None.
    """
    if forced is not None:
        yield AttentionKernelTaken(operation, kernel, (), "It is asked for by name")
        return
    choice = explained(request, kernel)
    yield AttentionKernelTaken(operation, *choice)
    better = _BETTER.get(request.device.type, ())
    if not better or request.empty or not (kernel == "blockwise" or choice.note):
        return
    reasons = [f"{name}: {why}" for name, why in choice.passed_over if name in better]
    detail = "; ".join([*reasons, choice.note] if choice.note else reasons)
    wanted = [name for name in better if name != kernel]
    yield FallbackTaken(f"attention of {operation}", " or ".join(wanted), kernel, "KERNEL", detail)


def foreseen(request: Request, forced: str | None) -> str:
    """What is known of the choice before sizes and keywords are: a sentence.

    Args:
        request: with sizes that every kernel takes.
    """
    if forced is not None:
        reason = KERNELS[forced].refusal(request)
        text = f"attention by {forced}, which is asked for by name"
        return text if reason is None else f"{text} but refuses: {reason}"
    reasons: dict[str, list[str]] = {}
    for name, kernel in KERNELS.items():
        reasons.setdefault(kernel.refusal(request) or "", []).append(name)
    possible = " or ".join(reasons.pop(""))
    text = "; ".join(f"not {', '.join(names)}: {why}" for why, names in reasons.items())
    return f"attention by {possible}, as sizes and keywords allow" + (f"; {text}" if text else "")
