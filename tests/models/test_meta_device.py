"""Models that start without data, on the meta device, are those made directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.models import (
    DecoderConfig,
    ImageEncoderConfig,
    MoEConfig,
    decoder_lm,
    image_encoder,
)
from opfuser.optim import MasterWeights
from opfuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

VOCAB, DIM, BF16 = 48, 128, torch.bfloat16
RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "blocks": Float8BlockScaling(),
}


def decoder(**how: Any) -> Callable[..., nn.Module]:
    return lambda device: decoder_lm(
        DecoderConfig(VOCAB, DIM, 1, 2, device=device, dtype=BF16, **how)
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "tied head": decoder(),
    "its own head": decoder(tied_head=False),
    "experts": decoder(moe=MoEConfig(DIM, DIM, 3, 2, score_correction_bias=True)),
    "images": lambda device: image_encoder(
        ImageEncoderConfig(8, 8, DIM, 1, 2, channels=2, device=device, dtype=BF16)
    ),
}


def to_empty(model: nn.Module, state: dict[str, Any]) -> None:
    model.to_empty(device="cpu")
    for t in (*model.parameters(), *model.buffers()):
        t.data.view(-1).view(torch.uint8).fill_(0x55)
    model.load_state_dict(state)


def assign(model: nn.Module, state: dict[str, Any]) -> None:
    model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)


def trained(model: nn.Module, recipe: Recipe | None) -> list[Tensor]:
    """Losses, gradients and weights of three steps."""
    torch.manual_seed(1)
    optimizer, found = MasterWeights(model, torch.optim.AdamW, lr=1e-2), []
    for _ in range(3):
        tokens, targets = torch.randint(VOCAB, (2, 2, 8))
        images = isinstance(getattr(model, "embedding", None), opfuser.Linear)
        given = (torch.randn(2, 2, 8, 8).to(BF16),) if images else (tokens, targets)
        with opfuser.autocast(recipe is not None, recipe=recipe):
            y = model(*given)
        loss = y.float().square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().float() for p in model.parameters())]


@pytest.mark.parametrize(
    ("fill", "recipe"), [(to_empty, None), (assign, "delayed"), (to_empty, "blocks")]
)
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_one_made_directly(name: str, fill: Any, recipe: str | None) -> None:
    chosen = RECIPES.get(recipe or "")
    with opfuser.quantized_model_init(chosen is not None, chosen):
        torch.manual_seed(0)
        direct, ours = MODELS[name](None), MODELS[name]("meta")
    assert all(t.is_meta for t in (*ours.parameters(), *ours.buffers()))
    fill(ours, direct.state_dict())
    named, expected = dict(ours.named_parameters()), dict(direct.named_parameters())
    assert list(named) == list(expected)
    for p, q in zip(named.values(), expected.values()):
        assert (p.dtype, p.requires_grad, p.grad_dtype) == (q.dtype, q.requires_grad, q.grad_dtype)
    for mine, theirs in zip(trained(ours, chosen), trained(direct, chosen), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_initial_values_are_drawn_once_there_is_memory(recipe: Recipe) -> None:
    made = []
    for device in (None, "meta"):
        torch.manual_seed(0)
        with opfuser.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            linear = opfuser.Linear(DIM, DIM, device=device)
        if device is not None:
            assert linear.weight.get_high_precision_init_val() is None
            torch.manual_seed(0)
            linear.to_empty(device="cpu").reset_parameters()
        made.append(linear)
    direct, ours = made
    assert torch.equal(ours.read_weight(), direct.read_weight())
    initial = ours.weight.get_high_precision_init_val()
    assert torch.equal(initial, direct.weight.get_high_precision_init_val())


@pytest.mark.parametrize("assigned", [True, False])
@pytest.mark.parametrize("make", [opfuser.Linear, opfuser.BasicLinear])
def test_masters_begin_with_the_values_that_were_loaded(make: Any, assigned: bool) -> None:
    high = make(DIM, DIM)
    with opfuser.quantized_model_init(
        recipe=RECIPES["current"], preserve_high_precision_init_val=True
    ):
        ours = make(DIM, DIM, device="meta" if assigned else None)
    ours.load_state_dict(high.state_dict(), strict=False, assign=assigned)
    assert torch.equal(ours.weight.get_high_precision_init_val(), high.weight)
    (master,) = MasterWeights(ours, torch.optim.SGD, [ours.weight], lr=1.0).optimizer.param_groups
    assert torch.equal(master["params"][0], high.weight)


def test_an_encoder_of_images_with_weights_in_fp8() -> None:
    config = ImageEncoderConfig(32, 16, 128, 1, 2, init_std=0.5)
    with opfuser.quantized_model_init(recipe=RECIPES["current"]):
        model = image_encoder(config)
    assert model.embedding.weight.dtype == torch.float8_e4m3fn
    assert model.embedding.read_weight().std().item() == pytest.approx(0.5, rel=0.02)


# A parameter in several places.


class Tied(nn.Module):
    """Sequences inside another module; a tie between operations of torch, and one across blocks."""

    def __init__(self, device: str) -> None:
        super().__init__()
        linears = [nn.Linear(4, 4, device=device) for _ in range(2)]
        blocks = [opfuser.Residual(opfuser.Linear(4, 4, device=device)) for _ in range(2)]
        self.seq = opfuser.Sequential(*linears, *blocks)
        linears[1].weight = linears[0].weight
        blocks[1][1].weight = blocks[0][1].weight

    def assert_tied(self) -> None:
        a, b, c, d = self.seq
        assert a.weight is b.weight
        assert c[1].weight is d[1].weight is not a.weight
        assert len(list(self.parameters())) == 6
        assert not any(p.is_meta for p in self.parameters())


def test_what_is_tied_stays_so() -> None:
    direct, ours = Tied("cpu"), Tied("meta").to_empty(device="cpu")
    ours.assert_tied()
    ours = Tied("meta")
    ours.load_state_dict(direct.state_dict(), assign=True)
    ours.assert_tied()
    assert ours.seq[0].weight.data_ptr() == direct.seq[0].weight.data_ptr()
    ours = Tied("meta")
    frozen = ours.seq[0].weight.requires_grad_(False)
    assign(ours, direct.state_dict())  # equal values of several tensors
    ours.assert_tied()
    assert not ours.seq[0].weight.requires_grad
    assert frozen.is_meta


def test_different_values_are_different_parameters() -> None:
    """Assigned as torch assigns them: none of them is lost."""
    state = Tied("cpu").state_dict()
    state["seq.1.weight"] = state["seq.1.weight"] + 1
    ours = Tied("meta")
    ours.load_state_dict(state, assign=True)
    assert all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())
