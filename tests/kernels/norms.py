"""What the tests of norms share: cases, float64 references, comparison."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser.kernels import norm
from tests.kernels.accuracy import assert_accurate, cut_off

EPS = 1e-5


class Case(NamedTuple):
    """Inputs of a norm; the bias is None for RMSNorm and for LayerNorm without one."""

    layer: bool
    centered: bool
    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    dtotal: Tensor | None

    def to(self, dtype: torch.dtype) -> Case:
        return Case(*(t.to(dtype) if isinstance(t, Tensor) else t for t in self))


def make(
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    add: bool = False,
    centered: bool = False,
    parameters: torch.dtype | None = None,
    pitch: int = 0,
) -> Case:
    """Random inputs, rows ``pitch`` elements further apart than they must be."""
    rows, cols = shape
    x, dy, residual, dtotal = torch.randn(4, rows, cols + pitch, device=device)[..., :cols]
    weight, bias = torch.randn(2, cols, device=device).to(parameters or dtype)
    padded = torch.zeros(4, rows, cols + pitch, device=device).to(dtype)[..., :cols]
    x, dy, residual, dtotal = padded.copy_(torch.stack((3 * x + 1, dy, residual, dtotal)))
    return Case(
        kind != "rms",
        centered,
        x,
        residual if add else None,
        weight,
        bias if kind == "layer" else None,
        dy,
        dtotal if add else None,
    )


def truth(case: Case, *, torchs: bool = False) -> dict[str, Tensor]:
    """All results by autograd, in the dtype of the case; by torch's functions or the formula."""
    total = case.x if case.residual is None else case.x + case.residual
    leaves = [t.clone().requires_grad_() for t in (total, case.weight, case.bias) if t is not None]
    x, weight, bias = (*leaves, None)[:3]
    mean = x.mean(-1, keepdim=True) if case.layer else torch.zeros_like(x[:, :1])
    rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + EPS)
    scale = weight + 1 if case.centered else weight
    if torchs and case.layer:
        y = F.layer_norm(x, (len(weight),), scale, bias, EPS)
    elif torchs:
        y = F.rms_norm(x, (len(weight),), scale, EPS)
    else:
        y = (x - mean) * rstd * scale + (0 if bias is None else bias)
    dx, *grads = torch.autograd.grad(y, leaves, case.dy)
    results = {"y": y, "rstd": rstd[:, 0], **dict(zip(("dw", "db"), grads))}
    results["dx"] = dx if case.dtotal is None else dx + case.dtotal
    if case.layer:
        results["mean"] = mean[:, 0]
    if case.residual is not None:
        results["total"] = total
    return {name: result.detach() for name, result in results.items()}


def forward(case: Case) -> dict[str, Tensor]:
    result = norm.norm_forward(
        case.x, case.residual, case.weight, case.bias, EPS, case.centered, case.layer
    )
    assert isinstance(result, norm.NormForward)
    assert (result.total is None) == (case.residual is None)
    return named(result)


def backward(
    case: Case, saved: dict[str, Tensor], wants: tuple[bool, bool, bool] = (True, True, True)
) -> dict[str, Tensor]:
    result = norm.norm_backward(
        case.dy, saved.get("total", case.x), case.weight, case.bias, saved.get("mean"),
        saved["rstd"], case.dtotal, EPS, case.centered, *wants,
    )  # fmt: skip
    assert isinstance(result, norm.NormGrads)
    dx, dw, y = wants
    assert [t is not None for t in result] == [dx, dw, dw and case.bias is not None, y]
    found = named(result)
    return found if result.y is None else {**found, "recomputed y": found.pop("y")}


def named(result: norm.NormForward | norm.NormGrads) -> dict[str, Tensor]:
    return {name: t for name, t in result._asdict().items() if t is not None}


def check_recomputed(recomputed: Tensor, y: Tensor) -> None:
    """The output recomputed in backward: the same bits; on a GPU, compiled apart, neighbors."""
    if y.is_cuda:
        torch.testing.assert_close(recomputed, y, rtol=torch.finfo(y.dtype).eps, atol=0)
    else:
        assert torch.equal(recomputed, y)


def check_norm(case: Case) -> None:
    """Twice the error of torch in fp32 with one rounding at the end is allowed, plus a floor."""
    dtype = case.x.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    saved = forward(case)
    # What follows a sum starts from the rounded one.
    summed = case if case.residual is None else case._replace(x=saved["total"], residual=None)
    expected, single = truth(summed.to(torch.float64)), truth(summed.to(wide), torchs=True)
    if case.residual is not None:
        expected["total"] = case.x.double() + case.residual.double()
        single["total"] = case.x.to(wide) + case.residual.to(wide)
    got = saved | backward(case, saved)
    check_recomputed(got.pop("recomputed y"), got["y"])
    assert got.keys() == expected.keys()
    for name, result in got.items():
        want = wide if name in ("mean", "rstd") else dtype
        want = case.weight.dtype if name in ("dw", "db") else want
        assert (result.dtype, result.is_contiguous()) == (want, True), name
        # A gradient in fp64 is no more accurate than the arithmetic was.
        rounded = result.to(wide) if want == torch.float64 else result
        compare(name, rounded, single[name].to(want), expected[name])


def compare(name: str, got: Tensor, plain: Tensor, expected: Tensor) -> None:
    """Asserts that ``got`` is at most twice as far from ``expected`` as ``plain``, plus a floor."""
    # Sums in another order in fp32 and fp64; in other dtypes the last rounding. 2e-7 is for
    # differences of numbers around one.
    units = {torch.float64: 16.0, torch.float32: 2.0}.get(got.dtype, 0.25)
    units = 1.0 if cut_off(got) else units
    floor = 1e-14 if got.dtype == torch.float64 else 2e-7
    assert_accurate(name, got, plain, expected, units=units, floor=floor)
