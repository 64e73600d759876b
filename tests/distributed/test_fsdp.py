"""``shard_layers``, and what users of FSDP2 switch on, on two ranks against one: in one start."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import opfuser
from opfuser import Linear
from opfuser.errors import ArgumentError, MasterWeightError, NotSupportedError
from opfuser.models import (
    DecoderConfig,
    EncoderConfig,
    ImageEncoderConfig,
    MoEConfig,
    decoder_lm,
    image_encoder,
    text_encoder,
)
from opfuser.models.sharding import shard_layers
from opfuser.optim import MasterWeights
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from tests.distributed.ranks import DEVICES, Check, Checks, Outcomes, assert_passed
from tests.distributed.sharded import (
    all_ranks,
    assert_same,
    batches,
    gradients_of_one,
    shard,
    twins,
    whole,
)

pytestmark = pytest.mark.distributed

RANKS = 2
CHECKS = check = Checks()
ON_A_CPU: set[str] = set()
CONFIG = DecoderConfig(29, 16, 3, 2, dtype=torch.float64)
RECIPES = DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()
make = partial(decoder_lm, CONFIG)


def pair(how: Any = shard, **arguments: Any) -> tuple[nn.Module, Any]:
    return twins(make, partial(how, **arguments))


def train(one: nn.Module, ours: Any, rank: int, steps: int = 2) -> None:
    """Steps of both, with gradients and weights of the one rank."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, ours)]
    for tokens, targets in batches(RANKS, [2] * steps):
        (losses,) = gradients_of_one(one, [(tokens, targets)])
        loss = ours(tokens[rank], targets[rank])
        assert loss.item() == pytest.approx(losses[rank], rel=1e-11)
        loss.backward()
        assert_same(ours, one)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours, one, grads=False)


def bf16_pair(policy: MixedPrecisionPolicy) -> tuple[nn.Module, nn.Module]:
    """A model in fp32, sharded, and its copy in bf16."""
    config = DecoderConfig(29, 16, 2, 2, tied_head=False)
    one, ours = twins(partial(decoder_lm, config), partial(shard, mp_policy=policy))
    return one.bfloat16(), ours


@check
def micro_batches(rank: int, ranks: int) -> None:
    """Of different sizes; reduced with the last one, while parameters stay gathered or not."""
    for adds in (False, True):
        one, ours = pair()
        for op in ours.modules():
            if isinstance(op, Linear):
                op.accumulate_into_grad = adds
        for keeps in (False, True):
            parts = batches(ranks, (2, 1, 3))
            for m in (one, ours):
                m.zero_grad()
            gradients_of_one(one, parts)
            for n, (tokens, targets) in enumerate(parts):
                last = n == len(parts) - 1
                ours.set_is_last_backward(last)
                ours.set_requires_gradient_sync(last)
                ours.set_reshard_after_backward(last or not keeps)
                ours(tokens[rank], targets[rank]).backward()
                if not last and not keeps:
                    assert all(p.grad is None for p in ours.parameters())
            assert_same(ours, one)


def on_a_cpu(function: Check) -> None:
    """A check of how modules are wrapped, which GPUs would only repeat."""

    def run(rank: int, ranks: int) -> None:
        if torch.get_default_device().type == "cpu":
            function(rank, ranks)

    CHECKS[function.__name__] = run
    ON_A_CPU.add(function.__name__)


def compare(
    build: Any, inputs: tuple[Tensor, ...], rank: int, how: Any = shard_layers, **arguments: Any
) -> Any:
    """Values and the mean gradients of two training steps; the first dimension is that of ranks."""
    one, ours = twins(build, partial(how, **arguments))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, ours)]
    for _ in range(2):
        exact = [one(*(t[r] for t in inputs)) for r in range(RANKS)]
        (sum(y.square().mean() for y in exact) / RANKS).backward()
        y = ours(*(t[rank] for t in inputs))
        y.square().mean().backward()
        torch.testing.assert_close(y, exact[rank], rtol=1e-10, atol=1e-12)
        assert_same(ours, one)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return ours


@on_a_cpu
def encoders(rank: int, ranks: int) -> None:
    text = EncoderConfig(29, 16, 2, 2, dtype=torch.float64)
    tokens = torch.randint(29, (RANKS, 2, 5))
    compare(lambda: text_encoder(text), (tokens, torch.zeros_like(tokens)), rank)
    image = ImageEncoderConfig(8, 4, 16, 2, 2, dtype=torch.float64)
    images = torch.randn(RANKS, 2, image.channels, 8, 8, dtype=torch.float64)
    compare(lambda: image_encoder(image), (images,), rank)


