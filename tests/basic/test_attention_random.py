"""Random calls of attention by every kernel, held to the definition in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from opfuser import DotProductAttention, KVCache
from opfuser.attention.call import Call, Grads, Heads, Request, Result, request_of
from opfuser.attention.choice import KERNELS
from opfuser.attention.exported import EXPORTED
from opfuser.basic import dot_product_attention as module
from opfuser.errors import NotSupportedError
from tests.basic import attention_cudnn
from tests.basic.attention_cases import (
    Case,
    as_exact,
    attended,
    bias_of,
    case_of,
    grads_of,
    mask_of,
    slope,
    split,
)
from tests.basic.attention_packages import few_queries, forget, install

# By each kernel as many cases as these, the first ones that it takes.
CASES = {
    "chosen": 60, "blockwise": 60, "one query at a time": 60, "exported": 60, "reference": 60,
    "cpu": 40, "cudnn": 40, "flex": 40, "flash_attn": 40,
}  # fmt: skip


def of_a_gpu(request: Request) -> Request:
    """The same request where other packages' kernels run, whose sizes of heads do not matter."""
    v_size = 64 if request.v_head_dim == request.head_dim else 128
    on = torch.device("cuda"), torch.bfloat16, 64, v_size
    names = "device", "dtype", "head_dim", "v_head_dim"
    return request._replace(**dict(zip(names, on)))


def exported_backward(dy: Tensor, x: Heads, r: Result, call: Call) -> Grads:
    """torch's, as in an exported program."""
    with torch.enable_grad():
        tensors = (*x, call.sinks, call.bias)
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        own = Heads(*leaves[:3])  # type: ignore[arg-type]
        y = EXPORTED.forward(own, call._replace(sinks=leaves[3], bias=leaves[4])).output
        given = [t for t in leaves if t is not None]
        grads = grads_of(y, dy, given)[1:] if y.requires_grad else [t * 0 for t in given]
        found = iter(grads)
        return Grads(*(None if t is None else next(found) for t in leaves))  # type: ignore[arg-type]


