"""Which other threads could wait for a device while launches are recorded.

A ``torch.cuda.synchronize()`` on any thread makes the recording of another one invalid, and raises.
"""

from __future__ import annotations

import re
import sys
import threading
from types import FrameType

# Files where threads begin that wait for no device: those of data loaders and their queues, of
# notebooks, debuggers, progress bars, loggers, and pytest-xdist.
_HARMLESS = re.compile(
    r"[/\\](torch[/\\]utils[/\\]data[/\\]_utils|multiprocessing[/\\](queues|resource_sharer)"
    r"|ipykernel|debugpy|pydevd\w*|_pydevd\w*|tqdm|tensorboard|wandb|execnet)\b"
)
_ENGINE = "_engine_run_backward"


def thread_that_may_wait() -> str | None:
    """The name of another thread that runs Python and might wait for a device; None without one.

    A thread that waits for autograd's engine is the caller of the backward pass which asks. Where
    two wait for it, one of them may be done at any time.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a cycle, which would keep what all callers refer to
    waiting = 0
    for ident, frame in frames.items():
        if _HARMLESS.search(_file_where_it_begins(frame)):
            continue
        if frame.f_code.co_name == _ENGINE and not waiting:
            waiting += 1
            continue
        named = (t.name for t in threading.enumerate() if t.ident == ident)
        return next(named, f"thread {ident}")
    return None


def _file_where_it_begins(frame: FrameType) -> str:
    """The file of the outermost frame that is not ``threading``'s."""
    found = ""
    while True:
        file = frame.f_code.co_filename
        if file != threading.__file__:
            found = file
        if frame.f_back is None:
            return found
        frame = frame.f_back
