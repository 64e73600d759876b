"""``pipeline.split`` under torch's schedules on two ranks, against the same model on one."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import opfuser
from opfuser.errors import ArgumentError, ChannelError, ExtraInputCountError, OpKwargsError
from opfuser.models import (
    DecoderConfig,
    EncoderConfig,
    MoEConfig,
    attention_kwargs,
    decoder_lm,
    swiglu_block,
    text_encoder,
)
from opfuser.models.pipeline import StageModule, own_loss, split
from opfuser.models.sharding import shard_layers
from opfuser.recipe import DelayedScaling, Float8CurrentScaling, Float8PredictedScaling, Recipe
from tests.distributed.ranks import Checks, Outcomes, assert_passed, outcomes_of

pytestmark = pytest.mark.distributed

RANKS = 2
MICROBATCHES = 4
CONFIG = DecoderConfig(29, 16, 3, 2, tied_head=False, dtype=torch.float64)
MOE = MoEConfig(16, 8, 4, 2)
CHECKS = check = Checks()
LossFn = Callable[[Any, Any], Tensor]


def device_of(rank: int) -> torch.device:
    """A GPU of its own where the processes talk over NCCL."""
    return torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")


def batch(rank: int, vocabulary: int = 29) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(vocabulary, (2, 2 * MICROBATCHES, 5))
    return tokens.to(device_of(rank)), targets.to(device_of(rank))


def pipelined(modules: list[StageModule], rank: int, kind: Any, loss_fn: LossFn) -> Any:
    """A schedule of the stages of this rank: every second one."""
    count = len(modules)
    mine = [PipelineStage(modules[n], n, count, device_of(rank)) for n in range(rank, count, RANKS)]
    given: Any = mine if kind is ScheduleInterleaved1F1B else mine[0]
    return kind(given, MICROBATCHES, loss_fn=loss_fn)


def step(schedule: Any, rank: int, inputs: tuple[Tensor, ...], **keywords: Any) -> list[Tensor]:
    """The losses of the micro-batches; on the rank of the last stage."""
    losses: list[Tensor] = []
    told = {"target": inputs[-1], "losses": losses, "return_outputs": False} if rank else {}
    if inputs[1:]:
        keywords["extra_inputs"] = inputs[1:]
    schedule.step(*inputs[: rank == 0], **told, **keywords)
    return losses


def compare(
    make: Callable[[], Any],
    rank: int,
    *,
    stages: Any = RANKS,
    kind: Any = Schedule1F1B,
    loss_fn: LossFn = own_loss,
    inputs: tuple[Tensor, ...] | None = None,
    **keywords: Any,
) -> list[StageModule]:
    """Losses, gradients and parameters of two training steps are those of one process."""
    torch.manual_seed(1)
    one = make().to(device_of(rank))
    modules = split(copy.deepcopy(one), stages)
    inputs = batch(rank) if inputs is None else inputs
    schedule = pipelined(modules, rank, kind, loss_fn)
    mine = nn.ModuleList(modules[rank::RANKS])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, mine)]
    for _ in range(2):
        losses = step(schedule, rank, inputs, **keywords)
        exact = []
        for parts in zip(*(t.chunk(MICROBATCHES) for t in inputs)):
            exact.append(loss_fn(one(*parts, **keywords), parts[-1]))
            (exact[-1] / MICROBATCHES).backward()
        if rank:
            torch.testing.assert_close(losses, exact, rtol=1e-10, atol=1e-12)
        expected = dict(one.named_parameters())
        for module in modules[rank::RANKS]:
            for name, p in module.named_parameters():
                assert p.grad is not None, name
                torch.testing.assert_close(
                    p.grad, expected[name].grad, rtol=1e-9, atol=1e-11, msg=name
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return modules


@check
def one_forward_one_backward(rank: int, ranks: int) -> None:
    """The last stage keeps the fused loss; the model is cut within a layer."""
    modules = compare(lambda: decoder_lm(CONFIG), rank, stages=["layers.1.mlp"])
    plan = modules[rank].last_plan
    assert bool(rank) == ("linear_cross_entropy" in plan.fused("forward"))
    assert plan.fused("backward")["norm_linear"] == 3


@check
def gpipe_with_a_loss_outside(rank: int, ranks: int) -> None:
    """Logits leave the last stage; the loss is the caller's."""

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    tokens = batch(rank)[:1]
    compare(
        lambda: decoder_lm(CONFIG, with_loss=False),
        rank,
        kind=ScheduleGPipe,
        loss_fn=loss_fn,
        inputs=tokens,
    )


