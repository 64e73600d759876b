"""A vocabulary divided among two ranks, against the same on one: all checks in one start."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from opfuser import BasicLinear, CrossEntropy, Embedding, Linear, Sequential
from opfuser.errors import ArgumentError, InputError, NotSupportedError
from tests.distributed.ranks import Checks, Outcomes, assert_passed
from tests.fused.losses import Largest, chunked

pytestmark = pytest.mark.distributed

RANKS, DIM = 2, 6
CHECKS = check = Checks()
F64: Any = {"dtype": torch.float64}


def part(full: Tensor, rank: int, dim: int = 0) -> Tensor:
    return full.chunk(RANKS, dim)[rank].contiguous()


def alike(make: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``make`` returns; what is drawn behind it is the same on all ranks."""
    with torch.random.fork_rng():
        return make(*args, **kwargs)


def same(ours: Tensor | None, exact: Tensor | None) -> None:
    assert ours is not None
    assert exact is not None
    torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)


def embedding_check(rows: int, padding: int | None, dim: int | None, index: torch.dtype) -> None:
    def run(rank: int, ranks: int) -> None:
        how = {} if dim is None else {"sequence_parallel": True, "sequence_dim": dim}
        whole = Embedding(rows, DIM, padding_idx=padding, **F64)
        ours = alike(Embedding, rows, DIM, padding_idx=padding, tensor_parallel=True, **how, **F64)
        if padding is not None:
            mine = ours.weight.any(1)
            assert part(torch.arange(rows) != padding % rows, rank).tolist() == mine.tolist()
        with torch.no_grad():
            ours.weight.copy_(part(whole.weight, rank))
        x, dy = torch.randint(rows, (2, 4), dtype=index), torch.randn(2, 4, DIM, **F64)
        x[0, 0] = (padding or 0) % rows

        def local(t: Tensor) -> Tensor:
            return t if dim is None else part(t, rank, dim)

        y, exact = ours(x), whole(x)
        same(y, local(exact))
        y.backward(local(dy))
        exact.backward(dy)
        assert whole.weight.grad is not None
        same(ours.weight.grad, part(whole.weight.grad, rank))

    CHECKS[f"embedding {rows} {padding} {dim} {index}"] = run


embedding_check(10, None, None, torch.int64)
embedding_check(11, 2, 0, torch.int64)
embedding_check(7, -1, 1, torch.int32)
embedding_check(2, 1, None, torch.int32)


@check
def embedding_on_its_own(rank: int, ranks: int) -> None:
    op = alike(Embedding, 11, 3, tensor_parallel=True)
    assert op.weight.shape == (6 - rank, 3)
    assert repr(op) == f"Embedding(11, 3, rows {6 * rank} to {(5, 10)[rank]})"
    assert torch.equal(copy.deepcopy(op)(torch.arange(11)), op(torch.arange(11)))
    op.requires_grad_(False)
    assert not op(torch.tensor([1])).requires_grad
    assert op(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 3)


@check
def an_index_outside_of_the_table_fails(rank: int, ranks: int) -> None:
    for index in (-1, 11):
        with pytest.raises((IndexError, RuntimeError)):
            Embedding(11, 3, tensor_parallel=True)(torch.tensor([index]))


def some_targets(classes: int, *shape: int) -> Tensor:
    targets = torch.randint(classes, shape)
    targets.view(-1)[::3] = -100
    return targets


TERMS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2, "z_loss": 1e-2, "reduction": "sum"},
    {"label_smoothing": 0.1, "reduction": "none"},
]


@check
def cross_entropy(rank: int, ranks: int) -> None:
    """Of logits of both ranks, which may differ by hundreds."""
    for classes, terms in zip((10, 7, 11), TERMS):
        logits = 20 * torch.randn(2, 5, classes, **F64)
        logits[0, 0, 0] = 700
        targets = some_targets(classes, 2, 5)
        whole = CrossEntropy(**terms)
        ours = CrossEntropy(**terms, tensor_parallel=True, num_classes=classes)
        x, mine = logits.requires_grad_(), part(logits.detach(), rank, -1).requires_grad_()
        loss, exact = ours(mine, targets), whole(x, targets)
        same(loss, exact)
        dloss = torch.randn_like(exact)
        loss.backward(dloss)
        exact.backward(dloss)
        assert x.grad is not None
        same(mine.grad, part(x.grad, rank, -1))


@check
def cross_entropy_in_blocks(rank: int, ranks: int) -> None:
    x, targets = torch.randn(70, 4001, dtype=torch.bfloat16), some_targets(4001, 70)
    exact = x.double().requires_grad_()
    one = torch.nn.functional.cross_entropy(exact, targets, label_smoothing=0.1)
    one.backward()
    mine = part(x, rank, -1).requires_grad_()
    op = CrossEntropy(label_smoothing=0.1, tensor_parallel=True, num_classes=4001)
    loss = op(mine, targets)
    loss.backward()
    assert exact.grad is not None
    assert mine.grad is not None
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), one, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        mine.grad.double(), part(exact.grad, rank, -1), rtol=2**-8, atol=1e-8
    )


