"""Comparison of sequences with the modules that they replace, on small inputs."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import OpfuserError

from . import leaves, structures
from .reading import Reader, Refused
from .structures import Built, Choice, Rotary

__all__ = ["Verified", "close", "run", "tables_of", "undisturbed"]

# Relative to the largest entry of the output. The arithmetic of both is fp32, which leaves 1e-6;
# the two kinds of GELU differ by 1e-3.
_TOLERANCE = 1e-4
# Inputs are small, so that an epsilon counts.
_SMALL = 0.03
# Scores of attention become about its square, so that a cap counts: in a layer, whose norm brings
# inputs to 1. Those of attention alone are that large, too.
_GAIN = 3.0
_SCALES = {"attention": (_SMALL, 1.0)}
_BATCH, _TOKENS = 2, 5
_OF_ONE_INPUT = "norm", "mlp", "experts"
_STATE = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


class Verified:
    """What modules compute, found out once for all that are of one structure.

    Attributes:
        tables: the kinds of rotary tables that the model makes.
    """

    def __init__(self, tables: tuple[Rotary, ...] = ()) -> None:
        self.tables = tables
        self._known: dict[Hashable, Any] = {}

    def choice(self, kind: str, module: nn.Module) -> Choice:
        """What a module is, as its forward has shown.

        Raises:
            Refused: no sequence computes what it does.
        """
        found: Choice = self.once((kind, _structure(module)), lambda: self._choose(kind, module))
        return found

    def of_norm(self, module: nn.Module, eps: float) -> str:
        """As of :class:`structures.Formulas`."""
        found: str = self.once(
            ("norm formula", eps, _structure(module)), lambda: _norm_formula(module, eps)
        )
        return found

    def of_activation(self, module: nn.Module) -> str:
        """As of :class:`structures.Formulas`."""
        found: str = self.once(
            ("activation formula", _structure(module)), lambda: _activation_formula(module)
        )
        return found

    def once(self, key: Hashable, find: Callable[[], Any]) -> Any:
        """What ``find`` returned, or refused, when it was first called for this key."""
        if key not in self._known:
            try:
                self._known[key] = find()
            except Refused as refused:
                self._known[key] = refused
        known = self._known[key]
        if isinstance(known, Refused):
            raise Refused(*known.args)
        return known

    def _choose(self, kind: str, module: nn.Module) -> Choice:
        why = ""
        with undisturbed():
            for choice in structures.choices(kind, module, self.tables):
                refusal = self._refusal(kind, module, choice)
                if not refusal:
                    return choice
                why = why or refusal
        raise Refused(why)

    def _refusal(self, kind: str, module: nn.Module, choice: Choice) -> str:
        try:
            structures.build(kind, module, choice, self, causal=None)
            self._compare(kind, module, choice)
        except Refused as refused:
            return str(refused)
        return ""

    def _compare(self, kind: str, module: nn.Module, choice: Choice) -> None:
        """Raises Refused unless the sequence computes what the module does."""
        twin = _random_copy(module)
        twin.eval()
        for p in _dropped(twin):
            for with_mask, scale in itertools.product((False, True), _SCALES.get(kind, (_SMALL,))):
                built = structures.build(
                    kind, twin, choice, self, causal=False if with_mask else None
                )
                built.follow()
                given = _arguments(kind, twin, built, with_mask, scale)
                try:
                    expected = type(twin).forward(twin, **given)
                # Whatever a module of somebody else raises when it is called so.
                except Exception as error:  # noqa: BLE001
                    text = f"{type(error).__name__}: {error}".splitlines()[0]
                    raise Refused(f"could not be run on a small input: {text}") from None
                if isinstance(expected, tuple) and kind not in _OF_ONE_INPUT:
                    expected = expected[0]
                try:
                    y = run(built, **_own(given, twin, choice))
                except OpfuserError as error:
                    text = str(error).split(". ")[0]
                    raise Refused(f"does not fit together as a sequence: {text}") from None
                if not close(y, expected):
                    what = f"with dropout by {p} " if p else ""
                    raise Refused(f"computes something else {what}than a sequence of its modules")
                if kind in _OF_ONE_INPUT:
                    break


def run(
    built: Built,
    x: Tensor,
    mask: Tensor | None = None,
    tables: Tensor | None = None,
    cache: Any | None = None,
) -> Tensor:
    """The output of a sequence, with what its attention and its rotation are given."""
    kwargs: dict[Any, dict[str, Any]] = {}
    if built.turns is not None:
        kwargs[built.turns[0]] = {"tables": tables}
    if mask is not None or cache is not None:
        assert built.attend is not None
        kwargs[built.attend] = {"mask": mask, "cache": cache}
    y: Tensor = built.sequence(x, op_kwargs=kwargs) if kwargs else built.sequence(x)
    return y


def tables_of(cos: Tensor, sin: Tensor, rotary: Rotary) -> Tensor:
    """Tables as a RotaryEmbedding takes them, of those (batch or 1, sequence, size) of a model."""
    half = slice(0, None, 2) if rotary.side_by_side else slice(rotary.size // 2)
    both = torch.stack([cos[..., half], sin[..., half]])
    return both.flatten(1, 2).to(torch.promote_types(both.dtype, torch.float32))


def _structure(module: nn.Module) -> Hashable:
    """All that its forward may depend on, besides the values of parameters."""
    out: list[Hashable] = []
    for name, inner in module.named_modules():
        own = inner.__dict__
        values = tuple(
            (key, value)
            for key, value in own.items()
            if isinstance(value, (bool, int, float, str, type(None))) and key not in _NO_STRUCTURE
        )
        shapes = tuple(
            (key, None if p is None else tuple(p.shape)) for key, p in inner._parameters.items()
        )
        how = getattr(own.get("config"), "_attn_implementation", None)
        out.append((name, type(inner), values, shapes, how))
    return tuple(out)


_NO_STRUCTURE = frozenset("training layer_idx gradient_checkpointing _is_hf_initialized".split())


class _StandIn(nn.Module):
    """In place of a module that is called as it is, whose structure does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.sin()


