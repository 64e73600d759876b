"""Training steps of whole small models, wall time: where the host's time counts.

GPT-2, a GPT of 6 layers, a Llama and a vision transformer, each with its loss and a step of AdamW.
torch.compile takes part in the modes that ``ENTRIES`` names; processes side by side fill its
caches first. A contestant that would compile is left out when the time of its model is over.
The first ten steps of one model, ``--case "first steps"``, come last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu import first_steps
from benchmarks.gpu.contest import solve
from benchmarks.gpu.problem import Options, Row
from benchmarks.gpu.small_problems import ENTRIES


def rows(options: Options) -> Iterator[Row]:
    entries = [entry for entry in ENTRIES if options.runs(entry.case.name)]
    if not (options.tiny or options.modes == ()):
        first_steps.compile_ahead(entries, options)
    for n, entry in enumerate(entries):
        own = with_share_of_time(options, len(entries) - n + 1)  # one for the first steps
        for row in solve(entry.case, own, entry.chosen(options)):
            if row.get("saved_bytes") == 0:  # what graphs hold is not seen
                del row["saved_bytes"]
            yield row
    yield from first_steps.rows(options)


def with_share_of_time(options: Options, count: int) -> Options:
    """The deadline of one of ``count`` measurements that share the time that is left."""
    now = time.monotonic()
    return replace(options, deadline=now + (options.deadline - now) / count)
