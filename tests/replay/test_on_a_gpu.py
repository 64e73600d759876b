"""Replayed calls among streams, threads, captures and optimizers of a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.models import DecoderConfig, MoEConfig, decoder_lm, moe_block
from tests.replay.models import DIM, assert_equal, block, code, count, draw, twin, warm_both

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("replaying")]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


def error(actual: Tensor | None, exact: Tensor | None) -> float:
    assert actual is not None
    assert exact is not None
    return ((actual - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [None, "mlp"])
def test_a_decoder_trains_alike(dtype: torch.dtype, recompute: str | None) -> None:
    config = DecoderConfig(
        997, 64, 2, 4, num_kv_heads=2, dtype=dtype, device="cuda", recompute=recompute
    )
    # From its first choice of a kernel on, torch prefers cuDNN, which tells calls apart.
    heads = torch.ones(1, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    nn.functional.scaled_dot_product_attention(heads, heads, heads)
    model = decoder_lm(config)
    other, exact = twin(model), twin(model).double()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, other)]
    floor = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for step in range(8):
        tokens, targets = torch.randint(0, 997, (2, 3, 33), device="cuda")
        for m in (model, other, exact):
            loss = m(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        for p, q, r in zip(*(m.parameters() for m in (model, other, exact))):
            assert error(p.grad, r.grad) <= 2 * error(q.grad, r.grad) + floor, tuple(p.shape)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        exact.zero_grad()
        for p, q, r in zip(*(m.parameters() for m in (model, other, exact))):
            q.data.copy_(p)
            r.data.copy_(p)
    assert count(model) == 7


def test_grad_scaler(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, other)]
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**40) for _ in pairs]
    for _ in range(8):
        x = draw(device)
        for (m, optimizer), scaler in zip(pairs, scalers):
            with torch.autocast("cuda", torch.float16):
                loss = m(x).square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)
            q.data.copy_(p)
    assert count(model) == 7


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_streams(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results: list[tuple[Tensor, Tensor]] = []
    for step in range(12):
        stream = streams[step % 2]
        stream.wait_stream(torch.cuda.current_stream())
        x = draw(device)
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            y = model(x)
            torch.cuda._sleep(100_000)
            (dx, *_), (dz, *_) = (
                torch.autograd.grad(m(v).square().sum(), [v, *m.parameters()])
                for m in (model, other)
                if (v := x.clone().requires_grad_()) is not None
            )
            results += [(y.detach(), other(x).detach()), (dx, dz)]
    torch.cuda.synchronize()
    for a, b in results:
        assert_equal(a, b)
    assert count(model) > 8


def test_threads(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator("cuda").manual_seed(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    x = torch.randn(6, DIM, device=device, generator=generator)
                    grads = []
                    for m in (model, other):
                        own = x.clone().requires_grad_()
                        grads.append(torch.autograd.grad(m(own).square().sum(), own)[0])
                    assert_equal(*grads)
                torch.cuda.current_stream().synchronize()
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert count(model) > 20


def test_inside_a_capture_of_the_callers(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    warm_both(model, device)
    x, y = draw(device), draw(device)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = model(x)
        x.copy_(y)
        graph.replay()
        assert_equal(static, other(y))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_graphed_callables(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    graphed: Any = torch.cuda.make_graphed_callables(model, (draw(device),))
    for _ in range(3):
        x = draw(device)
        y, z = graphed(x), other(x)
        assert_equal(y.detach(), z.detach())


def test_nothing_of_others_is_written(device: torch.device) -> None:
    """Memory that is free when a call is recorded belongs to others later."""
    model = block(device)
    warm_both(model, device)
    others = [torch.full((64, DIM), 7.0, device=device) for _ in range(200)]
    warm_both(model, device)
    for t in others:
        assert bool((t == 7).all())


def test_memory_comes_back(device: torch.device) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = block(device)
    warm_both(model, device)
    assert count(model) == 4
    del model
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**21


def test_random_numbers_are_distributed_as_in_eager_calls(device: torch.device) -> None:
    model = opfuser.Sequential(opfuser.Dropout(0.3), opfuser.GELU())
    x = torch.ones(512, DIM, device=device)
    masks = torch.stack([model(x) != 0 for _ in range(64)])
    assert count(model) == 63
    kept = masks.double()
    assert abs(kept.mean().item() - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    # Of no two calls the masks agree more often than by chance.
    agree = (masks[1:, None] == masks[None, :-1]).double().mean((2, 3))
    lower = agree[torch.ones_like(agree).tril().bool()]
    assert (lower - (0.49 + 0.09)).abs().max() < 6 * (0.25 / x.numel()) ** 0.5


# Steps in which mode "auto" has measured, recorded and decided.
UNTIL_DECIDED = 60


def test_auto_replays_a_small_model() -> None:
    """Hundreds of launches, which take the device less time than the host by far."""
    config = DecoderConfig(97, 64, 6, 4, num_kv_heads=2, device="cuda", dtype=torch.bfloat16)
    model = decoder_lm(config)
    other = twin(model)
    tokens, targets = torch.randint(0, 97, (2, 3, 33), device="cuda")
    with opfuser.replay("auto"):
        for _ in range(UNTIL_DECIDED):
            for m in (model, other):
                m.zero_grad()
                loss = m(tokens, targets)
                loss.backward()
    assert code(model) == ""
    assert count(model) > UNTIL_DECIDED // 2
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)


def test_auto_leaves_large_products_alone(device: torch.device) -> None:
    to = {"device": device, "dtype": torch.bfloat16}
    layers = [opfuser.Linear(4096, 4096, **to) for _ in range(4)]
    model = opfuser.Sequential(*layers)
    x = torch.randn(8192, 4096, **to)
    with opfuser.replay("auto"):
        for _ in range(UNTIL_DECIDED):
            model(x).backward(x)
            model.zero_grad()
    assert count(model) == 0
    assert code(model) in ("BUSY", "SHORT")


def test_auto_hands_out_gradients_that_other_streams_may_read(device: torch.device) -> None:
    """The memory of a gradient comes back when ``record_stream`` says, not at the next replay."""
    torch.manual_seed(0)
    model = opfuser.Sequential(*[opfuser.Linear(DIM, DIM, device=device) for _ in range(24)])
    side = torch.cuda.Stream()
    results: list[tuple[Tensor, Tensor]] = []
    with opfuser.replay("auto"):
        for _ in range(UNTIL_DECIDED + 10):
            model(draw(device)).square().sum().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            expected = [grad.clone() for grad in grads]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)
                copies = [grad.clone() for grad in grads]
            for grad in grads:
                grad.record_stream(side)
            results += zip(copies, expected)
            del grads
            model.zero_grad()
    torch.cuda.synchronize()
    for a, b in results:
        assert torch.equal(a, b)


def test_experts(device: torch.device) -> None:
    """Other tokens go to other experts, and no size is read."""
    config = MoEConfig(
        dim=64, ffn_dim=32, num_experts=8, top_k=2, aux_loss=True, init_std=0.5, device=device,
        dtype=torch.bfloat16,
    )  # fmt: skip
    model = moe_block(config)
    other = twin(model)
    for _ in range(6):
        x = torch.randn(3, 50, 64, device=device, dtype=torch.bfloat16)
        for m in (model, other):
            m.zero_grad()
            y, aux = m(x)
            (y.float().square().mean() + aux).backward()
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=5e-2, atol=5e-2)
    assert code(model) == ""
    assert count(model) == 5