@check
def interleaved_with_experts(rank: int, ranks: int) -> None:
    """Four stages. The terms of all routers go on to the loss at the end, through channels.

    Extra outputs reach the caller in order; one gets a gradient, the others none.
    """
    moe = replace(MOE, z_loss=True)
    config = replace(CONFIG, num_layers=4, moe=moe, router_aux_loss_coef=0.1)

    def loss_fn(outputs: tuple[Tensor, ...], target: Any) -> Tensor:
        loss, *z_losses = outputs
        assert len(z_losses) == 4
        return loss + 0.5 * z_losses[1]

    modules = compare(
        lambda: decoder_lm(config),
        rank,
        stages=["layers.1", "layers.2", "layers.3"],
        kind=ScheduleInterleaved1F1B,
        loss_fn=loss_fn,
    )
    assert [m.tensors.sent for m in modules] == [
        tuple(f"balance_terms.{n}" for n in range(count)) for count in (1, 2, 3, 0)
    ]


@check
def plain_modules_and_an_extra_input(rank: int, ranks: int) -> None:
    """Of a Sequential that is no model; the stage of the first rank reads the extra input."""

    def make() -> opfuser.Sequential:
        return opfuser.Sequential(
            opfuser.Linear(6, 6, dtype=torch.float64),
            opfuser.AddExtraInput(),
            nn.Tanh(),
            nn.Linear(6, 6, dtype=torch.float64),
            opfuser.GELU(),
            opfuser.Linear(6, 3, dtype=torch.float64),
        )

    x = torch.randn(2, 2 * MICROBATCHES, 6, dtype=torch.float64, device=device_of(rank))
    compare(make, rank, loss_fn=lambda y, _: y.square().mean(), inputs=(x[0], x[1]))


@check
def keywords_of_operations(rank: int, ranks: int) -> None:
    """A mask of padding reaches attention in every stage, cut into micro-batches."""
    config = EncoderConfig(29, 16, 2, 2, dtype=torch.float64)
    torch.manual_seed(1)
    one = text_encoder(config).to(device_of(rank))
    modules = split(copy.deepcopy(one), RANKS)
    tokens, types = batch(rank)[0], torch.zeros_like(batch(rank)[0])
    mask = torch.arange(5, device=tokens.device) < torch.arange(1, 9, device=tokens.device)[:, None]
    schedule = pipelined(modules, rank, Schedule1F1B, lambda y, _: y.square().mean())
    losses = step(
        schedule, rank, (tokens, types), op_kwargs=attention_kwargs(modules[rank], mask=mask)
    )
    exact = [
        one(t, k, op_kwargs=attention_kwargs(one, mask=m)).square().mean()
        for t, k, m in zip(*(t.chunk(MICROBATCHES) for t in (tokens, types, mask)))
    ]
    if rank:
        torch.testing.assert_close(losses, exact, rtol=1e-10, atol=1e-12)


@check
def evaluation(rank: int, ranks: int) -> None:
    """Integers and what has no gradient are sent too: the tokens of each expert."""
    config = replace(CONFIG, moe=replace(MOE, tokens_per_expert=True))
    torch.manual_seed(1)
    one = decoder_lm(config).to(device_of(rank))
    schedule = pipelined(split(one, RANKS), rank, ScheduleGPipe, own_loss)
    inputs = batch(rank)
    outputs: list[Any] = []
    stage = schedule._stage
    stage.submod.register_forward_hook(lambda module, args, y: outputs.append(y))
    losses: list[Tensor] = []
    told = {"target": inputs[1], "losses": losses} if rank else {}
    with torch.no_grad():
        schedule.eval(*inputs[: rank == 0], extra_inputs=inputs[1:], return_outputs=False, **told)
        exact = [one(*parts) for parts in zip(*(t.chunk(MICROBATCHES) for t in inputs))]
    if rank:
        torch.testing.assert_close(outputs[-MICROBATCHES:], exact)


