"""``to_torch``: operations as modules of torch, with the same parameters under the same names."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch import nn

import opfuser
from opfuser.errors import ArgumentTypeError, NotSupportedError
from tests.integrations.results import close, results

WIDTH = 8


class Block(nn.Module):
    """A module of a class of its own, with operations."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = sequence()
        self.layers = nn.ModuleList([opfuser.Linear(WIDTH, WIDTH), nn.Tanh()])
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


def sequence() -> opfuser.Sequential:
    shared = opfuser.LayerNorm(WIDTH, eps=0.25)
    return opfuser.Sequential(
        {
            "norm": shared,
            "inner": opfuser.Sequential(opfuser.Linear(WIDTH, 16), opfuser.GELU("tanh")),
            "down": opfuser.BasicLinear(16, WIDTH),
            "plain": nn.Hardswish(),
            "again": shared,
            "rms": opfuser.RMSNorm(WIDTH, eps=0.5),
            "last": opfuser.Linear(WIDTH, WIDTH, bias=False),
        }
    )


@pytest.mark.parametrize("make", [sequence, Block])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_same_results_with_the_same_parameters(
    make: type[nn.Module], dtype: torch.dtype
) -> None:
    ours = make().to(dtype)
    theirs = opfuser.to_torch(ours)
    mine, other = ours.state_dict(keep_vars=True), theirs.state_dict(keep_vars=True)
    assert list(mine) == list(other)
    assert all(mine[name] is other[name] for name in mine)
    assert not any(type(m).__module__.startswith("opfuser.") for m in theirs.modules())
    x = torch.randn(2, 5, WIDTH, dtype=dtype, requires_grad=True)
    close(results(theirs, x), results(ours, x))


def test_the_same_operation_twice_is_the_same_module() -> None:
    theirs = sequence().to_torch()
    assert theirs.norm is theirs.again


def test_and_back() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(8))
    again = opfuser.from_torch(layers).to_torch()
    assert str(again) == str(layers)
    assert list(again.state_dict()) == list(layers.state_dict())
    assert list(again.parameters()) == list(layers.parameters())