@check
def rows_that_do_not_count(rank: int, ranks: int) -> None:
    for rows in (0, 3):
        op = CrossEntropy(tensor_parallel=True, num_classes=5)
        x = torch.randn(rows, 3 - rank, requires_grad=True)
        loss = op(x, torch.full((rows,), -100))
        loss.backward()
        assert loss.isnan()
        assert x.grad is not None
        assert not x.grad.any()
    x = torch.randn(3, 3 - rank, requires_grad=True)
    each = CrossEntropy(reduction="none", tensor_parallel=True, num_classes=5)
    loss = each(x, torch.tensor([5, -1, 4]))
    loss.sum().backward()
    assert loss.isnan().tolist() == [True, True, False]
    assert x.grad is not None
    assert x.grad.isnan().all(1).tolist() == [True, True, False]


def head(classes: int, sequence: int | None, dtype: torch.dtype, **terms: Any) -> list[Sequential]:
    """On one rank, and on two."""
    how: Any = {} if sequence is None else {"sequence_parallel": True, "sequence_dim": sequence}
    how = {"tensor_parallel_mode": "vocabulary", "dtype": dtype, **how}
    linear = alike(BasicLinear, DIM, classes, **how)
    sliced = CrossEntropy(**terms, tensor_parallel=True, num_classes=classes)
    return [
        Sequential(BasicLinear(DIM, classes, dtype=dtype), CrossEntropy(**terms)),
        Sequential(linear, sliced),
    ]


