"""``from_torch`` and ``to_torch``: the same parameters under the same names, the same results."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import opfuser
from opfuser.errors import ArgumentTypeError, NotSupportedError
from opfuser.testing import assert_fused
from tests.integrations.results import close, results

WIDTH = 8


class Block(nn.Module):
    """A module of a class of its own, with layers of every kind that it may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)])
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        for layer in self.layers:
            x = layer(x)
        self.activation(x)  # what it returns is not read
        return x


class Named(nn.Sequential):
    """A subclass that only builds."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.width = WIDTH


class Doubling(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def tied() -> nn.Module:
    embedding = nn.Embedding(11, WIDTH, padding_idx=-1)
    head = nn.Linear(WIDTH, 11, bias=False)
    head.weight = embedding.weight
    norm = nn.LayerNorm(WIDTH, bias=False)
    return nn.Sequential(embedding, norm, nn.GELU("tanh"), norm, head)


def image() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
    head = nn.Sequential(nn.Linear(12, WIDTH), nn.Softplus(beta=2.0), nn.Sigmoid(), nn.Identity())
    return nn.Sequential(features, nn.Flatten(), head, nn.Hardswish())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH))
    )


TREES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 3, bias=False),
    "block": Block,
    "named": lambda: nn.Sequential(Named(), Doubling(nn.Linear(WIDTH, 4), nn.GELU())),
    "tied": tied,
    "image": image,
    "encoder": encoder,
}


def example(kind: str, dtype: torch.dtype) -> Tensor:
    if kind == "tied":
        return torch.randint(0, 11, (2, 5))
    shape = (4, 2, 4, 4) if kind == "image" else (2, 5, WIDTH)
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def holds_the_same(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = found.state_dict(keep_vars=True), expected.state_dict(keep_vars=True)
    assert list(mine) == list(theirs)
    assert all(mine[name] is theirs[name] for name in mine)
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in expected.named_parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", TREES)
def test_both_ways_with_the_same_parameters(kind: str, dtype: torch.dtype) -> None:
    original = TREES[kind]().to(dtype)
    x = example(kind, dtype)
    expected = results(original, x)
    ours = opfuser.from_torch(original)
    theirs = opfuser.to_torch(ours)
    again = opfuser.from_torch(theirs)
    for module in (ours, theirs, again):
        holds_the_same(module, original)
        close(results(module, x), expected)
    classes = {type(m) for m in theirs.modules()}
    assert not any(cls.__module__.startswith("opfuser.") for cls in classes)


def test_error_in_bf16_is_at_most_twice_torch_s() -> None:
    layers = nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.RMSNorm(64)
    original = nn.Sequential(*layers).bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    exact = results(copy.deepcopy(original).double(), x.detach().double().requires_grad_())
    found = [results(module, x) for module in (opfuser.from_torch(original), original)]
    for mine, theirs, right in zip(*found, exact):
        assert mine.dtype == torch.bfloat16
        assert (mine - right).norm() <= 2 * (theirs - right).norm()


def test_a_sequence_is_fused() -> None:
    ours = opfuser.from_torch(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))
    assert type(ours) is opfuser.Sequential
    assert_fused(ours, torch.randn(4, WIDTH), forward={"forward_linear_bias_activation": 1})


# Of every module that is asked about: what it becomes, or why it stays.

LEAVES: dict[str, tuple[nn.Module, str]] = {
    "identity": (nn.Identity(), "Identity()"),
    "gelu": (nn.GELU(), "GELU(approximate='none')"),
    "silu": (nn.SiLU(inplace=True), "SiLU()"),
    "softplus": (nn.Softplus(2.0, 5.0), "Softplus(beta=2.0, threshold=5.0)"),
    "dropout": (nn.Dropout(0.25), "Dropout(p=0.25)"),
    "flatten": (nn.Flatten(0), "Reshape()"),
    "linear": (nn.Linear(3, 2, bias=False), "Linear(in_features=3, out_features=2, bias=False)"),
    "embedding": (nn.Embedding(5, 3, padding_idx=-1), "Embedding(5, 3, padding_idx=4)"),
    "loss": (
        nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.25, reduction="sum"),
        "CrossEntropy(ignore_index=1, label_smoothing=0.25, reduction='sum')",
    ),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_options_are_read(kind: str) -> None:
    leaf, expected = LEAVES[kind]
    ours = opfuser.from_torch(leaf)
    assert str(ours) == expected
    assert type(opfuser.to_torch(ours)) is type(leaf)


def test_eps_of_norms_is_read() -> None:
    """Without one, RMSNorm of torch takes that of its arithmetic: fp32 for half precision."""
    assert opfuser.from_torch(nn.LayerNorm(4, eps=0.25)).eps == 0.25
    assert opfuser.from_torch(nn.RMSNorm(4, eps=0.25)).eps == 0.25
    for dtype, low, high in ((torch.bfloat16, 0.02, 0.04), (torch.float64, 0.99, 1.0)):
        norm, x = nn.RMSNorm(4, dtype=dtype), torch.full((1, 4), 1e-5, dtype=dtype)
        y = opfuser.from_torch(norm)(x)
        close([y], [norm(x)])
        assert torch.all((low < y) & (y < high))


def with_hook_of_its_own() -> nn.Module:
    linear = nn.Linear(3, 3)
    nn.utils.spectral_norm(linear)
    return linear


def with_replaced_forward() -> nn.Module:
    linear = nn.Linear(3, 3)
    plain = linear.forward
    linear.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]
    return linear


def pruned() -> nn.Module:
    linear = nn.Linear(3, 3)
    linear.weight = nn.Parameter(torch.randn(2, 3))
    return linear


def with_weight_in_front() -> nn.Module:
    linear = nn.Linear(3, 3)
    linear.__dict__["weight"] = torch.eye(3)
    return linear


def without_parameter() -> nn.Module:
    linear = nn.Linear(3, 3)
    del linear.weight
    linear.weight = torch.eye(3)  # type: ignore[assignment]
    return linear


def with_call_of_its_own() -> nn.Module:
    linear = nn.Linear(3, 3)
    linear._call_impl = torch.sin  # type: ignore[method-assign]
    return linear


STAYING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "flatten": (nn.Flatten, "start_dim=1 has no counterpart"),
    "norm": (lambda: nn.LayerNorm(3, elementwise_affine=False), "elementwise_affine=False has no"),
    "max_norm": (lambda: nn.Embedding(3, 3, max_norm=1.0), "max_norm=1.0 has no counterpart"),
    "sparse": (lambda: nn.Embedding(3, 3, sparse=True), "sparse=True has no counterpart"),
    "classes": (lambda: nn.CrossEntropyLoss(torch.ones(3)), "weight has no counterpart"),
    "complex": (lambda: nn.Linear(3, 3, dtype=torch.complex64), "weight is a Parameter of torch.c"),
    "lazy": (lambda: nn.LazyLinear(3), "no operation computes it"),
    "shape": (pruned, "weight has shape (2, 3), not (3, 3)"),
    "glu": (nn.GLU, "its gate is the second half of the input"),
    "attention": (lambda: nn.MultiheadAttention(4, 2), "it takes three tensors and returns two"),
    "parametrised": (
        lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
        "a class of torch.nn.utils.parametrize",
    ),
    "hook": (with_hook_of_its_own, "weight_orig has no counterpart"),
    "forward": (with_replaced_forward, "its forward was replaced"),
    "in front": (with_weight_in_front, "its weight was replaced"),
    "plain": (without_parameter, "it has no parameter weight"),
    "call": (with_call_of_its_own, "its _call_impl was replaced"),
    "container": (lambda: nn.ParameterList([torch.ones(2)]), "no operation computes it"),
    "activation": (
        lambda: nn.TransformerEncoderLayer(4, 2, activation=nn.functional.mish),
        "its activation mish is no operation",
    ),
}


def test_what_is_bound_to_the_original() -> None:
    """The copy is not compiled, and a module with a method put on it stays itself."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(1.0)

        def half(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(x)  # type: ignore[no-any-return]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.half(x)

    compiled = nn.Sequential(nn.Identity(), nn.Dropout(1.0))
    compiled.compile(backend="eager")
    x = torch.ones(2, 3)
    ours = opfuser.from_torch(compiled)
    compiled.eval()
    assert not ours(x).any()
    assert torch.equal(ours.eval()(x), x)
    patched = Halves()
    patched.half = MethodType(lambda self, x: 2 * self.drop(x), patched)  # type: ignore[method-assign]
    assert opfuser.from_torch(nn.ModuleList([patched]))[0] is patched


def test_attributes_may_be_tensors() -> None:
    linear = nn.Linear(3, 3)
    linear.scale = torch.ones(3)
    ours: Any = opfuser.from_torch(linear)
    assert type(ours) is opfuser.Linear
    assert ours.scale is linear.scale


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch recommends parametrisations instead
@pytest.mark.parametrize("kind", STAYING)
def test_what_stays_and_why(kind: str) -> None:
    make, why = STAYING[kind]
    torch.manual_seed(1)
    module = make()
    (entry,) = opfuser.conversion_report(module).modules
    assert (entry.path, entry.kind, entry.result) == ("", type(module).__name__, None)
    assert entry.note.startswith(why)
    ours = opfuser.from_torch(module)
    assert type(ours) is type(module)
    if kind in ("parametrised", "hook", "forward", "norm", "in front", "plain", "call"):
        x = torch.randn(2, 3)
        assert torch.equal(ours.eval()(x), module.eval()(x))


def test_the_report_lists_the_tree() -> None:
    tree = nn.Sequential(Block(), nn.Sequential(nn.Linear(8, 4), nn.ReLU(True), nn.Hardswish()))
    report = opfuser.conversion_report(tree)
    assert (
        str(report)
        == """\
(root): Sequential -> Sequential
0.norm: LayerNorm -> LayerNorm
0.mlp: Sequential -> Sequential
0.mlp.0: Linear -> Linear
0.mlp.1: SiLU -> SiLU
0.mlp.2: Linear -> Linear
0.layers.0: Linear -> Linear
0.layers.1: RMSNorm -> RMSNorm
0.activation: ReLU stays: outside of a Sequential nothing is fused with it
1: Sequential -> Sequential
1.0: Linear -> Linear
1.1: ReLU -> ReLU: writes to no input
1.2: Hardswish stays: no operation computes it"""
    )
    assert [m.path for m in report.kept] == ["0.activation", "1.2"]
    assert len(report.replaced) == len(report.modules) - 2


def test_a_loss_inside_a_module_stays_and_alone_is_converted() -> None:
    """Its classes are in dimension 1 of a tensor of any rank."""
    logits, targets = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 3, (5,))
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    close([opfuser.from_torch(loss)(logits, targets)], [loss(logits, targets)])
    (entry,) = opfuser.conversion_report(nn.ModuleDict({"loss": loss})).modules
    assert entry == ("loss", "CrossEntropyLoss", None, entry.note)
    assert entry.note == "its classes are in dimension 1, those of opfuser's in the last"


