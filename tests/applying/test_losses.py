"""Losses without logits are those of the model, and logits that something asks for are there."""

from __future__ import annotations

import copy
import gc
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser.applying import report
from opfuser.applying.deferred import Head
from opfuser.errors import NotSupportedError
from tests.reading.tiny import CACHE

from ..reading.recomputed import Example, read_of
from .models import IDS, NanoGPT, assert_as_exact, assert_equal_steps, llama, nano_gpt

Loss = Callable[[Tensor, Tensor], Tensor]


class Trained(NanoGPT):
    """A language model with a loss, and logits if it has none."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        return logits, None if targets is None else self.loss(logits, targets)


def rows(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), **options)


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    return rows(logits[..., :-1, :].contiguous(), targets[..., 1:].contiguous())


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return rows(logits, targets, ignore_index=3, label_smoothing=0.2)


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return rows(logits.float(), targets, reduction="sum") / 7


class Squares(torch.autograd.Function):
    """Torch is not told that its argument is read."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return dy * 2 * logits / logits.numel()


def written_to(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.view(-1, logits.size(-1))
    logits[..., 0] = -5
    return F.cross_entropy(flat, targets.view(-1))


WITHOUT: dict[str, Loss] = {
    "rows": rows,
    "shifted": shifted,
    "smoothed": smoothed,
    "summed": summed,
    "a module": lambda y, t: nn.CrossEntropyLoss()(y.view(-1, 64), t.view(-1)),
}
WITH: dict[str, Loss] = {
    "z-loss": lambda y, t: shifted(y, t) + y.logsumexp(-1).square().mean(),
    "sliced": lambda y, t: y[:, :-1, :].square().mean(),
    "capped": lambda y, t: rows(5 * torch.tanh(y / 5), t),
    "weighted": lambda y, t: rows(y, t, weight=torch.linspace(0, 1, 64, dtype=y.dtype)),
    "each": lambda y, t: rows(y, t, reduction="none").square().mean(),
    "columns": lambda y, t: F.cross_entropy(y.transpose(1, 2), t),
    "probabilities": lambda y, t: F.cross_entropy(y, torch.softmax(y.detach(), -1)),
    "of other rows": lambda y, t: rows(y.mT.contiguous().mT.contiguous(), t),
    "an autograd function": lambda y, t: Squares.apply(y),
    "written to": written_to,
}


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss = model(IDS, IDS.roll(1, 1))[1]
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("name", [*WITHOUT, *WITH])
def test_losses_and_gradients_are_those_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    plain = Trained({**WITHOUT, **WITH}[name]).double()
    model = copy.deepcopy(plain)
    opfuser.apply(model, fused_loss=True)
    for _ in range(2):
        assert_equal_steps(step(model), step(plain))
    found = [e.path for e in report(model).computed if "CrossEntropy" in e.operations]
    assert found == (["head"] if name in WITHOUT else [])
    assert (model(IDS, IDS)[0] is None) == (name in WITHOUT)
    assert torch.allclose(model(IDS)[0], plain(IDS)[0])
    assert model.eval()(IDS, IDS)[0] is not None
    with torch.no_grad():
        assert model.train()(IDS, IDS)[0] is not None


def test_under_autocast_and_in_half_precision() -> None:
    torch.manual_seed(0)
    exact = Trained(summed).double()
    want = step(exact)
    for dtype in (torch.float32, torch.bfloat16):
        plain = copy.deepcopy(exact).to(dtype)
        model = copy.deepcopy(plain)
        opfuser.apply(model, fused_loss=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            assert_as_exact(step(model), step(plain), want)


def test_a_head_with_a_hook_is_computed() -> None:
    model = Trained(rows).double()
    opfuser.apply(model, fused_loss=True)
    step(model)
    seen: list[type] = []
    model.head.register_forward_hook(lambda m, args, y: seen.append(type(y)))
    step(model)
    assert seen == [Tensor]


def test_what_logits_are_computed_of_may_not_be_written_to() -> None:
    def late(logits: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            model.head.weight.mul_(2)
        return rows(logits, targets)

    model = Trained(late).double()
    opfuser.apply(model, fused_loss=True)
    with pytest.raises(NotSupportedError, match=r"its parameters as they were.*fused_loss=False"):
        step(model)


class Again(Trained):
    """Its head and its loss are computed again in backward."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        def loss(x: Tensor) -> Tensor:
            assert targets is not None
            return self.loss(self.head(x), targets)

        x = self.norm(self.tokens(ids))
        return None, checkpoint(loss, x, use_reentrant=False)


def test_a_head_in_a_checkpoint_is_computed_both_times() -> None:
    model, plain = Again(rows).double(), Again(rows).double()
    plain.load_state_dict(model.state_dict())
    opfuser.apply(model, fused_loss=True)
    for _ in range(2):
        for m in (model, plain):
            m.zero_grad()
            m(IDS, IDS)[1].backward()
        torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)


def test_modules_that_are_called_by_themselves_return_logits() -> None:
    model = Trained(rows).double()
    opfuser.apply(model, fused_loss=True)
    step(model)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    assert type(model.head(x)) is Tensor
    assert torch.equal(model.head(x), F.linear(x, model.head.weight))


def test_storages_are_merged_when_a_call_is_traced() -> None:
    model = llama()
    attention = model.layers[0].self_attn
    parameters = [attention.q_proj.weight, attention.k_proj.weight]
    for dry_run in (True, False):
        opfuser.apply(model, example={"input_ids": IDS}, merge_storages=True, dry_run=dry_run)
        assert (len({p.untyped_storage()._cdata for p in parameters}) == 1) is not dry_run
    assert attention.q_proj.weight is parameters[0]


def test_a_layer_that_fails_stores_no_keys() -> None:
    caches = importlib.import_module("transformers.cache_utils")
    model = llama().eval()
    model.config.use_cache = True
    failing: list[int] = []
    # With a hook, it is called from the sequence.
    handle = model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0 if failing else None)
    opfuser.apply(model)
    cache = caches.DynamicCache()
    with torch.no_grad():
        model(IDS, **{CACHE: cache})
        assert "layers.0" in [entry.path for entry in report(model).computed]
        failing.append(1)
        with pytest.raises(ZeroDivisionError):
            model(IDS, **{CACHE: cache})
    assert cache.get_seq_length() == IDS.shape[1]
    handle.remove()


def test_what_extends_a_cache_is_not_put_off() -> None:
    caches = importlib.import_module("transformers.cache_utils")
    model = llama()
    calls: list[Any] = []
    attention = model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
    model(IDS)
    _, args, kwargs = calls[0]
    for cache in (None, caches.DynamicCache()):
        example = Example(attention, args, {**kwargs, CACHE: cache})
        attention._forward_pre_hooks.clear()
        head = Head.of(read_of(example), attention)
        assert (head is None) == (cache is not None)


def test_traces_let_the_tensors_of_a_call_go() -> None:
    model = llama()
    model.config.use_cache = True
    gc.collect()
    gc.disable()
    before = {id(t): t for t in gc.get_objects() if type(t) is Tensor}  # of other tests
    try:
        opfuser.apply(model, example={"input_ids": IDS})
        held = [t for t in gc.get_objects() if type(t) is Tensor and t.grad_fn is not None]
    finally:
        gc.enable()
    assert [t for t in held if id(t) not in before] == []


def test_logits_of_a_model_without_a_loss_are_there() -> None:
    model, plain = nano_gpt(), nano_gpt()
    opfuser.apply(model, fused_loss=True)
    for _ in range(2):
        assert torch.allclose(model(IDS), plain(IDS))