@on_a_cpu
def experts_with_an_extra_output(rank: int, ranks: int) -> None:
    """The terms of a unit's router reach the caller, and a loss that is called on them."""
    moe = MoEConfig(16, 8, 4, 2, balance_terms=True)
    config = DecoderConfig(29, 16, 2, 2, moe=moe, dtype=torch.float64)
    one, ours = twins(partial(decoder_lm, config), shard)
    ((tokens, targets),) = batches(RANKS)
    balance = opfuser.LoadBalancingLoss(2, 0.1)

    def loss(model: Any, r: int) -> Tensor:
        return balance(*model(tokens[r], targets[r]))[0]

    exact = [loss(one, r) for r in range(RANKS)]
    (sum(exact) / RANKS).backward()
    mine = loss(ours, rank)
    mine.backward()
    torch.testing.assert_close(mine, exact[rank], rtol=1e-10, atol=1e-12)
    assert_same(ours, one)


@on_a_cpu
def channels_across_units(rank: int, ranks: int) -> None:
    """From the router of each layer to the one loss of all, behind them."""
    moe = MoEConfig(16, 8, 4, 2)
    sizes = {"router_aux_loss_coef": 0.1, "dtype": torch.float64}
    config = DecoderConfig(29, 16, 2, 2, moe=moe, **sizes)
    inputs = tuple(torch.randint(29, (2, RANKS, 2, 5)))
    model = compare(lambda: decoder_lm(config), inputs, rank)
    assert model.num_extra_outputs == 0


@on_a_cpu
def layers_that_are_compiled(rank: int, ranks: int) -> None:
    """Before or after they are sharded; traced once for all of them."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # Dynamo reads it
    config = DecoderConfig(29, 16, 3, 2, dtype=torch.float64)
    inputs = tuple(torch.randint(29, (2, RANKS, 2, 5)))
    for first in (True, False):
        torch.compiler.reset()
        backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        def compiled(
            model: Any, first: bool = first, backend: Any = backend, **arguments: Any
        ) -> Any:
            if not first:
                shard_layers(model, **arguments)
            for layer in model.layers:
                layer.compile(fullgraph=True, backend=backend)
            return shard_layers(model, **arguments) if first else model

        compare(lambda: decoder_lm(config), inputs, rank, how=compiled)
        assert backend.frame_count == 1


class Recomputed(nn.Module):
    """A layer that ``torch.utils.checkpoint`` recomputes, as a model's own forward calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False, context_fn=keep_products)