def _random_copy(module: nn.Module) -> nn.Module:
    """A copy in fp32 on the CPU with random parameters, whose inner modules are simple ones.

    Linear modules become those of torch, whatever wraps or stores them, but for those with
    transposed weights; modules that are called as they are become a function of as many features.
    """
    memo: dict[int, Any] = {}
    single = not module._modules or leaves.experts_of(module) is not None
    found = None if single else leaves.leaves_of(Reader(), module)
    for inner in module.modules():
        config = inner.__dict__.get("config")
        if config is not None:
            memo[id(config)] = config
    for leaf in [] if found is None else found.linears:
        if leaves.is_transposed(leaf.module):
            continue
        sizes = leaves.sizes_of(leaf.module)
        bias = getattr(leaf.module, "bias", None) is not None
        memo[id(leaf.module)] = nn.Linear(*sizes, bias=bias, device="meta")
    for leaf in [] if found is None else found.unknown:
        memo[id(leaf.module)] = _StandIn()
    twin = copy.deepcopy(module, memo)
    twin.to(dtype=torch.float32).to_empty(device="cpu")
    for inner in twin.modules():
        inner.__dict__.pop("forward", None)
        if getattr(inner, "gradient_checkpointing", False):
            inner.gradient_checkpointing = False  # type: ignore[assignment]
        for name in _STATE:
            getattr(inner, name).clear()
        taken = 0 if leaves.is_transposed(inner) else -1
        for p in inner._parameters.values():
            if p is not None:
                nn.init.normal_(p, std=_GAIN * p.shape[taken] ** -0.5 if p.dim() > 1 else 1.0)
    return twin


def _dropped(twin: nn.Module) -> Iterator[str]:
    """Sets the copy to evaluation, and then to training with one kind of dropout after the other.

    With a probability of 1 the results of dropout are certain.
    """
    yield ""
    places = [
        (inner, name)
        for inner in twin.modules()
        for name, value in inner.__dict__.items()
        if isinstance(value, float) and value > 0 and _is_dropout(inner, name)
    ]
    for module, name in places:
        setattr(module, name, 0.0)
    twin.train()
    for module, name in places:
        setattr(module, name, 1.0)
        yield name
        setattr(module, name, 0.0)


