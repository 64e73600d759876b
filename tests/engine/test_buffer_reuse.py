"""What counts as a tensor that nobody else can see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuser.core.buffer_reuse import only_reference, shares_nothing


def test_a_tensor_that_only_the_list_holds() -> None:
    assert only_reference([torch.ones(3)])
    assert only_reference((torch.ones(3),))
    assert only_reference([None, torch.ones(3)], 1)
    assert not only_reference([None])


def test_a_name_counts() -> None:
    x = torch.ones(3)
    holder = [x]
    assert not only_reference(holder)
    del x
    assert only_reference(holder)


def test_views_and_aliases_count() -> None:
    holder = [torch.ones(4)]
    for share in (lambda t: t[1:], Tensor.detach):
        alias = [share(holder[0])]
        assert not only_reference(alias)
        assert not only_reference(holder)
        alias.clear()
        assert only_reference(holder)


def test_a_view_shares_its_memory_with_whoever_else_has_it() -> None:
    with torch.no_grad():  # as operations run
        given = torch.ones(4)
        view = torch.ones(4).view(2, 2)
        assert shares_nothing(view)
        assert shares_nothing(view.add_(1))
        another = view[0]
        assert not shares_nothing(view)
        del another
        assert shares_nothing(view)
        saved = view.detach()
        assert not shares_nothing(view)
        del saved
        assert shares_nothing(view)
        assert not shares_nothing(given.view(2, 2))
        assert not shares_nothing(given.detach().view(2, 2))
        assert not shares_nothing(torch.ones(4))  # no view


def test_what_autograd_saved_counts() -> None:
    x = torch.ones(3, requires_grad=True)
    holder = [x * 2]
    assert only_reference(holder)
    graph = holder[0].sin()  # saves its input
    assert not only_reference(holder)
    del graph
    assert only_reference(holder)


class _Probe(torch.autograd.Function):
    """Tells what is seen of saved tensors and incoming gradients in backward."""

    seen: dict[str, bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 3)
        return x * 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        saved = list(ctx.saved_tensors)
        if hasattr(ctx, "maybe_clear_saved_tensors"):
            ctx.maybe_clear_saved_tensors()
        holder = [grad]
        _Probe.seen = {"saved": only_reference(saved), "grad": only_reference(holder)}
        return grad * saved[0]


def test_saved_tensors_are_ours_unless_the_graph_is_kept() -> None:
    x = torch.ones(3, requires_grad=True)
    y = _Probe.apply(x)
    y.backward(torch.ones(3), retain_graph=True)
    assert _Probe.seen == {"saved": False, "grad": False}
    y.backward(torch.ones(3))
    assert _Probe.seen["saved"] == hasattr(torch._C._FunctionBase, "maybe_clear_saved_tensors")


def test_the_gradient_of_a_caller_is_never_ours() -> None:
    x = torch.ones(3, requires_grad=True)
    grad = torch.ones(3)
    _Probe.apply(x).backward(grad)
    assert not _Probe.seen["grad"]
    (_Probe.apply(x) * 2).sum().backward()
    assert not _Probe.seen["grad"]
