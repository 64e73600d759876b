"""Modes of attention, held to a formula that shares nothing with the kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from opfuser import BasicLinear, DotProductAttention, Linear, MakeExtraOutput, Sequential
from opfuser.errors import ArgumentError, InputError, NotSupportedError, OpKwargsError
from opfuser.testing import check_op
from tests.basic.attention_packages import few_queries
from tests.basic.values import FOUR_UNITS, check_values, fill, held_to, saved_by


def formula(op: DotProductAttention, *tensors: Tensor, **kwargs: Any) -> Tensor:
    """What a model in plain PyTorch would write, with one bias for all pairs of positions."""
    *tensors, given = tensors if op.core_attention_bias else (*tensors, None)  # type: ignore[assignment]
    h, g = op.num_heads, op.num_kv_heads
    if len(tensors) == 1:
        values = g * (op.v_head_dim or tensors[0].shape[2] // (h + 2 * g))
        size = (tensors[0].shape[2] - values) // (h + g)
        tensors = tensors[0].split([h * size, g * size, values], 2)
    q, k, v = (t.unflatten(2, (n, -1)).transpose(1, 2) for t, n in zip(tensors, (h, g, g)))
    k, v = (t.repeat_interleave(op.num_heads // op.num_kv_heads, 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if op.scale is None else op.scale
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)
    bias = torch.zeros_like(i - j, dtype=q.dtype)
    if op.alibi:
        bias = bias - torch.tensor(slopes(op.num_heads)).to(q)[:, None, None] * (i - j).abs()
    if given is not None:
        bias = bias + given.to(q.dtype)
    seen = i >= j if op.causal else torch.ones_like(i >= j)
    if op.window is not None:
        seen = seen & ((i - j).abs() < op.window)
    if "cu_seqlens" in kwargs:
        lengths = kwargs["cu_seqlens"].diff()
        own = torch.arange(len(lengths), device=q.device).repeat_interleave(lengths)
        seen = seen & (own[:, None] == own)
    mask = kwargs.get("mask", seen)
    mask = mask[:, None, None] if mask.dim() == 2 and mask is not seen else mask
    bias = (
        torch.where(seen & mask, bias, -math.inf)
        if mask.dtype == torch.bool
        else (torch.where(seen, bias + mask.to(q.dtype), -math.inf))
    )
    if op.softcap is None and op.sinks is None:
        bias = bias[None] if bias.dim() == 3 else bias  # else torch takes another kernel
        y = F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
        return y.transpose(1, 2).flatten(2)
    s = q @ k.mT * scale
    if op.softcap is not None:
        s = op.softcap * torch.tanh(s / op.softcap)
    # A column without a value: the sinks, or what takes all weight where no key is seen.
    sinks = torch.full_like(s[..., :1], torch.finfo(s.dtype).min)
    if op.sinks is not None:
        sinks = op.sinks.to(s.dtype)[:, None, None].expand_as(sinks)
    p = torch.cat([s + bias, sinks], -1).softmax(-1)[..., :-1]
    return (p @ v).transpose(1, 2).flatten(2)


def slopes(heads: int) -> list[float]:
    """As in the code that came with the paper."""
    n = 2 ** math.floor(math.log2(heads))
    own = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    return own + [2 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)]


PACKED: list[tuple[int, ...]] = [(2, 9, 8 * 6)]
LAST: list[tuple[int, ...]] = [(2, 1, 4 * 6), (2, 9, 2 * 6), (2, 9, 2 * 6)]
SEPARATE: list[tuple[int, ...]] = [(2, 5, 4 * 6), (2, 9, 2 * 6), (2, 9, 2 * 3)]
PADDING = torch.tensor([[True] * 9, [False] * 4 + [True] * 5])
TREE = torch.tensor([[j in (0, i // 2, i) for j in range(9)] for i in range(9)])[None, None]
FAR = -torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(3))
BIAS = {"core_attention_bias": True}
SEQUENCES = {"cu_seqlens": torch.tensor([0, 4, 4, 5, 9], dtype=torch.int32), "max_seqlen": 4}


class Mode(NamedTuple):
    """Arguments, shapes of the inputs, keywords, and the kernel that takes it on a CPU."""

    arguments: dict[str, Any]
    shapes: list[tuple[int, ...]] = PACKED
    keywords: Mapping[str, Any] = MappingProxyType({})
    kernel: str = "blockwise"


MODES = {
    "causal": Mode({}, [(2, 19, 8 * 16)], kernel="cpu"),
    "both directions": Mode({"causal": False, "scale": 1.0}, kernel="cpu"),
    "fewer queries": Mode({"layout": "separate"}, SEPARATE),
    "fewer keys": Mode({"layout": "separate"}, [(1, 6, 24), (1, 4, 12), (1, 4, 12)]),
    "cross": Mode({"layout": "separate", "causal": False}, [(2, 5, 24), (2, 9, 12), (2, 9, 12)],
                  kernel="cpu"),
    "one query": Mode({"layout": "separate"}, LAST, kernel="cpu"),
    "size of values": Mode({"v_head_dim": 3}, [(2, 9, 6 * 6 + 2 * 3)]),
    "window": Mode({"window": 3}),
    "window to both sides": Mode({"window": 2, "causal": False}),
    "window as long as the sequence": Mode({"window": 9}, kernel="cpu"),
    "window of a last query": Mode({"layout": "separate", "window": 4}, LAST),
    "soft-capping": Mode({"softcap": 0.5, "scale": 1.0}),
    "ALiBi": Mode({"alibi": True, "num_heads": 6}, [(2, 9, 10 * 6)]),
    "ALiBi, fewer queries": Mode({"alibi": True, "layout": "separate", "causal": False}, SEPARATE),
    "sinks": Mode({"sinks": True}, kernel="cpu"),
    "sinks, window": Mode({"sinks": True, "window": 3}),
    "padding": Mode({}, keywords={"mask": PADDING}, kernel="cpu"),
    "padding, sinks": Mode({"sinks": True}, keywords={"mask": PADDING}, kernel="cpu"),
    "mask": Mode({"causal": False}, keywords={"mask": TREE}, kernel="cpu"),
    "additive mask": Mode({"softcap": 2.0}, keywords={"mask": FAR}),
    "additive mask of heads": Mode({}, keywords={"mask": FAR.reshape(1, 2, 9, 9)[0, [0, 1, 0, 1]]},
                                   kernel="cpu"),
    "bias": Mode(BIAS, [*PACKED, (1, 4, 9, 9)], kernel="cpu"),
    "bias, both directions": Mode({**BIAS, "causal": False}, [*PACKED, (2, 1, 9, 9)], kernel="cpu"),
    "bias, padding": Mode({**BIAS, "causal": False}, [*PACKED, (1, 4, 9, 9)], {"mask": PADDING},
                          "cpu"),
    "bias, additive mask": Mode(BIAS, [*PACKED, (2, 4, 9, 9)], {"mask": FAR}, "cpu"),
    "bias of keys": Mode(BIAS, [*PACKED, (4, 1, 9)], kernel="cpu"),
    "bias, fewer queries": Mode({**BIAS, "layout": "separate"}, [*SEPARATE, (1, 4, 5, 9)]),
    "bias, cross": Mode({**BIAS, "layout": "separate", "causal": False}, [*SEPARATE, (5, 9)]),
    "bias, soft-capping, sinks": Mode({**BIAS, "softcap": 0.5, "sinks": True, "scale": 1.0},
                                      [*PACKED, (1, 4, 9, 9)]),
    "bias, ALiBi, window": Mode({**BIAS, "alibi": True, "window": 3}, [*PACKED, (1, 4, 9, 9)]),
    "bias, sequences": Mode(BIAS, [(1, 9, 48), (4, 9, 9)], SEQUENCES),
    "sequences": Mode({}, [(1, 9, 48)], SEQUENCES),
    "sequences, both directions": Mode({"causal": False}, [(1, 9, 48)], SEQUENCES),
    "sequences, window": Mode({"window": 2, "sinks": True}, [(1, 9, 48)], SEQUENCES),
}  # fmt: skip
HALF_TOO = {
    "causal",
    "both directions",
    "bias",
    "bias, padding",
    "fewer queries",
    "size of values",
    "soft-capping",
    "sinks",
    "padding",
    "sequences",
}
# Each of what the keys of some queries depend on, and of what is added up over queries.
IN_PARTS = (
    "causal",
    "fewer queries",
    "size of values",
    "window",
    "window to both sides",
    "ALiBi, fewer queries",
    "sinks, window",
    "padding, sinks",
    "additive mask",
    "bias, fewer queries",
    "bias, soft-capping, sinks",
    "sequences, window",
)


def make(mode: Mode, **more: Any) -> tuple[DotProductAttention, list[Tensor]]:
    arguments: Any = {"num_heads": 4, "num_kv_heads": 2, **mode.arguments, **more}
    op = fill(DotProductAttention(**arguments))
    return op, [torch.randn(shape) for shape in mode.shapes]


@pytest.mark.parametrize(
    ("name", "queries"), [*((name, "all") for name in MODES), *((name, "few") for name in IN_PARTS)]
)
def test_as_exact_as_the_formula(name: str, queries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel of a CPU, and in plain torch with some queries at a time."""
    mode = MODES[name]
    op, tensors = make(mode, kernel=None if queries == "all" else "blockwise")
    if queries != "all":
        few_queries(monkeypatch, 4 * 2 * 9 * 2)
    dtypes = [torch.float64, torch.float32]
    if queries == "all" and name in HALF_TOO:
        dtypes += [torch.bfloat16, torch.float16]
    # What the keywords say of the batch holds for as many rows.
    check_values(
        held_to(op, formula), *tensors, kwargs=mode.keywords, dtypes=dtypes, floors=FOUR_UNITS,
        zero_rows=not mode.keywords,
    )  # fmt: skip
    op(*tensors, **mode.keywords)
    assert op.last_choice is not None
    assert op.last_choice.kernel == (mode.kernel if queries == "all" else "blockwise")


