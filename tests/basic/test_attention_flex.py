"""flex_attention: its functions and blocks, when it is compiled, and what happens where it fails.

On a CPU its operators compute all scores in plain torch, of the functions that a GPU compiles.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

import opfuser
from opfuser import DotProductAttention, KVCache, Sequential
from opfuser.attention import choice, flex, flex_compiled
from opfuser.attention.alibi import alibi_slopes
from opfuser.attention.blockwise import hidden_keys
from opfuser.attention.call import Call, Heads
from opfuser.basic import dot_product_attention as module
from opfuser.engine.recorded.recordable import unrecorded
from opfuser.errors import NotSupportedError
from tests.basic.attention_packages import forget
from tests.basic.test_attention_kernels import check_numbers
from tests.basic.test_attention_modes import HALF_TOO, MODES, formula, make
from tests.basic.values import ONE_UNIT, check_values, fill, held_to


def flex_unless_empty(x: Heads, *_: Any) -> str:
    return "flex" if x.q.numel() and x.k.numel() else "blockwise"


@pytest.mark.parametrize("name", sorted(n for n in HALF_TOO if "bias" not in n))  # it is given none
def test_as_exact_as_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken in fp32. All modes in fp64: tests/basic/test_attention_random.py."""
    monkeypatch.setattr(module, "choose", flex_unless_empty)
    monkeypatch.setattr(module, "choose_plain", flex_unless_empty)
    mode = MODES[name]
    op, tensors = make(mode)
    check_values(
        held_to(op, formula), *tensors, kwargs=mode.keywords, floors=ONE_UNIT,
        dtypes=[torch.float64, torch.bfloat16], zero_rows=not mode.keywords,
    )  # fmt: skip


CPU = torch.device("cpu")
ENDS = torch.tensor([0, 100, 100, 384, 390, 700], dtype=torch.int32)
BLOCKS = {
    "causal": (700, 700, Call(True, 1.0)),
    "all": (256, 300, Call(False, 1.0)),
    "fewer queries": (200, 700, Call(True, 1.0)),
    "fewer keys": (700, 200, Call(True, 1.0)),
    "window": (700, 700, Call(True, 1.0, window=130)),
    "window to both sides": (700, 700, Call(False, 1.0, window=257)),
    "window, fewer queries": (300, 700, Call(True, 1.0, window=1)),
    "sequences": (700, 700, Call(True, 1.0, cu_seqlens=ENDS, max_seqlen=310)),
    "sequences, window": (700, 700, Call(False, 1.0, window=90, cu_seqlens=ENDS, max_seqlen=310)),
    "mask": (300, 300, Call(True, 1.0, mask=torch.ones(1, 1, 1, 300, dtype=torch.bool))),
}


def listed(counts: Tensor, order: Tensor) -> Tensor:
    """What is listed of each row, as a matrix of flags."""
    found = torch.zeros(order.shape[2:], dtype=torch.bool)
    for row, (count, columns) in enumerate(zip(counts[0, 0], order[0, 0])):
        found[row, columns[:count].long()] = True
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str) -> None:
    """Those left out see nothing, those without a mask see all, others see some of their keys."""
    queries, keys, call = BLOCKS[name]
    x = Heads(*(torch.zeros(1, 1, n, 16) for n in (queries, keys, keys)))
    form = flex.form_of(x, call)
    # Blocks are read by compiled kernels of a GPU alone: torch's operators on a CPU ignore them.
    _, _, *lists = flex._block_mask(x, form, flex.given_of(x, call, form))
    some, whole, by_keys, whole_by_keys = (listed(*lists[i : i + 2]) for i in (0, 2, 4, 6))
    hidden = hidden_keys(x, call, slice(0, queries), slice(0, keys))
    seen = torch.ones(queries, keys, dtype=torch.bool) if hidden is None else ~hidden
    padded = torch.zeros(128 * math.ceil(queries / 128), 128 * math.ceil(keys / 128))
    padded[:queries, :keys] = seen
    of_block = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).sum((1, 3))
    full = of_block == 128 * 128
    assert torch.equal(whole, full if call.mask is None else torch.zeros_like(full))
    assert torch.equal(some, (of_block > 0) & ~whole)
    assert torch.equal(by_keys, some.t())
    assert torch.equal(whole_by_keys, whole.t())


