"""Encoder layers of ``torch.nn``: what sequences compute of them, and what they leave to torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

import opfuser
from opfuser import Sequential
from tests.integrations.results import close, results

F64 = torch.float64
WIDTH, HEADS, BATCH, LENGTH = 8, 2, 3, 5
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH) >= torch.tensor([[5], [3], [4]])

OPTIONS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm_first": True, "batch_first": True, "activation": "gelu"},
    "no bias": {"bias": False, "batch_first": True, "activation": nn.GELU("tanh")},
    "pre, no bias": {"norm_first": True, "bias": False, "activation": nn.functional.silu},
    "eps": {"layer_norm_eps": 0.5, "batch_first": True, "activation": nn.SiLU()},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"src_mask": CAUSAL, "is_causal": True},
    "added": {"src_mask": torch.randn(LENGTH, LENGTH, dtype=F64)},
    "per head": {"src_mask": torch.randn(HEADS * BATCH, LENGTH, LENGTH, dtype=F64)},
    "padding": {"src_key_padding_mask": PADDING},
    "both": {"src_key_padding_mask": PADDING, "src_mask": CAUSAL, "is_causal": True},
}


def make(dropout: float = 0.0, **options: Any) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout, dtype=F64, **options)
    for parameter in layer.parameters():  # biases and norms too
        nn.init.normal_(parameter, std=0.5)
    return layer


def example(layer: nn.TransformerEncoderLayer) -> Tensor:
    rows = (BATCH, LENGTH) if layer.self_attn.batch_first else (LENGTH, BATCH)
    return torch.randn(*rows, WIDTH, dtype=F64, requires_grad=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call of a sequence: torch's own forward makes none."""
    seen: list[int] = []
    plain = Sequential.forward
    monkeypatch.setattr(
        Sequential, "forward", lambda *args, **kwargs: seen.append(1) or plain(*args, **kwargs)
    )
    return seen


@pytest.mark.parametrize(
    ("options", "masks"),
    [
        *((options, "both") for options in OPTIONS),
        *((options, masks) for options in ("post", "pre") for masks in MASKS if masks != "both"),
    ],
)
def test_equals_the_layer(options: str, masks: str, calls: list[int]) -> None:
    layer = make(**OPTIONS[options])
    x = example(layer)
    ours = opfuser.from_torch(layer)
    for mode in (True, False):
        calls.clear()
        layer.train(mode)
        ours.train(mode)
        close(results(ours, x, **MASKS[masks]), results(layer, x, **MASKS[masks]))
        assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_in_an_encoder_with_padding_and_without_grad(calls: list[int]) -> None:
    """Where torch runs the whole layer as one kernel, on nested tensors."""
    encoder = nn.TransformerEncoder(make(batch_first=True), 2).eval()
    ours = opfuser.from_torch(encoder)
    assert [m.result for m in opfuser.conversion_report(encoder).modules] == ["EncoderLayer"] * 2
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=F64)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=PADDING)
        close([ours(x, src_key_padding_mask=PADDING)], [expected])
    assert not calls


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
def test_takes_part_in_recipes(calls: list[int]) -> None:
    """With and without grad, so that evaluation computes as training does."""
    layer = nn.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True)
    ours: Any = opfuser.from_torch(layer)
    x = torch.randn(4, 16, 64)
    with opfuser.autocast(recipe=opfuser.recipe.Float8CurrentScaling()):
        y = ours(x)
        with torch.no_grad():
            assert torch.equal(ours(x), y)
    assert len(calls) == 4
    assert [
        len(seq.last_plan.quantized)
        for seq in (ours._fused.sequences[0], ours._fused.sequences[-1])
    ] == [1, 3]
    assert 1e-3 < (y - layer(x)).norm() / y.norm() < 0.1