@pytest.mark.parametrize("layout", ["packed", "separate"])
def test_gradients_of_a_subset_of_the_inputs(layout: str) -> None:
    """Those of the others are not returned, and those of sinks and bias not without need."""
    shapes = PACKED if layout == "packed" else SEPARATE
    arguments = {"layout": layout, "sinks": True, **BIAS}
    for wanted in range(len(shapes) + 2):
        op, tensors = make(Mode(arguments, [*shapes, (4, 1, 9)]))
        leaves = [*tensors, op.sinks]
        for n, leaf in enumerate(leaves):
            leaf.requires_grad_(n == wanted)
        op(*tensors).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [
            n == wanted for n in range(len(leaves))
        ]


@pytest.mark.parametrize("mask", [None, PADDING, FAR], ids=["none", "bool", "numbers"])
def test_a_bias_that_needs_no_gradient_is_left_to_the_kernel_of_masks(mask: Any) -> None:
    op, (x, bias) = make(Mode(BIAS, [*PACKED, (1, 4, 9, 9)]))
    given = {} if mask is None else {"mask": mask}
    outcomes = []
    for needs in (False, True):
        leaf = x.clone().requires_grad_()
        y = op(leaf, bias.requires_grad_(needs), **given)
        assert op.last_choice is not None
        assert op.last_choice.kernel == ("blockwise" if needs else "cpu")
        assert (
            "cpu",
            "it computes no gradient of a bias",
        ) in op.last_choice.passed_over or not needs
        outcomes.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaf)))
    torch.testing.assert_close(*outcomes)


