"""One call of a module's own forward on the meta device, recorded as a dataflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..runtime.tracing import transforms_active
from ..torch_internals import GLOBAL_HOOKS, caches_parametrizations, without_modes
from .call_key import CallKey, call_key
from .captured_outputs import is_idle
from .child_calls import recorded_calls
from .dataflow import Dataflow, map_leaves, tensors_in
from .kept import KeptError, NotNowError
from .reads import Reads
from .recording import ONE_AT_A_TIME, is_tracing
from .sizes import Sizes, function_of
from .stand_ins import Update, cached_length, ignores_more
from .tracing_mode import TracingMode


@dataclass(eq=False)
class Trace:
    """What a module's forward computes in calls like one.

    Attributes:
        module: whose forward was traced.
        dataflow: its operations.
        reads: what it has read besides tensors; the trace holds while ``reads.current()``.
        key: of the call; the trace holds for calls with equal ``key.facts``.
        guards: conditions on the sizes ``s`` of other calls, as expressions of Python. After the
            ``key.sizes`` come the numbers of keys that the ``updates`` of caches return.
        updates: of caches, in order.
    """

    module: nn.Module
    dataflow: Dataflow
    reads: Reads
    key: CallKey
    guards: tuple[str, ...]
    updates: tuple[Update, ...]

    def __post_init__(self) -> None:
        self._meets = function_of(" and ".join(self.guards) or "True")

    def takes(self, key: CallKey, module: nn.Module) -> bool:
        """Whether the sizes of a call with equal facts meet the guards.

        Args:
            key: of the call.
            module: that is called, which is the one that was traced or its sibling.
        """
        if not self.updates:
            return bool(self._meets(key.sizes))
        sizes = list(key.sizes)
        for update in self.updates:
            queries, layer = function_of(update.queries)(key.sizes), update.layer
            if update.holder is not None:
                layer = module.get_submodule(update.holder).layer_idx  # type: ignore[assignment]
            if update.more and not ignores_more(key.caches[update.cache], layer):
                return False
            sizes.append(cached_length(key.caches[update.cache], queries, layer))
        return bool(self._meets(tuple(sizes)))


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    ignored_hooks: Callable[[Any], bool] = is_idle,
) -> Trace:
    """What ``module``'s forward computes for a call with such arguments.

    The forward of the module's class runs once, with tensors on the meta device in place of the
    arguments, parameters and buffers. Nothing is copied or computed, and whatever the forward sets,
    appends or draws is as before when this returns or raises.

    A call of a child that has hooks is one node, ``call_module``: such a child is called as it is.

    Args:
        module: whose forward is called, without its own hooks.
        args: positional arguments of the call.
        kwargs: its keywords.
        ignored_hooks: whether a hook of a child is known to do nothing in such a call.

    Raises:
        KeptError: if the forward needs values of tensors, or cannot run on the meta device;
            :class:`NotNowError` if that is due to what is around the call.
    """
    if is_tracing():
        raise NotNowError("is traced while another trace is under way")
    if transforms_active():
        raise NotNowError("is called under a transform of torch.func")
    if any(GLOBAL_HOOKS):
        raise NotNowError("is called while all modules have hooks")
    if caches_parametrizations() and any(map(is_parametrized, module.modules())):
        raise NotNowError("is called while values of parametrizations are cached")
    key = call_key(module, args, kwargs)
    sizes = Sizes(key.sizes, key.constants)
    mode = TracingMode(module, device_of(module, args, kwargs), sizes, ignored_hooks)
    with ONE_AT_A_TIME, ExitStack() as end, ExitStack() as modes:
        end.callback(mode.forget)
        # What is around the call, such as a count of operations, is told of nothing.
        modes.enter_context(without_modes())
        args, kwargs = map_leaves(mode.take, args), map_leaves(mode.take, kwargs)
        for container in _containers((args, kwargs)):
            mode.recording.observed.hold(container)
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.set_grad_enabled(mode.grad_enabled))
        with mode.recording.active(), recorded_calls(mode):
            result = mode.call(type(module).forward, module, args, kwargs)
        modes.close()
        mode.dataflow.result = map_leaves(mode.result_leaf, result)
        reads = mode.recording.observed.reads()
        if not reads.current():
            raise KeptError("changes what it reads")
    return Trace(module, mode.dataflow, reads, key, sizes.guards, tuple(mode.updates))


def device_of(module: nn.Module, args: Any, kwargs: Any) -> torch.device:
    """Where a call computes."""
    tensors = [*module.parameters(), *module.buffers(), *tensors_in((args, kwargs))]
    return next((t.device for t in tensors if t.dim() > 0), torch.device("cpu"))


def _containers(tree: Any) -> Iterator[Any]:
    """The containers among arguments that a forward may write to."""
    if isinstance(tree, (tuple, list, dict)):
        if not isinstance(tree, tuple):
            yield tree
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers(part)