class RefusedError(Exception):
    """The kernel does not take the call."""


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes all calls those of a kernel, which refuses some unless it has to take all."""
    install(monkeypatch)
    monkeypatch.setitem(KERNELS, "", EXPORTED._replace(backward=exported_backward))

    def force(name: str, all_of_them: bool = False) -> None:
        kernel = "blockwise" if name == "one query at a time" else name
        if name == "one query at a time":
            few_queries(monkeypatch)
        if name == "exported":  # as while torch.export traces
            monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
        if name == "cudnn":
            stack.enter_context(attention_cudnn.stand_in())

        def choose(x: Heads, call: Call, told: Any, forced: str | None = None) -> str:
            request = told if isinstance(told, Request) else request_of(x, call, told)
            asked = request if kernel in ("cpu", "blockwise") else of_a_gpu(request)
            if not all_of_them and KERNELS[kernel].refusal(asked) is not None:
                raise RefusedError
            empty = not (x.q.numel() and x.k.numel())
            return "blockwise" if empty and kernel == "flex" else kernel

        if name not in ("chosen", "reference", "exported"):
            for function in ("choose", "choose_plain"):
                monkeypatch.setattr(module, function, choose)

    with ExitStack() as stack:
        yield force
    forget()


class Made(NamedTuple):
    """The operation of a case, and what a call is given."""

    op: DotProductAttention
    tensors: list[Tensor]
    keywords: dict[str, Any]
    mask: Tensor | None
    bias: list[Tensor]


def made(case: Case, seed: int) -> Made:
    torch.manual_seed(seed)
    op = DotProductAttention(**case.arguments, dtype=torch.float64)
    for p in op.parameters():
        p.data.normal_()
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in case.shapes]
    if case.strided:
        tensors = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    mask = mask_of(case)
    keywords: dict[str, Any] = {} if mask is None else {"mask": mask}
    if case.ends is not None:
        ends = torch.tensor(case.ends, dtype=torch.int32)
        keywords |= {"cu_seqlens": ends, "max_seqlen": int(ends.diff().max())}
    bias = bias_of(case)
    return Made(op, tensors, keywords, mask, [] if bias is None else [bias])


@pytest.mark.parametrize("kernel", CASES)
def test_values_and_gradients(kernel: str, takes: Any) -> None:
    takes(kernel)
    left, seeds = CASES[kernel], itertools.count()
    while left:
        seed = next(seeds)
        case = case_of(seed)
        op, tensors, keywords, mask, bias = made(case, seed)
        own = [t.detach().requires_grad_() for t in (*tensors, *bias)]
        leaves = [*own, *op.parameters()]
        try:
            y = (op.reference if kernel == "reference" else op)(*own, **keywords)
        except RefusedError:
            continue
        left -= 1
        heads, added = split(case, own[: len(tensors)]), own[len(tensors) :]
        want = attended(case, *heads, mask, op.sinks, *added)
        dy = torch.randn_like(want)
        torch.testing.assert_close(
            grads_of(y, dy, leaves), grads_of(want, dy, leaves), rtol=1e-10, atol=1e-10,
            msg=lambda text, at=f"case {seed}: {case}": f"{text}\n{at}",
        )  # fmt: skip


def parts(r: Random, length: int) -> list[int]:
    """Lengths of calls that continue each other; a call may have no position."""
    found: list[int] = []
    while sum(found) < length:
        found.append(min(r.choice([0, 1, 1, 2, 3]), length - sum(found)))
    return found


def with_room(mask: Tensor | None, keys: int, max_length: int | None) -> Tensor | None:
    """The mask for as many positions as the cache returns; what it says of later ones is True."""
    if mask is None or max_length is None or mask.shape[-1] != keys:
        return mask
    return torch.cat([mask, mask.new_ones(*mask.shape[:-1], max_length - keys)], -1)


@pytest.mark.parametrize(
    ("kernel", "max_length"),
    [
        ("chosen", None), ("chosen", 9), ("one query at a time", 9), ("flex", None),
        ("exported", None), ("exported", 9),
    ],
)  # fmt: skip
def test_cached_decoding(kernel: str, max_length: int | None, takes: Any) -> None:
    """Each call is that of all keys so far, also where queries are more or fewer than new keys."""
    takes(kernel, True)
    for seed in range(30):
        r, whole = Random(seed), case_of(seed)._replace(ends=None)
        whole = whole._replace(bias="") if kernel == "flex" else whole  # which it refuses
        op, tensors, *_ = made(whole, seed)
        cache, at = KVCache(max_length), 0
        for new in parts(r, whole.keys):
            xs = [t[:, at : at + new] for t in tensors]
            at += new
            step = whole._replace(queries=new, keys=at)
            if not whole.packed:
                queries = max(0, new + r.choice([-2, -1, 0, 0, 1, 4]))
                step = step._replace(queries=queries)
                xs[0] = torch.randn(step.shapes[0], dtype=torch.float64)
            mask, bias = mask_of(step), bias_of(step)
            given: dict[str, Any] = {"cache": cache}
            if mask is not None:
                given["mask"] = with_room(mask, at, max_length)
            added = [] if bias is None else [with_room(bias, at, max_length)]
            with torch.no_grad():
                y = op(*xs, *added, **given)
            seen = [t[:, :at] for t in tensors]
            q, (_, k, v) = split(whole, xs)[0], split(whole, seen)
            want = attended(step, q, k, v, mask, op.sinks, bias)
            torch.testing.assert_close(
                y, want, rtol=1e-10, atol=1e-10,
                msg=lambda text, at=f"case {seed}: {step}": f"{text}\n{at}",
            )  # fmt: skip
            assert int(cache.length) == at


@pytest.mark.parametrize("slack", [1, 40])
def test_the_longest_sequence_may_be_said_to_be_longer(slack: int) -> None:
    op, x = DotProductAttention(2), torch.randn(1, 9, 24)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    want = op(x, cu_seqlens=ends, max_seqlen=5)
    torch.testing.assert_close(op(x, cu_seqlens=ends, max_seqlen=5 + slack), want)


def holds_in_bf16(case: Case, seed: int, kernel: str, on: torch.device) -> bool:
    """Whether a kernel takes the call; if so, it is held to the definition."""
    op, tensors, keywords, mask, bias = made(case, seed)
    op = op.to(on, torch.bfloat16)
    op.kernel = kernel
    if mask is not None:
        mask = mask.to(on) if mask.dtype == torch.bool else mask.to(on, torch.bfloat16)
        keywords["mask"] = mask
    if case.ends is not None:
        keywords["cu_seqlens"] = keywords["cu_seqlens"].to(on)
    own = [t.to(on, torch.bfloat16).requires_grad_() for t in (*tensors, *bias)]
    try:
        y = op(*own, **keywords)
    except NotSupportedError:
        return False
    as_exact(case, y, torch.randn_like(y), [*own, *op.parameters()], mask)
    return True


GPU = ["cudnn", "flash", "efficient", "flash_attn"]  # flex would compile for each case
ON = [
    *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in GPU),
    ("cpu", "cpu"),
    ("blockwise", "cpu"),
]


@pytest.mark.parametrize(("kernel", "device"), ON)
def test_half_precision(kernel: str, device: str) -> None:
    """The same cases with heads as large as a GPU's kernels take them."""
    count = 0
    for seed in range(50):
        case = case_of(seed)
        case = case._replace(size=16 * case.size, v_size=16 * case.v_size)
        count += holds_in_bf16(case, seed, kernel, torch.device(device))
    if not count:
        pytest.skip(f"{kernel} takes none of them here")


def test_slopes_are_as_wide_as_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 9 heads are no powers of two: rounded to fp32, they would be other ones in fp64."""
    given: list[Call] = []
    monkeypatch.setattr(module, "choose", lambda x, call, *_: given.append(call) or "blockwise")
    exact = [slope(head, 9) for head in range(9)]
    for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        DotProductAttention(9, alibi=True)(torch.zeros(1, 2, 27 * 8, dtype=dtype))
        slopes = given.pop().slopes
        assert slopes is not None
        torch.testing.assert_close(slopes, torch.tensor(exact, dtype=wide), rtol=1e-7, atol=0)
    op, x = DotProductAttention(9, alibi=True, layout="separate"), torch.zeros(1, 3, 9).double()
    v = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)[None, :, None].expand(1, 3, 9)
    want = [1 / (1 + math.exp(-s) + math.exp(-2 * s)) for s in exact]
    torch.testing.assert_close(
        op(x, x, v.contiguous())[0, 2], torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0
    )
