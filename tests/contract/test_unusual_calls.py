"""Hazard 11: a sequence that is made on the meta device, materialized, called and differentiated.

Hazard 13, unusual shapes and layouts: ``check_op`` and ``check_fusion``, for all operations and
fusions (tests/basic, tests/fused).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, against, fill, rand


def block(**kwargs: object) -> of.Sequential:
    kw = {**F64, **kwargs}
    return of.Sequential(
        of.RMSNorm(8, **kw), of.Linear(8, 24, **kw), of.SwiGLU(), of.Linear(12, 8, **kw),
        of.AddExtraInput(), of.LayerNorm(8, **kw), of.GELU(), of.Linear(8, 5, bias=False, **kw),
    )  # fmt: skip


def formula(p: dict[str, Tensor], x: Tensor, h: Tensor) -> Tensor:
    a = F.linear(F.rms_norm(x, (8,), p["0.weight"], 1e-5), p["1.weight"], p["1.bias"])
    a = F.silu(a[..., :12]) * a[..., 12:]
    a = F.linear(a, p["3.weight"], p["3.bias"]) + h
    a = F.layer_norm(a, (8,), p["5.weight"], p["5.bias"], 1e-5)
    return F.linear(F.gelu(a, approximate="tanh"), p["7.weight"])


def _to_empty(model: of.Sequential, state: dict[str, Tensor]) -> None:
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def _alias(model: of.Sequential, state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(value))


def _assign(model: of.Sequential, state: dict[str, Tensor]) -> None:
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("materialize", [_to_empty, _alias, _assign])
@pytest.mark.parametrize("touched", [False, True])
def test_hazard_11_meta_device_then_materialized_then_backward(
    materialize: Callable[..., None], touched: bool
) -> None:
    model = block(device="meta")
    assert all(p.is_meta for p in model.parameters())
    if touched:
        y = model(torch.empty(3, 8, device="meta"), torch.empty(3, 8, device="meta"))
        assert (y.shape, y.device.type) == ((3, 5), "meta")
    state = {name: p.detach().clone() for name, p in fill(block()).named_parameters()}
    materialize(model, state)
    if materialize is not _to_empty:
        assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())
    against(model, formula, rand(3, 8, grad=True), rand(3, 8, grad=True))
