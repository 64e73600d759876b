"""Random expressions are recomputed exactly where they are read, and kept elsewhere."""

from __future__ import annotations

import random

import torch
from torch.nn import functional as F

from opfuser.reading.kept import KeptError

from .recomputed import assert_recomputed, read_of
from .test_grammar import example_of, rms

NAMES = {"F": F, "rms": rms, "torch": torch}
# Expressions of a module m and others; those that occur often are there twice.
FORMS = """
m.up({})
m.gate({})
m.norm({})
F.relu({})
F.silu({})
torch.sigmoid({})
rms({})
({} * m.w)
({} + m.b)
(2 * {})
(-{})
({} - {})
({} + {})
({} + {})
({} * {})
({} * {})
({} / ({}.square().mean(-1, keepdim=True) + 1).sqrt())
(lambda y: y + m.up(y))({})
(lambda y: y + y)({})
(lambda y: (y + m.up(y)) + (y + m.down(y)))({})
(lambda y: m.up(y) * F.silu(m.gate(y)))({})
""".strip().splitlines()


def expression(source: random.Random, depth: int) -> str:
    if not depth or source.random() < 0.1:
        return "x"
    form = source.choice(FORMS)
    return form.format(*(expression(source, depth - 1) for _ in range(form.count("{}"))))


def test_random_expressions_are_recomputed_or_kept() -> None:
    source, read = random.Random(0), 0
    for _ in range(100):
        text = expression(source, source.choice((2, 3, 4)))
        example = example_of(eval(f"lambda m, x: {text} * 1.5", dict(NAMES)))
        try:
            read_of(example)
        except KeptError:
            continue
        try:
            assert_recomputed(example)
        except Exception as error:
            raise AssertionError(text) from error
        read += 1
    assert read > 40
