"""Optimizers for weights that are not stored in fp32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .basic._master import Pair, WriteDetector
from .basic._whole_gradient import WholeGradient
from .basic.basic_linear import BasicLinear
from .errors import ArgumentError, MasterWeightError, NotSupportedError
from .linear import Linear
from .quantization.weights import is_fp8, take_initial_value

__all__ = ["MasterWeights"]

_MASTER = "master_param"
_Groups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class MasterWeights(Optimizer):
    """Runs any torch optimizer on fp32 copies of parameters of lower precision.

    In each step, the optimizer updates the copies (the master weights of Micikevicius et al.,
    "Mixed Precision Training", arXiv:1710.03740) with the gradients of the model's parameters, and
    the copies are rounded to the parameters: to FP8, with scales from their current largest values,
    if a linear operation was constructed within :func:`opfuser.quantized_model_init`. Parameters in
    fp32 and fp64 and complex ones are optimized directly.

    Use it like the optimizer itself, with schedulers, ``torch.amp.GradScaler``,
    ``torch.distributed.checkpoint`` and ``clip_grad_norm_(model.parameters(), ...)``; copying,
    pickling and hooks work too. ``param_groups`` have the model's parameters, and ``state`` is
    keyed by them: the optimizer's state for each, and the copy as ``"master_param"``. The next step
    uses any changes made there. ``optimizer`` is the optimizer that updates the copies.

    The state of a parameter is created at its first update, and the copy starts with the value that
    the parameter has then, so you can load a model before. A value kept by
    ``preserve_high_precision_init_val=True`` is used instead if it rounds to the parameter's; the
    constructor takes it over and frees it.

    From then on, nothing else must write to the parameter. The next step detects every write that
    changes the version counter (as in-place operations do), replaced memory (``p.data = ...``,
    ``vector_to_parameters``), and a write through ``p.data`` that changes one of the elements that
    are compared: 32 to 64 of each parameter, spread over it, and of its scale in FP8. On a GPU,
    where no step waits for the device, the last kind is detected one or more steps later, when it
    has been overwritten, or by :meth:`state_dict`; and not while a graph is recorded or replayed.
    Writing the values of the rounded copy is not an error. After any other write, call
    :meth:`read_parameters` before the next step.

    If an operation has added to ``main_grad`` since the last step or :meth:`zero_grad`, as
    ``grad_added_to_main_grad`` says, the gradient is the sum of ``main_grad`` and ``grad``, to
    which other uses of the parameter contribute. The step sets the flag to False; the caller zeroes
    ``main_grad``. Modules of Transformer Engine leave uninitialized values in ``grad`` unless the
    parameter has ``zero_out_wgrad``: the gradient is then ``main_grad`` alone. ``clip_grad_norm_``
    only sees ``grad``: clip ``main_grad`` yourself.

    Parameters in FP8 get ``grad_dtype = None``, because ``torch.distributed.checkpoint`` sets zero
    gradients of the parameter's own dtype to create the state.

    Args:
        model: holds all weights in FP8 that are optimized. As with any optimizer, its parameters
            must stay the same objects: construct this after ``to_empty`` and
            ``load_state_dict(assign=True)``.
        optimizer_class: such as ``torch.optim.AdamW``.
        params: parameters or groups of them, as for any optimizer; None means all of the model.
        arguments: of ``optimizer_class``.

    Raises:
        ArgumentError: a parameter is on the meta device, or is in FP8 and not a weight of the
            model's linear operations; at a step, if groups lost or got parameters other than by
            :meth:`add_param_group`, or if ``"master_param"`` was set to a tensor of another shape.
        MasterWeightError: at a step, if a parameter was written to since the last one, if an
            operation has another parameter instead of a weight in FP8, or if the flag says that a
            gradient is in a ``main_grad`` that does not exist.
        NotSupportedError: with ``differentiable``; at a step of ``GradScaler``, if gradients are in
            ``main_grad``; and if the first update is recorded into a CUDA graph.
    """

    optimizer: Optimizer

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., Optimizer],
        params: _Groups | None = None,
        **arguments: Any,
    ) -> None:
        self._linears = _weights_in_fp8(model)
        self._names = {param: name for name, param in model.named_parameters()}
        self._pairs: dict[Tensor, Pair] = {}
        self._writes = WriteDetector()
        super().__init__(model.parameters() if params is None else params, dict(arguments))
        self.optimizer = optimizer_class(self._with_masters(self.param_groups), **arguments)
        self.defaults = self.optimizer.defaults
        self._share_options(self.optimizer.param_groups, self.param_groups)
        self._masters_were_made()

    def _with_masters(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups with masters in place of parameters, whose pairs are noted."""
        params = [param for group in groups for param in group["params"]]
        for param in params:  # before the first pair takes an initial value
            self._check_param(param)
        for param in params:
            if param not in self._pairs:
                self._pairs[param] = self._pair(param)
        return [
            {**group, "params": [self._pairs[param].master for param in group["params"]]}
            for group in groups
        ]

    def _check_param(self, param: nn.Parameter) -> None:
        received = f"{self._name_of(param)} of {param.dtype} and shape {tuple(param.shape)}"
        if param.is_meta:
            raise ArgumentError.explained(
                "Parameters have values, which masters begin with",
                where="MasterWeights",
                received=f"{received} on the meta device",
                remedy="Materialize the model first: to_empty replaces its parameters",
            )
        if is_fp8(param.dtype) and param not in self._linears:
            raise ArgumentError.explained(
                "Parameters in FP8 are weights of linear operations of the model",
                where="MasterWeights",
                received=received,
                remedy="Pass the model that has it",
            )

    def _name_of(self, param: nn.Parameter) -> str:
        return self._names.get(param, "a parameter")

    @torch.no_grad()
    def _pair(self, param: nn.Parameter) -> Pair:
        linear, name = self._linears.get(param), self._name_of(param)
        pair = Pair(param, name, param, linear, WholeGradient(param, name))
        if not (param.is_floating_point() and param.itemsize < 4):
            return pair
        initial = take_initial_value(param)
        values = pair.values() if initial is None else initial.to(param.device, torch.float32)
        return replace(pair, master=values, has_initial_value=initial is not None)

    @torch.no_grad()
    def _masters_were_made(self) -> None:
        """Takes over what the inner optimizer has made for new masters, besides what was lent."""
        if any(group.get("differentiable") for group in self.optimizer.param_groups):
            self._refuse_derivatives()
        self._of_master = {pair.master: pair for pair in self._pairs.values()}
        for param in self._linears.keys() & self._pairs.keys():
            param.grad_dtype = None
        made = [self._of_master[key] for key in self.optimizer.state if key in self._of_master]
        new = [pair for pair in made if pair.param not in self.state]
        self._take_state_back()
        self._begin(new)
        for pair in new:
            self._keep_master(pair)
        self._writes.note(new, besides_others=True)

    def _refuse_derivatives(self) -> None:
        for pair in self._pairs.values():
            if pair.apart:
                raise NotSupportedError.explained(
                    "Rounding a master to its parameter has no derivative",
                    where="MasterWeights",
                    received=f"differentiable=True; {pair.name} of {pair.param.dtype}",
                    remedy="Leave it off, or keep parameters in fp32",
                )

    @staticmethod
    def _share_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Whatever groups have besides parameters."""
        for ours, theirs in zip(source, target):
            theirs.update((key, value) for key, value in ours.items() if key != "params")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as for any optimizer; its parameters get master weights."""
        super().add_param_group(param_group)
        if "optimizer" not in self.__dict__:
            return
        pairs, groups = dict(self._pairs), self.optimizer.param_groups
        self._lend_state()
        try:
            self.optimizer.add_param_group(*self._with_masters(self.param_groups[-1:]))
            self._masters_were_made()
        except Exception:
            self.optimizer.state.clear()
            self._pairs = pairs
            del self.param_groups[-1]
            del groups[len(self.param_groups) :]
            raise
        self._share_options(groups[-1:], self.param_groups[-1:])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates master weights and parameters; ``closure`` as for the optimizer."""
        self._check_groups()
        self._check_weights()
        self._refuse_scaler()
        started = self._started()
        self._writes.check(started)
        others = set(self._pairs.values()).difference(started)
        self._share_options(self.param_groups, self.optimizer.param_groups)
        self._lend_state()
        try:
            if closure is None:
                self._take_gradients()
                self._begin(pair for pair in others if pair.master.grad is not None)
                loss = self.optimizer.step()
            else:
                self._begin(others)  # which of them have gradients is not known yet
                loss = self.optimizer.step(self._evaluation(closure))
        finally:
            self._give_back()
            self._take_state_back()
        self._store()
        self._writes.note(self._started())
        return loss

    def _check_groups(self) -> None:
        given = {param for group in self.param_groups for param in group["params"]}
        if given != self._pairs.keys():
            raise ArgumentError.explained(
                "Parameters come into groups by add_param_group, and stay there",
                where="MasterWeights",
                received=f"{len(given - self._pairs.keys())} that are new and"
                f" {len(self._pairs.keys() - given)} that are gone",
                remedy="Make another optimizer and load the state dict of this one",
            )

    def _check_weights(self) -> None:
        for pair in self._pairs.values():
            if pair.is_replaced():
                raise MasterWeightError.explained(
                    "A weight in FP8 stays the parameter that its optimizer was made for",
                    where="MasterWeights",
                    received=f"{pair.name}, in whose place the operation has another one",
                    remedy="Make the optimizer after what replaces parameters, as"
                    " load_state_dict(assign=True) does",
                )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by GradScaler: whether it leaves the scale to :meth:`step`."""
        return any(pair.gradient.is_in_main_grad for pair in self._pairs.values())

    def _refuse_scaler(self) -> None:
        told = [self.__dict__.pop(name, None) for name in ("found_inf", "grad_scale")]
        if told[0] is not None:
            raise NotSupportedError.explained(
                "GradScaler unscales and checks grad alone",
                where="MasterWeights",
                received="gradients in main_grad",
                remedy="Leave accumulate_into_main_grad off, or train in bf16, which needs no"
                " scale",
            )

    def _started(self) -> list[Pair]:
        """Pairs whose masters the state has, after their first update."""
        none: dict[str, Any] = {}
        return [
            pair
            for param, pair in self._pairs.items()
            if pair.apart and _MASTER in self.state.get(param, none)
        ]

    @staticmethod
    def _begin(pairs: Iterable[Pair]) -> None:
        """Sets masters before their first update."""
        for pair in pairs:
            if not pair.apart:
                continue
            if pair.param.is_cuda and torch.cuda.is_current_stream_capturing():
                raise NotSupportedError.explained(
                    "The first update of a parameter is none that a graph repeats",
                    where="MasterWeights",
                    received=f"{pair.name}, which has no state yet",
                    remedy="Take a step before the graph is recorded",
                )
            pair.begin()

    @torch.no_grad()
    def _lend_state(self) -> None:
        """Hands the state to the inner optimizer: keyed by masters, which it does not have."""
        lent = self.optimizer.state
        lent.clear()
        for key, kept in self.state.items():
            pair = self._pairs.get(key)
            if pair is None or not pair.apart:
                lent[key] = kept
                continue
            rest = dict(kept)
            if rest.get(_MASTER, pair.master) is not pair.master:  # set by a user
                _check_master(pair, rest[_MASTER])
                pair.master.copy_(rest[_MASTER])
                kept[_MASTER] = pair.master
            rest.pop(_MASTER, None)
            if rest:
                lent[pair.master] = rest

    def _take_state_back(self) -> None:
        lent = self.optimizer.state
        for key, kept in lent.items():
            pair = self._of_master.get(key)
            if pair is None or not pair.apart:
                self.state[key] = kept
                continue
            own = self.state.setdefault(pair.param, {})
            has_master = _MASTER in own
            own.clear()
            if has_master:
                own[_MASTER] = pair.master
            own.update(kept)
        lent.clear()

    def _keep_master(self, pair: Pair) -> None:
        kept = self.state.setdefault(pair.param, {})  # torch's checkpoints ask for all or none
        if pair.apart:
            kept[_MASTER] = pair.master

    def _evaluation(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` for the masters, which the optimizer may move between two evaluations."""

        @torch.no_grad()
        def evaluate() -> Any:
            self._give_back()
            self._store()
            with torch.enable_grad():
                loss = closure()
            self._take_gradients()
            return loss

        return evaluate

    def _take_gradients(self) -> None:
        for pair in self._pairs.values():
            pair.take_gradient()

    def _give_back(self) -> None:
        for pair in self._pairs.values():
            pair.give_back()

    def _store(self) -> None:
        """Rounds the masters that had gradients; they hold none from now on."""
        for pair in self._pairs.values():
            if pair.master.grad is not None:
                self._keep_master(pair)
                if pair.apart:
                    pair.store()
                    pair.master.grad = None

    @torch.no_grad()
    def read_parameters(self) -> None:
        """Sets master weights to the values of the parameters, after another write to these."""
        for pair in self._pairs.values():
            if pair.apart:
                pair.read()
        self._writes.forget()
        self._writes.note(self._started())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of the model's parameters, as any optimizer does.

        It does not change ``main_grad``, but no step uses it before an operation adds to it again.
        """
        super().zero_grad(set_to_none)
        for pair in self._pairs.values():
            pair.gradient.forget()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, with master weights.

        Raises:
            MasterWeightError: a step has overwritten a write to a parameter on a GPU.
        """
        self._writes.raise_what_was_found()
        # Before the first step, what parameters were rounded from exists nowhere else.
        unused = [
            pair
            for param, pair in self._pairs.items()
            if pair.has_initial_value and param not in self.state and pair.is_stored()
        ]
        for pair in unused:
            self._keep_master(pair)
        try:
            return super().state_dict()
        finally:
            for pair in unused:
                del self.state[pair.param]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`, and rounds the master weights to the parameters.

        Master weights that it lacks, such as in the state dict of the optimizer alone, are set to
        the values of the parameters. If something does not fit, nothing changes.

        Raises:
            ArgumentError: groups or master weights do not fit.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            returned = before(self, state_dict)
            state_dict = state_dict if returned is None else returned
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @torch.no_grad()
    def _load(self, state_dict: dict[str, Any]) -> None:
        states, masters = dict(state_dict["state"]), {}
        for key, pair in self._by_key(state_dict["param_groups"]).items():
            if _MASTER in states.get(key, ()):
                rest = dict(states.pop(key))
                masters[pair] = rest.pop(_MASTER)
                _check_master(pair, masters[pair])
                if rest:
                    states[key] = rest
        # It checks the rest, and casts the state to the dtype of masters.
        self.optimizer.load_state_dict({**state_dict, "state": states})
        self.param_groups = [
            {**theirs, "params": ours["params"]}
            for ours, theirs in zip(self.param_groups, self.optimizer.param_groups)
        ]
        self.state = defaultdict(dict)
        self._take_state_back()
        self._begin(p for p in self._pairs.values() if p.param in self.state and p not in masters)
        for pair, master in masters.items():
            pair.master.copy_(master)
            pair.store()
        for pair in self._pairs.values():
            if pair in masters or pair.param in self.state:
                self._keep_master(pair)
        self._writes.forget()
        self._writes.note(self._started())

    def _by_key(self, groups: list[dict[str, Any]]) -> dict[Any, Pair]:
        """The pairs by what a state dict has for them in its groups.

        Those are numbers, or names in what ``torch.distributed.checkpoint`` hands over.
        """
        given, own = ([len(g["params"]) for g in of] for of in (groups, self.param_groups))
        if given != own:
            raise ArgumentError.explained(
                "A state dict has the groups of the optimizer, with as many parameters each",
                where="MasterWeights",
                received=f"groups of {given} parameters for those of {own}",
                remedy="Make the optimizer with the groups that were saved",
            )
        keys = (key for group in groups for key in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        return {key: self._pairs[param] for key, param in zip(keys, params)}

    def __getstate__(self) -> dict[str, Any]:
        own = ("optimizer", "_pairs", "_linears", "_names")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._writes = WriteDetector()
        self._masters_were_made()
        self._writes.distrust(self._started())


def _check_master(pair: Pair, master: Any) -> None:
    if isinstance(master, Tensor) and master.shape == pair.master.shape:
        return
    found = f"shape {tuple(master.shape)}" if isinstance(master, Tensor) else repr(master)
    raise ArgumentError.explained(
        "The state has a master of the shape of its parameter",
        where="MasterWeights",
        received=f'"{_MASTER}" of {found} for {pair.name} of shape {tuple(pair.param.shape)}',
        remedy="Load what was saved of the same model, or delete the state of this parameter,"
        " which then begins with its value",
    )


def _weights_in_fp8(model: nn.Module) -> dict[nn.Parameter, Linear | BasicLinear]:
    found: dict[nn.Parameter, Linear | BasicLinear] = {}
    for module in model.modules():
        # A Linear comes before its basic operation, which is not pickled without it.
        if isinstance(module, (Linear, BasicLinear)) and module.weight_format is not None:
            found.setdefault(module.weight, module)
    return found