def test_of_a_bias_no_more_is_kept_than_itself() -> None:
    """Neither weights nor scores, nor what a mask of rows and the bias are together."""
    op, (x, bias) = make(Mode({**BIAS, "causal": False}, [(2, 9, 48), (1, 4, 9, 9)]))
    leaves = x.requires_grad_(), bias.requires_grad_()
    saved = saved_by(lambda: op(*leaves, mask=PADDING))
    assert sorted(t.numel() for t in saved) == sorted([x.numel(), bias.numel(), PADDING.numel()])


def test_keys_and_values_from_channels() -> None:
    """Three projections of one input: it is published twice, and projected by parts of the row."""
    torch.manual_seed(1)
    x = torch.randn(2, 5, 12)
    attention = DotProductAttention(2, layout="separate")
    keys, values = MakeExtraOutput(), MakeExtraOutput()
    keys.set_extra_output_channel(0, "keys", output_to_caller=False)
    values.set_extra_output_channel(0, "values", output_to_caller=False)
    attention.set_extra_input_channel(0, "keys").set_extra_input_channel(1, "values")
    sequence = Sequential(keys, BasicLinear(12, 12), values, BasicLinear(12, 12), attention)
    with torch.no_grad():
        want = attention(sequence[3](sequence[1](x)), x, sequence[1](x))
    torch.testing.assert_close(sequence(x), want)
    leaf = x.clone().requires_grad_()
    sequence(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_dropout_keeps_each_weight_as_often_as_it_says() -> None:
    """Values that are unit vectors show the weights."""
    op = DotProductAttention(2, 1, causal=False, layout="separate", dropout_p=0.25)
    q, k = torch.zeros(40, 16, 2 * 8), torch.zeros(40, 16, 8)
    v = torch.eye(16).expand(40, 16, 16).contiguous()
    kept = op(q, k, v) != 0
    count = kept.numel()
    assert abs(kept.double().mean().item() - 0.75) < 5 * (0.25 * 0.75 / count) ** 0.5
    torch.testing.assert_close(op(q, k, v).max().item(), 1 / 16 / 0.75)
    assert torch.equal(op.eval()(q, k, v), torch.full((40, 16, 32), 1 / 16))


@pytest.mark.parametrize("scores", [1, 1 << 25])
def test_dropout_has_the_same_mask_in_backward(
    scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_queries(monkeypatch, scores)
    op, (x,) = make(Mode({"dropout_p": 0.3}))
    check_op(op, x, dtypes=[torch.float64], floor=1e-13)
    assert [t.dtype for t in saved_by(lambda: op(x.requires_grad_()))].count(torch.int64) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_same_dropout(use_reentrant: bool) -> None:
    op, (x,) = make(Mode({"dropout_p": 0.3}))

    def grad(call: Any) -> Tensor:
        torch.manual_seed(4)
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    again = grad(lambda t: checkpoint(op, t, use_reentrant=use_reentrant))
    torch.testing.assert_close(again, grad(op), rtol=0, atol=0)


def test_memory_is_that_of_a_block() -> None:
    """Of packed sequences, scores beyond the longest one are not computed."""
    op = DotProductAttention(1)
    total, longest = 4096, 64
    cu_seqlens = torch.arange(0, total + 1, longest, dtype=torch.int32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = f(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    x = torch.randn(1, total, 3 * 8, requires_grad=True)
    with Watch():
        op(x, cu_seqlens=cu_seqlens, max_seqlen=longest).sum().backward()
    assert largest <= x.numel()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"layout": "interleaved"}, "layout must be 'packed' or 'separate'.*layout='interleaved'"),
        ({"layout": "separate", "v_head_dim": 3}, "v_head_dim describes a packed input"),
        ({"v_head_dim": 2.5}, "v_head_dim must be an integer.*v_head_dim=2.5"),
        ({"sinks": True, "dtype": torch.int64}, "Sinks are float16, .*dtype=torch.int64"),
    ],
)
def test_refuses_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        DotProductAttention(4, **arguments)


