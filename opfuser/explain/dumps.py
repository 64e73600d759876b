"""Files of plans: for whoever asks later what was fused, and why a fusion did not match.

With ``OPFUSER_DUMP_DIR=dir``, every distinct plan that is made leaves its text there, and the same
as JSON (schema ``opfuser.plan/1``, that of ``opfuser explain --format json``)::

    rank0_1234_plan1.txt

1234 is the process. No file is ever deleted or overwritten. Only rank 0 writes;
``OPFUSER_DUMP_RANKS=all``, or numbers such as ``0,8``, names others. Both variables are read when a
plan is made. A directory that cannot be written is told in a warning of the log, once.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import torch.distributed as dist

from ..engine.plan import Plan, shown

logger = logging.getLogger("opfuser")


class _Written:
    """What this process has written, so that equal plans are written once, and has told."""

    lock = threading.Lock()
    plans: set[tuple[str, int]] = set()  # noqa: RUF012 - shared on purpose
    told: set[str] = set()  # noqa: RUF012


def dump(plan: Plan) -> None:
    """Writes the files of a plan that was made, if they are asked for of this rank."""
    folder = os.environ["OPFUSER_DUMP_DIR"]
    rank, ranks = _rank(), os.environ.get("OPFUSER_DUMP_RANKS", "0")
    if ranks != "all" and rank not in _numbers(ranks):
        return
    try:
        _write(plan, folder, f"rank{rank}_{os.getpid()}_plan{plan.numbers[0]}")
    except Exception as error:  # noqa: BLE001 - a full disk, or an extra_repr of the user's
        _warn_once(folder, f"OPFUSER_DUMP_DIR={folder} cannot be written: {error}")


def _write(plan: Plan, folder: str, stem: str) -> None:
    text, data = str(plan), json.dumps(shown(plan, "data"), indent=1)
    key = folder, hash((text, data))
    with _Written.lock:
        if key in _Written.plans:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        for suffix, content in ((".txt", text), (".json", data)):
            # Exclusive: what a process of the same number has left stays.
            with Path(folder, stem + suffix).open("x", encoding="utf-8") as file:
                file.write(content + "\n")
        _Written.plans.add(key)


def _warn_once(key: str, text: str) -> None:
    with _Written.lock:
        known = key in _Written.told
        _Written.told.add(key)
    if not known:
        logger.warning("%s", text)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")  # set by torchrun, before the process group is there
    return int(rank) if rank.isdecimal() else 0


def _numbers(ranks: str) -> set[int]:
    """The ranks that a text lists; 0 if it lists none, with a warning, once."""
    found = [part.strip() for part in ranks.split(",")]
    if all(part.isdecimal() for part in found):
        return set(map(int, found))
    _warn_once(ranks, f"OPFUSER_DUMP_RANKS is 'all' or numbers such as '0,8', not {ranks!r}")
    return {0}
