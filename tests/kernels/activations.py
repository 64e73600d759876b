"""Scalar functions to test kernels with, and what results are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opfuser import Softplus, Tanh
from opfuser.kernels.activation import activation_backward, activation_forward
from opfuser.kernels.capped_functions import (
    ClampedSwish,
    ShiftedClamp,
    SoftCap,
    SoftCappedSquaredRelu,
    SoftCappedSwish,
)
from opfuser.kernels.functions import (
    GeluErf,
    GeluTanh,
    Relu,
    Scale,
    Sigmoid,
    SquaredRelu,
    Swish,
)
from opfuser.kernels.gated import gated_backward, gated_backward_, gated_forward
from opfuser.kernels.gated_plain import Glu, product_spec
from opfuser.kernels.launch import runs
from opfuser.kernels.scalar import ScalarFunction
from tests.kernels.accuracy import assert_accurate

FUNCTIONS: dict[str, ScalarFunction] = {
    "scale": Scale(-0.7),
    "sigmoid": Sigmoid(),
    "tanh": Tanh().make_function(),
    "softplus": Softplus().make_function(),
    "softplus_sharp": Softplus(2.0, 3.0).make_function(),
    "relu": Relu(),
    "squared_relu": SquaredRelu(),
    "swish": Swish(),
    "swish_1.702": Swish(1.702),
    "gelu_erf": GeluErf(),
    "gelu_tanh": GeluTanh(),
    "soft_cap": SoftCap(3.0),
    "soft_capped_swish": SoftCappedSwish(3.0),
    "soft_capped_squared_relu": SoftCappedSquaredRelu(3.0),
    "clamped_swish": ClampedSwish(1.702, 0.75),
    "shifted_clamp": ShiftedClamp(0.75, 1.0),
}
PRODUCTS: dict[str, Glu | ScalarFunction] = {
    "glu": Glu(Sigmoid()),
    "geglu": Glu(GeluTanh()),
    "swiglu": Glu(Swish()),
    "reglu": Glu(Relu()),
    "situ": Glu(SoftCappedSwish(4.0), SoftCap(25.0)),
    "clamped": Glu(ClampedSwish(1.702, 0.75), ShiftedClamp(0.75, 1.0)),
    "no linear units": SquaredRelu(),
    "no linear units, capped": SoftCappedSquaredRelu(1.5),
    **{f"swiglu in blocks of {n}": Glu(Swish(), None, n) for n in (1, 2, 3, 4, 8, 24)},
    "clamped in blocks of 1": Glu(ClampedSwish(1.702, 0.75), ShiftedClamp(0.75, 1.0), 1),
}
LAYOUTS = (
    "contiguous",
    "rows apart",
    "transposed",
    "rows repeated",
    "constant",
    "every second column",
)
# Every layout of x and every one of dy, with another one.
PAIRS_OF_LAYOUTS = [*zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1]), ("contiguous", "contiguous")]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Every dtype of x and every one of the rest, with two others; those of the rest in fp64 with all.
PAIRS_OF_DTYPES = [
    *((one, FLOATS[(n + shift) % 4]) for n, one in enumerate(FLOATS) for shift in (1, 2)),
    (torch.float32, torch.float64),
]


def tensor(
    *shape: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "contiguous",
    scale: float = 2.0,
) -> Tensor:
    """Random values in that memory layout; one that takes two dimensions falls back on the first.

    Drawn on the CPU, so that they are the same on every device.
    """
    if layout == "constant":
        return torch.tensor(1.25, dtype=dtype, device=device).expand(shape)
    if layout == "rows repeated":
        return (scale * torch.randn(shape[-1:])).to(device, dtype).expand(shape)
    x = (scale * torch.randn(shape)).to(device, dtype)
    if layout == "rows apart":
        return torch.cat((x, x.new_full((*shape[:-1], 16), float("nan"))), -1)[..., : shape[-1]]
    if layout == "every second column":
        return torch.stack((x, torch.full_like(x, float("nan"))), -1)[..., 0]
    if layout == "transposed" and len(shape) > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


def assert_close(
    got: Sequence[Tensor],
    plain: Sequence[Tensor],
    exact: Sequence[Tensor],
    what: str = "",
    sums: Mapping[int, Tensor] | None = None,
    *,
    any_layout: bool = False,
) -> None:
    """:func:`assert_accurate`; in float64 the truth is hardly more exact, so an error says little.

    Args:
        sums: for results that are sums, the sums of their terms' sizes: units are those of that.
        any_layout: whether results need not be contiguous.
    """
    assert len(got) == len(plain) == len(exact)
    for n, (g, p, e) in enumerate(zip(got, plain, exact)):
        assert any_layout or g.is_contiguous(), f"{what}: result {n} has strides {g.stride()}"
        assert g.isfinite().all(), f"{what}: result {n} is not finite"
        terms = (sums or {}).get(n, e)
        size = terms.abs().max().item() if terms.numel() else 0.0
        units = 256 if g.dtype == torch.float64 else 2
        eps = max(torch.finfo(t.dtype).eps for t in (g, p))
        assert_accurate(f"{what}: result {n}", g, p, e, units=units, size=size, eps=eps)


def assert_rounded_once(got: Tensor, exact: Tensor, what: str = "") -> None:
    """Each element is within half a unit in its last place, and errors of arithmetic in fp32.

    These are 16 of fp32's roundings, relative to the largest element: sums may cancel.
    """
    info = torch.finfo(got.dtype)
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}"
    if not exact.numel():
        return
    _, exponent = torch.frexp(exact.abs().clamp_min(info.tiny))
    half_unit = torch.ldexp(torch.full_like(exact, info.eps / 4), exponent)
    allowed = half_unit + 16 * 2**-24 * exact.abs().max()
    beyond = (got.double() - exact).abs() / allowed
    worst = beyond.argmax()
    assert beyond.max() <= 1, (
        f"{what}: {(beyond > 1).double().mean():.1%} are rounded more than once, as"
        f" {exact.flatten()[worst]} to {got.flatten()[worst]}"
    )


def expected_activation(
    f: ScalarFunction, x: Tensor, dy: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    """y, dx, db, y by plain torch in ``dtype``."""
    leaf = x.detach().to(dtype).requires_grad_()
    y = f.reference(leaf if bias is None else leaf + bias.to(dtype))
    (dx,) = torch.autograd.grad(y, leaf, dy.to(dtype))
    db = dx.sum(tuple(range(x.dim() - 1))) if x.dim() > 1 else dx
    return [y.detach(), dx, db, y.detach()]


def check_activation(
    f: ScalarFunction, x: Tensor, dy: Tensor, bias: Tensor | None, what: str = ""
) -> None:
    """Holds forward and backward to float64; nothing that is passed may change."""
    given = [t for t in (x, dy, bias) if t is not None]
    before = [t.clone() for t in given]
    y = activation_forward(x, f.spec, bias)
    dx, db, again = activation_backward(dy, x, f.spec, bias, True, True, True)
    # Only fp64 gradients go another way than the forward: both are opfuser's kernels otherwise.
    assert torch.equal(y, again) or dy.dtype == torch.float64
    assert (y.dtype, dx.dtype) == (x.dtype, x.dtype)
    assert db.dtype == (x.dtype if bias is None else bias.dtype)
    plain, exact = (expected_activation(f, x, dy, bias, d) for d in (x.dtype, torch.float64))
    terms = exact[1].reshape(x.shape[:-1].numel(), x.shape[-1])
    # Plain torch that works on all rows at once leaves the layout to ATen.
    any_layout = bias is None and not runs(x)
    sums = {2: terms.norm(1, dim=0)}
    assert_close([y, dx, db, again], plain, exact, what, sums, any_layout=any_layout)
    for t, b in zip(given, before):
        assert torch.equal(t, b)


def columns(f: Glu | ScalarFunction, cols: int) -> int:
    """Columns of x for so many of y."""
    return 2 * cols if isinstance(f, Glu) else cols


def expected_gated(
    f: Glu | ScalarFunction, x: Tensor, dy: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    """y, dx, the gradient of scales if there are any, and y, by plain torch in ``dtype``."""
    wrt = [t.detach().to(dtype).requires_grad_() for t in (x, scales) if t is not None]
    y = f.reference(wrt[0])
    if scales is not None:
        y = y * wrt[1].unsqueeze(-1)
    return [y.detach(), *torch.autograd.grad(y, wrt, dy.to(dtype)), y.detach()]


def check_gated(
    f: Glu | ScalarFunction, x: Tensor, dy: Tensor, scales: Tensor | None, what: str = ""
) -> None:
    """Holds forward and backward, also in place, to float64; nothing that is passed may change."""
    given = [t for t in (x, dy, scales) if t is not None]
    before = [t.clone() for t in given]
    spec = product_spec(f)
    y = gated_forward(x, spec, scales)
    grads = gated_backward(dy, x, spec, scales, True, True)
    assert (grads.dscales is None) == (scales is None)
    results = [t for t in grads if t is not None]
    dtypes = [x.dtype] + [torch.promote_types(x.dtype, torch.float32)] * (scales is not None)
    assert [t.dtype for t in results] == [*dtypes, x.dtype]
    plain, exact = (expected_gated(f, x, dy, scales, d) for d in (x.dtype, torch.float64))
    terms = f.reference(x.double()) * dy.double()
    sums = {} if scales is None else {2: terms.norm(1, dim=-1)}
    assert_close([y, *results], plain, exact, what, sums)
    for t, b in zip(given, before):
        assert torch.equal(t, b)
    own = x.clone()
    in_place = [t for t in gated_backward_(dy, own, spec, scales, True) if t is not None]
    assert_close([y, *in_place], plain, exact, f"{what}, in place", sums)
