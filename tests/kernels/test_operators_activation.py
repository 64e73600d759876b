"""Activations as operators, in fp64, and in half precision on a CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from opfuser.kernels.activation import activation_backward, activation_forward
from opfuser.kernels.functions import Swish
from opfuser.kernels.gated import (
    Glu,
    gated_backward,
    gated_backward_,
    gated_forward,
    product_spec,
)
from opfuser.kernels.launch import INTERPRETED, recorded
from opfuser.kernels.operators import Traced
from opfuser.kernels.scalar import FUNCTIONS as BY_NAME
from opfuser.kernels.scalar import ScalarFunction, scalar_function
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


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_is_found_by_its_name_and_parameters(f: ScalarFunction) -> None:
    _, name, parameters = f.spec
    found = scalar_function(name, list(parameters))
    assert type(found) is type(f)
    assert found.spec[1:] == f.spec[1:]


def test_every_function_has_its_device_function() -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from opfuser.kernels.device import scalar  # noqa: PLC0415  # Triton takes long to import

    assert all(callable(getattr(scalar, name).fn) for name in BY_NAME)
    assert {type(f) for f in FUNCTIONS.values()} == set(BY_NAME.values())


def samples() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    bias, scales = torch.randn(8), torch.randn(6)
    ops = torch.ops.opfuser
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    # With and without the bias or the scales each layout once, and each thing that is wanted.
    for lies, (x, dy), with_rest, wanted in (
        ("straight", torch.randn(2, 6, 8), True, (True, False, False)),
        ("transposed", torch.randn(2, 8, 6).mT, True, (True, True, True)),
        ("straight", torch.randn(2, 6, 8), False, (True, True, True)),
        ("transposed", torch.randn(2, 8, 6).mT, False, (False, True, False)),
    ):
        half = dy[:, :4].t().contiguous().t()
        b, s = (bias, scales) if with_rest else (None, None)
        what = f"{lies} {with_rest}"
        found[f"forward {what}"] = ops.activation_forward, (x, *SWISH[1:], b)
        found[f"backward {what}"] = ops.activation_backward, (dy, x, *SWISH[1:], b, *wanted)
        found[f"gated forward {what}"] = ops.gated_forward, (x, *GLU[1:], s)
        found[f"gated backward {what}"] = ops.gated_backward, (half, x, *GLU[1:], s, *wanted)
    return found


SAMPLES = samples()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
@pytest.mark.parametrize(("operator", "args"), SAMPLES.values(), ids=SAMPLES)
def test_opcheck(operator: Any, args: tuple[Any, ...]) -> None:
    # The default of want_dscales is that of the schema, as every caller's.
    torch.library.opcheck(operator.default, args)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
def test_kernels_are_one_operator_each_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Traced, "as_operators", True)
    torch.compiler.reset()
    targets: list[str] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        targets.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    def step(x: Tensor, dy: Tensor, packed: Tensor, bias: Tensor) -> list[Tensor]:
        y = activation_forward(x, SWISH, bias)
        dx, db, _ = activation_backward(dy, x, SWISH, bias, True, True, False)
        h = gated_forward(packed, GLU, None)
        packed_grads = gated_backward_(dy, packed, GLU, None, True)
        return [y, dx, db, h, packed_grads.dx, packed_grads.y]

    inputs = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 16), torch.randn(8)
    with recorded() as noted:
        torch.compile(step, backend=backend, fullgraph=True)(*inputs)
    names = [t.split(".")[1] for t in targets if t.startswith("opfuser")]
    assert names == ["activation_forward", "activation_backward", "gated_forward", "gated_backward"]
    launched = [launch.launch.name for launch in noted]
    assert launched == [
        "activation:forward_rows",
        "activation:backward_rows",
        "gated:forward",
        "gated:backward",
    ]
    torch.compiler.reset()
    plain = torch.compile(step, backend="aot_eager", fullgraph=True)(*inputs)
    for got, want in zip(plain, step(*inputs), strict=True):
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
