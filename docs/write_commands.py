"""Writes ``docs/commands.md``, the reference of the commands, from their parsers.

``python docs/write_commands.py`` writes the page, and with ``--check`` only says whether it
differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As docs/write_snippets.py may be run from any folder, so may this.
sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.write_snippets import written
from opfuser.cli import parser
from opfuser.report import plan_json

PAGE = Path(__file__).with_name("commands.md")
LONG = 60  # characters of an argument's meaning that the page gives once

INTRODUCTION = """\
# Commands

<!-- Written by docs/write_commands.py from the commands themselves. -->

The command `opfuser`, or `python -m opfuser`, shows what is fused in a model, why the rest is not,
and what fusing gains, without a GPU. Most commands take a model by name: `package.module:build`,
where `build` is the model, or a function without arguments that returns it; or
[a transformers model](#models-of-transformers). By default the model is built on the meta device:
without data, and planned as on a GPU. Describe its inputs with `--input`, once for each, or set
`example_inputs` of the function, the model or its Python module: a tensor, a string such as
`"8x2048x4096:bf16"`, a list of these, or a function that returns one of them. Commands call the
model. A call that fails is an error, and a model that reads values needs `--device cpu` or `cuda`.

<!-- snippet: explained_model.py:model -->
<!-- snippet: commands.txt -->

Launches and bytes are counted, not measured: each kernel reads its inputs once, and writes its
results once. [Plans as JSON](#plans-as-json) says what other programs can rely on.

The exit status is 0 for success, 3 for findings, and 1 for an error, which is one sentence on the
standard error. The extra `opfuser[tools]` installs the packages for YAML and HTML.

## Models of transformers

`hf:NAME` is a Hugging Face transformers model; you need not write a function. The name is one of
these:

- a local `config.json`, or its folder: `hf:./llama`; the model's class is the first of its
  `architectures`
- a model class, such as `hf:LlamaForCausalLM`
- a configuration class or a model type, such as `hf:LlamaConfig` or `hf:llama`: the model without
  a head, if the configuration has no `architectures`

`--config FILE` is a JSON file with a whole configuration, or with the settings that differ, such as
`{"num_hidden_layers": 2}`. Names on the Hugging Face Hub are errors: nothing is downloaded, weights
are random, no code of a folder runs, and a `quantization_config` is an error. The model is in
training mode, without a cache of keys and values. Its dtype is that of the configuration, or
`--dtype`; what transformers keeps in fp32, such as the frequencies of rotary embeddings, stays in
fp32. Without `--input`, a call has 8 rows of 512 tokens, or fewer if the model has fewer positions,
or 8 images of the configured size. Inputs need no gradients.

```bash
opfuser explain hf:LlamaForCausalLM --config small.json --dtype bf16
opfuser audit hf:./llama
opfuser check hf:./llama --lock fusions.lock.yaml
opfuser bench hf:GPT2LMHeadModel --input 4x256:int64 --dtype bf16
```

`explain`, `diff`, `check`, `config check` and `bench` show and time the model as
[`opfuser.hf.apply`](hugging-face.md) runs it; if that replaces nothing, they fail and say why.
`bench` also times the unchanged model. `audit` examines the unchanged model, or with `--applied`
the model after `opfuser.hf.apply`. `pip install opfuser[hf]` installs transformers.
"""


def _commands(
    made: argparse.ArgumentParser, summary: str = ""
) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Every parser that runs something, with its summary."""
    nested = [a for a in made._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield made, summary
    for action in nested:
        summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, inner in action.choices.items():
            yield from _commands(inner, summaries.get(name, ""))


def _arguments(made: argparse.ArgumentParser, seen: dict[str, str]) -> Iterator[str]:
    """The table of a command's arguments; ``seen`` holds the long meanings of those before it."""
    rows = [action for action in made._actions if not isinstance(action, argparse._HelpAction)]
    if not rows:
        return
    yield "| argument | meaning |"
    yield "|---|---|"
    for action in rows:
        meaning = _meaning(made, action)
        first = seen.setdefault(meaning, made.prog) if len(meaning) > LONG else made.prog
        if first != made.prog:
            meaning = f"as in [{first}](#{first.replace(' ', '-')})"
        yield f"| {_name(action)} | {meaning} |"
    yield ""


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_cell(str(action.metavar or action.dest))}`"
    value = ""
    if action.nargs != 0:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
        value = f" {action.metavar or choices or action.dest.upper()}"
    return ", ".join(f"`{_cell(option + value)}`" for option in action.option_strings)


def _meaning(made: argparse.ArgumentParser, action: argparse.Action) -> str:
    known: dict[str, Any] = {**vars(action), "prog": made.prog}
    return _cell((action.help or "") % known)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _section(made: argparse.ArgumentParser, summary: str, seen: dict[str, str]) -> Iterator[str]:
    yield f"## {made.prog}\n"
    paragraphs = (made.description or summary).split("\n\n")
    yield "\n\n".join(" ".join(text.split()) for text in paragraphs) + "\n"
    yield from _arguments(made, seen)
    examples = re.sub(r"^examples?:\n", "", made.epilog or "")
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    yield "\n".join(["```bash", *lines, "```"]) + "\n"


def _schemas() -> Iterator[str]:
    """What the module's docstring says, which stands in code there."""
    text = plan_json.__doc__ or ""
    yield "## Plans as JSON\n"
    for n, part in enumerate(re.split(r"\n\n(?=\S)", text.strip())):
        prose, colon, listed = part.partition("::\n\n")
        if n == 0:
            yield "`opfuser explain --format json` writes these documents for other programs.\n"
            continue
        yield " ".join(prose.split()).replace("``", "`") + (":" if colon else "") + "\n"
        yield from _list(listed)


def _list(listed: str) -> Iterator[str]:
    rows = re.sub(r"\n {5,}", " ", listed).splitlines()
    for row in rows:
        names, _, meaning = row.strip().partition(": ")
        yield f"- `{names}`: {meaning}"
    if rows:
        yield ""


def page() -> str:
    """The text of the page."""
    lines, seen = [INTRODUCTION], dict[str, str]()
    for made, summary in _commands(parser()):
        lines += _section(made, summary, seen)
    lines += _schemas()
    return written("\n".join(lines).rstrip() + "\n")


def main(args: list[str] | None = None) -> None:
    """Writes or checks the page."""
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("--check", action="store_true", help="fail if the page differs")
    text = page()
    if not command.parse_args(args).check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} shows other commands: run python docs/write_commands.py")


if __name__ == "__main__":
    main()