SEPARATED = {"layout": "separate"}


@pytest.mark.parametrize(
    ("arguments", "shapes", "text"),
    [
        (
            {"v_head_dim": 7},
            [(1, 5, 56)],
            r"sequence, 8 \* head_dim \+ 28 of values\).*\(1, 5, 56\)",
        ),
        ({}, [(2, 3, 47)], r"sequence, 12 \* head_dim\) \(DotProductAttention\)"),
        ({}, [(2, 3, 0)], "The input must be floating point"),
        ({}, [(3, 48)], "The input must be floating point"),
        (SEPARATED, [(2, 5, 8), (2, 5, 8), (2, 4, 8)], "Queries must be floating"),
        (SEPARATED, [(2, 5, 8), (1, 5, 8), (1, 5, 8)], r"\(1, 5, 8\) of torch.float32"),
        (SEPARATED, [(2, 5, 8), (2, 5, 4), (2, 5, 8)], r"keys \(batch, keys, 4 \* head_dim\)"),
        (
            BIAS,
            [(2, 5, 24), (4, 5, 4)],
            r"The bias .* broadcasts to \(2, 4, 5, 5\).*\(4, 5, 4\) of",
        ),
        (BIAS, [(2, 5, 24), (3, 5, 5)], r"leading ones may be left out"),
        (BIAS, [(2, 5, 24), (1, 2, 4, 5, 5)], r"\(1, 2, 4, 5, 5\) of torch.float32"),
    ],
)
def test_refuses_inputs(
    arguments: dict[str, Any], shapes: list[tuple[int, ...]], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        DotProductAttention(4, **arguments)(*map(torch.ones, shapes))


def test_refuses_integers() -> None:
    with pytest.raises(InputError, match=r"The input must be floating point.*torch.int64"):
        DotProductAttention(4)(torch.ones(2, 5, 24).long())
    with pytest.raises(InputError, match=r"The bias must be floating point.*torch.int64"):
        DotProductAttention(4, **BIAS)(torch.ones(2, 5, 24), torch.ones(5, 5).long())


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"mask": torch.ones(2, 9, dtype=torch.int64)}, InputError, r"Convert integers by .bool"),
        (
            {"mask": torch.ones(9, 9)},
            InputError,
            r"\(2, 9\) or .* to \(2, 4, 9, 9\).*\(9, 9\) of",
        ),
        ({"mask": torch.ones(2, 1, 9, 8)}, InputError, r"\(2, 1, 9, 8\)"),
        ({"mask": torch.ones(2, 9, requires_grad=True)}, NotSupportedError, r"mask.detach\(\)"),
        ({"max_seqlen": 3}, InputError, "come together.*cu_seqlens=None, max_seqlen=3"),
        ({"cu_seqlens": torch.tensor([0]), "max_seqlen": 9}, InputError, "batch is 1.*batch 2"),
        ({"masks": None}, OpKwargsError, "Received: masks"),
        (
            {"cu_seqlens": torch.tensor([0, 9]), "max_seqlen": 9},
            InputError,
            r"int32.*\(2,\) of torch.int64, max_seqlen=9",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 9]).int(), "max_seqlen": torch.tensor(9)},
            InputError,
            r"max_seqlen=tensor\(9\)",
        ),
    ],
)
def test_refuses_keywords(keywords: dict[str, Any], error: Any, text: str) -> None:
    batch = 1 if "cu_seqlens" in keywords and "batch" not in text else 2
    with pytest.raises(error, match=text):
        DotProductAttention(4)(torch.ones(batch, 9, 12), **keywords)


