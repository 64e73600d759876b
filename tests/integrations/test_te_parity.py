"""Transformer Engine's own modules and what they become: outputs, gradients, checkpoints.

Runs where Transformer Engine can be imported, on a GPU. References are the sequences themselves in
float64 on the CPU, which ``test_te_modules`` holds to formulas.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from opfuser.integrations.te import from_te, load_te_state_dict, te_state_dict, to_te

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    te: Any = pytest.importorskip(
        "transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError
    )

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ROWS, DIM, HIDDEN, HEADS = 48, 64, 96, 4
PLACE: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
OP: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
CALM = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layernorm_epsilon": 1e-2}


@pytest.fixture(autouse=True)
def _compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules are computed without functions that torch would compile at the first call."""
    monkeypatch.setenv("NVTE_BIAS_DROPOUT_FUSION", "0")
    monkeypatch.setenv("NVTE_BIAS_GELU_NVFUSION", "0")


def mlp(**options: Any) -> Callable[[], Any]:
    return lambda: te.LayerNormMLP(DIM, HIDDEN, **options, **PLACE)


def layer(**options: Any) -> Callable[[], Any]:
    return lambda: te.TransformerLayer(DIM, HIDDEN, HEADS, **{**CALM, **PLACE, **options})


def operations() -> Any:
    ops = te.ops
    return ops.Sequential(
        ops.LayerNorm(DIM, zero_centered_gamma=True, eps=1e-2, **OP),
        ops.Linear(DIM, 2 * HIDDEN, **OP), ops.SwiGLU(),
        ops.BasicLinear(HIDDEN, DIM, **OP), ops.Bias(DIM, **OP), nn.Tanh(), ops.ConstantScale(0.5),
        ops.RMSNorm(DIM, eps=1e-2, **OP), ops.GELU(),
    )  # fmt: skip


ACTIVATIONS = (
    "gelu geglu glu qgelu qgeglu relu reglu srelu sreglu silu swiglu clamped_swiglu".split()
)
CASES: dict[str, Callable[[], Any]] = {
    "Linear": lambda: te.Linear(DIM, HIDDEN, **PLACE),
    "Linear, split": lambda: te.Linear(DIM, HIDDEN, parameters_split=("a", "b"), **PLACE),
    "LayerNorm": lambda: te.LayerNorm(DIM, eps=1e-2, zero_centered_gamma=True, **OP),
    "RMSNorm": lambda: te.RMSNorm(DIM, eps=1e-2, **OP),
    "LayerNormLinear": lambda: te.LayerNormLinear(
        DIM, HIDDEN, eps=1e-2, zero_centered_gamma=True, return_layernorm_output=True, **PLACE
    ),
    "LayerNormLinear, RMSNorm": lambda: te.LayerNormLinear(
        DIM, HIDDEN, normalization="RMSNorm", bias=False, **PLACE
    ),
    **{f"LayerNormMLP, {a}": mlp(activation=a, eps=1e-2) for a in ACTIVATIONS},
    "LayerNormMLP, limits": mlp(activation="clamped_swiglu", activation_params={"limit": 0.5}),
    "LayerNormMLP, RMSNorm": mlp(
        normalization="RMSNorm", zero_centered_gamma=True, bias=False, checkpoint=True
    ),
    "operations": operations,
    "TransformerLayer": layer(),
    "TransformerLayer, packed": layer(fuse_qkv_params=True, num_gqa_groups=2),
    "TransformerLayer, bshd": layer(
        fuse_qkv_params=True, qkv_weight_interleaved=False, num_gqa_groups=2,
        attn_input_format="bshd", normalization="RMSNorm", bias=False, activation="swiglu",
    ),
    "TransformerLayer, output norm": layer(output_layernorm=True, self_attn_mask_type="no_mask"),
    "TransformerLayer, residual of the norm": layer(
        apply_residual_connection_post_layernorm=True, zero_centered_gamma=True,
        kv_channels=32,
    ),
    "TransformerLayer, window": layer(window_size=(5, 0), activation="silu"),
    "TransformerLayer, norms of heads": layer(qk_norm_type="RMSNorm", qk_norm_eps=1e-2),
}  # fmt: skip


def spread(module: nn.Module) -> None:
    """Random parameters: norms begin at ones, biases at zeros, and weights so small that
    gradients of queries and keys would be rounding alone.
    """
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p), alpha=0.3)
            else:
                p.normal_(0, 0.14)


