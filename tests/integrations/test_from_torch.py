"""``from_torch``: modules as sequences of operations with the same parameters, or an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import opfuser
from opfuser.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from opfuser.testing import assert_fused
from tests.applying.models import assert_as_exact
from tests.integrations.results import close, results
from tests.reading.families import own_blocks

F64 = torch.float64
WIDTH, HEADS, BATCH, LENGTH = 8, 2, 3, 5
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH) >= torch.tensor([[5], [3], [4]])


class Computes(nn.Module):
    """A module with layers, whose forward is a function of it and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.norm, self.relu = nn.LayerNorm(WIDTH), nn.ReLU(inplace=True)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.qkv, self.square = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def fused_attention(m: Any, x: Tensor) -> Tensor:
    """As in timm."""
    b, n, c = x.shape
    q, k, v = m.qkv(m.norm(x)).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
    out: Tensor = x + m.scale * m.square(y)
    return out


def feed_forward(m: Any, x: Tensor) -> Tensor:
    out: Tensor = x + m.down(F.gelu(m.up(m.norm(x)), approximate="tanh"))
    return out


def encoder(layers: int = 2, **options: Any) -> nn.Module:
    layer = encoder_layer(**options)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def encoder_layer(dropout: float = 0.0, **options: Any) -> nn.TransformerEncoderLayer:
    options = {"batch_first": True, **options}
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout, **options)


def hooked(module: nn.Module, child: str = "") -> nn.Module:
    module.get_submodule(child).register_forward_hook(lambda m, args, y: y + 1)
    return module


def wrapped(module: nn.Module, child: str = "") -> nn.Module:
    inner: Any = module.get_submodule(child)
    plain = inner.forward
    inner.forward = lambda x: 2 * plain(x)
    return module


def parametrized() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
    parametrizations.weight_norm(module[0])
    return module


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)), nn.GELU())


def used_twice() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.ReLU(), layer)


CONVERTED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 3, bias=False),
    "nothing": nn.Sequential,
    "layers": lambda: nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU("tanh"), nn.Linear(16, WIDTH),
        nn.RMSNorm(WIDTH), nn.Identity(), nn.Softplus(2.0, 5.0), nn.Sigmoid(), nn.SiLU(), nn.Tanh(),
    ),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU()), nn.Linear(4, 2, bias=False)
    ),
    "a norm without weight": lambda: nn.Sequential(
        nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, WIDTH)
    ),
    "a child that is called": lambda: nn.Sequential(
        nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Hardswish(), nn.Linear(4, 2)
    ),
    "hook": lambda: hooked(layers(2), "0"),
    "forward of a child": lambda: wrapped(layers(1), "0"),
    "parametrized": parametrized,
    "used twice": used_twice,
    "post": encoder_layer,
    "pre": lambda: encoder_layer(norm_first=True, activation="gelu"),
    "no bias": lambda: encoder_layer(bias=False, activation=nn.GELU("tanh")),
    "sequence first": lambda: encoder_layer(batch_first=False, activation=F.silu),
    "encoder": encoder,
    "feed forward": lambda: Computes(feed_forward),
    "fused attention": lambda: Computes(fused_attention),
}  # fmt: skip


def randomized(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module.double()


def example(name: str) -> Tensor:
    torch.manual_seed(1)
    shape = (BATCH, WIDTH) if name == "a child that is called" else (BATCH, LENGTH, WIDTH)
    return torch.randn(shape, dtype=F64, requires_grad=True)


def wrt(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of a module's parameters."""
    return [y, *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()], allow_unused=True)]