def test_a_kernel_by_name_says_why_it_cannot() -> None:
    op = DotProductAttention(4, kernel="cpu", softcap=3.0)
    text = "The kernel 'cpu' does not take this call: it has no soft-capping .*With kernel=None"
    with pytest.raises(NotSupportedError, match=text):
        op(torch.ones(2, 9, 12))


def test_the_last_choice_says_why_not_another_kernel() -> None:
    op, x = DotProductAttention(4), torch.ones(2, 9, 12)
    assert op.last_choice is None
    op(x)
    gpu = "it runs on a GPU, not on cpu"
    before = (("cudnn", gpu), ("flash", gpu), ("efficient", gpu))
    assert op.last_choice == ("cpu", before, "")
    op.window = 2
    op(x)
    others = ("cpu", "it has no window"), ("flash_attn", gpu), ("flex", gpu)
    assert op.last_choice == ("blockwise", (*before, *others), "")
    assert "; cpu: it has no window; flash_attn: it runs on" in str(op.last_choice)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["size of values", "ALiBi", "mask", "sequences, window"])
def test_compiles_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()
    mode = MODES[name]
    op, tensors = make(mode)
    model = Sequential(op)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    leaves = [t.requires_grad_() for t in (*tensors, *op.parameters())]
    dy = torch.randn_like(op(*tensors, **mode.keywords))
    found = []
    for call in (model, compiled):
        y = call(*tensors, op_kwargs={0: dict(mode.keywords)} if mode.keywords else None)
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
    torch.testing.assert_close(*found)


