"""Products of MXFP8 and NVFP4: what they compute, and what a GPU is given to compute it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

import opfuser
from opfuser.errors import NotSupportedError
from opfuser.gemm import scaled
from opfuser.gemm.scaled import Accumulation, scaled_dgrad, scaled_forward, scaled_wgrad
from opfuser.kernels.microscaling import quantize_mxfp8, quantize_nvfp4
from opfuser.kernels.quantize import Codes, amax_of
from opfuser.quantization import quantizers
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from tests.basic.values import saved_by

E4M3, E5M2, FP4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)

Quantize = Callable[..., Codes]


def mxfp8(x: Tensor, **how: Any) -> Codes:
    how.pop("squares", None)
    return quantize_mxfp8(x, how.pop("dtype", E4M3), rows=True, cols=True, **how)


def nvfp4(x: Tensor, **how: Any) -> Codes:
    how.pop("dtype", None)
    return quantize_nvfp4(x, amax_of(x), rows=True, cols=True, **how)


each_format = pytest.mark.parametrize("quantize", [mxfp8, nvfp4], ids=["mxfp8", "nvfp4"])


def decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """(M, K) in float64, from the definition of the formats and of cuBLAS's order of scales."""
    factor, block = 1.0, 32
    if codes.dtype == FP4:
        bytes_ = codes.view(torch.uint8)
        nibbles = torch.stack((bytes_ & 15, bytes_ >> 4), 2).flatten(1).long()
        values = GRID[nibbles & 7] * (1 - 2 * (nibbles >> 3))
        factor, block = scale[-4:].view(torch.float32).double().item(), 16
        scales = scale[:-4].double()
    else:
        values = codes.double()
        scales = torch.exp2(scale.view(torch.uint8).double() - 127)
    rows, across = torch.arange(values.shape[0])[:, None], -(-values.shape[1] // (4 * block))
    blocks = torch.arange(values.shape[1])[None, :] // block
    tile = (rows // 128 * across + blocks // 4) * 512
    return factor * values * scales[tile + rows % 32 * 16 + rows % 128 // 32 * 4 + blocks % 4]


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


# Weights of so many rows have tiles of scales by columns that the gradient's rows lack.
SHAPES = [(1, 32, 32), (127, 96, 320), (129, 320, 96), (40, 256, 448), (256, 160, 128)]


def operands(quantize: Quantize, t: int, k: int, n: int) -> tuple[Codes, Codes, Codes]:
    torch.manual_seed(0)
    x, w, dy = torch.randn(t, k), torch.randn(n, k) * torch.randn(n, 1).exp(), torch.randn(t, n)
    x[:, 32:64] *= 2.0**9
    return quantize(x), quantize(w, squares=True), quantize(dy, dtype=E5M2)


@each_format
@pytest.mark.parametrize(("t", "k", "n"), SHAPES)
def test_products_are_those_of_the_codes(quantize: Quantize, t: int, k: int, n: int) -> None:
    x, w, dy = operands(quantize, t, k, n)
    how = Accumulation(torch.float32, True, hardware=False)
    b = torch.randn(n)
    by_rows = {name: decoded(c.rows, c.row_scale) for name, c in (("x", x), ("dy", dy), ("w", w))}
    by_cols = {name: decoded(c.cols, c.col_scale) for name, c in (("x", x), ("dy", dy), ("w", w))}
    y = scaled_forward(x, w, (t, n), b, how)
    assert error(y, by_rows["x"][:t] @ by_rows["w"][:n].t() + b.double()) < 1e-6
    dx = scaled_dgrad(dy, w, t, how)
    assert error(dx, by_rows["dy"][:t] @ by_cols["w"][:, :n].t()) < 1e-6
    dw = scaled_wgrad(dy, x, how)
    assert error(dw, by_cols["dy"] @ by_cols["x"].t()) < 1e-6


class Call:
    """What a product hands to ``scaled_mm``, where torch checks it on the meta device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.args: tuple[Any, ...] = ()
        self.how: dict[str, Any] = {}
        self._scaled_mm = F.scaled_mm
        monkeypatch.setattr(scaled.F, "scaled_mm", self)

    def __call__(self, *args: Any, **how: Any) -> Tensor:
        self.args, self.how = args, how
        moved = [self._moved(arg) for arg in args]
        on_meta = {name: self._moved(arg) for name, arg in how.items()}
        try:
            y = self._scaled_mm(*moved, **on_meta)
        except NotImplementedError:  # an older torch, which knows no meta device here
            y = moved[0].new_empty((len(args[0]), args[1].shape[1]), dtype=how["output_dtype"])
        return torch.zeros(y.shape, dtype=y.dtype)

    def _moved(self, arg: Any) -> Any:
        if isinstance(arg, list):
            return [self._moved(one) for one in arg]
        if not isinstance(arg, Tensor):
            return arg
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")


@each_format
@pytest.mark.parametrize(("t", "k", "n"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_a_gpu_is_given(
    quantize: Quantize, t: int, k: int, n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch checks dtypes, shapes, strides, numbers of scales and swizzles, and refuses others."""
    x, w, dy = operands(quantize, t, k, n)
    how, call = Accumulation(dtype, True, hardware=True), Call(monkeypatch)
    tp, packed = x.rows.shape[0], 2 if x.rows.dtype == FP4 else 1
    b = torch.randn(n, dtype=torch.bfloat16)
    for shape, product, (left, left_scale), (right, right_scale) in (
        ((tp, n, k), lambda: scaled_forward(x, w, (t, n), b, how), x[:2], w[:2]),
        ((tp, k, n), lambda: scaled_dgrad(dy, w, t, how), dy[:2], w[2:4]),
        ((n, k, tp), lambda: scaled_wgrad(dy, x, how), dy[2:4], x[2:4]),
    ):
        y = product()
        rows, cols, inner = shape
        assert (y.shape, y.dtype) == ((min(rows, t) if rows == tp else rows, cols), dtype)
        a, b_, scale_a, kind_a, scale_b, kind_b, swizzle_a, swizzle_b = call.args
        assert (a.shape, b_.shape) == ((rows, inner // packed), (inner // packed, cols))
        assert (a.stride(1), b_.stride(0)) == (1, 1)
        assert (a.data_ptr(), b_.data_ptr()) == (left.data_ptr(), right.data_ptr())
        assert all(s.is_contiguous() for s in (*scale_a, *scale_b))
        assert kind_a == kind_b
        assert swizzle_a == swizzle_b
        swizzle = SwizzleType.SWIZZLE_32_4_4
        if packed == 1:
            assert (kind_a, swizzle_a) == ([ScalingType.BlockWise1x32], [swizzle])
        else:
            assert kind_a == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
            assert swizzle_a == [swizzle, SwizzleType.NO_SWIZZLE]
            for own, given in ((scale_a, left_scale), (scale_b, right_scale)):
                assert own[1].item() == given[-4:].view(torch.float32).item()
                assert own[1].data_ptr() % 4 == 0
        assert not call.how["use_fast_accum"]
        # A product of codes that say where they are: those of the operands as they were.
        scales = [torch.cat([s.view(torch.uint8) for s in pair]) for pair in (scale_a, scale_b)]
        for matrix, one, exact in (
            (a, scales[0], decoded(left, left_scale)),
            (b_.t(), scales[1], decoded(right, right_scale)),
        ):
            found = decoded(matrix, one.view(E4M3) if packed == 2 else one)
            assert torch.equal(found, exact[: found.shape[0], : found.shape[1]])


def run(recipe: Recipe, seq: opfuser.Sequential, x: Tensor, dy: Tensor) -> list[Tensor]:
    with opfuser.autocast(recipe=recipe):
        y = seq(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *seq.parameters()], dy)]


NEAREST = NVFP4BlockScaling(
    disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
)


@pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")
@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"disable_rht": False}, (False, False, True)),
        ({"disable_stochastic_rounding": False}, (False, True, True)),
        ({"disable_2d_quantization": False}, (True, True, False)),
    ],
    ids=str,
)
def test_which_products_a_measure_of_nvfp4_touches(
    change: dict[str, bool], differs: tuple[bool, ...]
) -> None:
    torch.manual_seed(0)
    seq = opfuser.Sequential(opfuser.BasicLinear(64, 96))
    x, dy = torch.randn(40, 64, requires_grad=True), torch.randn(40, 96)
    plain, changed = (run(r, seq, x, dy) for r in (NEAREST, replace(NEAREST, **change)))
    assert tuple(not torch.equal(a, b) for a, b in zip(plain, changed)) == differs


@pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")
def test_stochastic_gradients_are_right_on_average() -> None:
    """The mean of n is closer by the square root of n; that of nearest values is no closer."""
    torch.manual_seed(0)
    seq = opfuser.Sequential(opfuser.BasicLinear(32, 64))
    x, dy = torch.randn(16, 32, requires_grad=True), torch.randn(16, 64)
    recipe = NVFP4BlockScaling(fprop="bf16", disable_rht=True, disable_2d_quantization=True)
    one = run(recipe, seq, x, dy)[1]
    many = torch.stack([run(recipe, seq, x, dy)[1] for _ in range(64)])
    w = next(seq.parameters()).detach()
    weight = nvfp4(w)
    exact = dy.double() @ decoded(weight.cols, weight.col_scale)[:, :64].t()
    assert error(many.mean(0), exact) < error(one, exact) / 4


@pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")
@pytest.mark.parametrize(
    ("recipe", "size"),
    [
        (MXFP8BlockScaling(), 64 * 256 + 128 * 256 // 32),
        (NVFP4BlockScaling(), 64 * 256 // 2 + 128 * 256 // 16 + 4),
    ],
    ids=["mxfp8", "nvfp4"],
)
def test_what_is_saved(recipe: Recipe, size: int) -> None:
    """Codes by columns, and scales of these, rounded up to 128 columns."""
    model = opfuser.Sequential(opfuser.BasicLinear(64, 32))
    with opfuser.autocast(recipe=recipe):
        saved = saved_by(lambda: model(torch.randn(256, 64)))
    weights = {p.data_ptr() for p in model.parameters()}
    assert sum(t.nbytes for t in saved if t.data_ptr() not in weights) == size


def test_emulation_is_told_once_for_each_format() -> None:
    device = torch.device("xpu")  # of which no other test has told
    for recipe, first in (
        (DelayedScaling(), "8.9 and later"),
        (MXFP8BlockScaling(), "10.0 and later"),
        (NVFP4BlockScaling(), "10.0 and later"),
    ):
        match = f"(?s){recipe.operands} is emulated.*compute capability {first}"
        with pytest.warns(UserWarning, match=match):
            assert not quantizers.has_hardware(device, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in (Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()):
            assert not quantizers.has_hardware(device, other)


@pytest.mark.parametrize(
    ("capability", "scales", "blocks", "micro"),
    [
        ((8, 0), False, False, False),
        ((8, 9), True, False, False),
        ((9, 0), True, True, False),
        ((10, 0), True, False, True),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")
def test_which_gpus_multiply_a_format(
    capability: tuple[int, int],
    scales: bool,
    blocks: bool,
    micro: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert quantizers.has_hardware(device, DelayedScaling()) == scales
    assert quantizers.has_hardware(device, Float8BlockScaling()) == blocks
    for recipe in (MXFP8BlockScaling(), NVFP4BlockScaling()):
        assert quantizers.has_hardware(device, recipe) == micro


def test_names_and_fields_of_transformer_engine() -> None:
    recipe = NVFP4BlockScaling()
    assert recipe.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert recipe.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert recipe.fp4_quant_bwd_grad == QParams(
        random_hadamard_transform=True, stochastic_rounding=True
    )
    off = NEAREST.fp4_quant_fwd_inp, NEAREST.fp4_quant_fwd_weight, NEAREST.fp4_quant_bwd_grad
    assert off == (QParams(),) * 3
    assert (recipe.fp4_format, recipe.fp8_format) == (Format.E2M1, Format.E4M3)
    assert [recipe.dtype(role) for role in ("input", "weight", "grad_output")] == [FP4] * 3
    hybrid = MXFP8BlockScaling(fp8_format=Format.HYBRID)
    assert [hybrid.dtype(role) for role in ("input", "grad_output")] == [E4M3, E5M2]
    assert MXFP8BlockScaling().dtype("grad_output") == E4M3


ONE_SCALE = "A tensor has one scale in fp32, and its blocks reach 6"
VALUES = "Values of NVFP4 are in E2M1, their scales in E4M3"
TRANSFORMS = "Transforms and stochastic rounding are of NVFP4"
RANDOM = QParams(stochastic_rounding=True)


@pytest.mark.parametrize(
    ("recipe", "how", "text"),
    [
        (MXFP8BlockScaling, {"margin": 1}, "Scales of MXFP8 leave no margin"),
        (MXFP8BlockScaling, {"enable_2d_quantization": True}, "Blocks of MXFP8 are 1 x 32"),
        (MXFP8BlockScaling, {"fp8_format": Format.E2M1}, "fp8_format is a format of 8 bits"),
        (MXFP8BlockScaling, {"backward_override": "dequantized"}, "is None or 'high_precision'"),
        (NVFP4BlockScaling, {"fp4_format": Format.E4M3}, VALUES),
        (NVFP4BlockScaling, {"fp8_format": Format.HYBRID}, VALUES),
        (NVFP4BlockScaling, {"row_scaled_activation": True}, ONE_SCALE),
        (NVFP4BlockScaling, {"nvfp4_4over6": "all"}, ONE_SCALE),
        (Float8CurrentScaling, {"fp8_quant_bwd_grad": RANDOM}, TRANSFORMS),
    ],
)
def test_refused(recipe: type[Recipe], how: dict[str, Any], text: str) -> None:
    with pytest.raises(NotSupportedError, match=text):
        recipe(**how)


@pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling()], ids=str)
def test_quantize_rounds_as_the_operation_behind_it_does(recipe: Recipe) -> None:
    """Operations hand on no codes of small blocks: what is rounded is quantized again."""
    torch.manual_seed(0)
    x, dy = torch.randn(3, 7, 64, requires_grad=True), torch.randn(3, 7, 64)
    seq = opfuser.Sequential(opfuser.Quantize(forward=True, backward=False))
    y = run(recipe, seq, x, dy)[0]
    quantize = mxfp8 if recipe.mxfp8() else nvfp4
    codes = quantize(x.detach().flatten(0, 1))
    exact = decoded(codes.rows, codes.row_scale)[:21].view(3, 7, 64)
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=0)
    odd = torch.randn(5, 40)
    with opfuser.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(seq(odd), odd), "no GEMM of this recipe takes it"


@pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling()], ids=str)
def test_watched_tensors(recipe: Recipe) -> None:
    """A value far below the largest of its block becomes 0; nothing is cut off."""
    seq = opfuser.Sequential(opfuser.BasicLinear(64, 32))
    x = torch.ones(4, 64)
    x[1, 3] = 1e-6
    with opfuser.watch_quantization() as told, opfuser.autocast(recipe=recipe), torch.no_grad():
        seq(x)
    record = next(tensor for tensor in told if tensor.role == "input")
    assert (record.dtype, record.scale, record.limit) == (recipe.dtype("input"), None, None)
    assert (record.amax, record.saturated, record.underflowed) == (1.0, 0, 1)
    assert "scales of blocks" in str(record)