def integers(rank: int, ranks: int) -> None:
    """Between tensors that have gradients: the tokens of each expert."""
    moe = replace(MOE, tokens_per_expert=True, z_loss=True)
    modules = compare(
        lambda: decoder_lm(replace(CONFIG, moe=moe)),
        rank,
        loss_fn=lambda outputs, _: outputs[0] + outputs[2] + outputs[4],
    )
    assert modules[-1].tensors.outputs == 2


if torch.__version__ >= "2.13":  # before, every tensor that a stage receives requires grad
    CHECKS["integers"] = integers


@check
def sharded_stages(rank: int, ranks: int) -> None:
    """FSDP2 of a stage: here a mesh of one process for each."""
    groups = [dist.new_group([r]) for r in range(RANKS)]
    mesh = DeviceMesh.from_group(groups[rank], device_of(rank).type)
    torch.manual_seed(1)
    one = decoder_lm(CONFIG).to(device_of(rank))
    modules = split(copy.deepcopy(one), RANKS)
    modules[rank] = shard_layers(modules[rank], mesh=mesh)
    inputs = batch(rank)
    losses = step(pipelined(modules, rank, Schedule1F1B, own_loss), rank, inputs)
    exact = [one(*parts) for parts in zip(*(t.chunk(MICROBATCHES) for t in inputs))]
    (sum(exact) / MICROBATCHES).backward()
    if rank:
        torch.testing.assert_close(losses, exact, rtol=1e-10, atol=1e-12)
    expected = dict(one.named_parameters())
    for name, p in modules[rank].named_parameters():
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), expected[name].grad, msg=name)


STEPS = 12  # three times the longest history of maxima
IN_FP8 = DecoderConfig(32, 32, 4, 2, ffn_dim=32, dtype=torch.float32)
FP8_RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "predicted": Float8PredictedScaling(),
}


class Trained(NamedTuple):
    """What came of each step.

    Attributes:
        losses: of its micro-batches.
        states: scales, histories and largest values of the operations, by name.
    """

    losses: list[list[Tensor]]
    states: list[dict[str, Tensor]]


def states_of(*modules: nn.Module) -> dict[str, Tensor]:
    found = [(k, v) for m in modules for k, v in m.state_dict().items() if ".quantization." in k]
    return {name: value.clone() for name, value in found}


def batch_in_fp8(step: int) -> tuple[Tensor, Tensor]:
    """Of values that grow and shrink from step to step, and from micro-batch to micro-batch."""
    generator = torch.Generator().manual_seed(step)
    of_host: Any = {"generator": generator, "device": "cpu"}
    x, target = torch.randn(2, 2 * MICROBATCHES, 5, IN_FP8.dim, **of_host)
    sizes = 2 ** torch.randn(2 * MICROBATCHES, 1, 1, **of_host)
    device = torch.get_default_device()
    return (x * sizes).to(device), (target * sizes).to(device)


