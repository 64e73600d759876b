"""Norms as operators, and in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opfuser.kernels import norm, norm_plain
from opfuser.kernels.launch import INTERPRETED
from tests.kernels.norms import EPS, Case, backward, check_norm, forward, make

if INTERPRETED:
    pytest.skip("the interpreter's process runs kernels instead", allow_module_level=True)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS = ["rms", "layer", "layer without bias"]
CPU = torch.device("cpu")


def transposed(case: Case) -> Case:
    """The same numbers, columns apart."""
    return case._replace(
        **{
            name: tensor.t().contiguous().t()
            for name in ("x", "residual", "dy", "dtotal")
            if (tensor := getattr(case, name)) is not None
        }
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_plain(kind: str, dtype: torch.dtype) -> None:
    for shape in ((7, 33), (1, 5), (3, 4), (600, 24), (0, 8)):
        check_norm(make(kind, shape, dtype, CPU, centred=True))
        check_norm(transposed(make(kind, shape, dtype, CPU, add=True)))
        check_norm(make(kind, shape, dtype, CPU, add=True, pitch=3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_block_by_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_plain, "_BLOCK", 64)
    case = make("layer", (600, 24), dtype, CPU, add=True)
    check_norm(case)
    saved = forward(case)
    everything = backward(case, saved)
    (dx,) = backward(case, saved, (True, False, False)).values()
    torch.testing.assert_close(dx, everything["dx"])
    for name, grad in backward(case, saved, (False, True, False)).items():
        torch.testing.assert_close(grad, everything[name])


@pytest.mark.parametrize("kind", KINDS)
def test_plain_with_parameters_of_another_dtype(kind: str) -> None:
    for parameters in (torch.float32, torch.float16, torch.float64):
        check_norm(make(kind, (9, 24), torch.bfloat16, CPU, add=True, parameters=parameters))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_residual_gradient_of_another_dtype(dtype: torch.dtype) -> None:
    case = make("rms", (5, 8), torch.bfloat16, CPU)
    rstd = forward(case)["rstd"]
    dtotal = torch.randn(5, 8, dtype=torch.float64).to(dtype)
    dy = torch.zeros_like(case.dy)
    args = dy, case.x, case.weight, None, None, rstd, dtotal, EPS, False, True, False, False
    dx = norm.norm_backward(*args).dx
    assert dx.dtype == torch.promote_types(torch.bfloat16, dtype)
    assert torch.equal(dx, dtotal.to(dx.dtype))


def samples() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    ops = torch.ops.opfuser
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    case = make("layer", (6, 8), torch.bfloat16, CPU, add=True, parameters=torch.float32)
    apart = transposed(case)
    mean, rstd = torch.randn(2, 6)
    kinds = {
        "l2": (None, None, None),
        "rms": (case.weight, None, None),
        "layer": (case.weight, case.bias, mean),
        "layer without bias": (case.weight, None, mean),
    }
    for name, c, residual in (
        ("l2", case, None),
        ("rms", apart, apart.residual),
        ("layer", case, case.residual),
        ("layer", apart, None),
        ("layer without bias", case, None),
    ):
        weight, bias, of_rows = kinds[name]
        layer = of_rows is not None
        args: tuple[Any, ...] = c.x, residual, weight, bias, EPS, not layer, layer
        found[f"{name} {len(found)}"] = ops.norm_forward, args
    for name, c, dtotal, *wants in (
        ("l2", case, None, True, False, True),
        ("l2", apart, apart.dtotal, True, True, True),
        ("rms", case, None, False, True, False),
        ("rms", apart, torch.randn(6, 8), True, False, False),
        ("layer", case, case.dtotal, True, True, True),
        ("layer", apart, None, False, True, True),
        ("layer without bias", case, torch.randn(6, 8), True, True, False),
    ):
        weight, bias, of_rows = kinds[name]
        args = c.dy, c.x, weight, bias, of_rows, rstd, dtotal, EPS, True, *wants
        found[f"{name} backward {len(found)}"] = ops.norm_backward, args
    return found


SAMPLES = samples()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
@pytest.mark.parametrize(("operator", "args"), SAMPLES.values(), ids=SAMPLES)
def test_opcheck(operator: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(operator.default, args)