def same(module: nn.Module, ours: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> None:
    expected = wrt(module, x, module(x, *args, **kwargs))
    for mine, theirs in zip(wrt(module, x, ours(x, *args, **kwargs)), expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert (mine - theirs).norm() <= 1e-12 * theirs.norm().clamp(min=1e-3)


@pytest.mark.parametrize("name", CONVERTED)
def test_values_and_gradients_are_the_module_s(name: str) -> None:
    module = randomized(CONVERTED[name]())
    before = [(m, dict(vars(m))) for m in module.modules()]
    state = torch.get_rng_state()
    ours = opfuser.from_torch(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(m)) for m, _ in before] == [own for _, own in before]
    assert type(ours) is opfuser.Sequential
    own = {id(p) for p in module.parameters()}
    assert {id(p) for p in ours.parameters() if p.requires_grad} <= own
    x = example(name)
    for training in (True, False):
        module.train(training)
        ours.train(training)
        same(module, ours, x)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_rows_of_any_rank(rank: int) -> None:
    module = randomized(CONVERTED["layers"]())
    x = torch.randn(*range(2, rank + 1), WIDTH, dtype=F64, requires_grad=True)
    same(module, opfuser.from_torch(module), x)


def test_a_table_and_a_head_that_is_tied_to_it() -> None:
    table, head = nn.Embedding(11, WIDTH, padding_idx=-1), nn.Linear(WIDTH, 11, bias=False)
    module = randomized(nn.Sequential(table, nn.LayerNorm(WIDTH, bias=False), nn.GELU(), head))
    head.weight = table.weight
    ours = opfuser.from_torch(module)
    assert isinstance(ours[0], opfuser.Embedding)
    ids = torch.randint(0, 11, (2, LENGTH))
    weights = list(module.parameters())
    assert list(ours.parameters()) == weights
    found, expected = (
        [y, *torch.autograd.grad(y.sin().sum(), weights)] for y in (ours(ids), module(ids))
    )
    close(found, expected)
    for options in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(NotSupportedError, match="embedding"):
            opfuser.from_torch(nn.Embedding(3, 3, **options))


def test_masks_are_not_made_in_the_dtype_of_numbers_of_rows() -> None:
    class Model(Computes):
        def forward(self, ids: Tensor, padding: Tensor | None = None) -> Any:
            return layer(table(ids), src_key_padding_mask=padding)

    module = Model(lambda m, x: x)
    module.table, module.layer = table, layer = nn.Embedding(9, WIDTH), encoder_layer()
    ids = torch.randint(0, 9, (BATCH, LENGTH))
    assert torch.allclose(opfuser.from_torch(module)(ids), module(ids), atol=1e-5)
    with pytest.raises(NotSupportedError, match="masks attention, and is given numbers of rows"):
        opfuser.from_torch(module, example=(ids, PADDING))


def test_names_are_those_of_layers() -> None:
    """And of what has no parameters, or those of several children, numbers that are free."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.GELU(), nn.Linear(8, 8))
    ours = opfuser.from_torch(module)
    assert list(ours.state_dict()) == list(module.state_dict())
    assert [name for name, _ in ours.named_children()] == ["0", "1", "3"]
    ours.load_state_dict(module.state_dict())
    assert [n for n, _ in opfuser.from_torch(encoder_layer()).named_children()] == [
        "0", "norm1", "1", "norm2",
    ]  # fmt: skip
    clash = nn.Sequential()
    clash.add_module("recipe", nn.Linear(8, 8))
    assert list(opfuser.from_torch(clash).state_dict()) == ["0.weight", "0.bias"]


def test_it_is_fused() -> None:
    ours = opfuser.from_torch(layers(1))
    assert_fused(ours, torch.randn(4, WIDTH), forward={"forward_linear_bias_activation": 1})


def test_error_in_bf16_is_at_most_twice_torch_s() -> None:
    parts = nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.RMSNorm(64)
    original = nn.Sequential(*parts).bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    exact = results(copy.deepcopy(original).double(), x.detach().double().requires_grad_())
    found = [results(module, x) for module in (opfuser.from_torch(original), original)]
    assert_as_exact(*found, exact, floor=0.0)


def test_eps_of_norms_is_read() -> None:
    """Without one, RMSNorm of torch takes that of its arithmetic: fp32 for half precision."""
    assert opfuser.from_torch(nn.LayerNorm(4, eps=0.25))[0].eps == 0.25
    for dtype, low, high in ((torch.bfloat16, 0.02, 0.04), (F64, 0.99, 1.0)):
        norm, x = nn.RMSNorm(4, dtype=dtype), torch.full((1, 4), 1e-5, dtype=dtype)
        y = opfuser.from_torch(norm)(x)
        close([y], [norm(x)])
        assert torch.all((low < y) & (y < high))


# Training, evaluation, and what is around the conversion.


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_that_of_the_sequence_s_mode(training: bool) -> None:
    module = randomized(encoder_layer(0.5)).train(training)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = opfuser.from_torch(module)
    assert ours.training is module.training is training
    x = example("")
    same(module.eval(), ours.eval(), x)
    first, second = ours.train()(x), ours(x)
    assert not torch.equal(first, second)
    (attention,) = (m for m in ours.modules() if isinstance(m, opfuser.DotProductAttention))
    assert attention.dropout_p == 0.5
    (gone,) = opfuser.from_torch(nn.Dropout(1.0))(torch.ones(1, 3))
    assert not gone.any()
    assert opfuser.from_torch(nn.Dropout(1.0).eval())(torch.ones(3)).all()


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.GELU())
    ours = opfuser.from_torch(module)
    assert {p.device.type for p in ours.parameters()} == {"meta"}
    assert ours(torch.empty(3, WIDTH, device="meta")).shape == (3, 4)
    ours.to_empty(device="cpu")
    for op in ours:
        getattr(op, "reset_parameters", lambda: None)()
    assert torch.isfinite(ours(torch.ones(3, WIDTH))).all()


def test_parameters_are_shared_and_stay_as_they_are() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module[0].bias.requires_grad_(False)
    ours = opfuser.from_torch(module)
    assert [p.requires_grad for p in ours.parameters()] == [True, False]
    module.load_state_dict({name: torch.ones_like(p) for name, p in module.state_dict().items()})
    assert all(p.eq(1).all() for p in ours.parameters())
    ours.double()
    assert {p.dtype for p in module.parameters()} == {F64}
    frozen = randomized(encoder_layer()).eval().requires_grad_(False)
    x = example("").detach()
    close([opfuser.from_torch(frozen)(x)], [frozen(x)])


def test_copied_pickled_and_called_with_other_parameters() -> None:
    module, x = randomized(encoder_layer()), example("")
    masked = opfuser.from_torch(module, example=(x, None, PADDING))
    for ours, given in ((opfuser.from_torch(module), ()), (masked, (None, PADDING))):
        expected = ours(x, *given)
        for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            close([twin(x, *given)], [expected])
            assert not any(a is b for a, b in zip(twin.parameters(), ours.parameters()))
            with torch.no_grad():
                next(twin.parameters()).add_(1)
            assert not torch.allclose(twin(x, *given), expected)
        close([ours(x, *given)], [expected])
    ours = opfuser.from_torch(module)
    doubled = {name: 2 * p for name, p in ours.named_parameters()}
    y = functional_call(ours, doubled, x)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    close([y], [module(x)])


def test_operations_and_sequences_of_opfuser() -> None:
    linear, sequence = opfuser.Linear(4, 4), opfuser.Sequential(opfuser.ReLU())
    assert opfuser.from_torch(sequence) is sequence
    (same,) = opfuser.from_torch(linear)
    assert same is linear


def test_compiled() -> None:
    module, x = randomized(CONVERTED["layers"]()), example("")
    ours = opfuser.from_torch(module)
    torch.compiler.reset()  # Dynamo counts what other tests compiled
    same(module, torch.compile(ours, backend="eager", fullgraph=True), x)


# Examples.


MASKS: dict[str, dict[str, Any]] = {
    "causal": {"src_mask": CAUSAL, "is_causal": True},
    "hidden": {"src_mask": CAUSAL},
    "padding": {"src_key_padding_mask": PADDING},
    "both": {"src_key_padding_mask": PADDING, "src_mask": CAUSAL},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_are_arguments_as_of_the_module(masks: str, batch_first: bool) -> None:
    layer = randomized(encoder_layer(norm_first=batch_first, batch_first=batch_first))
    rows = (BATCH, LENGTH) if batch_first else (LENGTH, BATCH)
    x = torch.randn(*rows, WIDTH, dtype=F64, requires_grad=True)
    ours = opfuser.from_torch(layer, example={"src": x, **MASKS[masks]})
    given = {} if masks == "causal" else MASKS[masks]
    for training in (True, False):
        layer.train(training)
        close([ours(x, **given)], [layer(x, **MASKS[masks])])
        same(layer.train(training), ours if given else lambda y, **_: ours(y), x, **MASKS[masks])
    fewer = {name: mask[:2] if "key" in name else mask for name, mask in MASKS[masks].items()}
    x = (x[:2] if batch_first else x[:, :2]).detach()
    close([ours(x, **(fewer if given else {}))], [layer(x, **fewer)])


def test_other_arguments_than_those_of_the_example_are_refused() -> None:
    layer = randomized(encoder_layer())
    x = example("")
    ours = opfuser.from_torch(layer, example={"src": x, "src_key_padding_mask": PADDING})
    close([ours(x, None, PADDING)], [ours(x, src_key_padding_mask=PADDING)])
    added = torch.zeros(BATCH, LENGTH, dtype=F64)
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ((x,), {}), ((x, CAUSAL, PADDING), {}), ((x, None, added), {}), ((), {}),
        ((x, None, PADDING, True), {}), ((x[0], None, PADDING), {}),
    ]  # fmt: skip
    for args, kwargs in wrong:
        with pytest.raises(ArgumentError, match="called with arguments of the structure of its ex"):
            ours(*args, **kwargs)


@pytest.mark.parametrize("name", ["nanoGPT", "timm", "llama2.c", "Meta's Llama"])
def test_blocks_that_people_write(name: str) -> None:
    """Of which the last two are given tables of rotary positions."""
    module, size = own_blocks()[name].module, own_blocks()[name].args[0].shape[-1]
    x = torch.randn(11, 13, size, dtype=F64, requires_grad=True)
    angles = torch.randn(13, 4, dtype=F64)
    tables = {
        "llama2.c": (angles.cos(), angles.sin()),
        "Meta's Llama": (torch.polar(torch.ones_like(angles), angles), angles),
    }.get(name, ())
    ours = opfuser.from_torch(module, example=(x, *tables) if tables else None)
    for training in (True, False):
        same(module.train(training), ours.train(training), x, *tables)
    fewer = x[:5, :9].detach().requires_grad_()
    same(module, ours, fewer, *(t[:9] for t in tables))


class Masked(Computes):
    """Attention with any mask, which is added to the scores."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: x)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, mask)
        out: Tensor = x + self.square(y.transpose(1, 2).flatten(2))
        return out


def test_masks_of_which_gradients_are_not_exact() -> None:
    module = randomized(Masked())
    x = torch.randn(7, LENGTH, WIDTH, dtype=F64, requires_grad=True)
    mask = torch.randn(7, 1, LENGTH, LENGTH, dtype=F64)
    ours = opfuser.from_torch(module, example={"mask": mask, "x": x})
    same(module, ours, x, mask)
    same(module, ours, x[:2].detach().requires_grad_(), mask[:2])
    mask[1, :, 2] = torch.finfo(F64).min
    with torch.no_grad():
        close([ours(x, mask)], [module(x, mask)])
    with pytest.raises(NotSupportedError, match="all hidden by large numbers are not exact"):
        ours(x, mask)


def test_of_one_tensor_dtype_rank_and_width_count() -> None:
    module = randomized(nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU()))
    for given in (torch.empty(4, 4, WIDTH, dtype=F64), (torch.empty(1, WIDTH, dtype=F64),)):
        same(module, opfuser.from_torch(module, example=given), example(""))
    norm = nn.LayerNorm(6, elementwise_affine=False)
    with pytest.raises(ArgumentError, match=r"tensor of 11 x 13 x 6 it computes|Received: LayerN"):
        opfuser.from_torch(nn.LayerNorm(7, elementwise_affine=False))
    x = torch.randn(2, 6)
    close([opfuser.from_torch(norm, example=x)(x)], [norm(x)])