def squared_error(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def model_in_fp8(recipe: str) -> opfuser.Sequential:
    torch.manual_seed(1)
    blocks = [swiglu_block(IN_FP8) for _ in range(2 * RANKS)]
    return opfuser.Sequential(*blocks, recipe=FP8_RECIPES[recipe])


@functools.lru_cache(None)
def in_one_process(recipe: str) -> Trained:
    """All micro-batches of a step in one region, backward of each behind its forward."""
    model, trained = model_in_fp8(recipe), Trained([], [])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for n in range(STEPS):
        losses = []
        with opfuser.autocast(recipe=FP8_RECIPES[recipe]):
            for x, target in zip(*(t.chunk(MICROBATCHES) for t in batch_in_fp8(n))):
                loss = squared_error(model(x), target)
                loss.backward()
                losses.append(loss.detach())
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= MICROBATCHES  # as schedules do
        optimizer.step()
        optimizer.zero_grad()
        trained.losses.append(losses)
        trained.states.append(states_of(model))
    return trained


def trains_in_fp8(kind: Any, numbers: list[list[int]], recipe: str, rank: int) -> None:
    """Losses and scales of every step are, bit for bit, those of one process.

    Args:
        kind: of schedule.
        numbers: of the stages of each rank.
        recipe: its name.
        rank: this one.
    """
    warnings.filterwarnings("ignore", "FP8 is emulated")
    count = sum(map(len, numbers))
    modules = split(model_in_fp8(recipe), count)
    # Told its shapes, a stage is not called with whatever memory holds to learn them.
    hidden = torch.empty(2, 5, IN_FP8.dim, requires_grad=True)
    stages = [
        PipelineStage(modules[n], n, count, torch.get_default_device(), hidden, hidden)
        for n in numbers[rank]
    ]
    schedule = kind(stages if count > RANKS else stages[0], MICROBATCHES, loss_fn=squared_error)
    mine = [modules[n] for n in numbers[rank]]
    optimizer = torch.optim.AdamW(nn.ModuleList(mine).parameters(), lr=1e-3)
    exact = in_one_process(recipe)
    for n in range(STEPS):
        x, target = batch_in_fp8(n)
        losses: list[Tensor] = []
        last = count - 1 in numbers[rank]
        told = {"target": target, "losses": losses, "return_outputs": False} if last else {}
        with opfuser.autocast(recipe=FP8_RECIPES[recipe]):
            schedule.step(*[x][: 0 in numbers[rank]], **told)
        optimizer.step()
        optimizer.zero_grad()
        if last:
            torch.testing.assert_close(losses, exact.losses[n], rtol=0, atol=0)
        states = states_of(*mine)
        assert len(states) == 3 * 2 * 2  # of both linear operations of two blocks
        expected = {name: exact.states[n][name] for name in states}
        torch.testing.assert_close(states, expected, rtol=0, atol=0)


def check_in_fp8(kind: Any, numbers: list[list[int]], recipe: str = "delayed") -> None:
    def run(rank: int, ranks: int) -> None:
        trains_in_fp8(kind, numbers, recipe, rank)

    CHECKS[f"{recipe} scaling, {kind.__name__}"] = run


check_in_fp8(ScheduleGPipe, [[0], [1]])
check_in_fp8(Schedule1F1B, [[0], [1]])
check_in_fp8(Schedule1F1B, [[0], [1]], "predicted")
check_in_fp8(ScheduleInterleaved1F1B, [[0, 2], [1, 3]])
if torch.__version__ >= "2.13":  # that of 2.11 splits no backward at an autograd.Function
    check_in_fp8(ScheduleInterleavedZeroBubble, [[0, 2], [1, 3]])
    check_in_fp8(ScheduleZBVZeroBubble, [[0, 3], [1, 2]])


@pytest.mark.parametrize("name", CHECKS)
def test_schedule(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)


@pytest.mark.gpu
@pytest.mark.slow
def test_schedules_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two CUDA devices")
    outcomes = outcomes_of(__name__, RANKS, tmp_path, "cuda")
    for name in CHECKS:
        assert_passed(outcomes, name)


def test_state_dicts_are_that_of_the_model() -> None:
    """By name, and the same parameters: nothing is copied."""
    model = decoder_lm(replace(CONFIG, device="meta"))
    whole = {name: id(p) for name, p in model.named_parameters()}
    stages = split(model, 4)
    parts = [{name: id(p) for name, p in stage.named_parameters()} for stage in stages]
    assert {name: p for part in parts for name, p in part.items()} == whole
    assert sum(map(len, parts)) == len(whole)
    assert all(set(stage.state_dict()) == set(part) for stage, part in zip(stages, parts))


@pytest.mark.parametrize(
    ("stages", "begin"),
    [
        # A layer has 4128 parameters and the head 8000; the table of as many counts nothing.
        (1, []),
        (2, ["layers.3"]),
        (3, ["layers.2", "norm"]),
    ],
)
def test_balance(stages: int, begin: list[str]) -> None:
    model = decoder_lm(DecoderConfig(500, 16, 4, 2, tied_head=False, device="meta"))
    named = split(model, begin)
    for ours, theirs in zip(split(model, stages), named, strict=True):
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]


