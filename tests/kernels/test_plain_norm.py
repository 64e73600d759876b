"""Norms in plain torch: in fp64, with columns apart, and as traced."""

from __future__ import annotations

import pytest
import torch

from opfuser.kernels.launch import INTERPRETED
from tests.kernels.norms import Case, backward, check_norm, forward, make

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
        check_norm(make(kind, shape, torch.float64, CPU, centered=True))
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
