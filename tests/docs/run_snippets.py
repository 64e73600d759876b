"""Runs each snippet in a fork of one interpreter that has imported what most snippets import.

``python run_snippets.py FOLDER SNIPPET...`` writes to FOLDER, for each snippet, ``NAME.txt`` with
what it printed, and ``NAME.status`` with its exit status.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch._dynamo
import transformers.modeling_utils  # noqa: F401

import opfuser.fused
import opfuser.models
import opfuser.testing  # noqa: F401


def run(snippet: Path, folder: Path) -> int:
    """Runs one snippet as a program would; returns its exit status."""
    torch.manual_seed(0)  # as the tests have it; a snippet does not show a seed
    # Of torch 2.11 about its own default.
    warnings.filterwarnings("ignore", message=".*Profiler clears events")
    with (folder / f"{snippet.stem}.txt").open("w", encoding="utf-8") as out:
        sys.stdout = sys.stderr = out
        sys.argv, sys.path[0] = [str(snippet)], str(snippet.parent)
        os.chdir(folder)
        try:
            runpy.run_path(str(snippet), run_name="__main__")
        except Exception:  # noqa: BLE001 - reported as an interpreter would
            traceback.print_exc()
            return 1
    return 0


def main() -> None:
    folder, *snippets = map(Path, sys.argv[1:])
    gc.freeze()  # or the first look for garbage of every fork would copy all of its memory
    for snippet in snippets:
        child = os.fork()
        if not child:
            os._exit(run(snippet, folder))
        _, status = os.waitpid(child, 0)
        (folder / f"{snippet.stem}.status").write_text(str(status), encoding="utf-8")


if __name__ == "__main__":
    main()
