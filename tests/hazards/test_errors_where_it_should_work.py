"""Hazards 11 to 13: meta devices, second backwards and unusual shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, close, fill, leaf, rand


class Plain(nn.Module):
    """The torch.nn twin of ``block``, with the same names of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.RMSNorm(8, eps=1e-5, **F64),
            nn.Linear(8, 24, **F64),
            nn.Identity(),
            nn.Linear(12, 8, **F64),
            nn.LayerNorm(8, **F64),
            nn.GELU(approximate="tanh"),
            nn.Linear(8, 5, bias=False, **F64),
        )

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        norm, up, _, down, norm2, gelu, out = self.layers
        a = up(norm(x))
        a = down(F.silu(a[..., :12]) * a[..., 12:]) + h
        return out(gelu(norm2(a)))


def block(**kwargs: object) -> of.Sequential:
    kw = {**F64, **kwargs}
    return of.Sequential(
        {
            "0": of.RMSNorm(8, **kw),
            "1": of.Linear(8, 24, **kw),
            "2": of.SwiGLU(),
            "3": of.Linear(12, 8, **kw),
            "add": of.AddExtraInput(),
            "4": of.LayerNorm(8, **kw),
            "5": of.GELU(),
            "6": of.Linear(8, 5, bias=False, **kw),
        }
    )


def pair() -> tuple[of.Sequential, Plain]:
    ours, plain = block(), fill(Plain())
    ours.load_state_dict(plain.layers.state_dict())
    return ours, plain


def compare(
    ours: of.Sequential, plain: Plain, x: Tensor, h: Tensor, dy: Tensor, *, root: Tensor
) -> None:
    x64, h64, root64 = x.detach().clone(), leaf(h), None
    y = ours(x, h)
    if root is x:
        x64.requires_grad_()
    else:  # x is a view of root: replay the view
        root64 = leaf(root)
        x64 = torch.as_strided(root64, x.shape, x.stride(), x.storage_offset())
    want = plain(x64, h64)
    close(y, want)
    assert y.shape == want.shape
    y.backward(dy)
    want.backward(dy)
    close(root.grad, (x64 if root64 is None else root64).grad)
    close(h.grad, h64.grad)
    for (name, p), q in zip(ours.named_parameters(), plain.layers.parameters()):
        assert p.grad is not None, name
        close(p.grad, q.grad)


@pytest.mark.parametrize("how", ["to_empty", "alias", "assign"])
@pytest.mark.parametrize("touched", [False, True])
def test_hazard_11_meta_device_then_materialised_then_backward(how: str, touched: bool) -> None:
    model = block(device="meta")
    assert all(p.is_meta for p in model.parameters())
    if touched:
        shape = model(torch.empty(3, 8, device="meta"), torch.empty(3, 8, device="meta")).shape
        assert shape == (3, 5)
    plain = fill(Plain())
    if how == "to_empty":
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert all(torch.isfinite(p).all() for p in model.parameters())
        plain.layers.load_state_dict(model.state_dict())
    elif how == "alias":
        real = dict(plain.layers.named_parameters())
        for name, _ in list(model.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            setattr(
                model.get_submodule(owner), attribute, nn.Parameter(real[name].detach().clone())
            )
    else:
        state = {k: v.clone() for k, v in plain.layers.state_dict().items()}
        model.load_state_dict(state, assign=True)
    x, h = rand(3, 8, grad=True), rand(3, 8, grad=True)
    compare(model, plain, x, h, rand(3, 5), root=x)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: of.BasicLinear(4, 3, device=d),
        lambda d: of.Linear(4, 3, device=d),
        lambda d: of.Bias(4, device=d),
        lambda d: of.RMSNorm(4, device=d),
        lambda d: of.RMSNorm(4, device=d, zero_centered_gamma=True),
        lambda d: of.LayerNorm((2, 2), device=d),
        lambda d: of.GroupedLinear(2, 4, 3, device=d),
    ],
)
def test_hazard_11_reset_parameters_gives_what_construction_gives(
    make: Callable[[str], nn.Module],
) -> None:
    torch.manual_seed(3)
    direct = make("cpu")
    late = make("meta").to_empty(device="cpu")
    torch.manual_seed(3)
    late.reset_parameters()
    for (name, want), (other, got) in zip(direct.named_parameters(), late.named_parameters()):
        assert name == other
        assert torch.equal(got, want)
        assert got.requires_grad