def compile_by(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """What would be compiled with Inductor is by that backend."""

    def compiled(function: Any, fullgraph: bool, **how: Any) -> Any:
        return plain(function, fullgraph=fullgraph, **(how if "backend" in how else own))

    plain, own = torch.compile, {"backend": backend}
    monkeypatch.setattr(torch, "compile", compiled)


# What a GPU alone has: kinds of calls that are compiled, and graphs that are captured. On a CPU
# these three names stand for it.


def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a CUDA graph is captured."""
    monkeypatch.setattr(flex_compiled, "_capturing", lambda _: True)


def forget_compiled() -> None:
    flex_compiled._compiled.clear()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls of a CPU compile as those of a GPU do, to graphs that the list counts."""
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    def compiled(t: Tensor) -> bool:
        return type(t) is Tensor and not torch.compiler.is_compiling()

    torch.compiler.reset()
    compile_by(monkeypatch, backend)
    monkeypatch.setattr(flex_compiled, "_is_compiled", compiled)
    forget_compiled()
    kernel = choice.KERNELS["flex"]
    monkeypatch.setitem(choice.KERNELS, "cpu", kernel._replace(refusal=lambda _: "not now"))
    monkeypatch.setitem(choice.KERNELS, "flex", kernel._replace(refusal=lambda _: None))
    forget()
    yield made
    forget()
    forget_compiled()


class Sizes(NamedTuple):
    """Arguments, and (batch, queries, keys) of calls that share their compiled code."""

    arguments: dict[str, Any]
    keyword: str
    sizes: list[tuple[int, int, int]]


COMPILED = {
    "soft-capping": Sizes({"softcap": 2.0}, "", [(2, 150, 150), (3, 256, 256), (5, 129, 129)]),
    "one block": Sizes({"softcap": 2.0}, "", [(2, 5, 5), (4, 128, 128), (3, 2, 2)]),
    "ALiBi, fewer queries": Sizes(
        {"alibi": True, "layout": "separate", "window": 60}, "", [(2, 130, 200), (3, 150, 256)]
    ),
    "padding, sinks": Sizes(
        {"sinks": True, "softcap": 2.0}, "padding", [(2, 150, 150), (3, 200, 200)]
    ),
    "sequences": Sizes({"softcap": 2.0}, "sequences", [(1, 150, 150), (1, 200, 200)]),
}


def words(keyword: str, batch: int, queries: int, keys: int) -> dict[str, Any]:
    if keyword == "padding":
        return {"mask": torch.arange(keys).expand(batch, keys) >= 3}
    if keyword == "additive":
        return {"mask": torch.randn(4, queries, keys)}
    if keyword == "sequences":
        ends = torch.tensor([0, 20, 21, keys], dtype=torch.int32)
        return {"cu_seqlens": ends, "max_seqlen": keys - 21}
    return {}


def inputs_of(op: DotProductAttention, batch: int, queries: int, keys: int) -> list[Tensor]:
    if op.layout == "packed":
        return [torch.randn(batch, keys, 8 * 16)]
    return [torch.randn(batch, n, heads * 16) for n, heads in ((queries, 4), (keys, 2), (keys, 2))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_a_kind_of_call_is_compiled_once(name: str, graphs: list[Any]) -> None:
    """Both passes at the first forward, for every batch and length; with the same results."""
    arguments, keyword, sizes = COMPILED[name]
    op = fill(DotProductAttention(4, 2, **arguments)).double()
    plain = DotProductAttention(4, 2, **arguments, kernel="blockwise").double()
    plain.load_state_dict(op.state_dict())
    for size in sizes:
        xs = [t.double().requires_grad_() for t in inputs_of(op, *size)]
        given = words(keyword, *size)
        y = op(*xs, **given)
        assert len(graphs) == 2, "one per pass, before backward"
        want = plain(*xs, **given)
        dy = torch.randn_like(y)
        got = torch.autograd.grad(y, [*xs, *op.parameters()], dy)
        of_want = torch.autograd.grad(want, [*xs, *plain.parameters()], dy)
        torch.testing.assert_close((y, got), (want, of_want))
    assert len(graphs) == 2
    assert op.last_choice is not None
    assert op.last_choice.kernel == "flex"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_training_after_evaluation_compiles_backward_alone(graphs: list[Any]) -> None:
    op, x = DotProductAttention(4, 2, softcap=2.0), torch.randn(2, 9, 8 * 16, requires_grad=True)
    for count in (1, 2):
        with torch.set_grad_enabled(count == 2):
            y = op(x)
        assert len(graphs) == count
    want = DotProductAttention(4, 2, softcap=2.0, kernel="blockwise")(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(want.sum(), x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_modes_of_torch_do_not_compile_again(graphs: list[Any]) -> None:
    op, x = DotProductAttention(4, 2, softcap=2.0), torch.randn(2, 9, 8 * 16)
    with torch.no_grad():
        op(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        op(x)
    op(x.bfloat16())
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("max_length", [None, 200])
def test_generation_with_a_cache(max_length: int | None, graphs: list[Any]) -> None:
    """Prefill is one kind of call, and all steps that follow another."""
    ops = [DotProductAttention(4, 2, alibi=True, softcap=2.0, kernel=name)
           for name in (None, "blockwise")]  # fmt: skip
    caches = [KVCache(max_length) for _ in ops]
    with torch.no_grad():
        for length in (5, 1, 1, 1):
            x = torch.randn(2, length, 8 * 16)
            torch.testing.assert_close(*(op(x, cache=c) for op, c in zip(ops, caches)))
    assert ops[0].last_choice is not None
    assert ops[0].last_choice.kernel == "flex"
    assert len(graphs) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_forms_do_not_share_compiled_code(graphs: list[Any]) -> None:
    """More of them than Dynamo compiles of one function."""
    x = torch.randn(2, 9, 8 * 16)
    with torch.no_grad():
        for n in range(1, 10):
            y = DotProductAttention(4, 2, softcap=float(n))(x)
            want = DotProductAttention(4, 2, softcap=float(n), kernel="blockwise")(x)
            torch.testing.assert_close(y, want)
    assert len(graphs) == 9


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_only_batch_and_lengths_are_dynamic(graphs: list[Any]) -> None:
    """Not what differs between passes or kinds: torch 2.11 compiles no dynamic number of heads."""

    def call(heads: int, kv_heads: int, size: int) -> None:
        x = torch.randn(2, 9, (heads + 2 * kv_heads) * size, requires_grad=True)
        DotProductAttention(heads, kv_heads, softcap=2.0)(x).sum().backward()

    kinds = (4, 2, 16), (6, 3, 24)
    for kind in kinds:
        call(*kind)
    torch.compiler.reset()  # calls compile again, of tensors that are not marked
    for kind in kinds:
        call(*kind)
    assert len(graphs) == 8
    for n, graph in enumerate(graphs):
        of_heads = [
            node.meta["example_value"].shape
            for node in graph.graph.find_nodes(op="placeholder")
            if getattr(node.meta["example_value"], "ndim", 0) == 4
        ]
        assert len(of_heads) in (3, 5)
        for batch, heads, length, size in of_heads:
            assert (type(heads), type(size)) == (int, int)
            assert n >= 4 or (type(batch), type(length)) == (torch.SymInt, torch.SymInt)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("graphs")
def test_inductor_does_not_choose_the_layout_of_what_backward_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled for one length, as after a reset, it would pad rows that the kernel reads."""
    nodes: list[Any] = []

    def passes(graph: Any, _: Any) -> Any:
        nodes.extend(graph.graph.nodes)
        return make_boxed_func(graph)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=passes)
    compile_by(monkeypatch, backend)
    op, x = DotProductAttention(4, 2, softcap=2.0), torch.randn(2, 9, 8 * 16, requires_grad=True)
    for _ in range(2):
        op(x).sum().backward()
        (kernel,) = (n for n in nodes if str(n.target) == "flex_attention_backward")
        assert kernel.args[4].op == "placeholder"
        nodes.clear()
        torch.compiler.reset()


@pytest.mark.usefixtures("graphs")
def test_what_does_not_compile_runs_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(*_: Any) -> Any:
        raise RuntimeError("out of shared memory\nand more")

    compile_by(monkeypatch, backend)
    op, x = DotProductAttention(4, 2, softcap=2.0), torch.randn(2, 9, 8 * 16, requires_grad=True)
    with pytest.warns(UserWarning, match="in plain torch, since flex_attention does not compile"):
        y = op(x)
    want = DotProductAttention(4, 2, softcap=2.0, kernel="blockwise")(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(want.sum(), x))
    assert op.last_choice is not None
    assert op.last_choice.kernel == "blockwise"
    name, reason = op.last_choice.passed_over[-1]
    assert name == "flex"
    assert reason.startswith("it does not compile: ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told of once
        op(x)
        with pytest.raises(NotSupportedError, match="'flex' does not take this call: it does not"):
            DotProductAttention(4, 2, softcap=2.0, kernel="flex")(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@unrecorded()  # as while a graph is captured
def test_nothing_is_compiled_while_a_graph_is_captured(
    graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, x = DotProductAttention(4, 2, softcap=2.0), torch.randn(2, 9, 8 * 16, requires_grad=True)
    with monkeypatch.context() as capturing:
        capture(capturing)
        op(x)
        assert not graphs
        assert op.last_choice is not None
        reason = op.last_choice.passed_over[-1]
        assert reason == ("flex", "it was not compiled before a CUDA graph is captured")
        op(x).sum().backward()
    op(x)
    assert op.last_choice.kernel == "flex"
    capture(monkeypatch)
    op(x).sum().backward()
    assert op.last_choice.kernel == "flex"
    assert len(graphs) == 2


@pytest.mark.usefixtures("graphs")
def test_a_backward_whose_kind_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where hooks of saved tensors give back another layout while a graph is captured."""
    op, x = DotProductAttention(4, 2, softcap=2.0), torch.randn(2, 9, 8 * 16, requires_grad=True)
    y = op(x)
    forget_compiled()
    capture(monkeypatch)
    (dx,) = torch.autograd.grad(y.sum(), x)
    want = DotProductAttention(4, 2, softcap=2.0, kernel="blockwise")(x)
    torch.testing.assert_close(dx, torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "name", ["soft-capping", "ALiBi", "fewer queries", "sinks, window", "window to both sides"]
)
def test_in_the_graph_of_a_caller(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators are in the graph, where the caller's backend makes kernels of them."""
    torch.compiler.reset()
    monkeypatch.setattr(module, "choose", flex_unless_empty)
    op, tensors = make(MODES[name])
    model, found = Sequential(op), []
    nodes: dict[str, Any] = {}

    def passes(graph: Any, _: Any) -> Any:
        nodes.update({str(node.target): node for node in graph.graph.nodes})
        return make_boxed_func(graph)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=passes)
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    leaves = [t.requires_grad_() for t in (*tensors, *op.parameters())]
    dy = torch.randn_like(op(*tensors))
    for call in (model, compiled):
        y = call(*tensors)
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
    torch.testing.assert_close(*found)
    assert "flex_attention" in nodes
    logsumexp = nodes["flex_attention_backward"].args[4]
    assert logsumexp.name.startswith("captured")  # Inductor would choose the layout of others


@pytest.mark.usefixtures("graphs")
def test_where_dynamo_traces_the_operation_it_is_not_taken() -> None:
    """As with keywords. Dynamo has no captured tensors for the operator."""
    op, (x,) = make(MODES["soft-capping"])
    mask = torch.ones(2, 9, dtype=torch.bool)
    compiled: Any = torch.compile(Sequential(op), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, op_kwargs={0: {"mask": mask}}), op(x, mask=mask))


GPU = {
    "soft-capping": ({"softcap": 2.0}, "", (2, 300, 300)),
    "soft-capping, window": ({"softcap": 2.0, "window": 70}, "", (2, 300, 300)),
    "ALiBi": ({"alibi": True}, "", (2, 300, 300)),
    "ALiBi, fewer queries": ({"alibi": True, "layout": "separate"}, "", (2, 130, 300)),
    "ALiBi, one query": ({"alibi": True, "layout": "separate"}, "", (2, 1, 300)),
    "soft-capping, sinks": ({"softcap": 2.0, "sinks": True}, "", (2, 300, 300)),
    "padding": ({"softcap": 2.0, "sinks": True}, "padding", (2, 300, 300)),
    "additive": ({"softcap": 2.0, "alibi": True}, "additive", (2, 300, 300)),
    "sequences": ({"softcap": 2.0}, "sequences", (1, 300, 300)),
    "one block": ({"softcap": 2.0}, "", (1, 60, 60)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GPU)
def test_numbers_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    arguments, keyword, size = GPU[name]
    op = fill(DotProductAttention(4, 2, **arguments, kernel="flex")).to("cuda", dtype)
    xs = [t.to("cuda", dtype) for t in inputs_of(op, *size)]
    given = {k: t.cuda() if isinstance(t, Tensor) else t for k, t in words(keyword, *size).items()}
    dy = torch.randn(size[0], size[1], 4 * 16, device="cuda")
    check_numbers(op, xs, given, dy)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 60, 64, 80, 128, 192, 256])
def test_head_sizes_compile_on_a_gpu(head_dim: int) -> None:
    """And nothing recompiles for another batch and length, nor in a graph that is captured."""
    op = DotProductAttention(4, 2, softcap=5.0, kernel="flex")
    dtype = torch.bfloat16
    for batch, length in ((2, 300), (3, 1000)):
        with torch.compiler.set_stance("default" if length == 300 else "fail_on_recompile"):
            x = torch.randn(batch, length, 8 * head_dim, device="cuda", dtype=dtype)
            x.requires_grad_()
            y = op(x)
            (dx,) = torch.autograd.grad(y.sum(), x)
        want = DotProductAttention(4, 2, softcap=5.0, kernel="blockwise")(x)
        (of_want,) = torch.autograd.grad(want.sum(), x)
        for ours, theirs in ((y, want), (dx, of_want)):
            assert (ours - theirs).float().norm() < 2e-2 * theirs.float().norm()


@pytest.mark.gpu
def test_compiled_again_after_a_reset_on_a_gpu() -> None:
    op = DotProductAttention(4, 2, softcap=5.0, kernel="flex")
    x = torch.randn(2, 300, 8 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (want,) = torch.autograd.grad(op(x).sum(), x)
    torch.compiler.reset()
    (dx,) = torch.autograd.grad(op(x).sum(), x)
    assert (dx - want).float().norm() < 1e-2 * want.float().norm()  # other sizes of blocks


@pytest.mark.gpu
def test_replayed_on_a_gpu() -> None:
    torch.manual_seed(0)
    model = Sequential(DotProductAttention(4, 2, softcap=5.0, kernel="flex"))
    x = torch.randn(2, 300, 8 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    want = torch.autograd.grad(model(x).sum(), x)
    with opfuser.replay("on"):
        for _ in range(6):
            got = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_what_a_gpu_takes_without_being_asked() -> None:
    for arguments in ({"softcap": 5.0}, {"alibi": True}):
        op = DotProductAttention(4, 2, **arguments)  # type: ignore[arg-type]
        op(torch.randn(2, 300, 8 * 64, device="cuda", dtype=torch.bfloat16))
        assert op.last_choice is not None
        assert op.last_choice.kernel in ("flash_attn", "flex")
        op(torch.randn(2, 300, 8 * 64, device="cuda"))
        assert op.last_choice.kernel == "blockwise"
        assert "taken for fp16 and bf16, not for torch.float32" in str(op.last_choice)


@pytest.mark.gpu
def test_compiled_with_inductor_on_a_gpu() -> None:
    torch.compiler.reset()
    for arguments, length in (
        ({"softcap": 5.0}, 300),
        ({"alibi": True}, 301),
        ({"softcap": 1.0}, 64),
    ):
        model = Sequential(DotProductAttention(4, 2, **arguments))  # type: ignore[arg-type]
        x = torch.randn(2, length, 8 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        compiled: Any = torch.compile(model, fullgraph=True, dynamic=False)
        found = [torch.autograd.grad(call(x).sum(), x)[0].float() for call in (compiled, model)]
        assert (found[0] - found[1]).norm() < 1e-2 * found[1].norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes_are_those_of_what_is_given(dtype: torch.dtype) -> None:
    x = Heads(*(torch.zeros(1, 2, n, 16, dtype=dtype) for n in (4, 9, 9)))
    same = Heads(*(torch.zeros(1, 2, 9, 16, dtype=dtype) for _ in range(3)))
    calls = [
        (x, Call(True, 1.0, slopes=alibi_slopes(2, CPU))),
        (same, Call(False, 1.0, start=torch.tensor(3), mask=torch.zeros(1, 1, 9, 9).double())),
        (same, Call(True, 1.0, mask=torch.ones(1, 1, 1, 9, dtype=torch.bool))),
        (same, Call(True, 1.0, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32), max_seqlen=9)),
    ]
    for heads, call in calls:
        form = flex.form_of(heads, call)
        given = flex.given_of(heads, call, form)
        want = tuple(None if t is None else t.dtype for t in given)
        assert flex.dtypes_of(heads, call, form) == want
