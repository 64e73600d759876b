"""Products of quantized operands by another library than torch, which a recipe names."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

import opfuser
from opfuser import gemm_providers
from opfuser.errors import ArgumentError
from opfuser.gemm_providers import Gemm, GemmOperand, GemmProvider
from opfuser.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe
from tests.quantization.test_values import error, results
from tests.replay.models import code
from tests.replay.recorded import replayed_on_a_cpu

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

E5M2 = torch.float8_e5m2
asked: list[Gemm] = []
computed: list[tuple[tuple[int, ...], torch.dtype, bool]] = []


def values(x: GemmOperand) -> Tensor:
    rows, cols = x.codes.shape
    scale = x.scale
    if x.scaling is ScalingType.BlockWise1x128:
        scale = scale.t().repeat_interleave(128, 1)[:, :cols]
    elif x.scaling is ScalingType.BlockWise128x128:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
    return x.codes.double() * scale


def refuses(gemm: Gemm) -> str | None:
    asked.append(gemm)
    return "it knows no dgrad" if gemm.product == "dgrad" and gemm.out_features == 256 else None


def multiply(a: GemmOperand, b: GemmOperand, dtype: torch.dtype, split: bool) -> Tensor:
    computed.append(((*a.codes.shape, b.codes.shape[0]), dtype, split))
    return (values(a) @ values(b).t()).to(dtype)


gemm_providers.register(GemmProvider("exact", refuses, multiply))
gemm_providers.register(GemmProvider("replayable", refuses, multiply, replayable=True))


@pytest.fixture(autouse=True)
def _forget() -> None:
    asked.clear()
    computed.clear()


def block() -> opfuser.Sequential:
    torch.manual_seed(0)
    norm, act = opfuser.RMSNorm(128), opfuser.SwiGLU()
    return opfuser.Sequential(norm, opfuser.Linear(128, 256), act, opfuser.Linear(128, 128))


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
def test_a_provider_computes_what_it_takes(kind: type[Recipe]) -> None:
    model = block()
    x = torch.randn(160, 128, requires_grad=True)
    got = {}
    for gemm in ("torch", "exact"):
        with opfuser.autocast(recipe=kind(gemm=gemm)):
            got[gemm] = results(model, x, list(model.parameters()), torch.ones(160, 128))
    for own, plain in zip(got["exact"], got["torch"]):
        assert error(own, plain.double()) < 1e-5
    shapes = {shape for shape, _, _ in computed}  # 160 rows, padded to a multiple of 128
    assert shapes == {(256, 128, 256), (256, 128, 128), (256, 256, 128), (128, 256, 128)}
    assert len(computed) == 5, "all six but the one that it refuses"
    plan = model.last_plan
    assert [(c.op, c.product, c.refusal) for c in plan.gemms] == [
        (1, "fprop", None), (1, "dgrad", "it knows no dgrad"), (1, "wgrad", None),
        (4, "fprop", None), (4, "dgrad", None), (4, "wgrad", None),
    ]  # fmt: skip
    text = str(plan)
    assert "\n  fprop of ops 1, 4: exact\n" in text
    assert "\n  dgrad of op 1: torch, because exact refuses: it knows no dgrad\n" in text


def test_what_a_provider_is_asked() -> None:
    model = opfuser.Sequential(opfuser.BasicLinear(128, 256))
    recipe = Float8BlockScaling(gemm="exact", dgrad="bf16")
    x = torch.randn(3, 128)
    with opfuser.autocast(recipe=recipe):
        plan = model.plan(x)
    one, square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    fixed = {"split": True, "device": torch.device("cpu"), "hardware": False}
    common: dict[str, Any] = {**fixed, "dtype": torch.float32, "formats": (e4m3, e4m3)}
    assert asked == [
        Gemm("fprop", 256, 128, scalings=(one, square), **common),
        Gemm("wgrad", 256, 128, scalings=(one, square), **common),
    ]
    assert [choice.product for choice in plan.gemms] == ["fprop", "wgrad"]
    asked.clear()
    with opfuser.autocast(recipe=Float8CurrentScaling(gemm="exact")):
        model.plan(x)
    assert [gemm.formats for gemm in asked] == [(e4m3, e4m3), (e5m2, e4m3), (e5m2, e4m3)]
    assert [gemm.split for gemm in asked] == [False, True, True]
    assert {*asked[0].scalings} == {ScalingType.TensorWise}


def test_provider_and_torch_have_plans_of_their_own() -> None:
    model = opfuser.Sequential(opfuser.Linear(128, 128))
    x = torch.randn(16, 128)
    plain, exact = Float8CurrentScaling(), Float8CurrentScaling(gemm="exact")
    for recipe in (plain, exact, plain):
        before = len(computed)
        with opfuser.autocast(recipe=recipe):
            model(x)
            plan = model.plan(x)
        assert (len(computed) > before) == bool(plan.gemms) == (recipe is exact)
    own = opfuser.Sequential(*model, recipe=exact)
    before = len(computed)
    own(x)
    assert len(computed) == before + 1, "a Sequential with a recipe of its own"


def test_projections() -> None:
    model = opfuser.Sequential(opfuser.MergedLinear(128, {"q": 128, "k": 256}))
    x = torch.randn(16, 128, requires_grad=True)
    recipe = Float8CurrentScaling(gemm="exact")
    with opfuser.autocast(recipe=recipe):
        model(x).sum().backward()
    assert {shape for shape, _, _ in computed} == {
        (128, 128, 384), (128, 384, 128), (384, 128, 128)
    }  # fmt: skip
    plan = model.last_plan
    assert [choice.refusal for choice in plan.gemms] == [None] * 3


def test_groups_and_main_grad() -> None:
    grouped = opfuser.GroupedLinear(2, 128, 128, accumulate_into_main_grad=True)
    linear = opfuser.BasicLinear(128, 128, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    for p in (*grouped.parameters(), linear.weight):
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    sizes = torch.tensor([16, 32])
    x = torch.randn(48, 128)
    kept: dict[str, Any] = {}
    for gemm in ("torch", "exact"):
        with opfuser.autocast(recipe=Float8CurrentScaling(gemm=gemm)):
            y = opfuser.Sequential(grouped)(x, sizes), opfuser.Sequential(linear)(x.bfloat16())
        (y[0].sum() + y[1].float().sum()).backward()
        grads = [grouped.weight0.main_grad, grouped.weight1.main_grad, linear.weight.main_grad]
        kept[gemm] = [*y, *(t.clone() for t in grads)]
        for t in grads:
            t.zero_()
    for own, plain in zip(kept["exact"], kept["torch"]):
        assert error(own, plain.double()) < (1e-5 if own.dtype == torch.float32 else 5e-3)
    # Of the linear operation alone: its forward is in bf16, what goes to main_grad in fp32.
    dtypes = [dtype for _, dtype, _ in computed]
    assert (dtypes.count(torch.bfloat16), dtypes.count(torch.float32)) == (1, 1)


def test_groups_are_multiplied_by_no_provider() -> None:
    seq = opfuser.Sequential(opfuser.GroupedLinear(2, 128, 128))
    x, sizes = torch.randn(48, 128), torch.tensor([16, 32])
    with opfuser.autocast(recipe=Float8CurrentScaling(gemm="exact")):
        seq(x, sizes).sum().backward()
        plan = seq.plan(x, sizes)
    assert not computed
    assert [choice.product for choice in plan.gemms] == ["fprop", "dgrad", "wgrad"]
    why = "torch, because exact refuses: groups of rows are multiplied at once"
    assert why in " ".join(str(plan).split())


class Stored(NamedTuple):
    """What stands for an operand of Transformer Engine."""

    data: Tensor
    fp8_scale_inv: Tensor
    fp8_dtype: str

    def values(self) -> Tensor:
        formats = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
        return self.data.view(formats[self.fp8_dtype]).double() * self.fp8_scale_inv


def general_gemm(
    A: Stored, B: Stored, out_dtype: torch.dtype, layout: str, use_split_accumulator: bool
) -> list[Tensor]:
    assert layout == "TN"
    return [(B.values() @ A.values().t()).to(out_dtype)]


def test_operands_of_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with its names."""
    engine, storage, functions = (ModuleType(name) for name in ("engine", "storage", "functions"))
    formats = SimpleNamespace(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2")
    monkeypatch.setattr(engine, "DType", formats, raising=False)
    monkeypatch.setattr(storage, "Float8TensorStorage", Stored, raising=False)
    monkeypatch.setattr(functions, "general_gemm", general_gemm, raising=False)
    name = "transformer_engine.pytorch"
    monkeypatch.setitem(sys.modules, name, engine)
    monkeypatch.setitem(sys.modules, f"{name}.tensor.storage.float8_tensor_storage", storage)
    monkeypatch.setitem(sys.modules, f"{name}.cpp_extensions", functions)
    one = ScalingType.TensorWise

    def operand(rows: int, scale: float, dtype: torch.dtype) -> GemmOperand:
        return GemmOperand(torch.randn(rows, 32).to(dtype), torch.tensor([scale]), one)

    left = [operand(16, 0.5, torch.float8_e4m3fn), operand(48, 2.0, E5M2)]
    right = [operand(64, 4.0, torch.float8_e4m3fn), operand(64, 1.0, torch.float8_e4m3fn)]
    provider = gemm_providers.find("te")
    want = [values(a) @ values(b).t() for a, b in zip(left, right)]
    one_by_one = [provider.multiply(a, b, torch.float64, True) for a, b in zip(left, right)]
    torch.testing.assert_close(one_by_one, want)


@pytest.mark.parametrize("replayable", [False, True])
def test_calls_are_recorded_only_if_the_provider_allows_it(replayable: bool) -> None:
    model = opfuser.Sequential(opfuser.Linear(128, 128))
    recipe = Float8CurrentScaling(gemm="replayable" if replayable else "exact")
    with replayed_on_a_cpu(), opfuser.replay("on"), torch.no_grad():
        for _ in range(4):
            with opfuser.autocast(recipe=recipe):
                model(torch.randn(16, 128))
    assert code(model) == ("" if replayable else "OPERATION")
    if not replayable:
        (replay,) = model.last_plan.replays
        assert "GEMMs of exact do not promise" in str(replay)


def test_names() -> None:
    with pytest.raises(ArgumentError, match=r"one of torch, te, .*'tee'.*Did you mean 'te'"):
        Float8CurrentScaling(gemm="tee")
    with pytest.raises(ArgumentError, match=r"GEMM provider is one of.*42.*Register it before"):
        Float8CurrentScaling(gemm=42)
    with pytest.raises(ArgumentError, match=r"name of a GEMM provider is its own.*'exact'"):
        gemm_providers.register(GemmProvider("exact", refuses, multiply))
    with pytest.raises(ArgumentError, match="'torch'"):
        gemm_providers.register(GemmProvider("torch", refuses, multiply))
    assert gemm_providers.names()[:3] == ["torch", "te", "deepgemm"]


def gemm(**changed: Any) -> Gemm:
    codes = torch.float8_e4m3fn
    blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    cuda = torch.device("cuda")
    own = Gemm("fprop", 128, 128, (codes, codes), blocks, torch.bfloat16, True, cuda, True)
    return own._replace(**changed)


@pytest.mark.parametrize(
    ("name", "changed", "why"),
    [
        ("te", {"hardware": False, "device": torch.device("cpu")}, "products are emulated on cpu"),
        ("te", {"scalings": (ScalingType.BlockWise1x32,) * 2}, "no scales of BlockWise1x32"),
        ("deepgemm", {"product": "wgrad"}, "squares in one operand"),
        ("deepgemm", {"dtype": torch.float32}, "in bfloat16, not torch.float32"),
        ("deepgemm", {"formats": (E5M2, torch.float8_e4m3fn)}, "operands are in E4M3"),
        ("deepgemm", {"scalings": (ScalingType.TensorWise,) * 2}, "no scales of TensorWise"),
    ],
)
def test_what_other_libraries_do_not_take(name: str, changed: dict[str, Any], why: str) -> None:
    provider = gemm_providers.find(name)
    refusal = provider.refuses(gemm(**changed))
    assert why in refusal


PACKAGES = {"te": "transformer_engine", "deepgemm": "deep_gemm"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_library_that_is_not_there_leaves_products_to_torch(name: str) -> None:
    if importlib.util.find_spec(PACKAGES[name]) is not None:
        pytest.skip(f"{PACKAGES[name]} can be imported")
    provider = gemm_providers.find(name)
    assert "cannot be imported: No module named" in (provider.refuses(gemm()) or "")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
@pytest.mark.parametrize("name", PACKAGES)
def test_other_libraries_on_a_gpu(name: str, kind: type[Recipe], dtype: torch.dtype) -> None:
    """Their products are torch's, up to the order of sums."""
    pytest.importorskip(PACKAGES[name], reason=f"needs {PACKAGES[name]}", exc_type=ImportError)
    model = block().to("cuda", dtype)
    with opfuser.disable("norm_linear", "activation_linear"):
        found = {}
        x = torch.randn(384, 128, device="cuda", dtype=dtype, requires_grad=True)
        for provider in ("torch", name):
            recipe = dataclasses.replace(kind(), gemm=provider)
            with opfuser.autocast(recipe=recipe):
                dy = torch.ones_like(x)
                found[provider] = results(model, x, list(model.parameters()), dy)
    plan = model.last_plan
    taken = {c.product for c in plan.gemms if c.refusal is None}
    blocks, bf16 = kind is Float8BlockScaling, dtype == torch.bfloat16
    wanted = {"fprop", "dgrad", "wgrad"} if name == "te" else {"fprop", "dgrad"}
    assert taken == (wanted if name == "te" or (blocks and bf16) else set())
    for own, plain in zip(found[name], found["torch"]):
        assert error(own, plain.double()) < 1e-2
