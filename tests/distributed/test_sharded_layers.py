"""``shard_layers`` on two ranks, against the same model on one: all checks in one start."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import opfuser
from opfuser.errors import ArgumentError, NotSupportedError
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
from tests.distributed.ranks import Checks, Outcomes, assert_passed
from tests.distributed.sharded import whole

pytestmark = pytest.mark.distributed

RANKS = 2
CHECKS = check = Checks()


def compare(
    make: Any, inputs: tuple[Tensor, ...], rank: int, shard: Any = shard_layers, **arguments: Any
) -> Any:
    """Values and the mean gradients of two training steps; the first dimension is that of ranks."""
    torch.manual_seed(1)
    one = make()
    ours = make()
    ours.load_state_dict(one.state_dict())
    assert shard(ours, **arguments) is ours
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, ours)]
    for _ in range(2):
        parts = [[t[r] for t in inputs] for r in range(RANKS)]
        exact = [one(*part) for part in parts]
        (sum(y.square().mean() for y in exact) / RANKS).backward()
        y = ours(*parts[rank])
        y.square().mean().backward()
        torch.testing.assert_close(y, exact[rank], rtol=1e-10, atol=1e-12)
        for (name, p), q in zip(ours.named_parameters(), one.parameters()):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-9, atol=1e-11, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return ours


@check
def decoder(rank: int, ranks: int) -> None:
    """Whether parameters stay gathered until backward or not, with a tied head and without."""
    inputs = tuple(torch.randint(29, (2, RANKS, 2, 5)))
    for reshard, tied in ((False, True), (True, False)):
        config = DecoderConfig(29, 16, 3, 2, tied_head=tied, dtype=torch.float64)
        model = compare(lambda c=config: decoder_lm(c), inputs, rank, reshard_after_forward=reshard)
        assert all(isinstance(layer, FSDPModule) for layer in model.layers)
        plan = model.last_plan
        assert plan.fused("forward")["linear_cross_entropy"] == 1
        assert plan.fused("backward")["norm_linear"] == 6
        costs = [no for _, no in plan.record("forward_add_rms_norm").refusals]
        why = "FSDPSequential is a unit of fully_shard, whose parameters are gathered when it is"
        assert [str(no) for no in costs] == [f"COMMUNICATION: {why} called"] * 3


@check
def encoders(rank: int, ranks: int) -> None:
    text = EncoderConfig(29, 16, 2, 2, dtype=torch.float64)
    tokens = torch.randint(29, (RANKS, 2, 5))
    compare(lambda: text_encoder(text), (tokens, torch.zeros_like(tokens)), rank)
    image = ImageEncoderConfig(8, 4, 16, 2, 2, dtype=torch.float64)
    images = torch.randn(RANKS, 2, image.channels, 8, 8, dtype=torch.float64)
    compare(lambda: image_encoder(image), (images,), rank)


@check
def experts_with_an_extra_output(rank: int, ranks: int) -> None:
    """The terms of a unit's router reach the caller, and a loss that is called on them."""
    moe = MoEConfig(16, 8, 4, 2, balance_terms=True)
    config = DecoderConfig(29, 16, 2, 2, moe=moe, dtype=torch.float64)
    torch.manual_seed(1)
    one, ours = decoder_lm(config), decoder_lm(config)
    ours.load_state_dict(one.state_dict())
    shard_layers(ours)
    tokens, targets = torch.randint(29, (2, RANKS, 2, 5))
    balance = opfuser.LoadBalancingLoss(2, 0.1)

    def loss(model: Any, r: int) -> Tensor:
        return balance(*model(tokens[r], targets[r]))[0]

    exact = [loss(one, r) for r in range(RANKS)]
    (sum(exact) / RANKS).backward()
    mine = loss(ours, rank)
    mine.backward()
    torch.testing.assert_close(mine, exact[rank], rtol=1e-10, atol=1e-12)
    for p, q in zip(ours.parameters(), one.parameters()):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-9, atol=1e-11)


@check
def channels_across_units(rank: int, ranks: int) -> None:
    """From the router of each layer to the one loss of all, behind them."""
    moe = MoEConfig(16, 8, 4, 2)
    sizes = {"router_aux_loss_coef": 0.1, "dtype": torch.float64}
    config = DecoderConfig(29, 16, 2, 2, moe=moe, **sizes)
    inputs = tuple(torch.randint(29, (2, RANKS, 2, 5)))
    model = compare(lambda: decoder_lm(config), inputs, rank)
    assert model.num_extra_outputs == 0


@check
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

        compare(lambda: decoder_lm(config), inputs, rank, shard=compiled)
        assert backend.frame_count == 1


@check
def start_on_the_meta_device(rank: int, ranks: int) -> None:
    """Nothing is there before it is sharded; then every rank draws its own shard."""
    model = decoder_lm(DecoderConfig(29, 16, 2, 2, tied_head=False, device="meta"))
    shard_layers(model).to_empty(device="cpu")
    for p in model.parameters():
        assert isinstance(p, DTensor)
        torch.nn.init.ones_(p)
    y = model(*torch.randint(29, (2, 2, 5)))
    # All logits are equal.
    torch.testing.assert_close(y, torch.tensor(29.0).log())


@check
def policy_of_precision(rank: int, ranks: int) -> None:
    """Stored in fp32, gathered and computed in bf16; gradients are of the parameters' dtype."""
    torch.manual_seed(1)
    model = decoder_lm(DecoderConfig(29, 16, 2, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_layers(model, mp_policy=policy)
    given = []
    model.layers[0].register_forward_hook(lambda module, args, y: given.append(y.dtype))
    model(*torch.randint(29, (2, 2, 5))).backward()
    assert given == [torch.bfloat16]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", CHECKS)
def test_sharded_layers(outcomes: Outcomes, name: str) -> None:
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