def test_a_sequence_with_something_of_its_own_stays() -> None:
    doubling = Doubling(nn.Linear(8, 8), nn.ReLU())
    entry, linear, relu = opfuser.conversion_report(doubling).modules
    assert entry == ("", "Doubling", None, "it has forward of its own")
    assert (linear.result, relu.result) == ("Linear", None)
    bare = nn.Sequential(nn.Linear(8, 8))
    bare.register_buffer("scale", torch.ones(1))
    assert opfuser.conversion_report(bare).modules[0].note == "it has scale of its own"
    clash = nn.Sequential(OrderedDict(plan=nn.Linear(8, 8), last_plan=nn.ReLU()))
    assert opfuser.conversion_report(clash).modules[0].note == "it has plan, last_plan of its own"
    named = opfuser.from_torch(Named())
    assert type(named) is opfuser.Sequential
    assert named.width == WIDTH


def test_an_empty_sequence_returns_its_input() -> None:
    x = torch.randn(2)
    ours = opfuser.from_torch(nn.Sequential())
    assert ours(x) is x
    assert ours.to_torch()(x) is x  # type: ignore[operator]


def test_nothing_but_modules_is_converted() -> None:
    for convert in (opfuser.from_torch, opfuser.conversion_report, opfuser.to_torch):
        with pytest.raises(ArgumentTypeError) as error:
            convert("linear")
        text = f"Modules are converted ({convert.__name__}). Received: str."
        assert str(error.value) == text


