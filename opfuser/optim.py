"""Optimisers of weights that are not stored in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .basic._whole_gradient import WholeGradient
from .basic.basic_linear import BasicLinear
from .errors import ArgumentError, MasterWeightError, NotSupportedError, explain
from .linear import Linear
from .quantization.weights import is_fp8, take_initial_value

__all__ = ["MasterWeights"]

_MASTER = "master_param"
_Groups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


@dataclass
class _Pair:
    """A parameter and its master.

    Attributes:
        param: of the model.
        master: fp32; the parameter itself where that is fp32 or fp64.
        linear: whose weight it is in FP8; None: it is no such weight.
        gradient: of the parameter.
        replaced: the ``grad`` of a parameter that is its own master, during a step that reads
            another one there.
    """

    param: nn.Parameter
    master: nn.Parameter
    linear: BasicLinear | None
    gradient: WholeGradient
    replaced: tuple[Tensor | None] | None = None

    def values(self) -> Tensor:
        """Of the parameter, in fp32."""
        if self.linear is None:
            return self.param.detach().float()
        return self.linear.read_weight(torch.float32)

    @property
    def apart(self) -> bool:
        """Whether there are two of them."""
        return self.master is not self.param

    def store(self) -> None:
        """Rounds the master to the parameter."""
        if self.linear is not None:
            self.linear.write_weight(self.master.detach())
        else:
            with torch.no_grad():
                self.param.copy_(self.master)

    def is_stored(self) -> bool:
        """Whether the parameter is the rounded master, whoever has written it. Waits for a GPU."""
        if self.linear is not None:
            return False
        return torch.equal(self.param, self.master.to(self.param.dtype))

    def take_gradient(self) -> None:
        """The master gets the gradient of the parameter, in its dtype."""
        grad = self.param.grad
        taken = self.gradient.take(self.master)
        if not self.apart and taken is not grad:
            self.replaced = (grad,)
        self.master.grad = taken

    def give_back(self) -> None:
        """The parameter gets back the ``grad`` that a step has replaced."""
        if self.replaced is not None:
            (self.param.grad,) = self.replaced
            self.replaced = None


class MasterWeights(Optimizer):
    """Any optimiser of torch, on fp32 copies of parameters that are stored in less.

    Each step takes the gradients of the model's parameters, has the optimiser update the copies
    (the master weights of Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740), and
    rounds these to the parameters: to FP8 with scales from the largest values of now, where a
    linear operation was constructed within :func:`opfuser.quantized_model_init`. Parameters in fp32
    and fp64 are optimised themselves.

    Used as the optimiser itself: by schedulers, ``torch.amp.GradScaler`` and
    ``clip_grad_norm_(model.parameters(), ...)``. ``param_groups`` have the model's parameters;
    ``optimizer`` has the copies. ``state_dict()`` is that of the optimiser with ``"master_param"``
    in the state of each parameter that has a copy.

    A copy starts with the value that ``preserve_high_precision_init_val=True`` has kept, which is
    then freed, or else with the value of the parameter.

    Where an operation has added to ``main_grad`` since the last step or :meth:`zero_grad`, as
    ``grad_added_to_main_grad`` says, the gradient is the sum of that and of ``grad``, to which
    other uses of the parameter contribute. The step sets the flag to False; the caller sets
    ``main_grad`` to zero. Modules of Transformer Engine leave in ``grad`` what was never written,
    unless the parameter has ``zero_out_wgrad``: the gradient is ``main_grad`` then.
    ``clip_grad_norm_`` sees ``grad`` alone: clip ``main_grad`` yourself.

    Args:
        model: has all weights in FP8 that are to be optimised.
        optimizer_class: as ``torch.optim.AdamW``.
        params: parameters or groups of them, as optimisers take them; None is all of the model.
        arguments: of ``optimizer_class``.

    Raises:
        ArgumentError: a parameter in FP8 is no weight of the model's linear operations.
        MasterWeightError: at a step, if a parameter was written to since the last one. Those that
            are not in FP8 may have been written with the values that they had. Or if a parameter's
            gradient is said to be in a ``main_grad`` that it lacks.
        NotSupportedError: at a step of ``GradScaler``, if gradients are in ``main_grad``.
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
        self._pairs: list[_Pair] = []
        self._versions: list[int] = []
        super().__init__(model.parameters() if params is None else params, dict(arguments))
        inner = [self._with_masters(group) for group in self.param_groups]
        self.optimizer = optimizer_class(inner, **arguments)
        self.defaults = self.optimizer.defaults
        self.state = self.optimizer.state
        self._share_options(self.optimizer.param_groups, self.param_groups)
        self._note_versions()

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group with masters in place of parameters, whose pairs are noted."""
        pairs = [self._pair(param) for param in group["params"]]
        self._pairs += pairs
        return {**group, "params": [pair.master for pair in pairs]}

    def _pair(self, param: nn.Parameter) -> _Pair:
        linear = self._linears.get(param)
        if linear is None and is_fp8(param.dtype):
            raise ArgumentError(
                explain(
                    "Parameters in FP8 are weights of linear operations of the model",
                    where="MasterWeights",
                    received=f"a parameter of {param.dtype} and shape {tuple(param.shape)}",
                    remedy="Pass the model that has it",
                )
            )
        if param.dtype in (torch.float32, torch.float64):
            return _Pair(param, param, None, WholeGradient(param))
        initial = take_initial_value(param)
        pair = _Pair(param, param, linear, WholeGradient(param))
        values = pair.values() if initial is None else initial.to(param.device, torch.float32)
        return replace(pair, master=nn.Parameter(values, requires_grad=param.requires_grad))

    @staticmethod
    def _share_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Whatever groups have besides parameters."""
        for ours, theirs in zip(source, target):
            theirs.update((key, value) for key, value in ours.items() if key != "params")

    def _note_versions(self) -> None:
        self._versions = [pair.param._version for pair in self._pairs]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimiser; the parameters get masters."""
        super().add_param_group(param_group)
        if "optimizer" in self.__dict__:
            before = len(self._pairs)
            self.optimizer.add_param_group(self._with_masters(self.param_groups[-1]))
            self._share_options(self.optimizer.param_groups[-1:], self.param_groups[-1:])
            self._versions += [pair.param._version for pair in self._pairs[before:]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates masters and parameters; ``closure`` as of the optimiser."""
        self._check_versions()
        self._refuse_scaler()
        self._share_options(self.param_groups, self.optimizer.param_groups)
        try:
            if closure is None:
                self._take_gradients()
                loss = self.optimizer.step()
            else:
                loss = self.optimizer.step(self._evaluation(closure))
        finally:
            self._give_back()
        self._store()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by GradScaler: whether it leaves the scale to :meth:`step`."""
        return any(pair.gradient.is_in_main_grad for pair in self._pairs)

    def _refuse_scaler(self) -> None:
        told = [self.__dict__.pop(name, None) for name in ("found_inf", "grad_scale")]
        if told[0] is not None:
            raise NotSupportedError(
                explain(
                    "GradScaler unscales and checks grad alone",
                    where="MasterWeights",
                    received="gradients in main_grad",
                    remedy="Leave accumulate_into_main_grad off, or train in bf16, which needs no"
                    " scale",
                )
            )

    def _evaluation(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` for the masters, which the optimiser may move between two evaluations."""

        def evaluate() -> Any:
            self._give_back()
            self._store()
            with torch.enable_grad():
                loss = closure()
            self._take_gradients()
            return loss

        return evaluate

    def _take_gradients(self) -> None:
        for pair in self._pairs:
            pair.take_gradient()

    def _give_back(self) -> None:
        for pair in self._pairs:
            pair.give_back()

    def _store(self) -> None:
        """Rounds the masters that had gradients; they hold none from now on."""
        for pair in self._pairs:
            if pair.apart and pair.master.grad is not None:
                pair.store()
                pair.master.grad = None
        self._note_versions()

    def _check_versions(self) -> None:
        for pair, version in zip(self._pairs, self._versions):
            written = pair.apart and pair.param._version != version
            # torch's set_state_dict loads a model behind its optimiser: the same values once more.
            if written and not pair.is_stored():
                raise MasterWeightError(
                    explain(
                        "Parameters with master weights are written to by their optimiser alone",
                        where="MasterWeights",
                        received=f"a parameter of shape {tuple(pair.param.shape)} that was"
                        " written to since",
                        remedy="Call read_parameters(), or load the optimiser's state after that of"
                        " the model",
                    )
                )

    def read_parameters(self) -> None:
        """Sets masters to the values of the parameters, after something else has written these."""
        for pair in self._pairs:
            if pair.apart:
                pair.master.data.copy_(pair.values())
        self._note_versions()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any optimiser, for the model's parameters.

        What ``main_grad`` holds is left to its owner; no step takes it before it was added to.
        """
        super().zero_grad(set_to_none)
        for pair in self._pairs:
            pair.gradient.forget()

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's, with masters."""
        self._share_options(self.param_groups, self.optimizer.param_groups)
        made = self.optimizer.state_dict()
        made["state"] = {n: dict(state) for n, state in made["state"].items()}
        for n, pair in enumerate(self._pairs):
            if pair.apart:
                made["state"].setdefault(n, {})[_MASTER] = pair.master.detach()
        return made

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` has made, and rounds the masters to the parameters.

        Masters that it does not have are set to the values of the parameters.
        """
        states = {n: dict(state) for n, state in state_dict["state"].items()}
        # Numbers; names in what torch.distributed.checkpoint hands over.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        masters = [states.get(key, {}).pop(_MASTER, None) for key in keys]
        states = {n: state for n, state in states.items() if state}
        self.optimizer.load_state_dict({**state_dict, "state": states})
        self.state = self.optimizer.state
        self._share_options(self.optimizer.param_groups, self.param_groups)
        for pair, master in zip(self._pairs, masters):
            if pair.apart:
                pair.master.copy_(pair.values() if master is None else master)
                if master is not None:
                    pair.store()
        self._note_versions()


def _weights_in_fp8(model: nn.Module) -> dict[Tensor, BasicLinear]:
    found: dict[Tensor, BasicLinear] = {}
    for module in model.modules():
        linear = module.basic_ops[0] if isinstance(module, Linear) else module
        if isinstance(linear, BasicLinear) and linear.weight_format is not None:
            found[linear.weight] = linear
    return found