def keep_products() -> Any:
    """Of a selective checkpoint: what matrix products return is saved."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def replace_layers(model: Any, inside: Any = None, outside: Any = None) -> None:
    """Shards layers and model; each layer is replaced before it is sharded, or behind that."""
    mesh = all_ranks()
    for n, layer in enumerate(model.layers):
        unit = fully_shard(layer if inside is None else inside(layer), mesh=mesh)
        model.layers[n] = unit if outside is None else outside(unit)
    fully_shard(model, mesh=mesh)


@check
def checkpointed(rank: int, ranks: int) -> None:
    """What is recomputed in backward: a unit, what is in it, or around it; by any of the ways."""
    for impl in CheckpointImpl:
        wrap = partial(checkpoint_wrapper, checkpoint_impl=impl)
        train(*pair(replace_layers, inside=wrap), rank)
        train(*pair(replace_layers, outside=wrap), rank)
    train(*pair(replace_layers, inside=Recomputed), rank)
    one, ours = twins(partial(decoder_lm, replace(CONFIG, recompute="mlp")), shard)
    train(one, ours, rank)
    assert ours.last_plan.fused("forward")["recompute_mlp_where_asked"] == 3


@check
def prefetched(rank: int, ranks: int) -> None:
    """Both orders in which torch may gather units ahead of their calls."""
    one, ours = pair()
    ours.set_modules_to_forward_prefetch(list(ours.layers[:2]))
    for near, behind in zip(ours.layers[:-1], ours.layers[1:]):
        near.set_modules_to_forward_prefetch([behind])
        behind.set_modules_to_backward_prefetch([near])
    train(one, ours, rank)


@on_a_cpu
def plans_of_units(rank: int, ranks: int) -> None:
    """Fusions within them, and what is not fused across; parameters stay until backward."""
    one, ours = pair(reshard_after_forward=False)
    train(one, ours, rank)
    assert all(isinstance(layer, FSDPModule) for layer in ours.layers)
    plan = ours.last_plan
    assert plan.fused("forward")["linear_cross_entropy"] == 1
    assert plan.fused("backward")["norm_linear"] == 6
    costs = [no for _, no in plan.record("forward_add_rms_norm").refusals]
    why = "FSDPSequential is a unit of fully_shard, whose parameters are gathered when it is"
    assert [str(no) for no in costs] == [f"COMMUNICATION: {why} called"] * 3


@check
def gradients_are_clipped(rank: int, ranks: int) -> None:
    one, ours = pair()
    for tokens, targets in batches(ranks):
        gradients_of_one(one, [(tokens, targets)])
        ours(tokens[rank], targets[rank]).backward()
    exact = nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    mine = nn.utils.clip_grad_norm_(ours.parameters(), 0.01)
    torch.testing.assert_close(whole(mine), exact, rtol=1e-11, atol=0)
    assert_same(ours, one)


def bf16_grads(one: nn.Module, parts: Any) -> list[list[Tensor]]:
    """Gradients of each rank in turn, of all parameters."""
    return [
        list(torch.autograd.grad(one(x, t), list(one.parameters())))
        for tokens, targets in parts
        for x, t in zip(tokens, targets)
    ]


@check
def precision(rank: int, ranks: int) -> None:
    """Computed in bf16, bit for bit as a model in bf16; added up and reduced in fp32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    one, ours = bf16_pair(policy)
    parts = batches(ranks, (2, 1))
    for n, (tokens, targets) in enumerate(parts):
        ours.set_requires_gradient_sync(n == 1)
        loss = ours(tokens[rank], targets[rank])
        assert torch.equal(loss, one(tokens[rank], targets[rank]))
        loss.backward()
    exact = [sum(g.float() for g in grads) / ranks for grads in zip(*bf16_grads(one, parts))]
    for p, dw in zip(ours.parameters(), exact):
        assert p.grad.dtype == p.dtype == torch.float32
        torch.testing.assert_close(whole(p.grad), dw, rtol=1e-6, atol=1e-9)


@check
def dtypes_of_inputs_and_outputs(rank: int, ranks: int) -> None:
    config = ImageEncoderConfig(8, 4, 16, 2, 2)
    images = torch.randn(2, config.channels, 8, 8)
    for output, cast in ((torch.float32, True), (None, False)):
        policy = MixedPrecisionPolicy(torch.bfloat16, None, output, cast)
        one, ours = twins(partial(image_encoder, config), partial(shard, mp_policy=policy))
        seen: list[tuple[torch.dtype, torch.dtype]] = []

        def look(m: nn.Module, args: Any, y: Tensor, seen: Any = seen) -> None:
            seen.append((args[0].dtype, y.dtype))

        for layer in ours.layers:
            layer.register_forward_hook(look)
        x = images if cast else images.bfloat16()
        y = ours(x)
        assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
        exact = one.bfloat16()(images.bfloat16())
        assert y.dtype == (output or torch.bfloat16)
        assert torch.equal(y, exact.to(y.dtype))
        y.sum().backward()
        assert {p.grad.dtype for p in ours.parameters()} == {torch.float32}


@check
def start_on_the_meta_device(rank: int, ranks: int) -> None:
    """Values are drawn by each rank for its shards, or come from the first rank."""
    config = replace(CONFIG, tied_head=False)
    torch.manual_seed(1)
    one = decoder_lm(config)
    ours = shard(decoder_lm(replace(config, device="meta"))).to_empty(
        device=torch.get_default_device()
    )
    with warnings.catch_warnings():
        # What DTensor says on a CPU: ranks with one seed draw equal shards.
        warnings.filterwarnings("ignore", "DTensor random operators")
        for module in ours.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    for name, p in ours.named_parameters():
        given = p.to_local()
        if given.dim() == 2 and "embedding" not in name:
            bound = p.shape[1] ** -0.5
            assert bound / 2 < given.abs().max() <= bound, name
    full = one.state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(ours, full, options=options)
    assert_same(ours, one, grads=False)
    train(one, ours, rank)