def test_examples_that_do_not_fit() -> None:
    layer = encoder_layer().float()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(ArgumentTypeError) as error:
        opfuser.from_torch(layer, example={"source": x})
    assert str(error.value).startswith(
        "An example has the arguments of one call of the module (from_torch). Received: source: "
    )
    with pytest.raises(ArgumentError, match="Each tensor of an example is there once"):
        opfuser.from_torch(layer, example=(x, x))
    with pytest.raises(ArgumentError, match="Pass tensors of other sizes, and masks of bool"):
        opfuser.from_torch(layer, example=(x, torch.zeros(LENGTH, LENGTH)))
    square = torch.randn(LENGTH, LENGTH, WIDTH)
    with pytest.raises(ArgumentError, match="do differ, and are neither 1 nor sizes of parameters"):
        opfuser.from_torch(layer, example=(square, CAUSAL))


def test_children_that_are_given_other_inputs_are_refused() -> None:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, batch_first=True)
    given = torch.randn(11, 13, WIDTH), torch.randn(11, 9, WIDTH)
    with pytest.raises(
        NotSupportedError, match="computes linear in 'multihead_attn', which attention reads"
    ):
        opfuser.from_torch(layer, example=given)
    cross = own_blocks()["cross"]
    with pytest.raises(NotSupportedError, match="attends to another input, which no operation of"):
        opfuser.from_torch(cross.module, example=cross.args)


