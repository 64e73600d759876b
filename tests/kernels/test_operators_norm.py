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
@pytest.mark.parametrize("shape", [(7, 33), (1, 5), (3, 4), (600, 24), (0, 8)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_plain(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for add, centred in ((False, True), (True, False)):
        case = make(kind, shape, dtype, CPU, add=add, centred=centred)
        check_norm(case)
        check_norm(transposed(case))
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


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_with_parameters_of_another_dtype(kind: str, parameters: torch.dtype) -> None:
    check_norm(make(kind, (9, 24), torch.bfloat16, CPU, add=True, parameters=parameters))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_residual_gradient_of_another_dtype(dtype: torch.dtype) -> None:
    case = make("rms", (5, 8), torch.bfloat16, CPU)
    rstd = forward(case)["rstd"]
    dtotal = torch.randn(5, 8, dtype=torch.float64).to(dtype)
    args = (torch.zeros_like(case.dy), case.x, case.weight, rstd, dtotal, False)
    (dx,) = norm.rms_norm_backward(*args, True, False, False)
    assert dx.dtype == torch.promote_types(torch.bfloat16, dtype)
    assert torch.equal(dx, dtotal.to(dx.dtype))


def samples() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    ops = torch.ops.opfuser
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    straight = make("layer", (6, 8), torch.bfloat16, CPU, add=True, parameters=torch.float32)
    for lies, case in (("", straight), (" transposed", transposed(straight))):
        x, residual, weight, bias = case.x, case.residual, case.weight, case.bias
        mean, rstd = torch.randn(2, 6)
        found[f"rms{lies}"] = ops.rms_norm_forward, (x, weight, EPS, True)
        found[f"add rms{lies}"] = ops.add_rms_norm_forward, (x, residual, weight, EPS, False)
        found[f"l2{lies}"] = ops.l2_norm_forward, (x, EPS)
        found[f"l2 backward{lies}"] = ops.l2_norm_backward, (case.dy, x, rstd)
        for b in (None, bias):
            name = f"layer{lies}" if b is not None else f"layer without bias{lies}"
            found[name] = ops.layer_norm_forward, (x, weight, b, EPS, True)
            args: tuple[Any, ...] = x, residual, weight, b, EPS, False
            found[f"add {name}"] = ops.add_layer_norm_forward, args
            for dtotal, *wants in ((None, True, False, True), (case.dtotal, True, True, False)):
                args = case.dy, x, weight, b, mean, rstd, dtotal, EPS, False, *wants
                found[f"{name} backward {wants}"] = ops.layer_norm_backward, args
        for dtotal, *wants in (
            (None, True, False, True),
            (None, False, True, False),
            (case.dtotal, True, True, True),
            (torch.randn(6, 8), True, False, False),
        ):
            args = case.dy, x, weight, rstd, dtotal, True, *wants
            found[f"rms backward{lies} {len(found)}"] = ops.rms_norm_backward, args
    return found


SAMPLES = samples()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
@pytest.mark.parametrize(("operator", "args"), SAMPLES.values(), ids=SAMPLES)
def test_opcheck(operator: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(operator.default, args)
