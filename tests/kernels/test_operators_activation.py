"""Activations as operators, and in plain torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from opfuser.kernels import cpu_blocks
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
from opfuser.kernels.scalar import FUNCTIONS as BY_NAME
from opfuser.kernels.scalar import ScalarFunction, scalar_function
from tests.kernels.activations import (
    FUNCTIONS,
    LAYOUTS,
    PRODUCTS,
    assert_rounded_once,
    check_activation,
    check_gated,
    columns,
    expected_activation,
    expected_gated,
    tensor,
)

if INTERPRETED:
    pytest.skip("the interpreter's process runs kernels instead", allow_module_level=True)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HALF = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
# Each layout with two dtypes, each dtype with three layouts.
PAIRS = [*zip(LAYOUTS, DTYPES * 2), *zip(LAYOUTS, (DTYPES[1:] + DTYPES[:1]) * 2)]
GLU = product_spec(Glu(Swish(), None, 2))
SWISH = Swish().spec


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_plain_activations(f: ScalarFunction) -> None:
    for layout, dtype in PAIRS:
        x, dy = (
            tensor(5, 24, dtype=dtype, device=CPU, layout=lies) for lies in (layout, "rows apart")
        )
        what = f"{layout}, {dtype}"
        check_activation(f, x, dy, torch.randn(24).to(dtype), f"{what}, with bias")
        check_activation(f, dy, x, None, f"{what}, without")


@pytest.mark.parametrize("f", PRODUCTS.values(), ids=PRODUCTS)
def test_plain_products(f: Glu | ScalarFunction) -> None:
    for layout, dtype in PAIRS:
        x = tensor(5, columns(f, 48), dtype=dtype, device=CPU, layout=layout)
        dy = tensor(5, 48, dtype=dtype, device=CPU, layout=layout)
        scales = tensor(5, dtype=dtype, device=CPU, layout=layout)
        what = f"{layout}, {dtype}"
        check_gated(f, x, dy, scales, f"{what}, with scales")
        check_gated(f, x, dy, None, f"{what}, without")


@pytest.mark.parametrize("shape", [(0, 24), (7,), (2, 3, 24)])
def test_plain_shapes(shape: tuple[int, ...]) -> None:
    x, dy = tensor(2, *shape, dtype=torch.float32, device=CPU)
    check_activation(Swish(), x, dy, torch.randn(shape[-1]))
    check_activation(Swish(), x, dy, None)
    packed = tensor(*shape[:-1], 2 * shape[-1], dtype=torch.float32, device=CPU)
    check_gated(Glu(Swish()), packed, dy, torch.randn(shape[:-1]))


@pytest.mark.parametrize(
    ("rows", "dtype"), [((5,), torch.bfloat16), ((2, 3), torch.float64)], ids=str
)
def test_plain_products_block_by_block(
    rows: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [tensor(*rows, columns(f, 24), dtype=dtype, device=CPU) for f in PRODUCTS.values()]
    wanted = [gated_forward(x, product_spec(f), None) for f, x in zip(PRODUCTS.values(), given)]
    monkeypatch.setattr(cpu_blocks, "BLOCK", 50)  # two rows of 24 and 24
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    at_once: list[int] = []
    split = Tensor.split
    monkeypatch.setattr(Tensor, "split", lambda x, rows: at_once.append(rows) or split(x, rows))
    for (name, f), x, want in zip(PRODUCTS.items(), given, wanted):
        at_once.clear()
        torch.testing.assert_close(gated_forward(x, product_spec(f), None), want, msg=name)
        assert at_once == ([2, 2] if isinstance(f, Glu) else [4, 4]), name


@pytest.mark.parametrize("want_y", [False, True])
@pytest.mark.parametrize("rows", [(5,), (2, 3), (0,), ()])
def test_plain_products_over_x_block_by_block(
    rows: tuple[int, ...], want_y: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_blocks, "BLOCK", 50)  # two rows of 24 and 24
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for f in PRODUCTS.values():
        spec = product_spec(f)
        x = tensor(*rows, columns(f, 24), dtype=torch.bfloat16, device=CPU)
        dy = tensor(*rows, 24, dtype=torch.bfloat16, device=CPU)
        want = gated_backward(dy, x, spec, None, True, want_y)
        got = gated_backward_(dy, x, spec, None, want_y)
        torch.testing.assert_close(got, want)
        assert (got.y is None) != want_y
        assert got.dx is x


@pytest.fixture(params=["at once", "block by block", "as traced"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as traced":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if request.param == "block by block":
        monkeypatch.setattr(cpu_blocks, "BLOCK", 50)  # two rows of 24 and 24
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


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


def test_a_bias_of_another_dtype() -> None:
    x, dy = tensor(2, 5, 24, dtype=torch.bfloat16, device=CPU)
    check_activation(Swish(), x, dy, torch.randn(24))


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
def test_kernels_are_one_operator_each_while_compiling() -> None:
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