def test_hazard_12_second_backward_with_retain_graph() -> None:
    ours, plain = pair()
    x, h, dy = rand(3, 8, grad=True), rand(3, 8, grad=True), rand(3, 5)
    y = ours(x, h)
    x64, h64 = leaf(x), leaf(h)
    want = plain(x64, h64)
    for keep in (True, True, False):
        # Different gradients, so that a remembered result would be noticed.
        y.backward(dy, retain_graph=keep)
        want.backward(dy, retain_graph=keep)
        dy = dy * 2
        close(x.grad, x64.grad)
        close(h.grad, h64.grad)
        for p, q in zip(ours.parameters(), plain.parameters()):
            close(p.grad, q.grad)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


def test_hazard_12_gradients_of_two_losses() -> None:
    ours, plain = pair()
    x, h = rand(3, 8, grad=True), rand(3, 8)
    y, x64 = ours(x, h), leaf(x)
    want = plain(x64, h)
    for row in range(3):
        (got,) = torch.autograd.grad(y[row].sum(), x, retain_graph=True)
        (expected,) = torch.autograd.grad(want[row].sum(), x64, retain_graph=True)
        close(got, expected)


@pytest.mark.parametrize(
    "rows", [(0,), (1,), (7,), (), (2, 3), (0, 3), (3, 0), (1, 1, 5), (129,)], ids=str
)
def test_hazard_13_any_number_of_rows(rows: tuple[int, ...]) -> None:
    ours, plain = pair()
    x, h = rand(*rows, 8, grad=True), rand(*rows, 8, grad=True)
    compare(ours, plain, x, h, rand(*rows, 5), root=x)
    if 0 in rows:
        assert all(not p.grad.any() for p in ours.parameters())  # type: ignore[union-attr]


def _inputs() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "transposed": lambda t: t[:8, :6].t(),
        "every other row": lambda t: t[::2, :8],
        "every other column": lambda t: t[:6, ::2],
        "offset": lambda t: t[3:9, 5:13],
        "expanded rows": lambda t: t[2, :8].expand(6, 8),
        "expanded columns": lambda t: t[:6, :1].expand(6, 8),
        "permuted": lambda t: t[:12, :16].reshape(12, 2, 8).permute(1, 0, 2),
    }


@pytest.mark.parametrize("view", _inputs())
def test_hazard_13_non_contiguous_and_expanded_inputs(view: str) -> None:
    ours, plain = pair()
    base = rand(12, 16, grad=True)
    x = _inputs()[view](base)
    h = rand(*x.shape, grad=True)
    before = base.detach().clone()
    compare(ours, plain, x, h, rand(*x.shape[:-1], 5), root=base)
    assert torch.equal(base, before)


@pytest.mark.parametrize("kind", ["expanded scalar", "expanded row", "transposed", "strided"])
def test_hazard_13_non_contiguous_and_expanded_gradients(kind: str) -> None:
    ours, plain = pair()
    x, h = rand(6, 8, grad=True), rand(6, 8, grad=True)
    dy = {
        "expanded scalar": rand(1, 1).expand(6, 5),
        "expanded row": rand(1, 5).expand(6, 5),
        "transposed": rand(5, 6).t(),
        "strided": rand(12, 10)[::2, ::2],
    }[kind]
    compare(ours, plain, x, h, dy, root=x)


@pytest.mark.parametrize("sizes", [[0, 5, 0], [5, 0, 0], [0, 0, 0], [1, 3, 1]], ids=str)
def test_hazard_13_empty_experts(sizes: list[int]) -> None:
    op = fill(of.GroupedLinear(3, 8, 4, **F64))
    x = rand(sum(sizes), 8, grad=True)
    dy = rand(sum(sizes), 4)
    y = of.Sequential(op)(x, torch.tensor(sizes))
    y.backward(dy)
    x64 = leaf(x)
    weights = [leaf(getattr(op, f"weight{g}")) for g in range(3)]
    biases = [leaf(getattr(op, f"bias{g}")) for g in range(3)]
    want = torch.cat([F.linear(r, w, b) for r, w, b in zip(x64.split(sizes), weights, biases)])
    want.backward(dy)
    close(y, want)
    close(x.grad, x64.grad)
    for g in range(3):
        close(getattr(op, f"weight{g}").grad, weights[g].grad)
        close(getattr(op, f"bias{g}").grad, biases[g].grad)
