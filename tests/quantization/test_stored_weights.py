"""Weights that are stored in FP8 alone."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import ArgumentError, NotSupportedError, QuantizedWeightError
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.quantization import weights
from opfuser.quantization.weights import WeightFormat, weight_codes
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from tests.kernels.codes import assert_codes, assert_scales, expected, expected_scale, inverse
from tests.quantization.masters_by_hand import saved

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
CURRENT, BLOCKS = Float8CurrentScaling(), Float8BlockScaling()
RECIPES: list[Recipe] = [CURRENT, BLOCKS, DelayedScaling()]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)


def model(recipe: Recipe | None, **how: Any) -> opfuser.Sequential:
    """The same values for each recipe; None: in high precision."""
    torch.manual_seed(0)
    preserve = how.pop("preserve", False)
    how = {"dtype": BF16, **how}
    with opfuser.quantized_model_init(recipe is not None, recipe, preserve):
        return opfuser.Sequential(
            opfuser.Linear(128, 256, **how), opfuser.GELU(), opfuser.BasicLinear(256, 128, **how)
        )


def inputs(dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 128, dtype=dtype, requires_grad=True), torch.randn(5, 128, dtype=dtype)


def results(seq: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    y = seq(x)
    return [y, *torch.autograd.grad(y, [x, *seq.parameters()], dy)]


def dequantized(seq: opfuser.Sequential) -> opfuser.Sequential:
    """The same values in high precision."""
    plain = model(None).to(seq[0].weight.device)
    plain.load_state_dict(seq.state_dict())
    return plain


def test_a_byte_for_each_element() -> None:
    seq = model(CURRENT)
    sizes = {name: (t.dtype, t.nbytes) for name, t in seq.state_dict().items()}
    assert sizes == {
        "0.weight": (E4M3, 256 * 128),
        "0.bias": (BF16, 512),
        "0.weight_scale": (torch.float32, 4),
        "2.weight": (E4M3, 128 * 256),
        "2.weight_scale": (torch.float32, 4),
    }
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in every(seq)}
    assert sum(storages.values()) == 2 * 256 * 128 + 512 + 8
    assert model(BLOCKS)[0].weight_scale.shape == (2, 4)
    for op in (seq[0], seq[2]):
        assert op.weight_format == WeightFormat(CURRENT, BF16)
        assert op.weight.grad_dtype == BF16
        assert "weight in torch.float8_e4m3fn" in repr(op)


def every(seq: nn.Module) -> list[Tensor]:
    return [*seq.parameters(), *seq.buffers()]


@each_recipe
def test_initial_values_are_those_without_rounded(recipe: Recipe) -> None:
    linear, plain = model(recipe)[0], model(None)[0]
    w = plain.weight.detach().float()
    if recipe is BLOCKS:
        squares = w.unflatten(1, (1, 128)).unflatten(0, (2, 128)).abs().amax((1, 3))
        s = torch.tensor([[expected_scale(a.item(), E4M3, True)] for a in squares.flatten()])
        assert_scales(linear.weight_scale[:, :1].contiguous(), inverse(s))
        assert (linear.weight_scale[:, 1:] == 1).all()
        s = s.repeat_interleave(128, 0)
    else:
        s = torch.tensor([expected_scale(w.abs().max().item(), E4M3, False)])
        assert_scales(linear.weight_scale, inverse(s))
    assert_codes(linear.weight.detach(), expected(w, s, E4M3), E4M3)
    values = linear.weight.detach().double() * inverse(s).double()
    assert torch.equal(linear.read_weight(), values.float().to(BF16))
    assert torch.equal(linear.read_weight(torch.float32), values.float())
    assert torch.equal(plain.read_weight(torch.float32), w)


def test_scales_follow_the_fields_of_the_recipe() -> None:
    how = QParams(power_2_scale=True, amax_epsilon=4.0)
    linear = model(Float8CurrentScaling(fp8_quant_fwd_weight=how))[0]
    assert linear.weight_scale.item() == 1 / 64
    squares = model(Float8BlockScaling(fp8_quant_fwd_weight=QParams()))[0]
    amax = model(None)[0].weight.detach()[:128].abs().max().item()
    assert squares.weight_scale[0, 0].item() == pytest.approx(amax / 448, rel=1e-6)


@each_recipe
def test_in_a_region_the_codes_are_used_as_they_are(recipe: Recipe, device: torch.device) -> None:
    """As where their values are quantized with the same scales, which gives the codes again."""
    how = {"dtype": torch.float32, "device": device}
    seq, plain = model(recipe, **how), model(None, **how)
    x, dy = (t.detach().to(device).requires_grad_() for t in inputs(torch.float32))
    plain.load_state_dict(seq.state_dict())
    with opfuser.autocast(recipe=recipe):
        for each in (seq, plain):
            results(each, x, dy)
        for n in (0, 2):
            if isinstance(recipe, DelayedScaling):
                plain[n].quantization.scale[1:2] = 1 / seq[n].weight_scale
        for ours, theirs in zip(results(seq, x, dy), results(plain, x, dy)):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert seq.last_plan.quantized == (0, 3)


@each_recipe
def test_elsewhere_the_weight_is_dequantized(recipe: Recipe, device: torch.device) -> None:
    seq = model(recipe).to(device)
    x, dy = (t.detach().to(device).requires_grad_() for t in inputs())
    got, plain = results(seq, x, dy), dequantized(seq)
    for ours, theirs in zip(got, results(plain, x, dy)):
        assert torch.equal(ours, theirs)
        assert ours.dtype == BF16
    h = torch.randn(3, 256, dtype=BF16, device=device)
    assert torch.equal(seq[2].reference(h), plain[2].reference(h))
    seq.requires_grad_(False)
    (dx,) = torch.autograd.grad(seq(x), [x], dy)
    assert torch.equal(dx, got[1])
    with torch.inference_mode():
        seq(x)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_gemms_in_high_precision_take_values(gemm: str) -> None:
    recipe = Float8CurrentScaling(**{gemm: "bf16"})
    seq, (x, dy) = model(recipe), inputs()
    with opfuser.autocast(recipe=recipe):
        got, want = results(seq, x, dy), results(dequantized(seq), x, dy)
    for ours, theirs in zip(got, want):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm()


def test_one_scale_stands_for_all_squares_but_not_the_reverse() -> None:
    seq, (x, dy) = model(CURRENT), inputs()
    made = weight_codes(seq[0].weight, seq[0].weight_scale, BLOCKS, rows=True, cols=True)
    scale = seq[0].weight_scale.item()
    assert made.row_scale.tolist() == [[scale, 1, 1, 1], [scale, 1, 1, 1]]
    assert made.col_scale.tolist() == [[scale, scale, 1, 1]]
    with opfuser.autocast(recipe=BLOCKS):
        got = results(seq, x, dy)
        assert seq.last_plan.quantized == (0, 3)
    for ours, theirs in zip(got, results(seq, x, dy)):
        assert (ours - theirs).norm() <= 0.06 * theirs.norm()
    with opfuser.autocast(recipe=CURRENT):
        plan = model(BLOCKS).plan(x)
    assert plan.quantized == ()
    assert [why.code for _, why in plan.high_precision] == ["LAYOUT", "LAYOUT"]
    assert "a scale for each square" in str(plan)


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling()], ids=type)
def test_small_blocks_are_not_stored(recipe: Recipe) -> None:
    wrong = opfuser.quantized_model_init(recipe=recipe)
    match = rf"one for each 128 x 128 \(quantized_model_init\).*{type(recipe).__name__}"
    with pytest.raises(NotSupportedError, match=match), wrong:
        pass
    with opfuser.quantized_model_init(False, recipe):
        assert opfuser.BasicLinear(128, 128).weight_format is None
    x, dy = inputs()
    for stored in (CURRENT, BLOCKS):
        seq = model(stored)
        with opfuser.autocast(recipe=recipe):
            got = results(seq, x, dy)
            assert seq[0].get_input_quantizer() is None
        assert seq.last_plan.quantized == ()
        why = [(refusal.code, refusal.detail) for _, refusal in seq.last_plan.high_precision]
        assert why == [("LAYOUT", f"no weight is stored in blocks of {recipe.operands}")] * 2
        for ours, theirs in zip(got, results(seq, x, dy), strict=True):
            assert torch.equal(ours, theirs)


@each_recipe
def test_both_layouts_are_the_same_codes(recipe: Recipe) -> None:
    """Products with identities show them: y is the weight by rows, dx by columns."""
    with opfuser.quantized_model_init(recipe=recipe):
        seq = opfuser.Sequential(opfuser.BasicLinear(256, 384))
    rows, cols = torch.eye(256, requires_grad=True), torch.zeros(384, 256, requires_grad=True)
    with opfuser.autocast(recipe=recipe):
        torch.testing.assert_close(seq(rows).t(), seq[0].read_weight(), rtol=1e-6, atol=0)
        (dx,) = torch.autograd.grad(seq(cols), cols, torch.eye(384))
        torch.testing.assert_close(dx, seq[0].read_weight(), rtol=1e-6, atol=0)


def test_micro_batches_share_the_transpose(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    transpose = weights.transpose_codes

    def counted(codes: Tensor) -> Tensor:
        calls.append(codes)
        return transpose(codes)

    monkeypatch.setattr(weights, "transpose_codes", counted)
    seq, (x, dy) = model(CURRENT), inputs()
    with opfuser.autocast(recipe=CURRENT):
        want = results(seq, x, dy)
        assert len(calls) == 2
        with opfuser.keep_quantized_weights():
            for _ in range(3):
                for ours, theirs in zip(results(seq, x, dy), want):
                    assert torch.equal(ours, theirs)
            assert len(calls) == 4
            seq[0].write_weight(torch.ones(256, 128))
            with pytest.raises(QuantizedWeightError, match="does not change within"):
                seq(x)


def test_a_weight_written_between_the_passes_is_an_error() -> None:
    seq, (x, dy) = model(CURRENT), inputs()
    with opfuser.autocast(recipe=CURRENT):
        y = seq(x)
    seq[0].write_weight(torch.ones(256, 128))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.parametrize("accumulate", ["main_grad", "grad"])
@pytest.mark.parametrize("region", [True, False])
def test_gradients_accumulate(accumulate: str, region: bool) -> None:
    how = {f"accumulate_into_{accumulate}": True}
    seq, (x, dy) = model(CURRENT, **how), inputs()
    with opfuser.autocast(enabled=region, recipe=CURRENT):
        _, _, dw, _, dv = results(model(CURRENT), x, dy)
        for linear in (seq[0], seq[2]):
            linear.weight.main_grad = torch.zeros(linear.weight.shape)
        for _ in range(2):
            seq(x).backward(dy)
    for linear, want in ((seq[0], dw), (seq[2], dv)):
        found = linear.weight.main_grad if accumulate == "main_grad" else linear.weight.grad
        torch.testing.assert_close(found.float(), 2 * want.float(), rtol=0.02, atol=1e-3)
        assert linear.weight.grad.dtype == BF16


def test_under_autocast() -> None:
    seq, (x, dy) = model(CURRENT, dtype=torch.float32), inputs(torch.float32)
    with torch.autocast("cpu", dtype=BF16):
        y, *grads = results(seq, x, dy.to(BF16))
        assert y.dtype == BF16
        assert seq.plan(x).env.autocast_dtype == BF16
    assert [g.dtype for g in grads] == [torch.float32] * 4


MOVES = {
    "bfloat16": (lambda m: m.bfloat16(), BF16),
    "half": (lambda m: m.half(), torch.float16),
    "to": (lambda m: m.to("cpu", torch.float32), torch.float32),
    "type": (lambda m: m.type(torch.float32), torch.float32),
    "share": (lambda m: m.share_memory(), BF16),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS])
def test_casts_leave_the_codes_alone(move: str, recipe: Recipe) -> None:
    seq, (x, dy) = model(recipe), inputs()
    before = {name: t.clone() for name, t in seq.state_dict().items()}
    seq(x).backward(dy)
    grads = [p.grad for p in seq.parameters()]
    apply, dtype = MOVES[move]
    apply(seq)
    for name, t in seq.state_dict().items():
        assert t.dtype == (dtype if name == "0.bias" else before[name].dtype), name
        assert torch.equal(t.float(), before[name].float())
    for p, grad in zip(seq.parameters(), grads):
        torch.testing.assert_close(p.grad, grad.to(dtype))
    x, dy = x.detach().to(dtype).requires_grad_(), dy.to(dtype)
    seq.zero_grad()
    assert {t.dtype for t in results(seq, x, dy)} == {dtype}
    assert seq[0].weight_format.dtype == seq[2].weight_format.dtype == dtype


@each_recipe
def test_deferred_initialization(recipe: Recipe) -> None:
    seq = model(recipe, device="meta")
    assert all(t.is_meta for t in every(seq))
    seq.to_empty(device="cpu")
    torch.manual_seed(0)
    for linear in (seq[0], seq[2]):
        linear.reset_parameters()
    want = model(recipe).state_dict()
    assert all(torch.equal(t.float(), want[name].float()) for name, t in seq.state_dict().items())
    x, dy = inputs()
    assert {t.dtype for t in results(seq, x, dy)} == {BF16}
    moved = model(recipe)
    moved(x).backward(dy)
    moved.to("meta")
    assert moved[0].weight.grad.dtype == BF16
    assert moved[0].weight.grad.is_meta


def assigned(seq: opfuser.Sequential) -> opfuser.Sequential:
    other = model(seq[0].weight_format.recipe, device="meta")
    other.load_state_dict(copy.deepcopy(seq.state_dict()), assign=True)
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, partial(saved, weights_only=False), assigned])
@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS])
def test_copies(copied: Any, recipe: Recipe) -> None:
    seq, (x, dy) = model(recipe), inputs()
    other = copied(seq)
    assert other[0].basic_ops[0].weight_scale is other[0].weight_scale
    for ours, theirs in zip(results(other, x, dy), results(seq, x, dy)):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        other[0].weight_scale.zero_()
    assert not torch.equal(other(x), seq(x))


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS])
def test_checkpoints(recipe: Recipe) -> None:
    """FP8 to FP8 as it is; high precision is quantized on its way, and the reverse."""
    seq = model(recipe)
    other = model(recipe, preserve=True)
    for linear in (other[0], other[2]):
        linear.initialize_weight(nn.init.ones_)
    other.load_state_dict(seq.state_dict())
    for name, t in other.state_dict().items():
        assert torch.equal(t.float(), seq.state_dict()[name].float())
    assert other[0].weight.get_high_precision_init_val() is None
    plain = model(None)
    torch.manual_seed(3)
    nn.init.normal_(plain[0].weight)
    state = plain.state_dict()
    other.load_state_dict(state)
    assert list(state) == ["0.weight", "0.bias", "2.weight"]
    assert torch.equal(other[0].weight.get_high_precision_init_val(), plain[0].weight)
    seq[0].write_weight(plain[0].weight)
    assert torch.equal(other[0].read_weight(), seq[0].read_weight())
    plain.load_state_dict(seq.state_dict())
    assert torch.equal(plain[0].weight, seq[0].read_weight())
    old = {f"{key[0]}.basic_ops.0.weight": v for key, v in state.items() if "0.weight" in key}
    seq.load_state_dict({**old, **{k: v for k, v in state.items() if k != "0.weight"}})
    assert torch.equal(seq[0].weight.float(), other[0].weight.float())


def test_codes_without_a_scale_are_missing_one() -> None:
    seq = model(CURRENT)
    state = seq.state_dict()
    del state["0.weight_scale"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight_scale"):
        seq.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        seq.load_state_dict({**seq.state_dict(), "0.weight": torch.zeros(3, 3)})


def test_who_stays_in_high_precision() -> None:
    with opfuser.quantized_model_init(recipe=BLOCKS):
        small = opfuser.Linear(64, 128)
        wide = opfuser.BasicLinear(128, 128, dtype=torch.float64)
        empty = opfuser.BasicLinear(0, 128)
        groups = opfuser.GroupedLinear(2, 128, 128)
        with opfuser.quantized_model_init(enabled=False):
            off = opfuser.BasicLinear(128, 128)
    for op in (small, wide, empty, off):
        assert op.weight_format is None
    dtypes = [p.dtype for op in (small, wide, empty, groups, off) for p in op.parameters()]
    assert E4M3 not in dtypes
    with opfuser.fp8_model_init():
        linear = opfuser.Linear(16, 48)
    assert linear.weight_format == WeightFormat(DelayedScaling(), torch.float32)
    assert opfuser.Linear(16, 48).weight_format is None
    wrong: Any = opfuser.quantized_model_init(recipe="fp8")
    with (
        pytest.raises(ArgumentError, match=r"one of opfuser.recipe \(quantized_model_init\)"),
        wrong,
    ):
        pass


def test_features_that_are_no_multiples_of_128(device: torch.device) -> None:
    """Nothing is padded: neither codes nor their transpose."""
    with opfuser.quantized_model_init(recipe=CURRENT):
        seq = opfuser.Sequential(opfuser.BasicLinear(48, 144, device=device))
    assert seq[0].weight.untyped_storage().nbytes() == 48 * 144
    x = torch.randn(5, 48, device=device, requires_grad=True)
    dy = torch.randn(5, 144, device=device)
    plain = opfuser.Sequential(opfuser.BasicLinear(48, 144, device=device))
    plain[0].write_weight(seq[0].read_weight())
    with opfuser.autocast(recipe=CURRENT):
        for ours, theirs in zip(results(seq, x, dy), results(plain, x, dy)):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_initial_values_in_high_precision() -> None:
    seq, plain = model(CURRENT, preserve=True), model(None)
    w: Any = seq[0].weight
    assert torch.equal(w.get_high_precision_init_val(), plain[0].weight)
    seq[0].initialize_weight(nn.init.ones_)
    assert (w.get_high_precision_init_val() == 1).all()
    assert saved(seq, weights_only=False)[0].weight.get_high_precision_init_val() is not None
    w.clear_high_precision_init_val()
    assert w.get_high_precision_init_val() is None
    assert not hasattr(model(CURRENT)[0].weight, "get_high_precision_init_val")


def test_gradients_are_never_rounded_to_fp8() -> None:
    seq, (x, _) = model(CURRENT), inputs()
    own = {name: t.detach().clone().requires_grad_() for name, t in seq.named_parameters()}
    with pytest.raises(ArgumentError, match=r"not rounded to FP8 .*a leaf with grad_dtype in FP8"):
        torch.func.functional_call(seq, own, x)
    with pytest.raises(ArgumentError, match="a tensor that is no leaf"):
        torch.func.functional_call(seq, {n: t.clone() for n, t in own.items()}, x)
    for name in ("0.weight", "2.weight"):
        own[name].grad_dtype = BF16
    torch.func.functional_call(seq, own, x).sum().backward()
    seq(x).sum().backward()
    for name, t in seq.named_parameters():
        assert torch.equal(own[name].grad, t.grad)


def test_functional_calls_with_another_scale() -> None:
    """Backward takes the scale of its forward."""
    seq, (x, dy) = model(CURRENT), inputs()
    twice = {name: 2 * b for name, b in seq.named_buffers()}
    with opfuser.autocast(recipe=CURRENT):
        y = torch.func.functional_call(seq, twice, x)
        (got,) = torch.autograd.grad(y, x, dy)
        for linear in (seq[0], seq[2]):
            linear.weight_scale.mul_(2)
        (want,) = torch.autograd.grad(seq(x), x, dy)
    assert torch.equal(got, want)


@pytest.mark.parametrize("region", [True, False])
def test_weights_in_high_precision_in_place_of_codes(region: bool) -> None:
    seq, plain, (x, dy) = model(CURRENT), model(None), inputs()
    with opfuser.autocast(enabled=region, recipe=CURRENT):
        want = results(plain, x, dy)
        y = torch.func.functional_call(seq, dict(plain.named_parameters()), x)
        got = [y, *torch.autograd.grad(y, [x, *plain.parameters()], dy)]
        for n in (0, 2):
            seq[n].weight = plain[n].weight
        seq[0].bias = plain[0].bias
        after = results(seq, x, dy)
    for one, other, expected_one in zip(got, after, want):
        assert torch.equal(one, expected_one)
        assert torch.equal(other, expected_one)
    assert seq[0].weight_format is None
    assert list(seq.state_dict()) == list(plain.state_dict())


def test_codes_are_not_shared_without_their_scale() -> None:
    seq, other = model(CURRENT), model(CURRENT)
    text = r"Codes of a weight go together with their scale .*float8_e4m3fn"
    for linear in (seq[0], seq[0].basic_ops[0]):
        with pytest.raises(ArgumentError, match=text + " that is the weight of another"):
            linear.weight = other[0].weight
        with pytest.raises(ArgumentError, match=text):
            model(None)[0].weight = nn.Parameter(torch.zeros(256, 128).to(E4M3))
        linear.weight = linear.weight
    twice = opfuser.Sequential(seq[0], seq[2], seq[0], seq[2])
    apart = opfuser.Sequential(seq[0], seq[2], *copy.deepcopy(opfuser.Sequential(seq[0], seq[2])))
    x, dy = inputs()
    (got,) = torch.autograd.grad(twice(x), [seq[0].weight], dy)
    first, second = torch.autograd.grad(apart(x), [apart[0].weight, apart[2].weight], dy)
    torch.testing.assert_close(got, first + second)


def test_a_scale_that_was_taken_away() -> None:
    seq, (x, _) = model(CURRENT), inputs()
    seq[0].weight_scale = None
    with pytest.raises(ArgumentError, match=r"A weight in FP8 has a scale .*Linear\(in_features"):
        seq(x)
    with pytest.raises(ArgumentError, match="A weight in FP8 has a scale"):
        seq[0].read_weight()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_traced_calls() -> None:
    seq, (x, _) = model(CURRENT), inputs()
    traced = torch.compile(seq, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(traced(x), seq(x))
    with pytest.raises(Exception, match=r"not traced by torch.compile, which would round"):
        traced(x)
    torch.compiler.reset()


def test_a_decoder() -> None:
    config = DecoderConfig(vocab_size=64, dim=64, num_layers=1, num_heads=4, ffn_dim=64)
    with opfuser.quantized_model_init(recipe=CURRENT, preserve_high_precision_init_val=True):
        made = decoder_lm(config)
    stored = [p for p in made.parameters() if p.dtype == E4M3]
    assert len(stored) >= 4
    for p in stored:
        value = p.get_high_precision_init_val()
        assert 0 < value.std() < 1.5 * config.init_std
