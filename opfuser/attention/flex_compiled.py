"""The kernels of ``flex_attention``: compiled once for a kind of call, before it needs them.

Dynamo would compile when a call first meets it: the backward pass in a thread of autograd, or
either while a CUDA graph is captured, where that is an error. So a kind of call is prepared before
its first forward pass: both passes are compiled and run with small tensors whose batch and lengths
are marked as dynamic. Calls of other sizes then find compiled code. Where that fails, the call is
computed otherwise, and the reason is kept.
"""

from __future__ import annotations

import threading
import types
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import torch_internals as internals
from ..runtime.recording import unwatched
from ..runtime.tracing import stands_in
from .blockwise import BLOCKWISE
from .call import Call, Heads, Result
from .flex import Form, Given, attend, dtypes_of, form_of, given_of, gradients, to_base_2

_HOW: Any = {"options": {"triton.cudagraphs": False}}
_ONE_BLOCK = 128  # up to this length torch's graph has one block, and guards that


class _Kind(NamedTuple):
    """What calls have in common that run the same compiled code.

    Attributes:
        form: see there.
        dtype, device: of the heads.
        heads, kv_heads, head_dim, v_head_dim: H, K, D, V.
        widths: of the rows (B, S, ...) in which queries, keys and values lie.
        batch: 1 or 2, which stands for more.
        queries, keys: 1, or a length that stands for others.
        given: which tensors there are, and the dtype of the mask.
        inference: whether tensors are those of ``torch.inference_mode``.
    """

    form: Form
    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    widths: tuple[int, int, int]
    batch: int
    queries: int
    keys: int
    given: tuple[torch.dtype | None, ...]
    inference: bool


class _Compiled(NamedTuple):
    """The passes of a kind; ``failure`` says why there are none. ``backward`` may come later."""

    forward: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    failure: str | None = None


_compiled: dict[_Kind, _Compiled] = {}
_OWN_LAUNCHES = "attention is compiled code, which launches kernels of its own"
_lock = threading.Lock()


def _representative(length: int) -> int:
    if length < 2:
        return length
    return 40 if length <= _ONE_BLOCK else 400


def _kind_of(x: Heads, call: Call, form: Form) -> _Kind:
    q, k, v = x
    queries, keys = _representative(q.shape[2]), _representative(k.shape[2])
    if queries == keys and q.shape[2] != k.shape[2]:
        # Not half of it, to which torch.compile would see a relation.
        queries, keys = (queries - 17, keys) if q.shape[2] < k.shape[2] else (queries, keys - 17)
    return _Kind(
        form,
        q.dtype,
        q.device,
        q.shape[1],
        k.shape[1],
        q.shape[3],
        v.shape[3],
        (_width(q), _width(k), _width(v)),
        min(q.shape[0], 2),
        queries,
        keys,
        dtypes_of(x, call, form),
        torch.is_inference_mode_enabled(),
    )


def _strides(shape: Sequence[int], width: int) -> tuple[int, ...]:
    """Strides of heads (B, H, S, D) that lie in rows (B, S, width)."""
    return shape[2] * width, shape[3], width, 1


def _in_rows(t: Tensor) -> bool:
    return t.stride() == _strides(t.shape, t.stride(2))


def _width(t: Tensor) -> int:
    return t.stride(2) if _in_rows(t) else t.shape[1] * t.shape[3]


def _rows(t: Tensor) -> Tensor:
    """Heads that lie in rows, copied to there where they do not.

    Neither is a view: of one, torch.compile guards the sizes of what it is a view of.
    """
    if not _in_rows(t):
        # With one query, strides of contiguous memory may be any.
        t = t.transpose(1, 2).contiguous().as_strided(t.shape, _strides(t.shape, _width(t)))
    return t.detach()


def _inputs(x: Heads, call: Call, form: Form) -> list[Tensor]:
    given = [t.contiguous() for t in given_of(x, call, form) if t is not None]
    return [*map(_rows, x), *(t.detach() for t in given)]


def _tensors(given: Given) -> list[Tensor]:
    return [t for t in given if t is not None]


@contextmanager
def _neutral(device: torch.device) -> Iterator[None]:
    """The modes of torch under which compiled code is looked up, whatever those of the call."""
    with torch.no_grad():
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


def _compile(function: Callable[..., Any], kind: _Kind) -> Callable[..., Any]:
    """A pass of a kind, compiled as a graph that only AOTAutograd traces, like the engine's."""
    torch.compiler.allow_in_graph(function)

    def opfuser_attention(*tensors: Tensor) -> Any:
        return function(*tensors)

    # Dynamo counts compilations by code object, and gives up after eight; it makes dynamic what
    # differs between calls of a name, and torch 2.11 compiles no dynamic number of heads. So each
    # pass of a kind has its own.
    number = zlib.crc32(repr((function.__name__, kind)).encode())
    own = types.FunctionType(
        opfuser_attention.__code__.replace(co_name=f"opfuser_attention_{number:08x}"),
        opfuser_attention.__globals__,
        closure=opfuser_attention.__closure__,
    )
    return torch.compile(own, fullgraph=True, **_HOW)


def _passes(kind: _Kind) -> tuple[Callable[..., Any], Callable[..., Any]]:
    form, present = kind.form, [dtype is not None for dtype in kind.given]

    def unpacked(tensors: tuple[Tensor, ...]) -> Given:
        rest = iter(tensors)
        return Given(*(next(rest) if there else None for there in present))

    def forward(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Any:
        return attend(form, Heads(q, k, v), unpacked(given))

    def backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, *given: Tensor
    ) -> Any:
        return gradients(form, dy, Heads(q, k, v), y, logsumexp, unpacked(given))

    return forward, backward