def shard_tied(model: Any) -> Any:
    """Units of the layers, and one of embedding, norm and head."""
    mesh = all_ranks()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.embedding, model.norm, model.head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@check
def tied_heads(rank: int, ranks: int) -> None:
    """Of one unit, also off the meta device: one parameter, with the gradients of both places."""
    train(*pair(shard_tied), rank)
    for sharded in (shard, shard_tied):
        one = decoder_lm(CONFIG)
        ours = sharded(decoder_lm(replace(CONFIG, device="meta"))).to_empty(
            device=torch.get_default_device()
        )
        assert ours.head.weight is ours.embedding.weight
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(ours, one.state_dict() if rank == 0 else {}, options=options)
        train(one, ours, rank)


@check
def tied_heads_in_fp8(rank: int, ranks: int) -> None:
    """Each recipe, with masters: as ranks whose gradients are averaged by hand."""
    warnings.filterwarnings("ignore", "FP8 is emulated")
    config = DecoderConfig(29, 128, 1, 2, dtype=torch.bfloat16)
    for recipe in RECIPES:
        one, ours = twins(partial(decoder_lm, config), shard)
        optimizers = [MasterWeights(m, torch.optim.AdamW, lr=1e-2) for m in (one, ours)]
        for tokens, targets in batches(ranks, [2] * 2):
            for m in (one, ours):
                with opfuser.autocast(recipe=recipe):
                    loss = m(tokens[rank], targets[rank])
                loss.backward()
            for p, q in zip(one.parameters(), ours.parameters(), strict=True):
                dist.all_reduce(p.grad)
                p.grad /= ranks
                error = (whole(q.grad) - p.grad).norm()
                assert error <= 2**-7 * p.grad.norm(), recipe  # sums in bf16
                q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements, src_data_rank=None)
            for m, o in zip((one, ours), optimizers):
                o.step()
                m.zero_grad()
            assert_same(ours, one, grads=False, bound=0)


@check
def master_weights(rank: int, ranks: int) -> None:
    """fp32 copies of the shards of parameters in bf16."""
    config = replace(CONFIG, dtype=torch.bfloat16, tied_head=False)
    one, ours = twins(partial(decoder_lm, config), shard)
    optimizers = [MasterWeights(m, torch.optim.AdamW, lr=1e-2) for m in (one, ours)]
    torch.manual_seed(3)
    for _ in range(3):
        for p, q in zip(one.parameters(), ours.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements, src_data_rank=None)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(ours, one, grads=False)


def sharded_in_bf16(seed: int = 1) -> tuple[Any, MasterWeights]:
    torch.manual_seed(seed)
    model = shard(decoder_lm(replace(CONFIG, dtype=torch.bfloat16, tied_head=False)))
    return model, MasterWeights(model, torch.optim.AdamW, lr=1e-2)


