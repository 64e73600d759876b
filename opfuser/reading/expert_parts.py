"""What the ways have in common in which mixtures of experts are written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch

from .activations import activations_in, gate_of, halves_of
from .dataflow import Node, Value
from .kept import KeptError
from .operations import Activation, ExpertsLinear, Gated
from .products import product_of
from .values import Values, computed


class Mixed(NamedTuple):
    """A sum over experts: ``y = Σ_j w_j down(f(up(x)))``, w and the experts of shape (rows, j)."""

    x: Value
    indices: Value
    weights: Value
    top_k: int
    up: ExpertsLinear
    activation: Activation | Gated
    down: ExpertsLinear


class Form:
    """How rows that are computed by different experts are written.

    Class attributes:
        multiplies_whole: whether products take the weights of all experts at once.

    Attributes:
        values: of the dataflow.
        experts: the expert of each row.
        written: nodes with an effect that belong to it.
    """

    multiplies_whole: ClassVar[bool] = False

    def __init__(self, values: Values, experts: Any) -> None:
        self.values, self.experts = values, experts
        self.written: tuple[Node, ...] = ()

    def rows(self, v: Value, top_k: int) -> Value | None:
        """What rows are copies of, each of so many."""
        raise NotImplementedError

    def product(self, v: Value) -> tuple[Value, Value, bool] | None:
        """(x, weights of all experts, whether these are stored as (in, out)) of a product."""
        raise NotImplementedError

    def is_expert(self, index: Any) -> bool:
        """Whether parameters that are indexed so are those of the expert of each row."""
        return isinstance(index, Value) and stripped(self.values, index) is self.experts

    def mixed(
        self, out: Value, weights: Value, top_k: int, indices: Value | None = None
    ) -> Mixed | None:
        """The experts that compute rows, which are summed with weights; None if they are none."""
        down = self.linear(out)
        if down is None:
            return None
        activation, hidden = _activation_of(self.values, down[1])
        up = self.linear(hidden)
        x = None if up is None else self.rows(up[1], top_k)
        if up is None or x is None or up[0].count != down[0].count:
            return None
        indices = self.experts if indices is None else indices
        return Mixed(x, indices, weights, top_k, up[0], activation, down[0])

    def linear(self, v: Value) -> tuple[ExpertsLinear, Value] | None:
        """The linear functions that rows are the results of, and their argument."""
        op, args = self.values.term(v)
        bias = None
        if op == "add" and isinstance(args[1], Value):
            for inner, added in (args, args[::-1]):
                bias = self.parameter(added)
                if bias is not None:
                    v = inner
                    break
        found = self.product(v)
        if found is None:
            return None
        x, weight, transposed = found
        if len(weight.shape) != 3 or weight.origin != "parameter":
            return None
        count, *features = weight.shape
        out_features, in_features = features[::-1] if transposed else features
        if bias is not None and bias.shape != (count, out_features):
            return None
        if any(t.meta.dtype not in self.values.dtypes for t in (weight, self.values.peel(v))):
            return None
        name = None if bias is None else bias.name
        sizes = count, in_features, out_features
        whole = transposed and self.multiplies_whole
        return ExpertsLinear(weight.name, name, *sizes, transposed, whole), x

    def parameter(self, v: Any) -> Value | None:
        """The parameter of all experts that a value has the entries of."""
        if not isinstance(v, Value):
            return None
        op, args = self.values.term(v)
        if op != "__getitem__" or args[0].origin != "parameter" or not self.is_expert(args[1]):
            return None
        whole: Value = args[0]
        return whole


def _activation_of(values: Values, v: Value) -> tuple[Activation | Gated, Value]:
    """An activation between two linear functions, gated or not, and its argument.

    Raises:
        KeptError: it is none that is known.
    """
    product = product_of(values, v, None)
    for found in activations_in(values, product):
        if found.rest.factor != 1:
            continue
        if not found.rest.values:
            return found.activation, found.x
        if len(found.rest.values) > 1:
            continue
        gated, gate, up = gate_of(values, found)
        halves = halves_of(values, gate, up)
        if halves is None:
            continue
        whole, order = halves
        columns = torch.arange(whole.shape[-1])
        for interleaved in (False, True):
            if torch.equal(order.view(2, -1).T.flatten() if interleaved else order, columns):
                return replace(gated, interleaved=interleaved), whole
    raise KeptError(computed(v, "has experts that compute"))


def stripped(values: Values, v: Value) -> Value:
    """The value whose entries these are, in the same order."""
    v = values.peel(v)
    while v.node is not None and values.term(v).op in ("reshape", "flatten"):
        v = values.peel(values.term(v).args[0])
    return v
