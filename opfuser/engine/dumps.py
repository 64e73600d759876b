"""Files that show what each fusion made of the operations: for whoever asks why it did not match.

With ``OPFUSER_DUMP_DIR=dir``, every distinct plan that is made leaves there, for every registered
fusion in the order of their attempts, a text and the same as JSON (schema ``opfuser.dump/1``), also
where nothing matched::

    000017_rank0_plan1_forward_forward_linear_bias_activation.txt

Numbers go on behind those that the directory holds. No file is ever deleted or overwritten. Only
rank 0 writes; ``OPFUSER_DUMP_RANKS=all``, or numbers such as ``0,8``, names others. Both variables
are read when a plan is made. A directory that cannot be written is told in a warning of the log,
once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ..fusion import Env
from ..op import BasicOperation, FusibleOperation
from .plan import FusionRecord, expand

__all__ = ["SCHEMA", "Attempt", "Dump"]

SCHEMA = "opfuser.dump/1"

logger = logging.getLogger("opfuser")

_NUMBER = re.compile(r"(\d+)_rank\d+_plan\d+_")


class Attempt(NamedTuple):
    """What a fusion was given and returned: for each operation its type, indices and fusion."""

    before: list[dict[str, Any]]
    after: list[dict[str, Any]]


class _Written:
    """What this process has written, so that equal plans are written once."""

    lock = threading.Lock()
    plans: set[tuple[str, int]] = set()  # noqa: RUF012 - shared on purpose
    told: set[str] = set()  # noqa: RUF012


class Dump:
    """The attempts of the plan that is being made, one for each record of its history.

    Args:
        folder: where they are written.
        rank: of this process.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.attempts: list[Attempt] = []

    @classmethod
    def wanted(cls) -> Dump | None:
        """One, if the environment asks for it."""
        folder = os.environ.get("OPFUSER_DUMP_DIR")
        if not folder:
            return None
        rank, ranks = _rank(), os.environ.get("OPFUSER_DUMP_RANKS", "0")
        return cls(folder, rank) if ranks == "all" or rank in _numbers(ranks) else None

    def add(
        self,
        before: Sequence[FusibleOperation],
        after: Sequence[FusibleOperation],
        made_by: dict[int, str],
    ) -> None:
        """Notes an attempt; ``made_by`` tells fused operations' fusions by their ids."""
        self.attempts.append(Attempt(_described(before, made_by), _described(after, made_by)))

    def write(
        self, number: int, ops: Sequence[BasicOperation], env: Env, history: Sequence[FusionRecord]
    ) -> None:
        """Writes the files of a plan, or of what there was of it when a fusion raised an error.

        Args:
            number: of the plan.
            ops: its basic operations.
            env: of the plan.
            history: its records; one that an attempt lacks is not there, for it raised an error.
        """
        try:
            self._write(number, ops, env, history)
        except Exception as error:  # noqa: BLE001 - a full disk, or an extra_repr of the user's
            with _Written.lock:
                known = self.folder in _Written.told
                _Written.told.add(self.folder)
            if not known:
                logger.warning("OPFUSER_DUMP_DIR=%s cannot be written: %s", self.folder, error)

    def _write(
        self, number: int, ops: Sequence[BasicOperation], env: Env, history: Sequence[FusionRecord]
    ) -> None:
        about = {
            "env": {
                "dtype": str(env.dtype),
                "device": str(env.device),
                "autocast_dtype": env.autocast_dtype and str(env.autocast_dtype),
                "grad_enabled": env.grad_enabled,
                "recipe": env.recipe and repr(env.recipe),
            },
            "operations": [f"{type(op).__name__}({op.extra_repr()})" for op in ops],
        }
        records = [_record(*pair) for pair in zip(history, self.attempts)]
        key = self.folder, hash(json.dumps([about, records]))
        with _Written.lock:
            if key in _Written.plans:
                return
            folder = Path(self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            last = _last_number(folder)
            for record in records:
                last = self._write_one(last + 1, {"plan": number, **record, **about})
            _Written.plans.add(key)

    def _write_one(self, number: int, record: dict[str, Any]) -> int:
        """The number under which a record was written: the first free one from ``number`` on."""
        name = re.sub(r"[^\w.-]+", "-", record["fusion"])[:80]
        while True:
            stem = f"{number:06}_rank{self.rank}_plan{record['plan']}_{record['stage']}_{name}"
            data = {"schema": SCHEMA, "number": number, "rank": self.rank, **record}
            try:
                # Exclusive: another process may write to the directory, too.
                with Path(self.folder, f"{stem}.json").open("x", encoding="utf-8") as file:
                    file.write(json.dumps(data, indent=1) + "\n")
                with Path(self.folder, f"{stem}.txt").open("x", encoding="utf-8") as file:
                    file.write(_text(data))
            except FileExistsError:
                number += 1
            else:
                return number


def _last_number(folder: Path) -> int:
    found = (_NUMBER.match(path.name) for path in folder.iterdir())
    return max((int(match[1]) for match in found if match), default=0)


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
    if ranks not in _Written.told:
        _Written.told.add(ranks)
        logger.warning("OPFUSER_DUMP_RANKS is 'all' or numbers such as '0,8', not %r", ranks)
    return {0}


def _described(ops: Iterable[FusibleOperation], made_by: dict[int, str]) -> list[dict[str, Any]]:
    out, at = [], 0
    for op in ops:
        parts = expand(op)
        out.append(
            {
                "indices": list(range(at, at + len(parts))),
                "operation": type(op).__name__,
                "covers": [type(part).__name__ for part in parts],
                "fusion": made_by.get(id(op)),
            }
        )
        at += len(parts)
    return out


def _record(record: FusionRecord, attempt: Attempt) -> dict[str, Any]:
    return {
        "fusion": record.name,
        "stage": record.stage,
        "status": record.status,
        "detail": record.detail,
        "matches": [list(match) for match in record.matches],
        "refusals": [{"index": at, **why._asdict()} for at, why in record.refusals],
        "near_misses": [
            {**near._asdict(), "stopped_by": near.stopped_by._asdict()}
            for near in record.near_misses
        ],
        **attempt._asdict(),
    }


def _text(data: dict[str, Any]) -> str:
    env = data["env"]
    about = [env["dtype"], env["device"], f"autocast {env['autocast_dtype'] or 'off'}"]
    about.append(f"grad {'on' if env['grad_enabled'] else 'off'}")
    if env["recipe"]:
        about.append(env["recipe"])
    head = f"[stage={data['stage']}, fusion={data['fusion']}] {data['status']}"
    lines = [
        f"{head} ({data['detail']})" if data["detail"] else head,
        f"plan {data['plan']}, rank {data['rank']}: {', '.join(about)}",
    ]
    lines += [f"matched: {_span(match)}" for match in data["matches"]]
    lines += [f"refused at {no['index']}: {no['code']}: {no['detail']}" for no in data["refusals"]]
    for near in data["near_misses"]:
        why = near["stopped_by"]
        what = f"{near['matched']} of {near['of']} at {near['start']}"
        lines.append(f"began: {what}; {why['code']}: {why['detail']}")
    for title in ("before", "after"):
        lines.append(f"{title}:" if data[title] else f"{title}: none")
        lines += [f"  {_step(step, data['operations'])}" for step in data[title]]
    return "\n".join(lines) + "\n"


def _step(step: dict[str, Any], operations: Sequence[str]) -> str:
    covered = " + ".join(operations[n] for n in step["indices"])
    made = f" [{step['fusion']}]" if step["fusion"] else ""
    name = step["operation"]
    what = covered if len(step["indices"]) == 1 and not made else f"{covered} -> {name}{made}"
    return f"{_span(step['indices']):<9} {what}"


def _span(indices: Sequence[int]) -> str:
    return str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"
