"""Runs a sequence with its forward and its backward fused and not: four pairings, one reference.

Joint fusions are off, for they would take the operations before: tests/fused/joint.py is for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.engine.plan import Plan, expand
from opfuser.op import BasicOperation

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

PAIRINGS = [(True, True), (True, False), (False, True), (False, False)]


class Layout(NamedTuple):
    """Leading dimensions of the input, and how inputs and gradients lie in memory."""

    rows: tuple[int, ...] = (5,)
    inputs: str = "contiguous"
    grads: str = "contiguous"


LAYOUTS = {
    "matrix": Layout((5,)),
    "vector": Layout(()),
    "batched": Layout((2, 3)),
    "one row": Layout((1,)),
    "zero rows": Layout((0,)),
    "zero rows in a batch": Layout((2, 0)),
    "many rows": Layout((131,)),
    "strided": Layout((2, 3), "strided", "strided"),
    "transposed": Layout((4, 3), "transposed", "transposed"),
    "expanded": Layout((4,), "expanded", "expanded"),
    "constant gradient": Layout((4,), grads="constant"),
}


class Case(NamedTuple):
    """A sequence, the widths of what it takes, and how often each fusion of one pass matches."""

    ops: Callable[[], list[nn.Module]]
    width: int
    extras: tuple[int, ...] = ()
    forward: dict[str, int] = {}  # noqa: RUF012 - never changed
    backward: dict[str, int] = {}  # noqa: RUF012


def tensor(shape: Sequence[int], dtype: torch.dtype, lies: str = "contiguous") -> Tensor:
    """Random values of that shape, in that memory layout."""
    shape = tuple(shape)
    if lies == "strided":
        wide = torch.randn([2 * n for n in shape]).to(dtype)
        return wide[tuple(slice(None, None, 2) for _ in shape)]
    if lies == "transposed":
        return torch.randn(shape[::-1]).to(dtype).permute(*range(len(shape))[::-1])
    if lies == "expanded":
        return torch.randn(1, *shape[1:]).to(dtype).expand(shape)
    if lies == "constant":
        return torch.randn(()).to(dtype).expand(shape)
    return torch.randn(shape).to(dtype)


def build(case: Case, dtype: torch.dtype) -> opfuser.Sequential:
    """The sequence in that dtype with random parameters."""
    seq = opfuser.Sequential(*case.ops()).to(dtype)
    with torch.no_grad():
        for p in seq.parameters():
            p.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0))
    return seq


@contextmanager
def only(*, forward: bool = True, backward: bool = True) -> Iterator[None]:
    """Switches off joint fusions, and those of the passes that are not asked for."""
    wanted = {"forward": forward, "backward": backward, "joint": False}
    with ExitStack() as stack:
        for info in opfuser.fusions():
            if not wanted[info.stage]:
                stack.enter_context(opfuser.disable(info.name))
        yield


class Result(NamedTuple):
    outputs: list[Tensor]
    grads: list[Tensor | None]


def grads_of(outputs: Sequence[Tensor], douts: Sequence[Tensor], wrt: Sequence[Tensor]) -> Result:
    chosen = [(y, dy) for y, dy in zip(outputs, douts) if y.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in chosen], wrt, [dy for _, dy in chosen], allow_unused=True
    )
    return Result([y.detach() for y in outputs], list(grads))


def as_list(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def reference(
    seq: opfuser.Sequential, inputs: Sequence[Tensor], douts: Sequence[Tensor | None]
) -> Result:
    """Outputs and all gradients in float64, by the references of the operations."""
    twin = copy.deepcopy(seq).double()
    x, *extras = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    wrt = [t for t in (x, *extras, *twin.parameters()) if t.requires_grad]
    left, outs = iter(extras), []
    y = x
    for op in basic_ops(twin):
        out = as_list(op.reference(y, *[next(left) for _ in range(op.num_extra_inputs)]))
        y = out[0]
        outs += out[1:]
    outs = [y, *outs]
    given = [(o, d.double()) for o, d in zip(outs, douts) if d is not None]
    return grads_of([o for o, _ in given], [d for _, d in given], wrt)._replace(
        outputs=[o.detach() for o in outs]
    )


def basic_ops(seq: opfuser.Sequential) -> list[BasicOperation]:
    return [basic for op in seq for basic in expand(op)]  # type: ignore[arg-type]


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return (got.double() - want.double()).abs().max().item() if got.numel() else 0.0


def assert_close(got: Result, separate: Result, exact: Result, eps: float, what: str) -> None:
    """``got`` errs at most twice as much as the separate operations do, and a little for luck."""
    # In float64 the truth is hardly more exact, so an error says little.
    floor = eps * (256 if eps == torch.finfo(torch.float64).eps else 2)
    for kind, gs, ps, es in zip(("output", "gradient"), got, separate, exact):
        for n, three in enumerate(zip(gs, ps, es)):
            # A gradient that does not arrive is zero: we may say so, autograd says None.
            some = next((t for t in three if t is not None), torch.zeros(()))
            g, p, e = (torch.zeros_like(some) if t is None else t for t in three)
            assert g.isfinite().all(), f"{what}: {kind} {n}"
            allowed = 2 * error(p, e) + floor * magnitude(e)
            assert error(g, e) <= allowed, f"{what}: {kind} {n} is off by {error(g, e)} > {allowed}"


def magnitude(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


def assert_unchanged(tensors: Sequence[Tensor], before: Sequence[Tensor], what: str) -> None:
    for t, b in zip(tensors, before):
        assert torch.equal(t, b), f"{what}: a tensor of the caller was written"


def assert_apart(grads: Sequence[Tensor], others: Sequence[Tensor], what: str) -> None:
    """No gradient of a parameter shares memory with another gradient, or one that came in."""
    places = [g.untyped_storage().data_ptr() for g in (*grads, *others) if g.numel()]
    own = [g.untyped_storage().data_ptr() for g in grads if g.numel()]
    assert all(places.count(place) == 1 for place in own), f"{what}: gradients share memory"


def check_pairings(
    case: Case,
    dtype: torch.dtype,
    layout: Layout = LAYOUTS["matrix"],
    *,
    input_grad: bool = True,
    frozen: Sequence[str] = (),
    no_grad_for: Sequence[int] = (),
    autocast: torch.dtype | None = None,
    input_dtype: torch.dtype | None = None,
    extra_dtype: torch.dtype | None = None,
) -> None:
    """Holds all pairings of a case to a float64 reference.

    Args:
        frozen: names of parameters that need no gradient.
        no_grad_for: which extra outputs get no gradient.
    """
    seq = build(case, dtype)
    for name in frozen:
        seq.get_parameter(name).requires_grad_(False)
    x = tensor((*layout.rows, case.width), input_dtype or dtype, layout.inputs)
    x.requires_grad_(input_grad)
    extras = [
        tensor((*layout.rows, width), extra_dtype or dtype, layout.inputs).requires_grad_()
        for width in case.extras
    ]
    inputs = [x, *extras]
    wrt = [t for t in (*inputs, *seq.parameters()) if t.requires_grad]
    lower = torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)
    with lower, only():
        plan = seq.plan(*inputs)
        outs = as_list(seq(*inputs))
    assert plan.fused("forward") == case.forward
    assert plan.fused("backward") == case.backward
    douts = [
        None if n - 1 in no_grad_for else tensor(o.shape, o.dtype, layout.grads)
        for n, o in enumerate(outs)
    ]
    exact = reference(seq, inputs, douts)
    results = {}
    for pairing in PAIRINGS:
        results[pairing] = run(seq, inputs, wrt, douts, pairing, autocast)
    separate = results[False, False]
    coarsest = max(torch.finfo(t.dtype).eps for t in (*inputs, *outs, *wrt))
    for pairing, got in results.items():
        assert_close(got, separate, exact, coarsest, f"forward and backward fused: {pairing}")
        for mine, other in zip((*got.outputs, *got.grads), (*separate.outputs, *separate.grads)):
            assert (mine is None) == (other is None)
            assert mine is None or mine.dtype == other.dtype


def run(
    seq: opfuser.Sequential,
    inputs: Sequence[Tensor],
    wrt: Sequence[Tensor],
    douts: Sequence[Tensor | None],
    pairing: tuple[bool, bool],
    autocast: torch.dtype | None,
) -> Result:
    """One pairing; the caller's tensors must survive it, and gradients lie apart."""
    what = f"forward and backward fused: {pairing}"
    given = [d for d in douts if d is not None]
    mine = [*inputs, *seq.parameters(), *given]
    before = [t.detach().clone() for t in mine]
    with only(forward=pairing[0], backward=pairing[1]):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            outs = as_list(seq(*inputs))
        got = grads_of([o for o, d in zip(outs, douts) if d is not None], given, wrt)._replace(
            outputs=[o.detach() for o in outs]
        )
    assert_unchanged(mine, before, what)
    parameters = {id(p) for p in seq.parameters()}
    own = [g for g, t in zip(got.grads, wrt) if g is not None and id(t) in parameters]
    rest = [g for g, t in zip(got.grads, wrt) if g is not None and id(t) not in parameters]
    assert_apart(own, [*rest, *given], what)
    for g, t in zip(got.grads, wrt):
        assert g is None or (g.dtype == t.dtype and g.shape == t.shape)
    return got


def with_subclass(ops: list[Any], at: int) -> list[nn.Module]:
    """The operations with that one of a subclass, which a fusion must leave alone."""
    ops[at].__class__ = type("Mine", (type(ops[at]),), {})
    return ops


def stopped_by(plan: Plan, name: str) -> str | None:
    """The code that kept the pattern of a fusion from fitting where most of it did."""
    miss = plan.record(name).near_miss
    return None if miss is None else miss.stopped_by.code


def plan_of(*ops: nn.Module, width: int = 6, extras: Sequence[int] = (), grad: bool = True) -> Plan:
    """The plan of a sequence for a float32 input of that width."""
    x = torch.randn(3, width, requires_grad=grad)
    return opfuser.Sequential(*ops).plan(x, *[torch.randn(3, width) for width in extras])


def refusal_codes(plan: Plan, name: str) -> list[str]:
    return [why.code for _, why in plan.record(name).refusals]


def what(error: pytest.ExceptionInfo[Exception]) -> str:
    """The text of an error without the step that it came to, which is another one when fused."""
    text, place = str(error.value).split(" It came to op ")
    assert place.endswith(" of the sequence.")
    return text