def test_where_no_call_can_be_made() -> None:
    with pytest.raises(ArgumentError) as error:
        opfuser.from_torch(nn.TransformerDecoderLayer(WIDTH, HEADS, 16))
    assert str(error.value) == (
        "Without example=, a module is called with one tensor as wide as its parameters, which has "
        "to work (from_torch). Received: TransformerDecoderLayer: missing a required argument: "
        "'memory'. Pass the arguments of one call as example=, unless its forward depends on "
        "values."
    )
    with pytest.raises(ArgumentError, match="with a tensor of 11 x 13 x 2 it computes conv1d"):
        opfuser.from_torch(nn.Conv1d(3, 4, 2))
    with pytest.raises(ArgumentError, match="11 x 13 x 8 it computes __bool__"):
        opfuser.from_torch(Computes(lambda m, x: x if x.sum() > 0 else m.square(x)))


# What is refused, and why.


def in_two_modes() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    module[1].eval()
    return module


def with_call_of_its_own() -> nn.Module:
    module = layers(1)
    module[0]._call_impl = torch.sin  # type: ignore[method-assign]
    return module


class Sliced(nn.Module):
    """Chooses among layers, in a list and in a sequence, by a function of its own."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.chain, self.function = nn.Sequential(*self.layers), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "operation": (lambda: Computes(lambda m, x: m.square(x).cos()), "computes cos"),
    "nothing else": (lambda: nn.Sequential(nn.Hardswish()), "computes hardswish in '0'"),
    "leaf": (nn.Hardswish, "computes hardswish"),
    "two results": (lambda: Computes(lambda m, x: (m.up(x), x)), "returns a tuple"),
    "hook": (lambda: hooked(nn.Linear(WIDTH, WIDTH)), "carries hooks or a forward of its own"),
    "forward": (lambda: wrapped(nn.Linear(WIDTH, WIDTH)), "carries hooks or a forward of its own"),
    "call": (with_call_of_its_own, "has '_call_impl' replaced in '0'"),
    "modes": (in_two_modes, r"has '1' in another mode: call train\(\) or eval\(\) before"),
    "dropout always": (
        lambda: Computes(lambda m, x: F.dropout(m.square(x), 0.5)), "else in evaluation, besides",
    ),
    "evaluation": (
        lambda: Computes(lambda m, x: m.square(x) if m.training else m.square(2 * x)),
        "else in evaluation, besides dropout",
    ),
    "without gradients": (
        lambda: Computes(lambda m, x: m.square(x if torch.is_grad_enabled() else 2 * x)),
        "computes something else without gradients",
    ),
    "sizes in evaluation": (
        lambda: Computes(lambda m, x: m.square(x if m.training or len(x) > 4 else 2 * x)),
        "decides by sizes, for 11 x 13 x 8 entries that",
    ),
    "rank": (
        lambda: Computes(lambda m, x: m.square(x if x.dim() == 3 else 2 * x)),
        "computes something else of 11 x 8 entries",
    ),
    "a dimension of one entry": (
        lambda: nn.Sequential(nn.Flatten(1), nn.Linear(WIDTH, 4)), "returns another dtype or shape",
    ),
    "a dimension of one entry that is dropped": (
        lambda: Computes(lambda m, x: m.square(x.squeeze(-2))), "another dtype or shape",
    ),
    "width": (
        lambda: Computes(lambda m, x: x * x.shape[-1]), "something else of 11 x 13 x 16 entries",
    ),
    "sizes": (
        lambda: Computes(lambda m, x: m.square(x) if x.shape[0] > 4 else x),
        r"decides by sizes, for 11 x 13 x 8 entries that s\[0\] > 4",
    ),
    "a size as a factor": (
        lambda: Computes(lambda m, x: m.square(x) * x.shape[1]), r"entries that s\[1\] == 13",
    ),
    "a slice of a list by a size": (
        lambda: Sliced(lambda m, x: nn.Sequential(*m.layers[: x.shape[1] // 8])(x)),
        r"decides by sizes, for 11 x 13 x 8 entries that \(s\[1\] // 8\) == 1",
    ),
    "a slice of a sequence by a size": (
        lambda: Sliced(lambda m, x: m.chain[x.shape[0] // 8 :](x)),
        r"decides by sizes, for 11 x 13 x 8 entries that \(s\[0\] // 8\) == 1",
    ),
    "a slice by the batch": (
        lambda: Sliced(lambda m, x: m.chain[: x.shape[0]](x)), r"entries that s\[0\] == 11",
    ),
    "its input is written": (lambda: Computes(lambda m, x: m.square(m.relu(x))), "'relu' write to"),
    "complex": (lambda: nn.Sequential(nn.Linear(3, 3, dtype=torch.complex64)), "in torch.complex"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sequence_is_refused_with_operation_and_place(name: str) -> None:
    make, why = REFUSED[name]
    module = make()
    given = torch.randn(2, 5, 3, dtype=torch.complex64) if name == "complex" else None
    flags = [m.training for m in module.modules()]
    with pytest.raises(NotSupportedError, match=why) as error:
        opfuser.from_torch(module, example=given)
    text = str(error.value)
    assert text.startswith(
        "opfuser.from_torch converts a module that is one sequence of operations. Received: "
        f"{type(module).__name__}, which "
    )
    assert text.endswith("opfuser.apply(model) has sequences compute those of its parts that are.")
    assert [m.training for m in module.modules()] == flags


def test_attention_of_other_ranks_is_refused_by_the_sequence() -> None:
    """Where torch's layer attends in one sequence without a batch."""
    for batch_first in (True, False):
        ours = opfuser.from_torch(encoder_layer(batch_first=batch_first))
        for shape in ((LENGTH, WIDTH), (2, BATCH, LENGTH, WIDTH)):
            with pytest.raises(opfuser.errors.InputError):
                ours(torch.randn(shape))


