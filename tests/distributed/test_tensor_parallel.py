"""``parallelize`` on two ranks, against the same model on one: all checks in one start."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser import (
    GELU,
    DotProductAttention,
    Dropout,
    Linear,
    MergedLinear,
    Residual,
    RMSNorm,
    Sequential,
    SwiGLU,
)
from opfuser.errors import ArgumentError, InputError, NotSupportedError
from opfuser.models import DecoderConfig, MoEConfig, decoder_layers, decoder_lm
from opfuser.models.parallel import parallelize
from opfuser.recipe import Float8BlockScaling
from tests.distributed.ranks import Checks, Outcomes, assert_passed
from tests.distributed.sharded import new_checkpoint, read_checkpoint, write_checkpoint

pytestmark = pytest.mark.distributed

RANKS = 2
CHECKS = check = Checks()
F64: Any = {"dtype": torch.float64}


def same(ours: Tensor | None, exact: Tensor | None, what: str = "") -> None:
    assert ours is not None, what
    assert exact is not None, what
    if isinstance(ours, DTensor):
        ours = ours.full_tensor()
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11, msg=lambda m: f"{what}: {m}")


def mesh_of(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))


def whole(model: nn.Module, grads: bool = False) -> dict[str, Tensor]:
    """Parameters, or their gradients, under the names of the model that was parallelized."""
    found: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        t = p.grad if grads else p
        assert isinstance(t, DTensor), name
        assert t.placements == p.placements, name
        *path, kind = name.split(".")
        if path[-1] in ("q", "k", "v", "gate", "up"):
            path.pop()
        found.setdefault(".".join([*path, kind]), []).append(t.detach().full_tensor())
    return {name: torch.cat(parts) for name, parts in found.items()}


def compare(config: DecoderConfig, *, sequence: bool, steps: int = 2) -> Sequential:
    """Losses, gradients, their norm and parameters in training steps."""
    torch.manual_seed(1)
    exact = decoder_lm(config)
    for p in exact.parameters():  # biases and the weights of norms too
        nn.init.normal_(p, std=0.3)
    ours = copy.deepcopy(exact)
    mesh = mesh_of(dist.get_world_size())
    assert parallelize(ours, mesh, sequence_parallel=sequence) is ours
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (exact, ours)]
    for _ in range(steps):
        tokens, targets = torch.randint(config.vocab_size, (2, 3, 8))
        targets[0, 2] = -100
        losses = [m(tokens, targets) for m in (exact, ours)]
        same(losses[1], losses[0], "loss")
        for loss in losses:
            loss.backward()
        theirs = {name: p.grad for name, p in exact.named_parameters()}
        mine = whole(ours, grads=True)
        assert set(mine) == set(theirs)
        for name, grad in mine.items():
            same(grad, theirs[name], name)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (exact, ours)]
        same(norms[1], norms[0], "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, p in whole(ours).items():
        same(p, exact.get_parameter(name).detach(), name)
    plan = ours.last_plan
    assert plan is not None
    assert plan.fused("forward").get("linear_cross_entropy", 0) == (config.logit_softcap is None)
    return ours


LLAMA: dict[str, Any] = {"num_kv_heads": 2, "ffn_dim": 24, **F64}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
QWEN: dict[str, Any] = {"qk_norm": True, "post_norms": True, "zero_centered_gamma": True, **BIASES}
GEMMA = {"logit_softcap": 5.0, "padding_idx": 3, "embedding_scale": 4.0}
GPT: dict[str, Any] = {"norm": "layer", "learned_positions": 8, "ffn_dim": 24, **BIASES, **F64}
BEHIND: dict[str, Any] = {"norm": "layer", "norm_first": False, "out_bias": True, **F64}
CONFIGS: dict[str, tuple[DecoderConfig, bool]] = {
    "llama, sequence": (DecoderConfig(29, 16, 2, 4, **LLAMA), True),
    "llama": (DecoderConfig(30, 16, 2, 4, tied_head=False, **LLAMA), False),
    "qwen and gemma, sequence": (DecoderConfig(31, 16, 1, 4, **QWEN, **GEMMA, **LLAMA), True),
    "gpt": (DecoderConfig(29, 16, 1, 2, activation="quick_gelu", qk_norm=True, **GPT), False),
    "norms behind, sequence": (DecoderConfig(29, 16, 1, 2, activation="sreglu", **BEHIND), True),
}


def config_check(name: str) -> None:
    config, sequence = CONFIGS[name]
    CHECKS[name] = lambda rank, ranks: compare(config, sequence=sequence) and None


for _name in CONFIGS:
    config_check(_name)


@check
def what_it_is_made_of(rank: int, ranks: int) -> None:
    """Each weight in slices, of which none holds the memory of others."""
    model = parallelize(decoder_lm(DecoderConfig(29, 16, 1, 4, **LLAMA)), mesh_of(ranks))
    layer = model.layers[0]
    qkv, out = layer.attention[2], layer.attention[-2]
    assert isinstance(qkv, MergedLinear)
    names = dict(layer.named_parameters())
    placed = {name: p.placements[0] for name, p in names.items()}
    assert {name: s.dim for name, s in placed.items() if isinstance(s, Shard)} == {
        "attention.2.q.weight": 0,
        "attention.2.k.weight": 0,
        "attention.2.v.weight": 0,
        "attention.5.weight": 1,
        "mlp.2.gate.weight": 0,
        "mlp.2.up.weight": 0,
        "mlp.4.weight": 1,
    }
    assert model.head.weight is model.embedding.weight
    assert out.weight.to_local().shape == (16, 8)
    parts = [p.to_local() for p in qkv.parameters()]
    assert [p.shape[0] for p in parts] == [8, 4, 4]
    assert all(
        p.to_local().untyped_storage().nbytes() == p.to_local().nbytes for p in names.values()
    )
    assert "tensor_parallel_mode='column', sequence_parallel=True" in repr(qkv.basic_ops[0])
    attention = next(op for op in layer.modules() if isinstance(op, DotProductAttention))
    assert (attention.num_heads, attention.num_kv_heads) == (2, 1)


@check
def saved_for_backward(rank: int, ranks: int) -> None:
    """With sequence parallelism no tensor of all rows is kept between the two passes."""
    config = DecoderConfig(29, 64, 2, 4, num_kv_heads=4, ffn_dim=64, **F64)
    model = parallelize(decoder_layers(config), mesh_of(ranks))
    kept: list[Tensor] = []
    x = torch.randn(2, 16 // ranks, 64, **F64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(x)
    assert y.shape == x.shape
    rows = [t for t in kept if t.dim() == 3]
    # Of all rows are those of heads and of features inside, of which a rank has half.
    assert {t.shape[2] for t in rows if t.shape[1] == 16} <= {3 * 32, 2 * 32, 32}
    assert any(t.shape[1] == 8 and t.shape[2] == 64 for t in rows)
    y.sum().backward()


@check
def gradients_of_norms_take_one_collective(rank: int, ranks: int) -> None:
    model = parallelize(decoder_lm(DecoderConfig(29, 16, 3, 2, **F64)), mesh_of(ranks))
    loss = model(*torch.randint(29, (2, 2, 8)))
    sizes: list[int] = []
    whole = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "all_reduce", lambda t, **how: sizes.append(t.numel()) or whole(t, **how)
        )
        loss.backward()
    assert sizes == [7 * 16]


@check
def no_gradient_is_needed(rank: int, ranks: int) -> None:
    torch.manual_seed(1)
    exact = decoder_lm(DecoderConfig(29, 16, 1, 2, **F64))
    exact.layers.requires_grad_(False)
    ours = parallelize(copy.deepcopy(exact), mesh_of(ranks))
    tokens = torch.randint(29, (2, 2, 8))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same(ours(*tokens), exact(*tokens))
    ours(*tokens).backward()
    exact(*tokens).backward()
    frozen = [p.grad is None for p in ours.layers.parameters()]
    assert all(frozen)
    assert len(frozen) == 9 - 2 + 1 + 1
    same(ours.embedding.weight.grad, exact.embedding.weight.grad)
    logits = ours[:-1](tokens[0])
    same(logits, exact[:-1](tokens[0]).chunk(ranks, -1)[rank])


@check
def recomputed_and_accumulated(rank: int, ranks: int) -> None:
    """Layers that a checkpoint computes again in backward; gradients of two batches."""
    torch.manual_seed(1)
    exact = decoder_layers(DecoderConfig(29, 16, 2, 2, **F64))
    ours = parallelize(copy.deepcopy(exact), mesh_of(ranks))
    for _ in range(2):
        x = torch.randn(3, 8, 16, **F64)
        part = x.chunk(ranks, 1)[rank]
        for layer in ours:
            part = checkpoint(layer, part, use_reentrant=False)
        y = exact(x)
        same(part, y.chunk(ranks, 1)[rank])
        part.square().sum().backward()
        y.square().sum().backward()
    for name, grad in whole(ours, grads=True).items():
        same(grad, exact.get_parameter(name).grad, name)


@check
def checkpoints(rank: int, ranks: int) -> None:
    """Written by two ranks, read by two without sequence parallelism, and by one each."""
    config = DecoderConfig(29, 16, 1, 2, tied_head=False, **F64)

    def made(mesh: DeviceMesh, **how: Any) -> tuple[Sequential, torch.optim.Optimizer]:
        model = parallelize(decoder_lm(config), mesh, **how)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Sequential, optimizer: torch.optim.Optimizer) -> Tensor:
        torch.manual_seed(2)
        loss = model(*torch.randint(29, (2, 2, 8)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    folder, (model, optimizer) = new_checkpoint(), made(mesh_of(ranks))
    step(model, optimizer)
    write_checkpoint(folder, model, optimizer)
    losses = [step(model, optimizer) for _ in range(2)]
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))["tp"]
    for mesh, sequence in ((mesh_of(ranks), False), (alone, True)):
        model, optimizer = made(mesh, sequence_parallel=sequence)
        read_checkpoint(folder, model, optimizer)
        for loss in losses:
            same(step(model, optimizer), loss)


@check
def start_on_the_meta_device(rank: int, ranks: int) -> None:
    torch.manual_seed(1)
    exact = decoder_lm(DecoderConfig(29, 16, 1, 2, tied_head=False, **F64))
    ours = decoder_lm(DecoderConfig(29, 16, 1, 2, tied_head=False, device="meta", **F64))
    parallelize(ours, mesh_of(ranks)).to_empty(device="cpu")
    source = parallelize(copy.deepcopy(exact), mesh_of(ranks))
    ours.load_state_dict(source.state_dict())
    tokens = torch.randint(29, (2, 2, 8))
    same(ours(*tokens), exact(*tokens))


@check
def copies_and_an_error_in_between(rank: int, ranks: int) -> None:
    """Parameters are DTensors again after a call, whatever came of it."""
    model = parallelize(decoder_lm(DecoderConfig(29, 16, 1, 2, **F64)), mesh_of(ranks))
    twin = copy.deepcopy(model)
    tokens = torch.randint(29, (2, 2, 8))
    same(twin(*tokens), model(*tokens))
    with pytest.raises(InputError, match="Dimension 1 of a tensor to scatter must be a multiple"):
        model(*torch.randint(29, (2, 2, 7)))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    plan = model.plan(*tokens)
    assert plan.fused("forward")["linear_cross_entropy"] == 1


@check
def quantized(rank: int, ranks: int) -> None:
    """Each rank's tensors have scales of their own: as good as those of one rank, not the same."""
    torch.manual_seed(1)
    sizes: Any = {"ffn_dim": 256, "init_std": 0.1, "dtype": torch.bfloat16}
    plain = decoder_lm(DecoderConfig(64, 256, 1, 2, **sizes))
    one = decoder_lm(DecoderConfig(64, 256, 1, 2, recipe=Float8BlockScaling(), **sizes))
    one.load_state_dict(plain.state_dict())
    ours = parallelize(copy.deepcopy(one), mesh_of(ranks))
    tokens = torch.randint(64, (2, 2, 128))
    text = str(ours.plan(*tokens))
    assert "quantized, Float8BlockScaling: 3, 6, 11, 13" in text, text
    grads = []
    for model in (plain, one, ours):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FP8 is emulated")
            model(*tokens).backward()
        grads.append(model.embedding.weight.grad)
    exact, theirs, mine = grads[0], grads[1], grads[2].full_tensor()
    apart, apart_of_one = (mine - exact).float().norm(), (theirs - exact).float().norm()
    assert 0 < apart <= 1.2 * apart_of_one, (apart, apart_of_one)


