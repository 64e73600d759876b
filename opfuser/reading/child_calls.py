"""Calls of children, recorded while a forward is traced."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .dataflow import Call, Node, map_leaves, tensors_in
from .reads import is_hooked
from .replaced_methods import replaced
from .tracing_mode import TracingMode, unrecorded


def recorded_calls(mode: TracingMode) -> AbstractContextManager[None]:
    """Records calls of children, in place of ``nn.Module.__call__``."""

    def recorded(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        path = mode.paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        return _called(mode, module, path, args, kwargs)

    original = nn.Module.__call__
    return replaced(nn.Module, "__call__", recorded)


def _called(mode: TracingMode, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
    """Calls a child's forward; of one that has hooks, what it does is one node."""
    flow = mode.dataflow
    mode.recording.observed.called[id(module)] = module
    call = Call(module, path, len(flow.nodes), switched=mode.switched)
    call.args, call.kwargs = map_leaves(mode.value_of, (args, kwargs))
    tensors = tensors_in((args, kwargs))
    with unrecorded():
        versions = [t._version for t in tensors]
    hooked = is_hooked(module, mode.ignored_hooks)
    mode.open_calls.append(call)
    if not mode.muted:
        flow.calls.append(call)
    mode.muted += hooked
    try:
        result = module.forward(*args, **kwargs)
    finally:
        mode.muted -= hooked
        mode.open_calls.pop()
    if hooked:
        with unrecorded(), torch.no_grad():  # as a hook may return other tensors than the forward
            result = map_leaves(lambda t: t.view_as(t) if isinstance(t, Tensor) else t, result)
        node = Node("call_module", module, call.args, call.kwargs, path)
        mode.append(node, tensors_in(result), requires_grad=True)
    call.end = len(flow.nodes)
    call.result = map_leaves(mode.value_of, result)
    with unrecorded():
        written = versions != [t._version for t in tensors]
    if written:
        mode.note_effect(f"has '{path}' write to its arguments")
    return result