def test_what_a_model_has_is_that_of_its_stages() -> None:
    recipe, config = Float8CurrentScaling(), {"joint": {"norm_linear": {"enabled": False}}}
    model = opfuser.Sequential(
        opfuser.GELU(), opfuser.ReLU(), recipe=recipe, replay="off", fusion_config=config
    ).eval()
    for stage in split(model, 2):
        assert (stage.recipe, stage.replay) == (recipe, "off")
        assert stage.fusion_config == model.fusion_config
        assert not stage.training


def text_of(stages: Any, model: opfuser.Sequential) -> str:
    with pytest.raises((ArgumentError, ChannelError)) as error:
        split(model, stages)
    return f"{type(error.value).__name__}: {error.value}"


def test_refusals() -> None:
    def gelus() -> opfuser.Sequential:
        return opfuser.Sequential(opfuser.GELU(), opfuser.GELU())

    assert text_of(3, gelus()) == (
        "ArgumentError: Every pipeline stage has a block, and a model has as many as it has "
        "(split). Received: 3 stages, 2 blocks and other modules. Ask for fewer stages, or name "
        "the modules at which they begin."
    )
    assert text_of(["2"], gelus()) == (
        "ArgumentError: Pipeline stages begin, in order, at modules of a Sequential behind the "
        "first (split). Received: '2'. Name some of 1, or of the modules in these."
    )
    assert "Received: '1', '1'." in text_of(["1", "1"], gelus())
    hooked = gelus()
    hooked.register_forward_hook(lambda *args: None)
    assert text_of(2, hooked) == (
        "ArgumentError: A model is split before it is wrapped (split). Received: Sequential with "
        "hooks or a forward of its own. Split the model, then register hooks on its stages or "
        "wrap these."
    )
    tied = decoder_lm(replace(CONFIG, tied_head=True))
    assert text_of(2, tied) == (
        "ArgumentError: A parameter is in one pipeline stage (split). Received: embedding.weight "
        "of stage 0 is head.weight of stage 1. Untie them (tied_head=False), or have both in one "
        "stage."
    )
    assert text_of(["layers.0.attention.2"], decoder_lm(CONFIG)) == (
        "ChannelError: A private channel stays within one pipeline stage (split). Received: "
        "'residual', read in stage 1, fed in stage 0. Begin a stage at a block, such as a "
        "Residual, not within it."
    )


def test_wrong_calls() -> None:
    first, last = split(decoder_lm(CONFIG), 2)
    tokens = torch.randint(29, (2, 5))
    with pytest.raises(ExtraInputCountError) as error:
        first(tokens, tokens)
    assert str(error.value) == (
        "This stage takes 0 tensors behind the output of the one before it (StageModule). "
        "Received: 1. Pass the extra inputs of the model as extra_inputs=(...)."
    )
    y = first(tokens, extra_inputs=(tokens,))
    with pytest.raises(ExtraInputCountError) as error:
        last(y)
    assert str(error.value) == (
        "extra_inputs are all extra inputs of the whole model, of which this stage takes 0 to 0 "
        "(StageModule). Received: 0 tensors. Call schedule.step(..., extra_inputs=(targets,)) on "
        "its process."
    )
    with pytest.raises(OpKwargsError) as kwargs_error:
        first(tokens, op_kwargs={0: {}})
    assert str(kwargs_error.value) == (
        "A pipeline stage is given keywords by operation (StageModule). Received: 0. Use the "
        "operation itself as the key."
    )