def test_modes_that_a_module_sets_itself() -> None:
    class Frozen(nn.Dropout):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    with pytest.raises(NotSupportedError, match="which has a train or eval of its own in '1'"):
        opfuser.from_torch(nn.Sequential(nn.Linear(8, 8), Frozen(0.5)).eval())


def test_a_class_that_somebody_has_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(module: nn.Linear, x: Tensor) -> Tensor:
        return 2 * F.linear(x, module.weight, module.bias)

    monkeypatch.setattr(nn.Linear, "forward", doubled)
    module = randomized(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)))
    same(module, opfuser.from_torch(module), example(""))


def test_nothing_but_modules_is_converted() -> None:
    with pytest.raises(ArgumentTypeError) as error:
        opfuser.from_torch("linear")  # type: ignore[arg-type]
    assert str(error.value) == "Modules are converted (from_torch). Received: str."


@pytest.mark.gpu
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(norm_first: bool, dtype: torch.dtype) -> None:
    """Error at most twice torch's, with a mask; of the output and of all gradients together."""
    layer, x = randomized(encoder_layer(norm_first=norm_first)), example("")
    exact = wrt(layer, x, layer(x, None, PADDING))
    moved = copy.deepcopy(layer).to("cuda", dtype)
    there, padding = x.detach().to("cuda", dtype).requires_grad_(), PADDING.cuda()
    ours = opfuser.from_torch(moved, example=(there, None, padding))
    errors = [
        sum((t.double().cpu() - right).norm() ** 2 for t, right in zip(found, exact)) ** 0.5
        for found in (wrt(moved, there, m(there, None, padding)) for m in (ours, moved))
    ]
    assert errors[0] <= 2 * errors[1]
