"""State of quantized compute before the first call: who has it, and resumed runs with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import opfuser
from opfuser.errors import ArgumentError
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.recipe import DelayedScaling, Float8CurrentScaling, Float8PredictedScaling, Recipe

pytestmark = [
    pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

DELAYED = DelayedScaling(amax_history_len=3)
RECIPES = DELAYED, Float8PredictedScaling(margin=1)
BOTH = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
KEYS = "scale", "amax_history", "amax"


def model(**options: Any) -> Any:
    torch.manual_seed(0)
    return opfuser.Sequential(
        opfuser.RMSNorm(32),
        opfuser.Linear(32, 64),
        opfuser.SwiGLU(),
        opfuser.BasicLinear(32, 48),
        opfuser.Linear(48, 20),  # no multiple of 16
        **options,
    )


def quantized(module: nn.Module) -> list[str]:
    """The paths of operations with state, all of whose keys are there."""
    keys = [key for key in module.state_dict() if "quantization" in key]
    paths = list(dict.fromkeys(key.rpartition("quantization")[0].rstrip(".") for key in keys))
    wanted = [f"{path}.quantization.{name}".lstrip(".") for path in paths for name in KEYS]
    assert keys == wanted
    return paths


def train(module: Any, steps: range, recipe: Recipe | None) -> list[Tensor]:
    """Outputs, gradients and scales of steps, with an evaluation after each."""
    seen: list[Tensor] = []
    for step in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * (step + 1)
        with opfuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
        y.square().mean().backward()
        with torch.no_grad():
            for p in module.parameters():
                seen.append(p.grad.clone())
                p.sub_(0.01 * p.grad)
                p.grad = None
        for _ in range(2):
            with torch.no_grad(), opfuser.autocast(enabled=recipe is not None, recipe=recipe):
                module(3 * x)
        seen += [y.detach(), *[t.clone() for t in module.state_dict().values()]]
    return seen


def assert_same(mine: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(mine, wanted, strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------ who has it


def in_region(recipe: Recipe) -> Any:
    with opfuser.autocast(recipe=recipe):
        return model()


def told(recipe: Recipe) -> Any:
    made = model()
    opfuser.init_recipe_state(made, recipe)
    return made


def told_later(recipe: Recipe) -> Any:
    made = model()
    made.recipe = recipe
    return made


def appended(recipe: Recipe) -> Any:
    made, parts = opfuser.Sequential(recipe=recipe), list(model())
    made.extend(parts[:2])
    made.append(nn.Identity())
    made[2] = parts[2]
    made.insert(3, parts[4])
    made.insert(3, parts[3])
    return made


def reset(recipe: Recipe) -> Any:
    made = model()
    for op in (made[1].basic_ops[0], made[3], made[4].basic_ops[0]):
        op.reset_recipe_state(recipe=recipe)
    return made


WAYS = [in_region, told, told_later, lambda r: model(recipe=r), appended, reset]
WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("<>"))


@BOTH
@WAY
def test_operations_that_quantize_have_state_and_others_none(
    way: Callable[[Recipe], Any], recipe: Recipe
) -> None:
    made = way(recipe)
    assert quantized(made) == ["1", "3"]
    length = 3 if recipe is DELAYED else 1
    for path in ("1", "3"):
        state = made.get_submodule(path).quantization
        assert state.scale.tolist() == [1.0] * 3
        assert state.amax_history.tolist() == [[0.0] * 3] * length
        assert state.known == [False] * 3
    assert quantized(way(Float8CurrentScaling())) == []


@BOTH
@WAY
def test_training_is_that_of_state_made_at_the_first_call(
    way: Callable[[Recipe], Any], recipe: Recipe
) -> None:
    assert_same(train(way(recipe), range(4), recipe), train(model(), range(4), recipe))


def test_who_follows_a_recipe() -> None:
    class Own(opfuser.BasicLinear):
        pass

    left_out = opfuser.Linear(32, 32)
    left_out.recipe = None
    inner = opfuser.Sequential(opfuser.Linear(32, 32), recipe=Float8CurrentScaling())
    holder = nn.ModuleDict({
        "linear": opfuser.Linear(32, 32, bias=False),
        "merged": opfuser.MergedLinear(32, {"q_proj": 32, "k_proj": 16}),
        "grouped": opfuser.GroupedLinear(2, 32, 32),
        "stacked": opfuser.GroupedLinear(2, 32, 32, single_grouped_weight=True),
        "in_fp64": opfuser.Linear(32, 32, dtype=torch.float64),
        "transposed": opfuser.BasicLinear(32, 32, weight_transposed=True),
        "grouped_transposed": opfuser.GroupedLinear(2, 32, 32, weight_transposed=True),
        "subclass": Own(32, 32),
        "left_out": left_out,
        "other": inner,
        "of_torch": nn.Linear(32, 32),
        "norm": opfuser.RMSNorm(32),
    })  # fmt: skip
    opfuser.init_recipe_state(holder, DelayedScaling(min_features=64))
    opfuser.init_recipe_state(holder, DelayedScaling(fprop="bf16", dgrad="bf16", wgrad="bf16"))
    assert quantized(holder) == []
    opfuser.init_recipe_state(holder, DELAYED)
    names = ["linear", "merged", "grouped", "stacked", "transposed"]
    assert quantized(holder) == names
    before = holder["linear"].quantization
    opfuser.init_recipe_state(holder, RECIPES[1])
    assert holder["linear"].quantization is before
    assert len(before.amax_history) == 3
    with opfuser.autocast(recipe=DELAYED):
        holder["linear"](torch.ones(16, 32))
    holder["linear"].recipe = holder["merged"].recipe = None
    assert quantized(holder) == ["linear", "grouped", "stacked", "transposed"], (
        "scales may be needed again"
    )
    with pytest.raises(ArgumentError, match=r"(?s)one of opfuser.recipe.*init_recipe_state.*None"):
        opfuser.init_recipe_state(holder, None)


def test_weights_stored_as_codes_have_state_with_them() -> None:
    with opfuser.quantized_model_init(recipe=DELAYED):
        made = model()
    assert quantized(made) == ["1", "3"]
    with opfuser.quantized_model_init(recipe=Float8CurrentScaling()):
        assert quantized(model()) == []


def test_heads_that_stay_in_high_precision_have_none() -> None:
    config = DecoderConfig(64, 32, 1, 2)
    layers = [f"layers.0.{path}" for path in ("attention.2", "attention.5", "mlp.2", "mlp.4")]
    with opfuser.autocast(recipe=DELAYED):
        assert quantized(decoder_lm(config)) == layers
    assert quantized(decoder_lm(DecoderConfig(64, 32, 1, 2, recipe=DELAYED))) == layers


def test_without_a_recipe_keys_are_those_of_torch() -> None:
    made = model()
    train(made, range(1), None)
    assert list(made.state_dict()) == [name for name, _ in made.named_parameters()]


# ------------------------------------------------------------------------------ resume


def by_state_dict(source: Any, target: Any, folder: Path) -> None:
    target.load_state_dict(source.state_dict())


def by_assignment(source: Any, target: Any, folder: Path) -> None:
    state = {key: t.clone() for key, t in source.state_dict().items()}
    target.load_state_dict(state, assign=True)


def by_checkpoint(source: Any, target: Any, folder: Path) -> None:
    """Read in place: nobody calls ``load_state_dict``."""
    dcp.save(source.state_dict(), checkpoint_id=folder, no_dist=True)
    dcp.load(target.state_dict(), checkpoint_id=folder, no_dist=True)


def by_state_of_checkpoint(source: Any, target: Any, folder: Path) -> None:
    dcp.save({"model": source}, checkpoint_id=folder, no_dist=True)
    dcp.load({"model": target}, checkpoint_id=folder, no_dist=True)


RESUMED = [by_state_dict, by_assignment, by_checkpoint, by_state_of_checkpoint]


@BOTH
@pytest.mark.parametrize("saved_after", [0, 1, 3])
@pytest.mark.parametrize("load", RESUMED, ids=lambda load: load.__name__)
def test_a_resumed_run_goes_on_as_the_unbroken_one(
    load: Callable[..., None], saved_after: int, recipe: Recipe, tmp_path: Path
) -> None:
    source = told(recipe)
    train(source, range(saved_after), recipe)
    target = told(recipe)
    with torch.no_grad():
        for p in target.parameters():
            p.zero_()
    load(source, target, tmp_path)
    wanted = train(source, range(saved_after, 6), recipe)
    assert_same(train(target, range(saved_after, 6), recipe), wanted)


def evaluated(recipe: Recipe) -> Any:
    made = told(recipe)
    with torch.no_grad(), opfuser.autocast(recipe=recipe):
        made(torch.ones(16, 32))
    return made


def trained(recipe: Recipe) -> Any:
    made = told(recipe)
    train(made, range(2, 4), recipe)
    return made


@pytest.mark.parametrize(
    ("load", "made"),
    [
        (by_checkpoint, trained),
        (by_checkpoint, evaluated),
        (by_checkpoint, told),
        (by_state_dict, lambda recipe: model()),
    ],
)
def test_what_a_checkpoint_is_read_into(
    load: Callable[..., None], made: Callable[[Recipe], Any], tmp_path: Path
) -> None:
    """Models that were called, a copy of what was read in place, and what had no state."""
    source, target = told(DELAYED), made(DELAYED)
    train(source, range(3), DELAYED)
    load(source, target, tmp_path)
    assert quantized(target) == ["1", "3"]
    twin = copy.deepcopy(target)
    wanted = train(source, range(3, 6), DELAYED)
    for own in (target, twin):
        assert_same(train(own, range(3, 6), DELAYED), wanted)


@WAY
def test_a_first_value_of_zero_is_a_value(way: Callable[[Recipe], Any]) -> None:
    scales = []
    for made in (way(DELAYED), model()):
        with opfuser.autocast(recipe=DELAYED):
            y = made[1](torch.zeros(16, 32))
        (0 * y.sum()).backward()
        with opfuser.autocast(recipe=DELAYED):
            made[1](torch.ones(16, 32))
        scales.append(made[1].quantization.scale.tolist())
        assert made[1].quantization.known == [True] * 3
    assert scales[0] == scales[1]
    assert scales[0][0] == 1.0


def test_scales_are_known_by_any_of_their_history(tmp_path: Path) -> None:
    """Two evaluations leave the last calls without a gradient."""
    source = told(DELAYED)
    train(source, range(2), DELAYED)
    with opfuser.autocast(recipe=DELAYED):
        pass
    state = source[1].quantization
    assert state.amax_history[0, 2] == 0.0 < state.amax_history[1:, 2].max()
    target = model()
    target.load_state_dict(source.state_dict())
    assert target[1].quantization.known == [True] * 3


def test_a_plain_checkpoint_loads_as_long_as_nothing_was_scaled() -> None:
    plain, target = model().state_dict(), told(DELAYED)
    result = target.load_state_dict(plain)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same(train(target, range(2), DELAYED), train(model(), range(2), DELAYED))
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*1\.quantization\.scale"):
        target.load_state_dict(plain)
    result = target.load_state_dict(plain, strict=False)
    assert len(result.missing_keys) == 6


def without(name: str, state: dict[str, Any]) -> None:
    del state[f"1.quantization.{name}"]


def shaped(name: str, shape: tuple[int, ...], state: dict[str, Any]) -> None:
    state[f"1.quantization.{name}"] = torch.full(shape, 2.0)


@pytest.mark.parametrize(
    ("spoil", "told_of"),
    [
        (lambda s: without("scale", s), r"Missing key.*1\.quantization\.scale"),
        (lambda s: without("amax_history", s), r"Missing key.*1\.quantization\.amax_history"),
        (lambda s: shaped("scale", (4,), s), r"size mismatch for 1\.quantization\.scale.*\(4,\)"),
        (lambda s: shaped("amax", (), s), r"size mismatch for 1\.quantization\.amax:"),
        (
            lambda s: shaped("amax_history", (3, 2), s),
            r"size mismatch for 1\.quantization\.amax_history.*\(3, 2\).*\(length, 3\)",
        ),
        (lambda s: shaped("amax_history", (0, 3), s), r"size mismatch.*\(0, 3\)"),
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_that_does_not_fit_changes_nothing(
    spoil: Callable[[Any], None], told_of: str, assign: bool
) -> None:
    source, target = told(DELAYED), told(DELAYED)
    train(source, range(3), DELAYED)
    train(target, range(1), DELAYED)
    state = {key: t.clone() for key, t in source.state_dict().items()}
    spoil(state)
    own = target[1].quantization
    before, known = {k: t.clone() for k, t in own.state_dict().items()}, list(own.known)
    with pytest.raises(RuntimeError, match="(?s)" + told_of):
        target.load_state_dict(state, assign=assign)
    assert all(torch.equal(t, before[key]) for key, t in own.state_dict().items())
    assert own.known == known
    fresh = model()
    with pytest.raises(RuntimeError, match=r"(?s)Unexpected key.*1\.quantization"):
        fresh.load_state_dict(state, assign=assign)
    assert "quantization" not in fresh[1]._modules


# ------------------------------------------------------------------------------ moves and walks


@pytest.mark.parametrize("kept", ["plain", "scales"])
@pytest.mark.parametrize("load", ["to_empty", "assign"])
def test_a_model_of_the_meta_device(load: str, kept: str) -> None:
    source = told(DELAYED)
    if kept == "scales":
        train(source, range(2), DELAYED)
    state = (source if kept == "scales" else model()).state_dict()
    with torch.device("meta"):
        target = told(DELAYED)
    if load == "to_empty":
        target.to_empty(device="cpu")
        assert target[1].quantization.scale.tolist() == [1.0] * 3
        assert target[1].quantization.amax_history.tolist() == [[0.0] * 3] * 3
    target.load_state_dict({k: t.clone() for k, t in state.items()}, assign=load == "assign")
    assert_same(train(target, range(2, 4), DELAYED), train(source, range(2, 4), DELAYED))


def test_scales_outlive_to_empty() -> None:
    """That of a device to itself: torch leaves parameters without values, of which scales tell."""
    made = told(DELAYED)
    train(made, range(2), DELAYED)
    before = {k: t.clone() for k, t in made[1].quantization.state_dict().items()}
    made.to_empty(device="cpu")
    assert all(torch.equal(t, before[k]) for k, t in made[1].quantization.state_dict().items())
    made.to("meta").to_empty(device="cpu")
    assert made[1].quantization.known == [False] * 3


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_and_functional_calls_leave_scales_alone(use_buffers: bool) -> None:
    made = model()
    averaged = AveragedModel(made, use_buffers=use_buffers)
    train(made, range(2), DELAYED)  # state that the copy has not
    scales = {k: t.clone() for k, t in made.state_dict().items() if "quantization" in k}
    averaged.update_parameters(made)
    averaged.update_parameters(made)
    assert quantized(averaged) == []
    assert all(torch.equal(t, scales[k]) for k, t in made.state_dict().items() if k in scales)
    assert dict(made.named_buffers()) == {}
    values = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    with opfuser.autocast(recipe=DELAYED):
        torch.func.functional_call(made, values, (torch.ones(16, 32),))


@pytest.mark.parametrize("how", ["dispatch_model", "cpu_offload"])
def test_scales_with_accelerate(how: str) -> None:
    """It finds them where it puts tensors on devices."""
    accelerate = pytest.importorskip("accelerate", reason="needs the extra opfuser[hf]")
    made = told(DELAYED)
    if how == "dispatch_model":
        accelerate.dispatch_model(made, {"": "cpu"}, force_hooks=True)
        assert_same(train(made, range(3), DELAYED), train(model(), range(3), DELAYED))
        return
    train(made, range(2), DELAYED)
    twin = copy.deepcopy(made)
    accelerate.cpu_offload(made, execution_device=torch.device("cpu"))
    with torch.no_grad(), opfuser.autocast(recipe=DELAYED):
        x = torch.ones(16, 32)
        assert torch.equal(made(x), twin(x))
