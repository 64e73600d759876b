"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ..errors import TargetError
from ..report.inputs import named_dtype
from ..report.target import Target, load

FINE, ERROR, FINDINGS = 0, 1, 3  # the exit statuses of every command

MODEL = "pkg.mod:build | hf:NAME"
MODEL_HELP = (
    "a function without arguments that builds the model, or the model itself; or a model of "
    "transformers: hf: and a class such as LlamaForCausalLM, a model type such as llama, or a "
    "local config.json or its folder"
)

Subparsers = Any  # argparse keeps the class of its subparsers private


def add_command(
    subparsers: Subparsers, name: str, summary: str, description: str, example: str
) -> argparse.ArgumentParser:
    """The parser of a command, whose help shows an example."""
    made: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"examples:\n{example}" if "\n" in example else f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return made


def add_model(parser: argparse.ArgumentParser, *, with_data: bool = False) -> None:
    """Adds the arguments that name a model and the inputs of its call.

    Args:
        with_data: whether the default device is not meta, but CUDA, or the CPU without it.
    """
    parser.add_argument("model", metavar=MODEL, help=MODEL_HELP)
    add_inputs(parser, with_data=with_data)


def add_inputs(parser: argparse.ArgumentParser, *, with_data: bool = False) -> None:
    """Adds those of :func:`add_model` besides the model."""
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE:DTYPE",
        help="shape and dtype of an input, such as 8x2048x4096:bf16 or 2x128:int64; once per "
        "input of the call (default: what example_inputs beside the model says; with hf:NAME, 8 "
        "rows of up to 512 tokens, or 8 images)",
    )
    parser.add_argument(
        "--device",
        default=None if with_data else "meta",
        metavar="DEVICE",
        help="cpu or cuda (default: cuda where there is one)"
        if with_data
        else "meta, cpu or cuda; meta plans like a GPU and needs none (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default=None,
        metavar="DTYPE",
        help="convert parameters and inputs, such as bf16",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=None,
        metavar="FILE",
        help="with hf:NAME, a config.json, or a JSON file with some settings of one",
    )
    parser.set_defaults(with_data=with_data, applied=True)


def target_of(args: argparse.Namespace) -> Target:
    """The model and the inputs that :func:`add_model` has read.

    Raises:
        TargetError: as :func:`opfuser.report.target.load`.
    """
    dtype = None if args.dtype is None else named_dtype(args.dtype)
    if dtype is not None and not dtype.is_floating_point:
        raise TargetError.explained(
            "Parameters are converted to a floating-point dtype",
            received=args.dtype,
            remedy="Use fp64, fp32, bf16 or fp16",
        )
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return load(
        args.model,
        args.input,
        device,
        dtype,
        with_data=args.with_data,
        config=args.config,
        applied=args.applied,
    )


def model_words(args: argparse.Namespace) -> list[str]:
    """The model and its inputs as the words of a command, as :func:`add_model` reads them."""
    words = [args.model] if args.config is None else [args.model, "--config", str(args.config)]
    for text in args.input:
        words += ["--input", text]
    if args.device not in (None, "meta"):
        words += ["--device", args.device]
    return words if args.dtype is None else [*words, "--dtype", args.dtype]


def add_output(parser: argparse.ArgumentParser, *formats: str) -> None:
    """Adds where a command writes to, and as what.

    Args:
        formats: the first is the default; none leaves ``--format`` out.
    """
    if formats:
        parser.add_argument(
            "--format",
            choices=formats,
            default=formats[0],
            help="how it is shown (default: %(default)s)",
        )
    parser.add_argument(
        "-o", "--output", type=Path, default=None, metavar="FILE", help="write to a file"
    )


def write(text: str, file: Path | None) -> None:
    """Writes a text to a file, or prints it.

    Raises:
        TargetError: the file cannot be written.
    """
    if file is None:
        print(text)
        return
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TargetError.explained(
            "The file cannot be written", received=f"{file}: {error.strerror}"
        ) from error