LEAVES: dict[str, tuple[nn.Module, str]] = {
    "identity": (opfuser.Identity(), "Identity()"),
    "gelu": (opfuser.GELU("tanh"), "GELU(approximate='tanh')"),
    "softplus": (opfuser.Softplus(2.0, 5.0), "Softplus(beta=2.0, threshold=5.0)"),
    "dropout": (opfuser.Dropout(0.25), "Dropout(p=0.25, inplace=False)"),
    "flatten": (opfuser.Reshape(-1), "Flatten(start_dim=0, end_dim=-1)"),
    "embedding": (opfuser.Embedding(5, 3, padding_idx=-1), "Embedding(5, 3, padding_idx=4)"),
    "norm": (opfuser.RMSNorm(3, eps=0.5), "RMSNorm((3,), eps=0.5, elementwise_affine=True)"),
    "loss": (opfuser.CrossEntropy(1, 0.25, "sum"), "CrossEntropyLoss()"),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_options_are_kept(kind: str) -> None:
    leaf, expected = LEAVES[kind]
    theirs = opfuser.to_torch(leaf)
    assert str(theirs) == expected
    if isinstance(theirs, nn.CrossEntropyLoss):
        options = theirs.ignore_index, theirs.label_smoothing, theirs.reduction
        assert options == (1, 0.25, "sum")


def test_flags_hooks_attributes_and_requires_grad_are_preserved() -> None:
    ours = opfuser.Sequential(
        opfuser.Linear(WIDTH, WIDTH), opfuser.Dropout(0.5), opfuser.ReLU(), nn.Sequential()
    )
    ours[0].bias.requires_grad_(False)
    ours[0].tag = "first"
    ours.eval()
    ours[2].train()
    seen: list[str] = []

    def note(module: nn.Module, args: object, y: torch.Tensor) -> torch.Tensor:
        seen.append(type(module).__name__)
        return y + 1

    ours[0].register_forward_hook(note)
    ours[2].register_full_backward_hook(lambda m, dx, dy: seen.append("backward"))
    ours.register_forward_pre_hook(lambda m, args, kwargs: seen.append("before"), with_kwargs=True)
    x = torch.randn(3, WIDTH, requires_grad=True)
    expected = results(ours, x)
    seen.clear()
    theirs = ours.to_torch()
    assert [m.training for m in theirs.children()] == [False, False, True, False]
    assert [p.requires_grad for p in theirs.parameters()] == [True, False]
    assert theirs[0].tag == "first"  # type: ignore[index]
    close(results(theirs, x), expected)
    assert seen == ["before", "Linear", "backward"]


def test_the_original_is_not_touched() -> None:
    original = Block()
    before = [(name, id(m), dict(vars(m))) for name, m in original.named_modules()]
    theirs = opfuser.to_torch(original)
    theirs.eval()
    for module in theirs.modules():
        module.register_forward_hook(lambda *args: None)
    theirs.extra = nn.Parameter(torch.ones(2))
    theirs.register_buffer("more", torch.ones(2), persistent=False)
    for (name, at, state), (now, module) in zip(before, original.named_modules(), strict=True):
        assert (name, at, state.keys()) == (now, id(module), vars(module).keys())
        assert module.training
        assert not module._forward_hooks
    assert not hasattr(original, "extra")
    assert not original._non_persistent_buffers_set


def test_what_is_bound_to_the_original_stays_there() -> None:
    """The copy is not compiled; a module whose forward was replaced is the same object."""
    compiled = nn.Sequential(nn.Identity(), nn.Dropout(1.0))
    compiled.compile(backend="eager")
    theirs = opfuser.to_torch(compiled)
    compiled.eval()
    assert not theirs(torch.ones(2, 3)).any()
    patched = nn.Linear(3, 3)
    patched.forward = MethodType(lambda self, x: 2 * x, patched)  # type: ignore[method-assign]
    assert opfuser.to_torch(nn.ModuleList([patched]))[0] is patched  # type: ignore[index]


def test_an_empty_sequence_returns_its_input() -> None:
    x = torch.randn(2)
    assert opfuser.Sequential().to_torch()(x) is x


def test_on_the_meta_device_and_without_random_numbers() -> None:
    with torch.device("meta"):
        ours = sequence()
    state = torch.get_rng_state()
    theirs = ours.to_torch()
    assert torch.equal(torch.get_rng_state(), state)
    assert {p.device.type for p in theirs.parameters()} == {"meta"}


def test_nothing_but_modules_is_converted() -> None:
    with pytest.raises(ArgumentTypeError) as error:
        opfuser.to_torch("linear")  # type: ignore[arg-type]
    assert str(error.value) == "Modules are converted (to_torch). Received: str."


# What torch.nn lacks.


def test_what_torch_lacks_is_named() -> None:
    ours = opfuser.Sequential(
        {
            "norm": opfuser.RMSNorm(4, zero_centered_gamma=True),
            "inner": opfuser.Sequential(opfuser.SwiGLU(), opfuser.BasicLinear(2, 2)),
            "shape": opfuser.Reshape((2, 2)),
            "linear": opfuser.Linear(2, 2, accumulate_into_main_grad=True),
            "transposed": opfuser.Linear(2, 2, weight_transposed=True),
            "wrapped": opfuser.Linear(2, 2),
        }
    )
    ours.wrapped.forward = lambda x: x  # type: ignore[union-attr]
    ours.inner.recipe = opfuser.recipe.Float8CurrentScaling()  # type: ignore[union-attr]
    with pytest.raises(NotSupportedError) as error:
        ours.to_torch()
    assert str(error.value) == (
        "to_torch needs a module of torch.nn for every operation. Received: RMSNorm at 'norm': "
        "zero_centered_gamma=True has no counterpart; SwiGLU at 'inner.0': it has no counterpart; "
        "Sequential at 'inner': it has recipe of its own; Reshape at 'shape': shape=(2, 2) has no "
        "counterpart; Linear at 'linear': accumulate_into_main_grad=True has no counterpart; "
        "Linear at 'transposed': weight_transposed=True has no counterpart; "
        "Linear at 'wrapped': its forward was replaced. Convert the parts of the sequence that "
        "have one."
    )


def test_a_residual_has_no_place_in_torch_sequences() -> None:
    with pytest.raises(NotSupportedError, match="MakeExtraOutput at '0': it has no counterpart"):
        opfuser.Residual(opfuser.ReLU()).to_torch()


def test_options_without_effect_on_results_are_no_obstacle() -> None:
    linear = opfuser.Linear(4, 4, accumulate_into_grad=True)
    linear.recipe = None
    theirs = opfuser.Sequential(linear, opfuser.GELU(cache_quantized_input=True)).to_torch()
    assert str(theirs[0]) == "Linear(in_features=4, out_features=4, bias=True)"  # type: ignore[index]
    assert theirs[0].weight is linear.weight  # type: ignore[index]