@check
def errors(rank: int, ranks: int) -> None:
    mesh = mesh_of(ranks)
    for config, text in (
        (DecoderConfig(29, 15, 1, 3, head_dim=4), r"num_heads must.*QKNorm|num_heads=3, 2 ranks"),
        (
            DecoderConfig(29, 16, 1, 4, num_kv_heads=1),
            r"num_kv_heads must .*num_kv_heads=1, 2 ranks",
        ),
        (
            DecoderConfig(29, 16, 1, 2, ffn_dim=9),
            r"Features inside .*Received: 9 features, 2 ranks",
        ),
        (DecoderConfig(1, 16, 1, 2), r"Every rank must have a slice"),
    ):
        model = decoder_lm(config)
        with pytest.raises(ArgumentError, match=text):
            parallelize(model, mesh)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert not any(isinstance(m, MergedLinear) for m in model.modules())
    text = r"Modules that are called know nothing of other ranks \(MergedLinear"
    model = parallelize(decoder_lm(DecoderConfig(29, 16, 1, 2)), mesh)
    model.layers[0].attention[2].q.register_forward_hook(lambda *_: None)
    with pytest.raises(NotSupportedError, match=text):
        model(*torch.randint(29, (2, 2, 8)))
    merged = MergedLinear(4, {"a": 4, "b": 2}, tensor_parallel=True)
    with pytest.raises(NotSupportedError, match=r"covers one rank \(BasicMergedLinear\)"):
        merged.basic_ops[0].reference(torch.ones(1, 4))
    with pytest.raises(ArgumentError, match=r"out_features must be a multiple.*column mode"):
        MergedLinear(4, {"a": 4, "b": 3}, tensor_parallel=True)