@contextlib.contextmanager
def chunks_of(rows: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        chunked(patch, rows)
        yield


@check
def head_and_loss(rank: int, ranks: int) -> None:
    """Fused, in one chunk of rows and in four, and each on its own."""
    for classes, sequence, terms in ((10, None, TERMS[0]), (11, 1, TERMS[1]), (7, 0, TERMS[2])):
        whole, ours = head(classes, sequence, torch.float64, **terms)
        ours[0].weight = nn.Parameter(part(whole[0].weight.detach(), rank))
        x, targets = torch.randn(4, 12, DIM, **F64), some_targets(classes, 4, 12)
        given = x if sequence is None else part(x, rank, sequence)
        fused = terms.get("reduction") != "none"
        exact_x = x.clone().requires_grad_()
        exact = whole(exact_x, targets)
        dloss = torch.randn_like(exact)
        exact_dx, exact_dw = torch.autograd.grad(exact, [exact_x, whole[0].weight], dloss)
        for chunk in (12, 256):
            with chunks_of(chunk):
                mine = given.clone().requires_grad_()
                loss = ours(mine, targets)
                plan = ours.last_plan
                assert plan is not None
                assert plan.fused("forward") == ({"linear_cross_entropy": 1} if fused else {})
                dx, dw = torch.autograd.grad(loss, [mine, ours[0].weight], dloss)
                same(loss, exact)
                same(dx, exact_dx if sequence is None else part(exact_dx, rank, sequence))
                same(dw, part(exact_dw, rank))
        with torch.no_grad():
            same(ours(given, targets), exact)


@check
def head_in_half_precision(rank: int, ranks: int) -> None:
    """Errors of at most twice those of one rank with the same dtype, over three chunks of rows."""
    for dtype in (torch.bfloat16, torch.float16):
        whole, ours = head(31, None, dtype)
        ours[0].weight = nn.Parameter(part(whole[0].weight.detach(), rank))
        x, targets = torch.randn(33, DIM, dtype=dtype), some_targets(31, 33)
        exact = [t.detach().double().requires_grad_() for t in (x, whole[0].weight)]
        logits = exact[0] @ exact[1].t()
        (4 * CrossEntropy().reference(logits, targets)).backward()
        found = []
        with chunks_of(12):
            for model in (whole, ours):
                own = x.clone().requires_grad_()
                (4 * model(own, targets)).backward()
                found.append((own.grad, model[0].weight.grad))
        (dx1, dw1), (dx2, dw2) = found
        for one, two, truth in (
            (dx1, dx2, exact[0].grad),
            (part(dw1, rank), dw2, part(exact[1].grad, rank)),
        ):
            theirs, mine = ((t.double() - truth).norm() for t in (one, two))
            assert mine <= 2 * theirs + 1e-9, (dtype, mine, theirs)


@check
def logits_are_never_whole(rank: int, ranks: int) -> None:
    """Neither of all rows nor of all classes; and a rank exchanges 4 numbers a row besides dx."""
    _, ours = head(99, None, torch.float32)
    x, targets = torch.randn(120, DIM, requires_grad=True), torch.randint(99, (120,))
    gathered: list[int] = []

    class Noting(Largest):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d" and "allgather" in func.name():
                gathered.append(args[1].numel())
            return super().__torch_dispatch__(func, types, args, kwargs)

    with chunks_of(30), Noting() as largest:
        ours(x, targets).backward()
    assert gathered == [4 * 30] * 4
    assert 30 * 49 * 4 <= largest.bytes <= 30 * 50 * 4


@check
def tied_with_an_embedding(rank: int, ranks: int) -> None:
    """One parameter, a slice of the rows of the table and of the classes of the head."""
    table = Embedding(11, DIM, **F64)
    whole = Sequential(table, Linear(DIM, 11, bias=False, **F64), CrossEntropy())
    whole[1].weight = table.weight
    own = alike(Embedding, 11, DIM, tensor_parallel=True, **F64)
    linear = alike(Linear, DIM, 11, bias=False, tensor_parallel_mode="vocabulary", **F64)
    ours = Sequential(own, linear, CrossEntropy(tensor_parallel=True, num_classes=11))
    own.weight = nn.Parameter(part(table.weight.detach(), rank))
    linear.weight = own.weight
    tokens, targets = torch.randint(11, (2, 3, 4))
    loss, exact = ours(tokens, targets), whole(tokens, targets)
    same(loss, exact)
    loss.backward()
    exact.backward()
    assert table.weight.grad is not None
    same(own.weight.grad, part(table.weight.grad, rank))


@check
def heads_with_a_bias(rank: int, ranks: int) -> None:
    op = Linear(DIM, 11, tensor_parallel_mode="vocabulary", **F64)
    assert op.weight.shape == (6 - rank, DIM)
    assert op.bias.shape == (6 - rank,)
    assert op(torch.randn(3, DIM, **F64)).shape == (3, 6 - rank)


@check
def where_head_and_loss_do_not_fuse(rank: int, ranks: int) -> None:
    """Other classes, another group, or a head that is no slice: as refused as without a loss."""
    pair = dist.new_group([0, 1])
    x, targets = torch.randn(3, DIM, requires_grad=True), torch.tensor([0, 1, 2])
    for loss in (
        CrossEntropy(tensor_parallel=True, num_classes=10, tensor_parallel_group=pair),
        CrossEntropy(),
    ):
        linear = BasicLinear(DIM, 10, tensor_parallel_mode="column")
        record = Sequential(linear, loss).plan(x, targets).record("linear_cross_entropy")
        assert not record.matches
        assert "communicates right after its input-gradient GEMM" in str(record)


@check
def errors(rank: int, ranks: int) -> None:
    text = r"Every rank must have a slice .*torch\.chunk \({}\)\. Received: 1 classes, 2 ranks"
    with pytest.raises(ArgumentError, match=text.format("Embedding")):
        Embedding(1, 3, tensor_parallel=True)
    with pytest.raises(ArgumentError, match=text.format("CrossEntropy")):
        CrossEntropy(tensor_parallel=True, num_classes=1)
    with pytest.raises(ArgumentError, match=text.format("BasicLinear")):
        BasicLinear(3, 1, tensor_parallel_mode="vocabulary")
    with pytest.raises(InputError, match=r"this rank's \d of 5 classes \(CrossEntropy\)"):
        CrossEntropy(tensor_parallel=True, num_classes=5)(torch.ones(2, 5), torch.tensor([0, 1]))
    with pytest.raises(NotSupportedError, match=r"covers one rank \(Embedding\)"):
        Embedding(4, 3, tensor_parallel=True).reference(torch.tensor([1]))
    op = CrossEntropy(tensor_parallel=True, num_classes=4)
    with pytest.raises(NotSupportedError, match=r"covers one rank \(CrossEntropy\)"):
        op.reference(torch.ones(1, 2), torch.tensor([1]))
    text = "classes {} to {} of 5".format(*((0, 2), (3, 4))[rank])
    assert text in repr(CrossEntropy(tensor_parallel=True, num_classes=5))


@pytest.mark.parametrize("name", CHECKS)
def test_vocabulary_parallel(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)


def test_one_rank_holds_all() -> None:
    table = Embedding(5, 3, tensor_parallel=True, sequence_parallel=True)
    loss = CrossEntropy(tensor_parallel=True, num_classes=3)
    linear = Linear(3, 3, tensor_parallel_mode="vocabulary")
    assert table.weight.shape == (5, 3)
    assert not any(op.communicates for op in (table, loss, *linear.basic_ops))
    Sequential(table, linear, loss)(torch.tensor([1, 4]), torch.tensor([0, 2])).backward()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Embedding(5, 3, sequence_parallel=True),
            "sequence_parallel needs tensor_parallel",
        ),
        (
            lambda: Embedding(5, 3, tensor_parallel=True, sequence_dim=-1),
            r"sequence_dim must not be negative \(Embedding\)\. Received: sequence_dim=-1",
        ),
        (
            lambda: CrossEntropy(tensor_parallel=True),
            r"num_classes is the number .*\(CrossEntropy\).*num_classes=None",
        ),
        (lambda: CrossEntropy(num_classes=3), "tensor_parallel=False, num_classes=3"),
    ],
)
def test_arguments(make: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        make()
