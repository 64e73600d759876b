"""Writes ``docs/families.md``, what opfuser computes of families of transformers.

``python docs/write_families.py`` reads a tiny model of each, as ``make sweep`` does of all, and
writes the page; with ``--check`` it only says whether that differs.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

# As docs/write_snippets.py may be run from any folder, so may this.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import nn

import opfuser.hf
from tests.reading.recomputed import called_in
from tests.reading.sweep import Outcome, outcomes_of
from tests.reading.tiny import causal_model_of

PAGE = Path(__file__).with_name("families.md")

INTRODUCTION = """\
# What is replaced, per family

<!-- Written by docs/write_families.py from what the tests read. -->

This page shows what `opfuser.apply` replaces in models of transformers {version}. It reads what a
module computes, whatever its name. The table was made from a tiny model of each family, in
evaluation, with gradients and without a cache.

- **yes**: opfuser computes it, by itself or as part of a layer. **no**: it is kept unchanged.
  **part**: some of both, or it calls a child that is kept, such as an expert router. Blank: the
  model has none.
- *cache*: whether the layers and attention that take a cache are computed with one.
- *loss*: whether [`opfuser.hf.apply`](hugging-face.md) with `fused_loss=True` computes a causal
  language model's loss without storing its logits.
- *why not*: why the first kept module is kept.

{counts}

"""
FAMILIES = """afmoe albert bart bert bloom codegen cohere deepseek_v2 deepseek_v3 dinov2
    falcon gemma2 gpt2 gpt_neo gpt_neox gpt_oss gptj llama llama4_text marian minicpm3 mixtral
    mpt nanochat opt persimmon phi qwen2 qwen3 roberta t5 vit whisper""".split()
COLUMNS = "layer", "attention", "MLP", "experts", "norms", "cache", "loss"
# What a class of modules is, by its name: for the table alone.
_KINDS = {
    "norms": r"Norm",
    "experts": r"Expert|Moe|MoE|MOE",
    "attention": r"Attention|Attn",
    "MLP": r"MLP|Mlp|FeedForward|FFN|DenseAct|DenseGated|LayerFF",
}


def row(family: str) -> dict[str, str]:
    """The cells of a family by column, and why the first module is kept.

    Raises:
        Exception: of many kinds, if no tiny model can be made or called.
    """
    found: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    outcomes = outcomes_of(family)
    for outcome, state in _states(outcomes):
        kind = _kind(outcome)
        found.setdefault(kind, []).append(state)
        if state == "no":
            reasons.setdefault(kind, outcome.reason.partition(" (")[0])
    found["cache"] = [state for _, state in _states(outcomes_of(family, "with a cache"))]
    cells = {kind: _joint(found[kind]) for kind in COLUMNS if found.get(kind)}
    torch_norms = any(isinstance(m, nn.LayerNorm) for o in outcomes for m in _modules(o))
    for kind in ("attention", "MLP", "norms"):
        if cells.get("layer") == "yes" or (kind == "norms" and torch_norms):
            cells.setdefault(kind, "yes")
    cells["loss"] = _loss(family)
    cells["reason"] = next((reasons[kind] for kind in COLUMNS if kind in reasons), "")
    return cells


def _states(outcomes: list[Outcome]) -> Iterator[tuple[Outcome, str]]:
    """Modules, and what is computed of each: by itself, or within one before."""
    computed: list[Outcome] = []
    for outcome in outcomes:
        state = "part" if outcome.reading else "no"
        if outcome.whole or any(_is_inside(outcome.path, other) for other in computed):
            state = "yes"
        computed += [outcome] if outcome.reading else []
        yield outcome, state


def _is_inside(path: str, outer: Outcome) -> bool:
    """Whether a module is computed with one that it is inside of."""
    assert outer.reading is not None
    called = [f"{outer.path}.{child}" for child in called_in(outer.reading)]
    within = [f"{path}.".startswith(f"{at}.") for at in (outer.path, *called)]
    return path != outer.path and within[0] and not any(within[1:])


def _modules(outcome: Outcome) -> Iterator[nn.Module]:
    return outcome.example.module.modules()


def _kind(outcome: Outcome) -> str:
    name = type(outcome.example.module).__name__
    kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), "")
    if not kind and outcome.path.rpartition(".")[2].isdecimal():
        return "layer"
    return kind


def _joint(states: list[str]) -> str:
    """What holds of several modules."""
    if len(set(states)) == 1:
        return states[0]
    return "part"


def _loss(family: str) -> str:
    """Whether the loss of a causal language model is computed without logits."""
    try:
        model = causal_model_of(family)
    except ValueError:  # there is none
        return ""
    opfuser.hf.apply(model, fused_loss=True)
    ids = torch.randint(3, 60, (2, 7))
    return "yes" if model(input_ids=ids, labels=ids).logits is None else "no"


def line(family: str, cells: dict[str, str]) -> str:
    """A row of the table."""
    texts = [cells.get(column, "") for column in COLUMNS]
    reason = cells["reason"].replace("|", "\\|").replace("_", "\\_").replace("*", "\\*")
    return f"| {family} | {' | '.join(texts)} | {reason} |"


def page() -> str:
    """The text of the page."""
    rows = dict(_rows())
    counts = [
        f"the {what} of {sum(cells.get(column) == 'yes' for cells in rows.values())}"
        for column, what in (("layer", "layers"), ("attention", "attention"), ("MLP", "MLP"))
    ]
    text = f"Out of {len(rows)} families, opfuser computes {', '.join(counts)}."
    head = INTRODUCTION.format(version=transformers.__version__, counts=text)
    title = f"| family | {' | '.join(COLUMNS)} | why not |\n|{'---|' * (len(COLUMNS) + 2)}\n"
    return head + title + "".join(f"{line(*item)}\n" for item in rows.items())


def _rows() -> Iterator[tuple[str, dict[str, str]]]:
    for family in sorted(FAMILIES):
        with contextlib.suppress(Exception):
            yield family, row(family)


def main(args: list[str] | None = None) -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page differs")
    check = parser.parse_args(args).check
    warnings.simplefilter("ignore")
    text = page()
    if check and text != PAGE.read_text("utf-8"):
        sys.exit("docs/families.md differs: run python docs/write_families.py")
    if not check:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
