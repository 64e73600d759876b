"""Norms as operators, in fp64, and with columns apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("kind", KINDS)
def test_in_fp64(kind: str) -> None:
    """There is no kernel; what there is for other dtypes, tests/kernels/numerics tests."""
    for shape in ((7, 33), (3, 4), (0, 8)):
        check_norm(make(kind, shape, torch.float64, CPU, centred=True))
        check_norm(make(kind, shape, torch.float64, CPU, add=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_takes_columns_that_are_apart(kind: str, dtype: torch.dtype) -> None:
    check_norm(transposed(make(kind, (7, 33), dtype, CPU, add=True)))


@pytest.mark.parametrize("kind", ["rms", "l2"])
def test_the_gradient_as_traced(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its formula, which a compiler fuses, and not by ATen's pass."""
    case = make(kind, (5, 8), torch.float64, CPU, add=True)
    saved = forward(case)
    wanted = backward(case, saved)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for name, grad in backward(case, saved).items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-12, atol=1e-13)


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
