"""What the reader explains, and the reasons for which it keeps a module."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser.reading import grammar
from opfuser.reading import operations as read
from opfuser.reading.construction import build
from opfuser.reading.kept import KeptError
from opfuser.reading.operations import (
    Activation,
    Called,
    Dropout,
    Gated,
    Norm,
    Parallel,
    Residual,
    Scale,
    Times,
)
from opfuser.reading.tracer import trace

from .recomputed import (
    Example,
    assert_equal_steps,
    assert_recomputed,
    called_in,
    operations_in,
    read_of,
)

SIZE = 8


class Computes(nn.Module):
    """A module whose forward is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.up, self.gate, self.down = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.wide = nn.Linear(SIZE, 2 * SIZE)
        self.norm, self.drop = nn.LayerNorm(SIZE), nn.Dropout(0.5)
        self.w, self.b = nn.Parameter(torch.randn(SIZE)), nn.Parameter(torch.randn(SIZE))
        self.odd = Odd()

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Odd(nn.Module):
    """What no rule explains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sin()


def example_of(function: Callable[..., Any], dtype: torch.dtype = torch.float64) -> Example:
    x = torch.randn(3, 5, SIZE, dtype=dtype, requires_grad=True)
    return Example(Computes(function).to(dtype), (x,))


def operations_of(function: Callable[..., Any]) -> tuple[read.Operation, ...]:
    return assert_recomputed(example_of(function)).operations


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


NORMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Norm]] = {
    "in any order": (lambda m, x: m.w * rms(x), Norm(False, (SIZE,), 1e-6, "w")),
    "without weight": (lambda m, x: rms(x, 0.1), Norm(False, (SIZE,), 0.1)),
    "1 + weight": (lambda m, x: (1 + m.w) * rms(x), Norm(False, (SIZE,), 1e-6, "w", None, True)),
    "by a root": (
        lambda m, x: x / (x.square().mean((-1,), keepdim=True) + 1e-6).sqrt() * m.w,
        Norm(False, (SIZE,), 1e-6, "w"),
    ),
    "by a power": (
        lambda m, x: x * ((x * x).mean(2, True) + 1e-6) ** -0.5 * m.w,
        Norm(False, (SIZE,), 1e-6, "w"),
    ),
    "by a variance": (
        lambda m, x: (
            (x - x.mean(-1, keepdim=True))
            * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6)
            * m.w
            + m.b
        ),
        Norm(True, (SIZE,), 1e-6, "w", "b"),
    ),
    "with a mean twice": (
        lambda m, x: (
            m.w
            * (x - x.mean(-1, keepdim=True))
            / ((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        ),
        Norm(True, (SIZE,), 1e-6, "w"),
    ),
    "layer_norm of 1 + weight": (
        lambda m, x: F.layer_norm(x, (SIZE,), m.w + 1, m.b, 0.1),
        Norm(True, (SIZE,), 0.1, "w", "b", True),
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_read_however_it_is_written(name: str) -> None:
    function, norm = NORMS[name]
    assert operations_of(function) == (norm,)


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Activation]] = {
    "silu": (lambda x: torch.sigmoid(x) * x, Activation("silu")),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), Activation("quick_gelu")),
    "squared relu": (lambda x: F.relu(x) ** 2, Activation("squared_relu")),
    "gelu": (lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)), Activation("gelu")),
    "gelu by tanh": (
        lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        Activation("gelu_tanh"),
    ),
    "gelu by tanh, as fast": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
        Activation("gelu_tanh"),
    ),
    "softplus": (lambda x: F.softplus(x, 2.0), Activation("softplus", (2.0, 20.0))),
    "tanh": (torch.tanh, Activation("tanh")),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_read_however_it_is_written(name: str) -> None:
    function, activation = ACTIVATIONS[name]
    operations = assert_recomputed(example_of(lambda m, x: function(x))).operations
    assert operations == (activation,)


def test_an_activation_of_a_sum_with_an_adapter_is_read() -> None:
    def written(m: Any, x: Tensor) -> Tensor:
        y = m.up(x) + 0.5 * F.linear(F.linear(x, m.down.weight), m.gate.weight)
        return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))

    *_, activation = operations_of(written)
    assert activation == Activation("gelu_tanh")


def test_gates_are_read_of_two_projections_and_of_one() -> None:
    (_, gated, _) = operations_of(lambda m, x: m.down(m.up(x) * F.silu(m.gate(x))))
    assert gated == Gated(Activation("silu"))
    _, gated = operations_of(
        lambda m, x: torch.mul(*map(_activated, m.wide(x).chunk(2, -1), (1, 0)))
    )
    assert gated == Gated(Activation("relu"))
    _, reorder, gated = operations_of(
        lambda m, x: torch.mul(*map(_activated, m.wide(x).chunk(2, -1), (0, 1)))
    )
    assert (reorder.blocks, gated) == ((1, 0), Gated(Activation("relu")))
    _, reorder, gated = operations_of(
        lambda m, x: torch.mul(
            *map(_activated, m.wide(x).unflatten(-1, (-1, 2)).unbind(-1), (1, 0))
        )
    )
    assert (reorder.size, gated) == (1, Gated(Activation("relu")))
    _, gated = operations_of(
        lambda m, x: F.silu(m.gate(x).clamp(max=0.25)) * (m.up(x).clamp(-0.25, 0.25) + 1)
    )
    assert gated == Gated(Activation("silu"), 0.25, 1.0)


def _activated(x: Tensor, active: int) -> Tensor:
    return F.relu(x) if active else x


def test_branches_share_what_comes_before_them() -> None:
    shared = lambda m, x: x + m.up(h := m.norm(x)) + m.down(F.relu(m.gate(h)))  # noqa: E731
    (residual,) = operations_of(shared)
    assert isinstance(residual, Residual)
    norm, parallel = residual.branch
    assert isinstance(norm, Norm)
    assert isinstance(parallel, Parallel)
    assert len(parallel.branches) == 2


def test_a_gate_may_be_of_an_earlier_value_than_what_it_multiplies() -> None:
    times, scale, _ = operations_of(lambda m, x: m.down(F.silu(m.gate(m.norm(x))) * 2 * m.up(x)))
    assert isinstance(times, Times)
    assert scale == Scale(2.0)


@pytest.mark.parametrize("wide", [True, False])
def test_a_product_of_branches_of_which_one_may_have_one_column(wide: bool) -> None:
    example = example_of(lambda m, x: m.down(F.relu(m.up(x))) * torch.sigmoid(m.by(x)) * -2)
    example.module.by = nn.Linear(SIZE, SIZE if wide else 1).double()
    times, scale = assert_recomputed(example).operations
    assert isinstance(times, Times)
    assert scale == Scale(-2.0)


def test_branches_follow_branches() -> None:
    def gated(m: Computes, x: Tensor) -> Tensor:
        y = m.up(x) * m.gate(x)
        y = m.down(y) * m.norm(y)
        return y + (m.up(y) + (m.gate(y) + m.down(y)))

    first, second, residual = operations_of(gated)
    assert isinstance(first, Times)
    assert isinstance(second, Times)
    assert isinstance(residual, Residual)
    assert isinstance(residual.branch[0], Parallel)
    assert len(residual.branch[0].branches) == 3


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_input_that_is_added_several_times_is_not_added_once(times: int) -> None:
    def summed(m: Computes, x: Tensor) -> Tensor:
        y = (x + m.up(x)) + (x + F.relu(m.gate(x))) if times > 1 else x + m.up(x)
        return y + (x + m.down(x)) if times > 2 else y

    (residual,) = operations_of(summed)
    assert isinstance(residual, Residual)


@pytest.mark.parametrize("gate", [lambda y: y, torch.tanh])
def test_an_inverse_root_beside_two_factors_is_not_overlooked(gate: Any) -> None:
    def divided(m: Computes, x: Tensor) -> Tensor:
        return m.up(x) * gate(m.gate(x)) / ((x * x).mean(-1, keepdim=True) + 1.0).sqrt()

    with pytest.raises(KeptError, match="computes div"):
        read_of(example_of(divided))


@pytest.mark.parametrize("flipped", [False, True])
def test_a_column_of_an_input_scales_rows(flipped: bool) -> None:
    def scaled(m: Computes, x: Tensor) -> Tensor:
        pair = m.column(x).sigmoid(), m.up(x)
        return 3 * pair[flipped] * pair[not flipped]

    example = example_of(scaled)
    example.module.column = nn.Linear(SIZE, 1).double()
    times, _ = assert_recomputed(example).operations
    assert isinstance(times, Times)
    assert isinstance(times.branches[0][-1], Activation)


def test_a_factor_a_bias_and_a_scale_of_columns_are_read() -> None:
    assert operations_of(lambda m, x: (x * 3 / 2 + m.b) * m.w) == (
        read.Scale(1.5),
        read.Bias("b", SIZE),
        read.ColumnScale("w"),
    )


def test_dropout_is_read_where_it_is_active() -> None:
    drops = lambda m, x: m.up(m.drop(x))  # noqa: E731
    assert read_of(example_of(drops)).operations[0] == Dropout(0.5)
    example = example_of(drops)
    example.module.eval()
    assert len(assert_recomputed(example).operations) == 1


def test_a_child_that_is_not_explained_is_called() -> None:
    reading = assert_recomputed(example_of(lambda m, x: x + m.odd(m.up(x))), whole=False)
    assert [op for op in operations_in(reading.operations) if isinstance(op, Called)] == [
        Called("odd", SIZE, SIZE, "computes sin in 'odd'")
    ]
    reading = assert_recomputed(example_of(lambda m, x: F.silu(m.gate(x)) * m.odd(x)), whole=False)
    assert called_in(reading) == ["odd"]


KEPT: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "an unknown operation": (lambda m, x: m.up(x).sin(), "computes sin"),
    "a clamp": (lambda m, x: m.up(m.up(x).clamp(-1, 1)), "computes clamp"),
    "a constant": (lambda m, x: m.up(x) + 1, "computes add"),
    "another dtype": (
        lambda m, x: m.up(x.half().double()),
        "rounds to float16 by half",
    ),
    "writing in place": (
        lambda m, x: (m.w.detach().zero_(), m.up(x))[1],
        "writes in place by zero_",
    ),
    "two tensors": (lambda m, x: (m.up(x), m.gate(x)), "returns 2 tensors"),
    "other rows": (lambda m, x: m.up(x).mean(1), "computes mean"),
    "rows in another order": (lambda m, x: m.up(x.flip(1)), "computes flip"),
    "a child that is called with other rows": (
        lambda m, x: x + m.odd(x.flatten(0, 1)).view(x.shape),
        "calls a child with, other rows than those of its input",
    ),
    "another shape": (lambda m, x: m.up(x).flatten(0, 1), "returns another dtype or shape"),
    "a gradient that ends": (lambda m, x: m.up(x.detach()), "computes detach"),
    "a weight that is computed": (
        lambda m, x: F.linear(x, m.up.weight + m.down.weight),
        "computes linear",
    ),
    "dropout that is read twice": (
        lambda m, x: x + m.up(h := m.drop(x)) + m.down(F.relu(h)) + m.gate(x),
        "reads the result of dropout, or of a child that is called, twice",
    ),
    "a broadcast sum": (lambda m, x: m.up(x) + m.up(x[:1]), "broadcasts by add"),
    "gates by GELU": (
        lambda m, x: F.gelu(m.gate(x)) * m.up(x),
        "opfuser has no operation that gates by gelu",
    ),
    "a norm with eps outside of the root": (
        lambda m, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * m.w,
        "computes",
    ),
    "a norm of something else": (
        lambda m, x: m.up(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        "computes",
    ),
    "a norm by a number over a mean square": (
        lambda m, x: x * (0.5 / (x.pow(2).mean(-1, keepdim=True) + 1e-6)) * m.w,
        "computes",
    ),
    "an activation by a number over a value": (lambda m, x: m.up(-2 / F.relu(x)), "computes"),
    "an unbiased variance": (
        lambda m, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 0.1).sqrt(),
        "computes",
    ),
    "a sum weighted by alpha": (lambda m, x: torch.add(x, m.up(x), alpha=2), "computes add"),
}


def test_a_child_is_called_in_its_own_dtype_alone() -> None:
    """Its argument and its result are of the stream's dtype, or it would get or return another."""

    class Widened(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().sin()

    for function in (
        lambda m, x: x + m.odd(m.up(x).float()).to(x.dtype),
        lambda m, x: x + m.widened(m.up(x)).to(x.dtype),
    ):
        example = example_of(function)
        example.module.add_module("widened", Widened())
        lower = Example(example.module.bfloat16(), (example.args[0].bfloat16(),))
        with pytest.raises(KeptError, match="computes sin"):
            read_of(lower)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_explained_is_the_reason_to_keep_a_module(name: str) -> None:
    function, reason = KEPT[name]
    example = example_of(function)
    with pytest.raises(KeptError) as kept:
        build(read_of(example), example.module)
    assert reason in kept.value.reason


def test_bits_that_are_read_as_another_dtype_are_not_passed() -> None:
    with pytest.raises(KeptError, match="rounds to float16 by view"):
        read_of(example_of(lambda m, x: m.up(x.view(torch.float16).to(x.dtype)), torch.bfloat16))


def under_autocast(function: Callable[..., Any]) -> tuple[read.Reading, Example]:
    example = example_of(function, torch.float32)
    return grammar.read(trace(*example).dataflow, torch.bfloat16), example


def test_autocast_rounds_where_the_module_does() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        reading, example = under_autocast(lambda m, x: x + m.down(F.silu(m.gate(m.norm(x)))))
        assert called_in(reading) == []
        got = build(reading, example.module)(example.inputs())
        want = example.module(*example.args)
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
        reading, _ = under_autocast(lambda m, x: m.norm(x + m.up(x)))
        assert called_in(reading) == ["norm"]
        reason = "keeps torch.float32 under autocast after mul"
        with pytest.raises(KeptError, match=reason):
            under_autocast(lambda m, x: rms(x) * m.w)


def test_parameters_that_are_exchanged_are_followed() -> None:
    example = example_of(lambda m, x: m.down(F.silu(m.gate(h := rms(x))) * m.up(h)))
    module = example.module
    built = build(read_of(example), module)
    for linear in (module.up, module.down):
        linear.weight = nn.Parameter(torch.randn_like(linear.weight))
    built.follow()
    assert_equal_steps(example, built)
    module.half()
    built.follow()
    assert {p.dtype for p in built.sequence.parameters()} == {torch.float16}


def test_a_child_with_hooks_is_called() -> None:
    example = example_of(lambda m, x: m.down(m.up(x)))
    example.module.up.register_forward_hook(lambda module, args, output: output * 2)
    reading = assert_recomputed(example, whole=False)
    assert called_in(reading) == ["up"]


class Importer:
    """Finds no module, and reads what cannot be compared."""

    def find_spec(self, name: str, *others: Any) -> None:
        assert NOTHING_TO_COMPARE is not None


NOTHING_TO_COMPARE = iter(())


def test_an_import_is_no_part_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def imports(m: Any, x: Tensor) -> Tensor:
        import colorsys  # noqa: PLC0415 - within the forward

        assert colorsys.ONE_SIXTH
        y: Tensor = m.up(x)
        return y

    monkeypatch.setattr(sys, "meta_path", [Importer(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert len(operations_of(imports)) == 1