def step_of(model: Any, optimizer: MasterWeights, rank: int, n: int) -> None:
    tokens, targets = batches(RANKS, [2] * 6)[n]
    model(tokens[rank], targets[rank]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@check
def masters_by_hand(rank: int, ranks: int) -> None:
    """Bit for bit those in fp32 of whole parameters, with gradients that FSDP2 has made."""
    model, optimizer = sharded_in_bf16()
    masters = [nn.Parameter(whole(p).float()) for p in model.parameters()]
    hand = torch.optim.AdamW(masters, lr=1e-2)
    for n in range(4):
        optimizer.zero_grad()
        step_of(model, optimizer, rank, n)
        for p, master in zip(model.parameters(), masters):
            master.grad = whole(p.grad).float()
        hand.step()
        for p, master in zip(model.parameters(), masters):
            assert torch.equal(whole(p), master.bfloat16())
            assert torch.equal(whole(optimizer.state[p]["master_param"]), master)


@check
def writes_to_shards(rank: int, ranks: int) -> None:
    """Each is noticed, by the rank whose shard it is."""
    model, optimizer = sharded_in_bf16()
    name, weight = next((n, p) for n, p in model.named_parameters() if p.dim() == 2)
    writes = [
        lambda: weight.mul_(2),
        lambda: weight.to_local().mul_(2),
        lambda: weight.data.mul_(2),
        lambda: weight.to_local().data.mul_(2),
    ]

    def notice() -> None:
        optimizer.step()
        if weight.is_cuda:  # the host has learned of some by the next step
            torch.cuda.synchronize()
            optimizer.step()

    for n, write in enumerate(writes):
        step_of(model, optimizer, rank, n)
        with torch.no_grad():
            write()
        with pytest.raises(MasterWeightError, match=name):
            notice()
        optimizer.read_parameters()
        optimizer.step()


@check
def masters_in_state_dicts(rank: int, ranks: int) -> None:
    """Into models that took steps or none: flat, whole from the first rank, and as shards."""
    exact = sharded_in_bf16()
    for n in range(2):
        step_of(*exact, rank, n)
    exact[1].zero_grad()
    for given in (
        {},
        {"flatten_optimizer_state_dict": True},
        {"full_state_dict": True, "broadcast_from_rank0": True},
    ):
        options = StateDictOptions(**given)
        for steps in range(2):
            states = copy.deepcopy(get_state_dict(*exact, options=options))
            model, optimizer = sharded_in_bf16(seed=2)
            for n in range(steps):
                step_of(model, optimizer, rank, n)
            optimizer.zero_grad()
            set_model_state_dict(model, states[0], options=options)
            set_optimizer_state_dict(model, optimizer, states[1], options=options)
            for p, q in zip(model.parameters(), exact[0].parameters()):
                assert torch.equal(whole(p), whole(q))
                assert optimizer.state[p].keys() == exact[1].state[q].keys()
                for key, want in exact[1].state[q].items():
                    pair = optimizer.state[p][key], want
                    if key == "step":  # made on the default device, loaded to the CPU
                        mine, theirs = (t.cpu() for t in pair)
                    else:
                        mine, theirs = map(whole, pair)
                    assert mine.device == theirs.device, key
                    assert torch.equal(mine, theirs), key
            step_of(model, optimizer, rank, 3)


@pytest.mark.parametrize("outcomes", DEVICES, indirect=True, scope="module")
@pytest.mark.parametrize("name", CHECKS)
def test_fsdp(outcomes: Outcomes, name: str, request: pytest.FixtureRequest) -> None:
    if name in ON_A_CPU and request.node.callspec.params["outcomes"] != "cpu":
        pytest.skip("is about how modules are wrapped, and ran on a CPU")
    assert_passed(outcomes, name)


def test_a_model_without_layers() -> None:
    message = r"Sequential named layers \(shard_layers\).*Sequential with NoneType.*fully_shard"
    with pytest.raises(ArgumentError, match=message):
        shard_layers(opfuser.Sequential(opfuser.GELU()))


@pytest.mark.parametrize("last", ["layers.1.1.bias", "norm.weight"])
def test_a_parameter_in_two_units_is_refused(last: str) -> None:
    """torch would make two parameters of it."""
    layers = [opfuser.Sequential(opfuser.RMSNorm(4), opfuser.Bias(4)) for _ in range(2)]
    model = opfuser.Sequential({"layers": opfuser.Sequential(*layers), "norm": opfuser.RMSNorm(4)})
    path, name = last.rsplit(".", 1)
    setattr(model.get_submodule(path), name, model.layers[0][1].bias)
    with pytest.raises(ArgumentError) as error:
        shard_layers(model)
    assert str(error.value) == (
        "A parameter lies in one unit (shard_layers). Received: layers.0.1.bias and "
        f"{last}, which are one. Untie them, or call torch's fully_shard with a list of what is "
        "to be one unit."
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_in_fp8_are_refused(device: str) -> None:
    """Nothing was sharded before."""
    with opfuser.quantized_model_init():
        model = decoder_lm(DecoderConfig(29, 32, 2, 2, dtype=torch.bfloat16, device=device))
    types = [type(m) for m in model.modules()]
    with pytest.raises(NotSupportedError) as error:
        shard_layers(model)
    path = next(path for path, p in model.named_parameters() if p.itemsize == 1)
    assert path.startswith("layers.0.")
    assert str(error.value) == (
        "Sharded parameters are stored in high precision, as torch gathers and reduces those of a "
        f"unit in one dtype (shard_layers). Received: {path} of torch.float8_e4m3fn. Construct the "
        "model outside of opfuser.quantized_model_init; a region of a recipe still computes in FP8."
    )
    assert [type(m) for m in model.modules()] == types
