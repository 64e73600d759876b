"""Layers of torchtitan with fused operations, against torchtitan's own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchtitan.config.override", reason="torchtitan is not installed")

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from opfuser.report.target import Target, calls

OVERRIDES = "opfuser.integrations.torchtitan"
DIM, HEADS, VOCABULARY = 32, 4, 61


def configuration(*, fuse_qkv: bool = True) -> Any:
    """Of a model with two layers, whose attention runs on a CPU."""
    config = llama3._debugmodel("flex")
    rope = ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=64, theta=10000.0)
    config.layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=DIM,
        n_heads=HEADS,
        n_kv_heads=2,
        hidden_dim=48,
        rope=rope,
        fuse_qkv=fuse_qkv,
        attn_backend="flex",
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dim = config.norm.normalized_shape = config.lm_head.in_features = DIM
    config.tok_embeddings.embedding_dim = DIM
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = VOCABULARY
    return config


def built(config: Any, *names: str) -> Any:
    """The model in fp64, after these overrides."""
    imports = [f"{OVERRIDES}.{name}" for name in names]
    replaced = apply_overrides(OverrideConfig(imports=imports), config)
    assert len(replaced) == 2 * len(names)
    torch.manual_seed(1)
    model = config.build()
    model.init_states()
    return model.double()


def batch() -> tuple[Tensor, Tensor]:
    positions = torch.arange(7).repeat(3, 1)
    return torch.randint(VOCABULARY, positions.shape), positions


def compare(ours: Any, theirs: Any) -> None:
    """Values and gradients. torchtitan turns queries and keys in fp32, whatever they are."""
    given = batch()
    results = [model(*given) for model in (ours, theirs)]
    for y in results:
        y.square().mean().backward()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-5, atol=1e-8, msg=name)


def fused(model: Any, layer: str) -> list[str]:
    """The fusions of the sequences that a layer calls."""
    found = [call for call in calls(Target("", model, batch())) if call.path.startswith(layer)]
    return [r.name for call in found for r in call.plan.history if r.status == "matched"]


@pytest.mark.parametrize("fuse_qkv", [False, True])
def test_layers(fuse_qkv: bool) -> None:
    ours = built(configuration(fuse_qkv=fuse_qkv), "transformer_block")
    theirs = built(configuration(fuse_qkv=fuse_qkv))
    compare(ours, theirs)
    for n in range(2):
        names = fused(ours, f"layers.{n}")
        assert names.count("norm_linear") == 2
        assert {"forward_linear_bias_add", "activation_linear_add"} <= {*names}
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.verify_module_protocol()


def test_feed_forward_blocks() -> None:
    ours = built(configuration(), "feed_forward")
    compare(ours, built(configuration()))
    assert fused(ours, "layers.0.feed_forward") == ["activation_linear"]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_sharded_layers() -> None:
    """After torchtitan has put its own forwards around the modules, and each layer is a unit."""
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1)
    dims = ParallelDims(**degrees, world_size=1, spmd_backend="spmd_types")
    config = configuration()
    set_llama3_sharding_config(config, enable_sp=False)
    ours = built(config, "transformer_block")
    dims.build_mesh()
    ours.parallelize(dims)
    mesh = init_device_mesh("cpu", (1,))
    for layer in ours.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    compare(ours, built(configuration()))
    assert "norm_linear" in fused(ours, "layers.1")


def test_copies() -> None:
    ours = built(configuration(), "transformer_block")
    ours(*batch())
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        twin.layers["0"].feed_forward.w2.weight.zero_()
    compare(ours, built(configuration()))


def test_compiled() -> None:
    """torchtitan's own forward is traced."""
    ours = built(configuration(), "transformer_block")
    x, positions = torch.randn(2, 7, DIM, dtype=torch.float64), torch.arange(7).repeat(2, 1)
    layer = ours.layers["0"]
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(
        compiled(x, None, positions), layer(x, None, positions), rtol=1e-5, atol=1e-7
    )
    torch._dynamo.reset()


def hooked(layer: Any) -> str:
    layer.ffn_norm.register_forward_hook(lambda module, args, y: 2 * y)
    return "ffn_norm carries hooks"


def replaced(layer: Any) -> str:
    layer.feed_forward.w1 = torch.nn.Linear(DIM, 48, bias=False).double()
    return "feed_forward.w1 is Linear"


def with_own_forward(layer: Any) -> str:
    layer.attention.wo.forward = lambda x: 3 * x
    return "attention.wo has a forward of its own"


def in_tensor_parallel(layer: Any) -> str:
    layer.parallelize(SimpleNamespace(tp_enabled=True, cp_enabled=False))
    return "tensor and context parallelism are torchtitan's"


@pytest.mark.parametrize("change", [hooked, replaced, with_own_forward, in_tensor_parallel])
def test_what_torchtitan_computes_itself(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it changes after the first call."""
    models = [built(configuration(), "transformer_block"), built(configuration())]
    x, positions = torch.randn(2, 7, DIM, dtype=torch.float64), torch.arange(7).repeat(2, 1)
    layers = [model.layers["0"] for model in models]
    if change is not in_tensor_parallel:
        layers[0](x, None, positions)
    with torch.random.fork_rng(), caplog.at_level(logging.WARNING, "opfuser"):
        for layer in layers:
            torch.manual_seed(2)
            why = change(layer)
        for _ in range(2):
            torch.testing.assert_close(*[layer(x, None, positions) for layer in layers])
    assert caplog.messages == [f"FusedTransformerBlock: {why}; its own forward runs"]
