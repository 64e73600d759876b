"""The loss of a language model computed by its head's sequence, so that no logits are stored."""

from __future__ import annotations

import copy
import types
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser import CrossEntropy, Linear, Plan, Sequential

from . import leaves
from .forwards import Fallback, Forward, Refusal
from .reading import Reader, Refused
from .structures import Built
from .verification import close, undisturbed

__all__ = ["LossForward", "has_loss"]

_IGNORED = -100
_CLASSES, _TOKENS = 13, 5
_LOGIT = 10.0  # so that a cap counts


class _Parts(NamedTuple):
    """A language model.

    Attributes:
        base: what makes the hidden states.
        head: the linear module that makes logits.
    """

    base: nn.Module
    head: nn.Module


class _Found(NamedTuple):
    """What a comparison has found.

    Attributes:
        output: the class of what the model returns.
    """

    output: type[Any]


def has_loss(module: nn.Module, names: list[str]) -> bool:
    """Whether a module may be a language model with a loss of its own."""
    return {"labels", "logits_to_keep"} <= set(names) and len(module._modules) == 2


class LossForward(Forward):
    """The forward of a language model, which in training with labels returns no logits.

    The head and the cross entropy are one sequence, whose fusion computes them for some tokens at a
    time.
    """

    def _replaced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._arguments(args, kwargs)
        labels = given.pop("labels", None)
        if labels is None or not self.module.training:
            return self.untouched(*args, **kwargs)
        self._check_arguments(given)
        built = self._with_reduction(given.get("num_items_in_batch") is not None)
        parts = _parts(Reader(), self.module)
        given.pop("logits_to_keep", None)
        made = parts.base(**given)
        loss = _loss(built, made[0], labels, given.get("num_items_in_batch"))
        rest = {n: made.get(n) for n in ("past_key_values", "hidden_states", "attentions")}
        found = self.shared.verified.once(_key(self.module), lambda: _compare(self.module, parts))
        return found.output(loss=loss, logits=None, **rest)

    def built(self, causal: bool | None = None) -> Built:
        """The sequence of head and loss."""
        return self._with_reduction(False)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = tuple(self.__signature__.parameters)
        return {**dict(zip(names, args)), **kwargs}

    def _check_arguments(self, given: dict[str, Any]) -> None:
        """Raises Fallback where more than the loss is asked for."""
        config = getattr(self.module, "config", None)
        if given.get("return_dict", getattr(config, "return_dict", True)) is False:
            raise Fallback("a tuple is asked for")
        for name in ("logits_to_keep", "shift_labels", "output_router_logits"):
            value = given.get(name)
            if isinstance(value, Tensor) or value:
                raise Fallback(f"{name} is given")
        if getattr(config, "output_router_logits", False):
            raise Fallback("the configuration asks for output_router_logits")

    def _with_reduction(self, summed: bool) -> Built:
        return super().built(summed)

    def _build(self, causal: bool | None) -> Built | Refusal:
        read = Reader()
        try:
            parts = _parts(read, self.module)
            self.shared.verified.once(_key(self.module), lambda: _compare(self.module, parts))
        except Refused as refused:
            return Refusal(str(refused), Reader.of_all(self.module))
        return _build(read, parts.head, bool(causal))

    def plan(self) -> Plan:
        first = next(self.module.parameters())
        like: Any = {"device": first.device}
        with torch.enable_grad():
            built = self.built()
            weight = next(built.sequence.parameters())
            x = torch.empty(1, 2, built.features, dtype=weight.dtype, requires_grad=True, **like)
            return built.sequence.plan(x, torch.empty(1, 2, dtype=torch.int64, **like))


def _key(module: nn.Module) -> Hashable:
    """All that its loss may depend on."""
    scalars = (bool, int, float, str, type(None))
    config = getattr(module, "config", None)
    owns = [getattr(each, "__dict__", {}) for each in (module, config)]
    values = [sorted((n, v) for n, v in own.items() if isinstance(v, scalars)) for own in owns]
    return "loss", type(module), repr(values)


def _parts(read: Reader, module: nn.Module) -> _Parts:
    children = list(read.children(module).values())
    heads = [child for child in children if leaves.is_linear(child)]
    if len(children) != 2 or len(heads) != 1:
        raise Refused("has more than a model and a linear head")
    (base,) = [child for child in children if child is not heads[0]]
    read.inner(heads[0])
    if leaves.linear(heads[0]) is heads[0]:
        raise Refused("has a head that has to be called")
    return _Parts(base, heads[0])


def _build(read: Reader, head: nn.Module, summed: bool) -> Built:
    op = leaves.linear(head)
    assert isinstance(op, Linear)
    loss = CrossEntropy(_IGNORED, reduction="sum" if summed else "mean")
    return Built(Sequential(op, loss), read, leaves.sizes_of(head)[0])


def _loss(built: Built, hidden: Tensor, labels: Tensor, count: Any) -> Tensor:
    """The mean over the labels behind each token; or over ``count`` of them."""
    targets = F.pad(labels, (0, 1), value=_IGNORED)[..., 1:].contiguous().to(hidden.device)
    loss: Tensor = built.sequence(hidden, targets)
    if count is None:
        return loss
    return loss / (count.to(loss.device) if isinstance(count, Tensor) else count)


class _Hidden(nn.Module):
    """In place of the model below the head: returns hidden states that it holds."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(self.hidden)


class _Output(types.SimpleNamespace):
    """What a model returns, of which all but the hidden states is None."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _compare(module: nn.Module, parts: _Parts) -> _Found:
    """Raises Refused unless the model's loss is the cross entropy of its head's output."""
    with undisturbed():
        features = leaves.sizes_of(parts.head)[0]
        head = nn.Linear(features, _CLASSES, bias=getattr(parts.head, "bias", None) is not None)
        nn.init.normal_(head.weight, std=_LOGIT * features**-0.5)
        hidden = torch.randn(2, _TOKENS, features)
        memo: dict[int, Any] = {id(parts.base): _Hidden(hidden), id(parts.head): head}
        twin = copy.deepcopy(module, memo)
        twin.__dict__.pop("forward", None)
        for holder in (twin, getattr(twin, "config", None)):
            if "vocab_size" in getattr(holder, "__dict__", {}):
                holder.vocab_size = _CLASSES  # type: ignore[union-attr]
        labels = torch.tensor([[3, 1, -100, 12, 0], [4, -100, -100, 2, 7]])
        for count in (None, torch.tensor(5)):
            given = {} if count is None else {"num_items_in_batch": count}
            try:
                out = type(twin).forward(twin, input_ids=labels.abs(), labels=labels, **given)
                kind, expected = type(out), out.loss
                made = dict.fromkeys(("past_key_values", "hidden_states", "attentions"))
                kind(loss=expected, logits=None, **made)
            # Whatever a model of somebody else raises when it is called so.
            except Exception as error:  # noqa: BLE001
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                raise Refused(f"could not be run on small hidden states: {text}") from None
            built = _build(Reader(), head, count is not None)
            if not close(_loss(built, hidden, labels, count), expected):
                raise Refused("has another loss than the cross entropy of its head's output")
    return _Found(kind)