def test_dropout_is_drawn_in_training_alone() -> None:
    layer = make(dropout=0.5)
    ours, x = opfuser.from_torch(layer), example(layer)
    close([ours.eval()(x)], [layer.eval()(x)])
    first, second = ours.train()(x), ours(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    first = ours(x)
    torch.manual_seed(1)
    assert torch.equal(ours(x), first)
    close([ours.eval()(x)], [layer.eval()(x)])


def test_attention_weights_are_dropped_as_in_torch() -> None:
    layer = make(dropout=0.5)
    for dropout in (layer.dropout, layer.dropout1, layer.dropout2):
        dropout.p = 0.0
    ours, x = opfuser.from_torch(layer), example(layer)
    torch.manual_seed(1)
    expected = layer(x)
    torch.manual_seed(1)
    close([ours(x)], [expected])
    assert not torch.allclose(expected, layer.eval()(x))


def test_its_steps_are_fused() -> None:
    ours: Any = opfuser.from_torch(make(norm_first=True))
    ours(example(ours))
    for sequence in (ours._fused.sequences[0], ours._fused.sequences[-1]):
        assert len(sequence.last_plan.record("norm_linear").matches) == 1


@pytest.mark.parametrize("norm_first", [True, False])
def test_error_under_autocast_is_at_most_twice_torch_s(norm_first: bool, calls: list[int]) -> None:
    layer = nn.TransformerEncoderLayer(64, 2, 128, 0.0, norm_first=norm_first)
    x, padding = (
        torch.randn(LENGTH, BATCH, 64, requires_grad=True),
        {"src_key_padding_mask": PADDING},
    )
    exact = results(copy.deepcopy(layer).double(), x.double().detach(), **padding)
    ours = opfuser.from_torch(layer)
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = (results(m, x.detach(), **padding) for m in (ours, layer))
    assert len(calls) == (2 if norm_first else 0)
    for mine, other, right in zip(found, theirs, exact):
        assert mine.dtype == other.dtype
        assert (mine - right).norm() <= 2 * (other - right).norm()


# Changes after the conversion reach the next call.


def replace(layer: nn.TransformerEncoderLayer) -> None:
    with torch.no_grad():
        layer.linear1.weight = nn.Parameter(layer.linear1.weight + 1)
        layer.self_attn.in_proj_bias = nn.Parameter(layer.self_attn.in_proj_bias + 1)
        layer.norm2.bias = None


def scale(layer: nn.TransformerEncoderLayer) -> None:
    layer.norm1.eps = 0.5
    layer.norm_first = True


def prune(layer: nn.TransformerEncoderLayer) -> None:
    with torch.no_grad():
        layer.linear1.weight = nn.Parameter(layer.linear1.weight[:5].clone())
        layer.linear1.bias = nn.Parameter(layer.linear1.bias[:5].clone())
        layer.linear2.weight = nn.Parameter(layer.linear2.weight[:, :5].clone())


def without_bias(layer: nn.TransformerEncoderLayer) -> None:
    layer.linear2.bias = None


@pytest.mark.parametrize("change", [replace, scale, prune, without_bias])
def test_changes_count(change: Callable[..., None], calls: list[int]) -> None:
    layer = make()
    ours: Any = opfuser.from_torch(layer)
    x = example(layer)
    ours(x)
    change(layer)
    change(ours)
    ours.load_state_dict(layer.state_dict())
    calls.clear()
    close(results(ours, x), results(layer, x))
    assert len(calls) == 2


def hook(layer: nn.TransformerEncoderLayer) -> None:
    layer.linear2.register_forward_hook(lambda module, args, y: y + 1)


def wrap(layer: nn.TransformerEncoderLayer) -> None:
    plain = layer.norm1.forward
    layer.norm1.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]


def parametrise(layer: nn.TransformerEncoderLayer) -> None:
    parametrizations.weight_norm(layer.self_attn.out_proj)


def swap(layer: nn.TransformerEncoderLayer) -> None:
    layer.dropout1 = nn.Sequential(layer.dropout1, nn.Tanh())  # type: ignore[assignment]


def activate(layer: nn.TransformerEncoderLayer) -> None:
    layer.activation = nn.functional.mish


def shadow(layer: nn.TransformerEncoderLayer) -> None:
    """A module in front of that of the same name."""
    twin = nn.Linear(WIDTH, 16, dtype=F64)
    nn.init.ones_(twin.weight)
    nn.init.ones_(twin.bias)
    layer.__dict__["linear1"] = twin


def shadow_weight(layer: nn.TransformerEncoderLayer) -> None:
    layer.self_attn.__dict__["in_proj_weight"] = layer.self_attn.in_proj_weight.detach() + 1


def untie(layer: nn.TransformerEncoderLayer) -> None:
    weight = layer.linear2.weight.detach()
    del layer.linear2.weight
    layer.linear2.weight = weight  # type: ignore[assignment]


def patch(layer: nn.TransformerEncoderLayer) -> None:
    layer._ff_block = torch.sin  # type: ignore[method-assign]


def widen(layer: nn.TransformerEncoderLayer) -> None:
    layer.norm1 = nn.LayerNorm((BATCH, WIDTH), dtype=F64)


def separate(layer: nn.TransformerEncoderLayer) -> None:
    attention = layer.self_attn
    attention._qkv_same_embed_dim = False
    for name, scale in (("q", 1.0), ("k", 2.0), ("v", 3.0)):
        weight = nn.Parameter(scale * torch.eye(WIDTH, dtype=F64))
        setattr(attention, f"{name}_proj_weight", weight)