def gradients(call: Callable[..., Any], parameters: list[Tensor], x: Tensor, dys: Any) -> Any:
    """Outputs, and the gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    ys = call(x)
    ys = ys if isinstance(ys, tuple) else (ys,)
    dys = [dy.to(y) for dy, y in zip(dys, ys)]
    return [*ys, *torch.autograd.grad(ys, [x, *parameters], dys)]


def compare(names: list[str], own: Any, theirs: Any, exact: Any, tolerance: float) -> None:
    """Theirs are what ours are, as near as bf16 allows; ours are no farther from the exact ones."""
    for name, a, b, c in zip(names, own, theirs, exact):
        size, ours, other = c.norm(), (a.cpu() - c).norm(), (b.cpu() - c).norm()
        if size < 1e-9:  # of biases of keys without positions: rounding is all there is
            assert max(ours, other) < 0.2 * c.numel() ** 0.5, name
            continue
        # What queries get cancels for the most part, and they are rounded before.
        allowed = 0.25 if "query" in name or "key" in name else tolerance
        assert min(ours, other) <= allowed * size, f"both of {name}"
        assert ours <= 2 * other + 2**-8 * size, name


def check(
    module: Any,
    sequence: of.Sequential,
    x: Tensor,
    call: Callable[..., Any] | None = None,
    tolerance: float = 3e-2,
) -> None:
    ours = dict(sequence.named_parameters())
    assert {id(p) for p in module.parameters()} == {id(p) for p in ours.values()}
    twin = copy.deepcopy(sequence).double().cpu()
    with torch.no_grad():
        ys = sequence(x)
    dys = [torch.randn(y.shape) for y in (ys if isinstance(ys, tuple) else (ys,))]
    theirs = gradients(call or module, list(ours.values()), x, dys)
    own = gradients(sequence, list(ours.values()), x, dys)
    exact = gradients(twin, list(twin.parameters()), x.cpu().double(), dys)
    names = [*(f"output {n}" for n in range(len(dys))), "x", *ours]
    compare(names, own, theirs, exact, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str) -> None:
    module = CASES[name]()
    spread(module)
    x = 0.1 * torch.randn(ROWS, 2, DIM, **OP)  # of the size of the square root of eps
    # Rounding moves some values across a kink, where gradients jump: ReLU has one, limits three.
    kinks = 1 if name.endswith(("relu", "reglu")) else 3 * name.endswith("limits")
    check(module, from_te(module), x, tolerance=8e-2 * kinks**0.5 if kinks else 3e-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions(interleaved: bool) -> None:
    module = layer(rotary_pos_interleaved=interleaved)()
    angles = te.RotaryPositionEmbedding(
        DIM // HEADS, rotary_base=100, interleaved=interleaved
    )(ROWS).cuda()  # fmt: skip
    sequence = from_te(module, rotary_base=100.0)
    x = torch.randn(ROWS, 2, DIM, **OP)
    check(module, sequence, x, lambda x: module(x, rotary_pos_emb=angles))


def test_grouped_linear() -> None:
    module = te.GroupedLinear(3, DIM, HIDDEN, **PLACE)
    spread(module)
    sizes = [16, 0, 32]
    sequence = from_te(module)
    splits = torch.tensor(sizes)
    x = torch.randn(sum(sizes), DIM, **OP)
    ours = [p for _, p in sequence.named_parameters()]
    dy = [torch.randn(sum(sizes), HIDDEN)]
    theirs = gradients(lambda x: module(x, sizes), ours, x, dy)
    own = gradients(lambda x: sequence(x, splits.cuda()), ours, x, dy)
    twin = copy.deepcopy(sequence).double().cpu()
    exact = gradients(lambda x: twin(x, splits), list(twin.parameters()), x.cpu().double(), dy)
    names = ["output", "x", *dict(sequence.named_parameters())]
    compare(names, own, theirs, exact, 3e-2)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("LayerNorm", "RMSNorm")])
def test_there_and_back(name: str) -> None:
    """The same parameters under the same names, and checkpoints of either side."""
    module = CASES[name]()
    sequence = from_te(module)
    back = to_te(sequence)
    assert type(back) is type(module)
    assert dict(back.named_parameters()).keys() == dict(module.named_parameters()).keys()
    for parameter, p in module.named_parameters():
        assert back.get_parameter(parameter) is p
    assert te_state_dict(sequence).keys() == module.state_dict().keys()
    x = torch.randn(ROWS, 2, DIM, **OP)
    torch.testing.assert_close(back(x), module(x))

    other = CASES[name]()
    other.load_state_dict(te_state_dict(sequence))
    fresh = from_te(CASES[name]())
    load_te_state_dict(fresh, module.state_dict())
    for (key, p), q, r in zip(module.named_parameters(), other.parameters(), module.parameters()):
        assert torch.equal(p, q), key
        assert p is r
    for (key, p), q in zip(sequence.named_parameters(), fresh.parameters()):
        assert torch.equal(p, q), key
