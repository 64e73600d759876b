"""Launches recorded on a CPU, so that the logic of replaying is tested without a GPU.

What a CUDA graph does to memory, this does too: every result has one address, and a replay writes
new values there, whoever holds it. Python numbers are as they were when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    active = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class RecordedGraph:
    """Stands for a CUDA graph; see :class:`opfuser.engine.graphs.Graph`."""

    made = 0
    limit = 2**30

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def capture(self, function: Callable[[], Any]) -> Any:
        type(self).made += 1
        recorder = _Recorder()
        _Recorder.active += 1
        try:
            # As in a capture, no random number is used up.
            with torch.random.fork_rng(devices=[]), recorder:
                result = function()
        finally:
            _Recorder.active -= 1
        self.calls = recorder.calls
        made = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for _, _, _, out in self.calls
            for t in tree_leaves(out)
            if isinstance(t, Tensor)
        }
        self.bytes = sum(made.values())
        return result

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            for old, made in zip(tree_leaves(out), tree_leaves(new)):
                if isinstance(old, Tensor) and old.data_ptr() != made.data_ptr():
                    old.copy_(made)

    @staticmethod
    def stream(device: torch.device) -> int:
        return 0

    @staticmethod
    def under_way() -> bool:
        return _Recorder.active > 0

    @classmethod
    def memory(cls, device: torch.device) -> int:
        return cls.limit