def switch(layer: nn.TransformerEncoderLayer) -> None:
    layer.dropout.p = 1.0
    layer.eval()
    layer.dropout.train()


@pytest.mark.parametrize(
    "change",
    [
        hook, wrap, parametrise, swap, activate, switch,
        shadow, shadow_weight, untie, patch, widen, separate,
    ],
)  # fmt: skip
def test_what_a_change_needs_torch_for(change: Callable[..., None], calls: list[int]) -> None:
    layer = make()
    ours: Any = opfuser.from_torch(layer)
    x = example(layer)
    change(layer)
    change(ours)
    close([ours(x)], [layer(x)])
    assert not calls
    assert opfuser.conversion_report(layer).modules[0].result is None


def test_an_activation_is_what_it_computes(calls: list[int]) -> None:
    """A module's forward may be replaced, and a callable need not be hashable."""

    class Cosine:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Tensor) -> Tensor:
            return x.cos()

    def patched(attribute: str) -> nn.Module:
        module = nn.GELU()
        setattr(module, attribute, torch.cos)
        return module

    for activation in (Cosine(), patched("forward"), patched("_call_impl")):
        layer = make(activation=activation)
        x = example(layer)
        close([opfuser.from_torch(layer)(x)], [layer(x)])
    assert not calls


def test_frozen_it_is_the_kernel_of_torch(calls: list[int]) -> None:
    """Which computes another GELU than the layer does in training."""
    layer = make(batch_first=True, activation=nn.GELU("tanh")).eval().requires_grad_(False)
    x = example(layer).detach()
    close([opfuser.from_torch(layer)(x)], [layer(x)])
    assert not calls


def test_class_that_somebody_has_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(module: nn.Linear, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, module.weight, module.bias)

    monkeypatch.setattr(nn.Linear, "forward", doubled)
    layer = make()
    x = example(layer)
    close(results(opfuser.from_torch(layer), x), results(layer, x))
    (entry, *_) = opfuser.conversion_report(layer).modules
    assert entry.note == "forward of torch.nn.Linear was replaced"
    leaf = nn.Linear(WIDTH, 3, dtype=F64)
    close(results(opfuser.from_torch(leaf), x), results(leaf, x))
    (entry,) = opfuser.conversion_report(leaf).modules
    assert entry.note == "the forward of torch.nn.Linear was replaced"


def test_unbatched_and_nested_inputs_are_left_to_torch(calls: list[int]) -> None:
    layer = make(batch_first=True).eval()
    ours = opfuser.from_torch(layer)
    x = torch.randn(LENGTH, WIDTH, dtype=F64)
    close([ours(x)], [layer(x)])
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        ours(x[None].requires_grad_(), is_causal=True)
    with torch.no_grad():
        nested = torch.nested.nested_tensor([x, x[:2]])
        found, expected = ours(nested), layer(nested)
    close(list(found.unbind()), list(expected.unbind()))
    assert not calls


def test_compiled_it_is_torch_s(calls: list[int]) -> None:
    layer = make()
    ours, x = opfuser.from_torch(layer), example(layer)
    torch.compiler.reset()  # Dynamo counts what other tests compiled
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    close(results(compiled, x), results(layer, x))
    assert not calls


def test_copied_pickled_and_called_with_other_parameters() -> None:
    layer = make()
    ours, x = opfuser.from_torch(layer), example(layer)
    expected = results(ours, x)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        close(results(twin, x), expected)
        assert not any(a is b for a, b in zip(twin.parameters(), ours.parameters()))
    doubled = {name: 2 * p for name, p in ours.named_parameters()}
    close([functional_call(ours, doubled, x)], [functional_call(layer, doubled, x)])
    close(results(ours, x), expected)


def test_back_to_torch_s() -> None:
    ours = opfuser.from_torch(make())
    x = example(ours)  # type: ignore[arg-type]
    expected = results(ours, x)
    theirs = opfuser.to_torch(ours)
    assert type(theirs) is nn.TransformerEncoderLayer
    close(results(theirs, x), expected)
    assert type(opfuser.from_torch(theirs)) is type(ours)


# Decoder layers: the same, with the cross-attention by torch's module.


class Decoding(NamedTuple):
    """A decoder layer with its inputs."""

    layer: nn.TransformerDecoderLayer
    tgt: Tensor
    memory: Tensor


def decoding(**options: Any) -> Decoding:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, 0.0, dtype=F64, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    first = layer.self_attn.batch_first
    tgt = torch.randn(*((BATCH, LENGTH) if first else (LENGTH, BATCH)), WIDTH, dtype=F64)
    memory = torch.randn(*((BATCH, 4) if first else (4, BATCH)), WIDTH, dtype=F64)
    return Decoding(layer, tgt.requires_grad_(), memory.requires_grad_())