def _is_dropout(module: nn.Module, name: str) -> bool:
    return "dropout" in name or (isinstance(module, nn.Dropout) and name == "p")


def _arguments(
    kind: str, twin: nn.Module, built: Built, with_mask: bool, scale: float
) -> dict[str, Any]:
    """What the copy's forward is called with."""
    names = list(inspect.signature(type(twin).forward).parameters)[1:]
    given: dict[str, Any] = {names[0]: scale * torch.randn(_BATCH, _TOKENS, built.features)}
    if kind in _OF_ONE_INPUT:
        return given
    given["attention_mask"] = None
    if with_mask:
        seen = torch.rand(_BATCH, 1, _TOKENS, _TOKENS) < 0.6
        seen |= torch.eye(_TOKENS, dtype=torch.bool)
        how = getattr(getattr(built.holder, "config", None), "_attn_implementation", "sdpa")
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
        given["attention_mask"] = seen if how == "sdpa" else mask
    if built.turns is not None:
        tables = built.turns[1]
        angles = torch.randn(_BATCH, _TOKENS, tables.size // 2)
        halves = torch.cat([angles, angles], -1)
        both = angles.repeat_interleave(2, -1) if tables.side_by_side else halves
        given["position_embeddings"] = both.cos(), both.sin()
    return given


def _own(given: dict[str, Any], twin: nn.Module, choice: Choice) -> dict[str, Any]:
    """The same arguments for the sequence."""
    x, *_ = given.values()
    own = {"x": x, "mask": given.get("attention_mask")}
    if choice.rotary is not None:
        cos, sin = given["position_embeddings"]
        own["tables"] = tables_of(cos, sin, choice.rotary)
    return own


def close(y: Tensor, expected: Any) -> bool:
    """Whether y is what it should be, up to rounding."""
    if not isinstance(expected, Tensor) or y.shape != expected.shape:
        return False
    bound = _TOLERANCE * float(expected.abs().max())
    return bool(((y - expected).abs() <= bound).all())


def _norm_formula(module: nn.Module, eps: float) -> str:
    with undisturbed():
        twin = _random_copy(module).eval()
        weight: Any = twin.weight
        x = _SMALL * torch.randn(7, weight.shape[0])
        x[0] += 1.0
        expected = _result(twin, x)
        for name, make in leaves.NORMS.items():
            op = make(weight.shape[0], eps)
            if (name == "layer") == ("bias" in twin._parameters):
                op.__dict__["_parameters"] = twin._parameters
                if close(op(x), expected):
                    return name
    raise Refused("is no RMSNorm or LayerNorm over the last dimension")


def _activation_formula(module: nn.Module) -> str:
    with undisturbed():
        x = torch.linspace(-6, 6, 193).reshape(1, -1)
        expected = _result(module, x)
        for name, make in leaves.ACTIVATIONS.items():
            if isinstance(expected, Tensor) and expected.shape == x.shape:
                close = torch.isclose(make().reference(x), expected, rtol=1e-5, atol=1e-6)
                if bool(close.all()):
                    return name
    kind = type(module)
    raise Refused(f"has the activation {kind.__name__}, for which there is no operation")


def _result(module: nn.Module, x: Tensor) -> Any:
    try:
        return type(module).forward(module, x)
    # Whatever a module of somebody else raises when it is called so.
    except Exception:  # noqa: BLE001
        return None


@contextmanager
def undisturbed() -> Iterator[None]:
    """Plain fp32 without gradients, whatever surrounds it; random numbers are as they were."""
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(torch.random.fork_rng(devices=[]))
        enter(torch.device("cpu"))
        enter(torch.no_grad())
        enter(torch.autocast("cpu", enabled=False))
        enter(opfuser.autocast(enabled=False))
        torch.default_generator.manual_seed(0)
        yield