# What a module carries.


def test_flags_hooks_attributes_and_requires_grad_are_preserved_both_ways() -> None:
    original = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.ReLU())
    original[0].bias.requires_grad_(False)
    original[0].tag = "first"
    original.eval()
    original[2].train()
    seen: list[str] = []
    original[0].register_forward_hook(lambda m, args, y: seen.append(type(m).__name__) or y + 1)
    original[2].register_full_backward_hook(lambda m, dx, dy: seen.append("backward"))
    original.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append("before"), with_kwargs=True
    )
    x = torch.randn(3, WIDTH, requires_grad=True)
    expected = results(original, x)
    seen.clear()
    ours = opfuser.from_torch(original)
    for module in (ours, ours.to_torch()):  # type: ignore[operator]
        assert [m.training for m in module.modules()] == [False, False, False, True]
        assert [p.requires_grad for p in module.parameters()] == [True, False]
        assert module[0].tag == "first"  # type: ignore[index]
        close(results(module, x), expected)
        assert seen == ["before", "Linear", "backward"]
        seen.clear()


def test_the_original_is_not_touched() -> None:
    original = Block()
    before = [(name, id(m), dict(vars(m))) for name, m in original.named_modules()]
    ours = opfuser.from_torch(original)
    ours(torch.randn(2, WIDTH)).sum().backward()
    ours.eval()
    for module in ours.modules():
        module.register_forward_hook(lambda *args: None)
    ours.extra = nn.Parameter(torch.ones(2))
    ours.register_buffer("more", torch.ones(2), persistent=False)
    for (name, at, state), (now, module) in zip(before, original.named_modules()):
        assert (name, at, state.keys()) == (now, id(module), vars(module).keys())
        assert module.training
        assert not module._forward_hooks
    assert not hasattr(original, "extra")
    assert not hasattr(original, "more")
    assert not original._non_persistent_buffers_set