def decoded(layer: nn.Module, tgt: Tensor, memory: Tensor, **masks: Any) -> list[Tensor]:
    y = layer(tgt, memory, **masks)
    return [y, *torch.autograd.grad(y.sin().sum(), [tgt, memory, *layer.parameters()])]


CROSSING: dict[str, Any] = {
    "tgt_mask": CAUSAL, "tgt_is_causal": True, "tgt_key_padding_mask": PADDING,
    "memory_mask": CAUSAL[:, [4, 0, 1, 2]].flip(0), "memory_key_padding_mask": PADDING[:, 1:],
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "masks"),
    [("post", {}), ("pre", {}), ("post", CROSSING), ("pre", CROSSING), ("no bias", {})],
)
def test_decoder_layer_equals_torch_s(
    options: str, masks: dict[str, Any], calls: list[int]
) -> None:
    case = decoding(**OPTIONS[options])
    ours = opfuser.from_torch(case.layer)
    for mode in (True, False):
        calls.clear()
        case.layer.train(mode)
        ours.train(mode)
        close(decoded(ours, *case[1:], **masks), decoded(*case, **masks))
        assert len(calls) == 3


def test_decoder_layer_calls_what_is_put_on_its_cross_attention(calls: list[int]) -> None:
    layer, tgt, memory = decoding()
    layer.multihead_attn.register_forward_hook(lambda m, args, y: (2 * y[0], None))
    ours: Any = opfuser.from_torch(layer)
    close(decoded(ours, tgt, memory), decoded(layer, tgt, memory))
    assert len(calls) == 3
    calls.clear()
    for each in (ours, layer):
        each.norm3.register_forward_hook(lambda m, args, y: 2 * y)
    close([ours(tgt, memory)], [layer(tgt, memory)])
    assert not calls


def test_a_transformer_of_both(calls: list[int]) -> None:
    """And back."""
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 16, 0.0, batch_first=True, dtype=F64)
    ours = opfuser.from_torch(model)
    x, y = (torch.randn(BATCH, n, WIDTH, dtype=F64, requires_grad=True) for n in (4, LENGTH))
    mask = {"tgt_mask": CAUSAL, "tgt_is_causal": True}
    expected = decoded(model, x, y, **mask)
    close(decoded(ours, x, y, **mask), expected)
    assert len(calls) == 5
    theirs: Any = opfuser.to_torch(ours)
    assert type(theirs.decoder.layers[0]) is nn.TransformerDecoderLayer
    close(decoded(theirs, x, y, **mask), expected)
    assert len(calls) == 5


@pytest.mark.parametrize("kind", ["decoder", "transformer"])
def test_a_module_as_activation_that_torch_copies(kind: str, calls: list[int]) -> None:
    """Copies of a decoder layer compute ReLU in torch, in front of their module."""
    torch.manual_seed(3)
    options: dict[str, Any] = {"activation": nn.GELU(), "batch_first": True}
    if kind == "decoder":
        model: nn.Module = nn.TransformerDecoder(decoding(**options).layer, 2)
    else:
        model = nn.Transformer(WIDTH, HEADS, 1, 2, 16, 0.0, **options, dtype=F64)
    x, y = (torch.randn(BATCH, n, WIDTH, dtype=F64, requires_grad=True) for n in (LENGTH, 4))
    ours = opfuser.from_torch(model)
    close(decoded(ours, x, y), decoded(model, x, y))
    assert len(calls) == {"decoder": 6, "transformer": 8}[kind]
    close(decoded(opfuser.to_torch(ours), x, y), decoded(model, x, y))


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["pre", "post"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(options: str, dtype: torch.dtype) -> None:
    """Error at most twice torch's, with masks; of the output and of all gradients together."""
    encoder = make(**OPTIONS[options])
    decoder, tgt, memory = decoding(**OPTIONS[options])
    for layer, inputs in ((encoder, (example(encoder),)), (decoder, (tgt, memory))):
        mask = {"src_key_padding_mask" if layer is encoder else "tgt_key_padding_mask": PADDING}
        run = results if layer is encoder else decoded
        exact = run(layer, *inputs, **mask)
        moved = copy.deepcopy(layer).to("cuda", dtype)
        there = [x.detach().to("cuda", dtype).requires_grad_() for x in inputs]
        mask = {name: value.cuda() for name, value in mask.items()}
        errors = [
            sum((t.double().cpu() - right).norm() ** 2 for t, right in zip(found, exact)) ** 0.5
            for found in (run(m, *there, **mask) for m in (opfuser.from_torch(moved), moved))
        ]
        assert errors[0] <= 2 * errors[1]