@pytest.mark.parametrize("name", CHECKS)
def test_tensor_parallel(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield mesh_of(1)
    dist.destroy_process_group()


def transposed() -> Sequential:
    return Sequential(Linear(4, 4, weight_transposed=True))


def stored() -> Sequential:
    with opfuser.quantized_model_init():
        return Sequential(Linear(128, 128))


def block(*ops: nn.Module) -> Sequential:
    return Residual(RMSNorm(8), *ops)


def attention(**how: Any) -> Sequential:
    return block(Linear(8, 24), DotProductAttention(2, **how), Linear(8, 8))


REFUSED: dict[str, tuple[Any, str]] = {
    "experts": (
        lambda: decoder_lm(DecoderConfig(29, 16, 1, 2, moe=MoEConfig(16, 8, 4, 2))),
        "TopKRouter",
    ),
    "positions": (lambda: decoder_lm(DecoderConfig(29, 16, 1, 2, learned_positions=8)), "Position"),
    "dropout": (lambda: block(Linear(8, 8), GELU(), Linear(8, 8), Dropout(0.1)), "Dropout whose"),
    "attention dropout": (lambda: attention(dropout_p=0.1), "DotProductAttention with dropout"),
    "slopes": (lambda: attention(alibi=True), "DotProductAttention with slopes, sinks"),
    "sinks": (lambda: attention(sinks=True), "DotProductAttention with slopes, sinks"),
    "a bias": (
        lambda: attention(core_attention_bias=True),
        "DotProductAttention with slopes, sinks or a bias",
    ),
    "layout": (lambda: attention(layout="separate"), "DotProductAttention of another layout"),
    "codes": (stored, "Linear whose weight is stored as codes"),
    "transposed": (transposed, "Linear whose weight is transposed"),
    "main_grad": (
        lambda: Sequential(Linear(4, 4, accumulate_into_main_grad=True)),
        "Linear with accumulate_into_main_grad",
    ),
    "interleaved": (
        lambda: block(Linear(8, 16), SwiGLU(glu_interleave_size=4), Linear(8, 8)),
        "SwiGLU with interleaved halves",
    ),
    "two activations": (
        lambda: block(Linear(8, 8), GELU(), GELU(), Linear(8, 8)),
        "Linear in front of GELU, GELU",
    ),
    "three linears": (
        lambda: Sequential(*(Linear(4, 4) for _ in range(3))),
        "Sequential with 3 linear operations",
    ),
    "a loss alone": (lambda: Sequential(opfuser.CrossEntropy()), "CrossEntropy without a head"),
    "a plain module": (lambda: Sequential(nn.Tanh()), "Tanh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, one_rank: DeviceMesh) -> None:
    make, received = REFUSED[name]
    remedy = "outside of opfuser.quantized_model_init" if name == "codes" else r"models\.shard"
    text = rf"^Models are parallelized that .*\(parallelize\)\. Received: {received}.*{remedy}"
    with pytest.raises(NotSupportedError, match=text):
        parallelize(make(), one_rank)


def test_one_rank(one_rank: DeviceMesh) -> None:
    torch.manual_seed(1)
    exact = decoder_lm(DecoderConfig(29, 16, 1, 2, **F64))
    ours = parallelize(copy.deepcopy(exact), one_rank)
    tokens = torch.randint(29, (2, 2, 7))
    for model in (exact, ours):
        model(*tokens).backward()
    for name, grad in whole(ours, grads=True).items():
        same(grad, exact.get_parameter(name).grad, name)
    assert {p.placements for p in ours.parameters()} <= {(Replicate(),), (Shard(0),), (Shard(1),)}
    message = r"parallelized once, and before it is sharded.*Received: embedding\.weight"
    with pytest.raises(ArgumentError, match=message):
        parallelize(ours, one_rank)
    message = r"over a mesh of one dimension.*Received: 2 dimensions"
    with pytest.raises(ArgumentError, match=message):
        parallelize(exact, init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")))
    torch.compiler.reset()
    with pytest.raises(
        Exception, match=r"DTensors are not traced .*Received: 1\d of them, as after"
    ):
        torch.compile(ours, backend="eager", fullgraph=True)(*tokens)