def test_the_same_module_twice_stays_the_same_module() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    ours: Any = opfuser.from_torch(nn.ModuleList([nn.Sequential(layer, nn.ReLU(), layer)]))
    assert ours[0][0] is ours[0][2]
    theirs: Any = opfuser.to_torch(ours)
    assert theirs[0][0] is theirs[0][2]


def test_on_the_meta_device_and_without_random_numbers() -> None:
    with torch.device("meta"):
        original = nn.Sequential(nn.Embedding(4, WIDTH), nn.Linear(WIDTH, 2), nn.LayerNorm(2))
    state = torch.get_rng_state()
    ours = opfuser.from_torch(original)
    opfuser.to_torch(ours)
    assert torch.equal(torch.get_rng_state(), state)
    assert {p.device.type for p in ours.parameters()} == {"meta"}
    assert ours(torch.ones(3, dtype=torch.long, device="meta")).shape == (3, 2)
    ours.to_empty(device="cpu")
    for module in ours:  # type: ignore[union-attr]
        module.reset_parameters()
    assert torch.isfinite(ours(torch.ones(3, dtype=torch.long))).all()


def test_operations_in_the_tree_stay_themselves() -> None:
    linear, residual = opfuser.Linear(4, 4), opfuser.Residual(opfuser.ReLU())
    layer = opfuser.from_torch(nn.TransformerEncoderLayer(4, 2))
    ours: Any = opfuser.from_torch(nn.Sequential(linear, residual, layer))
    assert [ours[0], ours[1], ours[2]] == [linear, residual, layer]


# The other way, with what torch.nn lacks.


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


def test_cast_copied_and_saved_like_any_module(tmp_path: Any) -> None:
    original = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ours = opfuser.from_torch(original)
    torch.save(ours, tmp_path / "ours.pt")
    loaded = torch.load(tmp_path / "ours.pt", weights_only=False)
    x = torch.randn(2, 4)
    assert torch.equal(loaded(x), ours(x))
    assert torch.equal(copy.deepcopy(ours)(x), ours(x))
    ours.double()  # parameters are shared, so the original's are cast too
    assert {p.dtype for p in original.parameters()} == {torch.float64}