def test_dropout_under_compile_is_that_of_its_backward() -> None:
    torch.compiler.reset()
    op, (x,) = make(Mode({"dropout_p": 0.4}))
    compiled: Any = torch.compile(Sequential(op), backend="aot_eager", fullgraph=True)
    found = []
    for call in (compiled, op):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        found.append((y, *torch.autograd.grad(y.square().sum(), leaf)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", MODES)
def test_shapes_on_the_meta_device(name: str) -> None:
    mode = MODES[name]
    op, tensors = make(mode)
    keywords = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in mode.keywords.items()}
    want = op(*tensors, **mode.keywords)
    leaves = [t.to("meta").requires_grad_() for t in tensors]
    y = op.to("meta")(*leaves, **keywords)
    y.backward(torch.empty_like(y))
    assert y.shape == want.shape
    assert [t.grad is not None and t.grad.shape for t in leaves] == [t.shape for t in leaves]


def test_a_plan_says_what_is_known_of_the_kernel() -> None:
    x = torch.ones(1, 3, 24)

    def note(x: Tensor, **options: Any) -> str:
        plan = Sequential(DotProductAttention(2, **options)).plan(x)
        ((at, text),) = plan.notes
        assert at == 0
        assert text in " ".join(str(plan).split())
        return text

    assert note(x) == (
        "attention by cpu or blockwise, as sizes and keywords allow; "
        "not cudnn, flash, efficient, flash_attn, flex: it runs on a GPU, not on cpu"
    )
    assert note(x, window=2).endswith("; not cpu: it has no window")
    by_name = "attention by blockwise, which is required by name"
    assert note(x, kernel="blockwise") == by_name
    assert note(x, kernel="flash") == (
        "attention by flash, which is required by name but refuses: it runs on a GPU, not on cpu"
    )
    meta = torch.ones(1, 3, 24, dtype=torch.bfloat16, device="meta")
    assert note(meta).startswith(
        "attention by cudnn or flash or efficient or flex or blockwise, as"
    )


@pytest.mark.parametrize(("name", "sinks"), [("causal", False), ("fewer queries", True)])
def test_autocast(name: str, sinks: bool, device: torch.device) -> None:
    op, tensors = make(MODES[name], sinks=sinks)
    op, tensors = op.to(device), [t.to(device) for t in tensors]
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, *tensors)
        y = op(*tensors)
    torch.testing.assert_close(y, op(*[t.bfloat16() for t in tensors]), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", [None, "blockwise"])
def test_large_scores_do_not_overflow(kernel: str | None) -> None:
    op = DotProductAttention(2, scale=1.0, kernel=kernel)
    x = (30 * torch.randn(1, 6, 6 * 8)).requires_grad_()
    y = op(x)
    torch.testing.assert_close(y.double(), formula(op, x.double()))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


class Doubled(DotProductAttention):
    def op_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().op_forward(*args, **kwargs)


class Negated(DotProductAttention):
    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
        y, extras = super().fuser_forward(*args, **kwargs)
        return -y, extras


@pytest.mark.parametrize(("kind", "factor"), [(Doubled, 2), (Negated, -1)])
def test_either_forward_of_a_subclass_counts(kind: Any, factor: int) -> None:
    x = torch.randn(2, 5, 24)
    for keywords in ({}, {"mask": torch.ones(2, 5, dtype=torch.bool)}):
        want = factor * DotProductAttention(2)(x, **keywords)
        torch.testing.assert_close(kind(2)(x, **keywords), want)
        got = Sequential(kind(2))(x, op_kwargs={0: keywords} if keywords else None)
        torch.testing.assert_close(got, want)


# Dynamo's own use of torch and of Python warns in some versions.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["recorded", "compiled"])
def test_a_bias_in_a_sequence(compiled: bool) -> None:
    """In one call after another, with other numbers, with gradients of it and without."""
    attention = DotProductAttention(2, **BIAS)
    sequence: Any = Sequential(Linear(6, 36), attention, Linear(12, 6)).double()
    call = torch.compile(sequence, backend="aot_eager", fullgraph=True) if compiled else sequence
    for number in range(8):
        x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(1, 2, 7, 7, dtype=torch.float64, requires_grad=number % 4 < 3)
        leaves = [t for t in (x, bias, *sequence.parameters()) if t.requires_grad]
        y = formula(attention, F.linear(x, sequence[0].weight, sequence[0].bias), bias)
        want = F.linear(y, sequence[2].weight, sequence[2].bias)
        dy = torch.randn_like(want)
        got = call(x, bias)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy)
        )
        with torch.no_grad():
            torch.testing.assert_close(call(x, bias), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["cross", "padding, sinks"])
def test_compiled_for_any_size(name: str) -> None:
    """Numbers are symbols to Dynamo then, those of heads, lengths and dropout among them."""
    mode = MODES[name]
    op, tensors = make(mode)
    torch.compiler.reset()
    how: Any = {"backend": "aot_eager", "dynamic": True, "fullgraph": True}
    compiled: Any = torch.compile(op, **how)
    leaves = [t.requires_grad_() for t in (*tensors, *op.parameters())]
    found = []
    for call in (op, compiled):
        y = call(*tensors, **mode.keywords)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    torch.testing.assert_close(*found)
