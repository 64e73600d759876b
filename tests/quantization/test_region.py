"""Where quantized compute applies, the scales that are kept, and what is refused."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

import opfuser
from opfuser import recipe as recipes
from opfuser.errors import ArgumentError, NotSupportedError, QuantizedWeightError
from opfuser.recipe import DelayedScaling, Float8CurrentScaling, Float8PredictedScaling, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

CURRENT = Float8CurrentScaling()


def model(**how: Any) -> opfuser.Sequential:
    torch.manual_seed(0)
    return opfuser.Sequential(opfuser.Linear(32, 48), opfuser.GELU(), opfuser.Linear(48, 16), **how)


def quantized(seq: opfuser.Sequential) -> tuple[int, ...]:
    return seq.last_plan.quantized


X = torch.randn(5, 32)


def test_a_region_and_its_end() -> None:
    seq = model()
    with opfuser.autocast(recipe=CURRENT):
        seq(X)
        assert quantized(seq) == (0, 3)
        with opfuser.autocast(enabled=False):
            seq(X)
            assert quantized(seq) == ()
        with opfuser.fp8_autocast(fp8_recipe=recipes.Float8PredictedScaling()):
            seq(X)
        assert isinstance(seq.last_plan.env.recipe, Float8PredictedScaling)
    seq(X)
    assert quantized(seq) == ()
    opfuser.autocast(recipe=CURRENT)(seq)(X)
    assert quantized(seq) == (0, 3)


def test_the_default_recipe() -> None:
    with torch.device("meta"):
        x, seq = torch.empty(16, 2048), opfuser.Sequential(opfuser.Linear(2048, 2048))
        small = opfuser.Sequential(opfuser.Linear(2048, 2032), opfuser.ReLU())
        merged = opfuser.Sequential(opfuser.MergedLinear(2048, {"gate": 1024, "up": 1024}))
    with opfuser.autocast():
        assert seq.plan(x).env.recipe == DelayedScaling(min_features=2048)
        assert seq.plan(x).quantized == merged.plan(x).quantized == (0,)
        plan = small.plan(x)
    assert plan.quantized == ()
    assert "not op 0: SHAPE: its features, (2032, 2048), are below min_features = 2048" in str(plan)


def test_weights_stored_in_fp8_are_multiplied_whatever_their_size() -> None:
    with opfuser.quantized_model_init():
        seq = model()
    with opfuser.autocast():
        assert seq.plan(X).quantized == (0, 3)


def test_other_threads_are_outside() -> None:
    seq, found = model(), []
    with opfuser.autocast(recipe=CURRENT):
        thread = threading.Thread(target=lambda: found.append(seq.plan(X).quantized))
        thread.start()
        thread.join()
        assert seq.plan(X).quantized == (0, 3)
    assert found == [()]


def test_a_sequence_with_a_recipe_of_its_own() -> None:
    seq = model(recipe=CURRENT)
    assert seq.plan(X).quantized == (0, 3)
    seq(X)
    assert quantized(seq) == (0, 3)
    seq.recipe = None
    seq(X)
    assert quantized(seq) == ()
    outer = opfuser.Sequential(opfuser.Linear(32, 32), model(recipe=CURRENT))
    outer(X)
    assert quantized(outer) == (2, 5)
    assert outer.plan(X).quantized == (2, 5)
    assert pickle.loads(pickle.dumps(outer))[1].recipe == CURRENT


def test_the_plan_says_what_stays_in_high_precision() -> None:
    odd = opfuser.Sequential(opfuser.Linear(32, 20), opfuser.ReLU(), opfuser.Linear(20, 16))
    with opfuser.autocast(recipe=CURRENT):
        plan = odd.plan(X)
    assert [(at, why.code) for at, why in plan.high_precision] == [(0, "SHAPE"), (3, "SHAPE")]
    assert "quantized, Float8CurrentScaling: none" in str(plan)
    assert "not op 0: SHAPE: its features, (20, 32), are not multiples of 16" in str(plan)
    seq = model()
    seq[0].basic_ops[0].recipe = None
    with opfuser.autocast(recipe=CURRENT):
        plan = seq.plan(X)
        assert plan.quantized == (3,)
        assert [why.code for _, why in plan.high_precision] == ["NO_RECIPE"]
        assert [why.code for _, why in model().double().plan(X.double()).high_precision] == [
            "DTYPE",
            "DTYPE",
        ]
    seq[0].basic_ops[0].recipe = "inherit"
    with opfuser.autocast(recipe=CURRENT):
        assert seq.plan(X).quantized == (0, 3)


@pytest.mark.parametrize("grad", [True, False])
def test_a_head_is_left_in_high_precision(grad: bool) -> None:
    head = opfuser.Sequential(opfuser.BasicLinear(32, 16), opfuser.CrossEntropy())
    targets = torch.zeros(5, dtype=torch.int64)
    with opfuser.autocast(recipe=CURRENT), torch.set_grad_enabled(grad):
        plan = head.plan(X, targets)
    assert plan.quantized == ()
    assert [(at, why.code) for at, why in plan.high_precision] == [(0, "CONFLICT")]


def test_delayed_scales_follow_the_history() -> None:
    seq = opfuser.Sequential(opfuser.BasicLinear(32, 16))
    recipe = DelayedScaling(amax_history_len=2)
    inputs = [X / X.abs().max() * amax for amax in (2.0, 8.0, 1.0, 1.0, 1.0)]
    expected = [448 / 2, 448 / 2, 448 / 8, 448 / 8, 448]  # the first from the values themselves
    op: Any = seq[0]
    for x, scale in zip(inputs, expected):
        with opfuser.autocast(recipe=recipe):
            seq(x).sum().backward()
            assert op.quantization.scale[0].item() == pytest.approx(scale)
    assert list(seq.state_dict()) == [
        "0.weight",
        "0.quantization.scale",
        "0.quantization.amax_history",
        "0.quantization.amax",
    ]
    assert op.quantization.bfloat16().scale.dtype == torch.float32


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8PredictedScaling()], ids=type)
def test_what_overflows_says_nothing_of_the_next_call(recipe: Recipe) -> None:
    seq = opfuser.Sequential(opfuser.BasicLinear(32, 16))
    op: Any = seq[0]
    bad = X.clone()
    bad[1, 2] = float("inf")
    with torch.no_grad():
        for x in (bad, X):
            with opfuser.autocast(recipe=recipe):
                finite = seq(x).isfinite().all()
            assert finite == (x is X)
        assert op.quantization.scale[0] == 1
        for x in (bad, X):  # nor does it enter the history
            with opfuser.autocast(recipe=recipe):
                seq(x)
        with opfuser.autocast(recipe=recipe):
            fits = 448 / X.abs().max().item() / 2 ** getattr(recipe, "margin", 0)
            assert op.quantization.scale[0].item() == pytest.approx(fits)


def test_predicted_scales_look_at_the_first_tensor() -> None:
    seq = opfuser.Sequential(opfuser.BasicLinear(32, 16))
    op: Any = seq[0]
    with opfuser.autocast(recipe=Float8PredictedScaling(margin=2)):
        seq(X)
    assert op.quantization.scale[0].item() == pytest.approx(448 / X.abs().max().item())
    with opfuser.autocast(recipe=Float8PredictedScaling(margin=2)):
        seq(X)
    assert op.quantization.scale[0].item() == pytest.approx(448 / X.abs().max().item() / 4)


def test_it_is_skipped_where_no_recipe_is_active() -> None:
    seq = model()
    record = seq.plan(X).record("quantized_linear")
    assert (record.status, record.detail) == ("skipped", "no recipe of quantized compute is active")
    with opfuser.autocast(recipe=CURRENT), torch.no_grad():
        assert seq.plan(X).record("quantized_linear").matches == ((0, 1), (3, 4))


def test_kept_weights() -> None:
    seq, plain = model(), model()
    x = X.clone().requires_grad_()
    with opfuser.autocast(recipe=CURRENT):
        wanted = torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])
    with opfuser.keep_quantized_weights():
        for _ in range(2):
            with opfuser.autocast(recipe=CURRENT):
                got = torch.autograd.grad(seq(x).sum(), [x, *seq.parameters()])
            for a, b in zip(got, wanted):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
        with torch.no_grad():
            next(seq.parameters()).mul_(2)
        with (
            opfuser.autocast(recipe=CURRENT),
            pytest.raises(
                QuantizedWeightError, match="A weight does not change within keep_quantized_weights"
            ),
        ):
            seq(x)
    with opfuser.autocast(recipe=CURRENT):
        assert not torch.equal(seq(x), plain(x))


@pytest.mark.slow
def test_compiled_calls_are_refused() -> None:
    seq = model()
    compiled = torch.compile(seq, backend="eager", fullgraph=True)
    compiled(X)
    with opfuser.autocast(recipe=CURRENT), pytest.raises(Exception, match="not traced by torch"):
        compiled(X)
    compiled(X)
    torch.compiler.reset()


E5M2, HYBRID = recipes.Format.E5M2, recipes.Format.HYBRID
NOT_SPLIT = recipes.MMParams(False)
Blocks = recipes.Float8BlockScaling
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (opfuser.autocast, {"recipe": "fp8"}, "A recipe is one of opfuser.recipe"),
    (opfuser.autocast, {"recipe": Recipe()}, "A recipe is one of"),
    (model, {"recipe": 1}, "A recipe is one of opfuser.recipe"),
    (DelayedScaling, {"min_features": -1}, "min_features is at least 0"),
    (DelayedScaling, {"fprop": "fp4"}, "fprop, dgrad and wgrad are"),
    (DelayedScaling, {"save_activations": "bf16"}, "is None or 'fp8'.*Received: 'bf16'"),
    (DelayedScaling, {"fp8_format": "E4M3"}, "fp8_format is a Format"),
    (DelayedScaling, {"amax_history_len": 0}, "amax_history_len is positive"),
    (Blocks, {"wgrad_x_block_scaling_dim": 0}, "Blocks of inputs in wgrad are 1 x 128 or 128 x"),
]
NOT_SUPPORTED: list[tuple[Any, dict[str, Any], str]] = [
    (opfuser.autocast, {"calibrating": True}, "Scales are taken from"),
    (DelayedScaling, {"fp8_mha": True}, "Attention is not computed"),
    (DelayedScaling, {"backward_override": "x"}, "backward_override is"),
    (DelayedScaling, {"fp8_format": E5M2}, "No GPU multiplies E5M2 by E5M2"),
    (DelayedScaling, {"amax_compute_algo": "mean"}, "amax_compute_algo"),
    (DelayedScaling, {"scaling_factor_compute_algo": max}, "Scales are computed by the library"),
    (Blocks, {"w_block_scaling_dim": 1}, "Blocks are 1 x 128, 128 x 128 and 1 x 128"),
    (Blocks, {"fp8_format": HYBRID}, "Blocks are in E4M3"),
    (Blocks, {"fp8_gemm_fprop": NOT_SPLIT}, "GEMMs of blocks split their sums"),
]


@pytest.mark.parametrize(
    ("error", "make", "how", "text"),
    [*((ArgumentError, *row) for row in WRONG), *((NotSupportedError, *r) for r in NOT_SUPPORTED)],
)
def test_refused(error: type[Exception], make: Any, how: dict[str, Any], text: str) -> None:
    with pytest.raises(error, match=text):
        make(**how)


def test_an_operation_inherits_its_recipe_or_has_none() -> None:
    op = opfuser.BasicLinear(16, 16)
    op.recipe = "fp8"
    with pytest.raises(ArgumentError, match="The recipe of an operation is 'inherit' or None"):
        op(torch.randn(2, 16))


def test_recipes_are_equal_by_value_and_tell_their_kind() -> None:
    assert DelayedScaling(margin=1) == DelayedScaling(margin=1) != DelayedScaling()
    assert hash(DelayedScaling()) == hash(DelayedScaling())
    assert DelayedScaling(save_activations="fp8") != DelayedScaling()
    kinds = {
        recipes.DelayedScaling: ("delayed", "float8_per_tensor_scaling"),
        recipes.Float8CurrentScaling: ("float8_current_scaling", "float8_per_tensor_scaling"),
        recipes.Float8PredictedScaling: ("float8_per_tensor_scaling",),
        recipes.Float8BlockScaling: ("float8_block_scaling",),
        recipes.MXFP8BlockScaling: ("mxfp8",),
        recipes.NVFP4BlockScaling: ("nvfp4",),
    }
    every = {name for names in kinds.values() for name in names}
    for kind, names in kinds.items():
        assert {name for name in every if getattr(kind, name)()} == set(names)
    assert recipes.Format.HYBRID.value.max_bwd == 57344
    override = DelayedScaling(backward_override="high_precision")
    assert (override.fprop, override.dgrad, override.wgrad) == ("fp8", "bf16", "bf16")