def _example(kind: _Kind) -> tuple[Heads, Given]:
    """Small tensors of the kind, of which batch and lengths are marked as dynamic."""
    shapes = (
        (kind.heads, kind.queries, kind.head_dim),
        (kind.kv_heads, kind.keys, kind.head_dim),
        (kind.kv_heads, kind.keys, kind.v_head_dim),
    )
    heads = []
    for (count, length, size), width in zip(shapes, kind.widths):
        memory = torch.zeros(kind.batch, length, width, dtype=kind.dtype, device=kind.device)
        shape = kind.batch, count, length, size
        t = memory.as_strided(shape, _strides(shape, width)).detach()
        heads.append(_dynamic(t, {0: kind.batch, 2: length}))
    sizes = {0: kind.batch, 1: kind.heads, 2: kind.queries, 3: kind.keys}
    kept = kind.form.mask or ()
    shapes_given = (kind.heads,), (), (kind.keys,), tuple(sizes[i] for i in kept)
    dims: tuple[dict[int, int], ...] = (
        {},
        {},
        {0: kind.keys},
        {at: sizes[i] for at, i in enumerate(kept) if i != 1},
    )
    given = [
        None if dtype is None else _dynamic(torch.zeros(shape, dtype=dtype, device=kind.device), of)
        for dtype, shape, of in zip(kind.given, shapes_given, dims)
    ]
    return Heads(*heads), Given(*given)


def _dynamic(t: Tensor, sizes: dict[int, int]) -> Tensor:
    for dim, size in sizes.items():
        if size > 1:
            internals.mark_dynamic(t, dim)
    return t


def _made(kind: _Kind, differentiable: bool, earlier: _Compiled | None) -> _Compiled:
    passes = _passes(kind)
    known = None if earlier is None else earlier.forward
    forward, backward = known or _compile(passes[0], kind), None
    x, given = _example(kind)
    with _neutral(kind.device):
        y, logsumexp = forward(*x, *_tensors(given))
        if differentiable:
            backward = _compile(passes[1], kind)
            of_queries = {0: kind.batch, 2: kind.queries}
            kept = [_dynamic(t.detach(), of_queries) for t in (y, to_base_2(logsumexp))]
            dy = _dynamic(_rows(torch.zeros_like(y)), of_queries)
            backward(dy, *x, *kept, *_tensors(given))
    return _Compiled(forward, backward)


def _is_compiled(t: Tensor) -> bool:
    """Whether a call of this tensor runs code that was compiled for it alone."""
    return t.is_cuda and not stands_in(t)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def prepare(x: Heads, call: Call, differentiable: bool) -> str | None:
    """Compiles what a call of this kind needs, unless it is there; says why it cannot."""
    if not _is_compiled(x.q):
        return None
    kind = _kind_of(x, call, form_of(x, call))
    found = _compiled.get(kind)
    if found is None or (differentiable and found.backward is None and found.failure is None):
        if _capturing(x.q.device):
            return "it was not compiled before a CUDA graph is captured"
        with _lock:
            found = _attempt(kind, differentiable)
    return found.failure


def _attempt(kind: _Kind, differentiable: bool) -> _Compiled:
    found = _compiled.get(kind)
    if found is not None and (found.failure or found.backward or not differentiable):
        return found  # by another thread
    try:
        if internals.compiler_is_off():
            made = _Compiled(None, None, "torch.compile is disabled")
        else:
            with unwatched(_OWN_LAUNCHES):
                made = _made(kind, differentiable, found)
    # Whatever is missing or too large there, plain torch computes the same.
    except Exception as error:  # noqa: BLE001
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        made = _Compiled(None, None, f"it does not compile: {text}")
        warnings.warn(
            f"Attention runs in plain torch, since flex_attention does not compile here: {text}",
            stacklevel=2,
        )
    _compiled[kind] = made
    return made


def forward(x: Heads, call: Call) -> Result:
    """As the kernel of :mod:`.flex_kernel`."""
    form = form_of(x, call)
    if not _is_compiled(x.q):
        return Result(*attend(form, x, given_of(x, call, form)))
    compiled = _compiled[_kind_of(x, call, form)].forward
    assert compiled is not None
    with _neutral(x.q.device), unwatched(_OWN_LAUNCHES):
        return Result(*compiled(*_inputs(x, call, form)))


def backward(dy: Tensor, x: Heads, r: Result, call: Call) -> Any:
    """As the kernel of :mod:`.flex_kernel`."""
    assert r.logsumexp is not None
    form = form_of(x, call)
    if not _is_compiled(x.q):
        given = given_of(x, call, form)
        logsumexp, copied = to_base_2(r.logsumexp), stands_in(x.q)
        return gradients(form, dy, x, r.output, logsumexp, given, copied)
    compiled = _for_backward(_kind_of(x, call, form))
    if compiled is None:
        return BLOCKWISE.backward(dy, x, r, call)
    tensors = _inputs(x, call, form)
    with _neutral(x.q.device), unwatched(_OWN_LAUNCHES):
        # Not in the compiled code: see opfuser::captured. It may be compiled again for one length,
        # after torch.compiler.reset(), say.
        kept = _rows(r.output), to_base_2(r.logsumexp.detach())
        return compiled(_rows(dy), *tensors[:3], *kept, *tensors[3:])


def _for_backward(kind: _Kind) -> Callable[..., Any] | None:
    """The compiled pass, which is there unless a hook of saved tensors changed their layout."""
    found = _compiled.get(kind)
    if (found is None or found.backward is None) and not _capturing(kind.device):
        with _lock:
            found = _attempt(kind, True)
    return None if found is None else found.backward
