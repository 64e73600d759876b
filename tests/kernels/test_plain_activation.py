"""Activations in plain torch: in fp64, in half precision on a CPU, and as traced."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from opfuser.kernels.activation import activation_backward, activation_forward
from opfuser.kernels.functions import Swish
from opfuser.kernels.gated import gated_backward, gated_backward_, gated_forward
from opfuser.kernels.gated_plain import Glu, product_spec
from opfuser.kernels.launch import INTERPRETED, recorded
from opfuser.kernels.scalar import ScalarFunction
from tests.kernels.activations import (
    FUNCTIONS,
    PRODUCTS,
    assert_rounded_once,
    check_activation,
    check_gated,
    columns,
    expected_activation,
    expected_gated,
    tensor,
)
from tests.kernels.blocks import small_blocks

if INTERPRETED:
    pytest.skip("the interpreter's process runs kernels instead", allow_module_level=True)

HALF = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
GLU = product_spec(Glu(Swish(), None, 2))
SWISH = Swish().spec


def test_in_fp64() -> None:
    """There is no kernel; what there is for other dtypes, tests/kernels/numerics tests."""
    for name, f in FUNCTIONS.items():
        x, dy = tensor(2, 5, 24, dtype=torch.float64, device=CPU)
        check_activation(f, x, dy, tensor(24, dtype=torch.float64, device=CPU), name)
        check_activation(f, x, dy, None, name)
    for name, product in PRODUCTS.items():
        x = tensor(5, columns(product, 48), dtype=torch.float64, device=CPU)
        dy, scales = (tensor(*s, dtype=torch.float64, device=CPU) for s in ((5, 48), (5,)))
        check_gated(product, x, dy, scales, name)


def test_rows_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)  # two rows of 24 and 24
    at_once: list[int] = []
    split = Tensor.split
    monkeypatch.setattr(Tensor, "split", lambda x, rows: at_once.append(rows) or split(x, rows))
    for name, f in PRODUCTS.items():
        at_once.clear()
        x = tensor(5, columns(f, 24), dtype=torch.float32, device=CPU)
        gated_forward(x, product_spec(f), None)
        assert at_once == ([2, 2] if isinstance(f, Glu) else [4, 4]), name


@pytest.fixture(params=["at once", "block by block", "as traced"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as traced":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if request.param == "block by block":
        small_blocks(monkeypatch)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_products_in_half_precision_are_rounded_once(dtype: torch.dtype) -> None:
    sizes = ((5,), "rows apart"), ((3, 3), "transposed"), ((0,), "contiguous"), ((), "")
    for (name, f), (rows, layout) in itertools.product(PRODUCTS.items(), sizes):
        x = tensor(*rows, columns(f, 24), dtype=dtype, device=CPU, layout=layout)
        dy = tensor(*rows, 24, dtype=dtype, device=CPU, layout=layout)
        for scales in (None, tensor(*rows, dtype=dtype, device=CPU)):
            y, dx, *dscales, again = expected_gated(f, x, dy, scales, torch.float64)
            what = f"{name}, {rows}, {layout}, scales {scales is not None}"
            assert_rounded_once(gated_forward(x, product_spec(f), scales), y, f"y, {what}")
            given = product_spec(f), scales
            for got in (
                gated_backward(dy, x, *given, True, True),
                gated_backward_(dy, x.clone(), *given, True),
            ):
                assert_rounded_once(got.dx, dx, f"dx, {what}")
                assert_rounded_once(got.y, again, f"y of backward, {what}")
                if dscales:
                    terms = (f.reference(x.double()) * dy.double()).abs().sum(-1)
                    assert ((got.dscales - dscales[0]).abs() <= 2**-20 * terms).all(), what


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_activations_in_half_precision_are_rounded_once(dtype: torch.dtype) -> None:
    sizes = ((9, 24), "rows apart"), ((3, 3, 24), "transposed"), ((0, 24), ""), ((25,), "")
    for (name, f), (shape, layout) in itertools.product(FUNCTIONS.items(), sizes):
        x, dy = (tensor(*shape, dtype=dtype, device=CPU, layout=layout) for _ in range(2))
        for bias in (None, tensor(shape[-1], dtype=dtype, device=CPU)):
            y, dx, _, again = expected_activation(f, x, dy, bias, torch.float64)
            what = f"{name}, {shape}, {layout}, bias {bias is not None}"
            got = activation_forward(x, f.spec, bias)
            assert_rounded_once(got, y, f"y, {what}")
            got, _, got_again = activation_backward(dy, x, f.spec, bias, True, True, True)
            assert_rounded_once(got, dx, f"dx, {what}")
            assert_rounded_once(got_again, again, f"y of backward, {what}")


def test_every_function_has_its_device_function() -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from opfuser.kernels.device import scalar  # noqa: PLC0415  # Triton takes long to import

    named = {f for f in ScalarFunction.__subclasses__() if "name" in vars(f)}
    assert all(callable(getattr(scalar, f.name).fn) for f in named)
    assert {type(f) for f in FUNCTIONS.values()} == named


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
def test_traced_functions_are_plain_torch_and_write_to_nothing() -> None:
    def step(x: Tensor, dy: Tensor, packed: Tensor, bias: Tensor) -> list[Tensor | None]:
        y = activation_forward(x, SWISH, bias)
        grads = activation_backward(dy, x, SWISH, bias, True, True, True)
        h = gated_forward(packed, GLU, bias)
        return [y, *grads, h, *gated_backward_(dy, packed, GLU, bias, True)]

    torch.compiler.reset()
    inputs = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 16), torch.randn(8)
    before = [t.clone() for t in inputs]
    with recorded() as noted:  # as if the CPU had kernels
        traced = torch.compile(step, backend="aot_eager", fullgraph=True)(*inputs)
    assert not noted
    for t, b in zip(inputs, before, strict=True):
        assert torch.equal(t, b)
    for got, want in zip(traced, step(*inputs), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
def test_data_may_decide_how_many_rows_are_traced() -> None:
    def step(chosen: Tensor, dy: Tensor, packed: Tensor) -> list[Tensor | None]:
        rows = chosen.nonzero().squeeze(1)
        return [*gated_backward_(dy[rows], packed.t()[:, rows].t(), GLU, None, True)]

    torch.compiler.reset()
    dy, packed = torch.randn(5, 8), torch.randn(5, 16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        for chosen in (torch.tensor([1, 0, 1, 1, 0]), torch.zeros(5), torch.eye(5)[2]):
            got, want = compiled(chosen, dy, packed), step(chosen, dy, packed)
            torch.testing.assert_close(got, want)


def test_what_is_computed_in_fp64_goes_to_plain_torch() -> None:
    x, dy = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8)
    packed = torch.randn(5, 16, dtype=torch.float64)
    with recorded() as noted:
        results = [
            *activation_backward(dy, x, SWISH, None, True, True, True),
            *gated_backward(dy, packed, GLU, None, True, True),
            *gated_backward_(dy, packed, GLU, None, True),
        ]
    assert not noted
    assert {t.dtype for t in results if t is not None} == {torch.float64}
