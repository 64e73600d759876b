"""Markdown tables of what run.py wrote: ``python -m benchmarks.gpu.tables FOLDER``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ORDER = ("opfuser", "torch", "torch.compile", "Liger-Kernel", "quack", "Transformer Engine")
TITLES = {
    "kernels": "Kernels",
    "sums": "Residual sums behind a GEMM",
    "blocks": "Blocks",
    "quantized": "Blocks and models in FP8",
    "experts": "Mixtures of experts",
    "model": "Models",
    "hugging_face": "Models of transformers",
    "hugging_face_layers": "Layers of transformers",
    "small": "Small models",
    "replay": "Replayed calls",
    "host": "Host time",
    "distributed": "Several GPUs",
    "expert_parallel": "Experts on several GPUs",
}
MEMORY = {"reserved_bytes": "reserved", "captured_bytes": "captured"}


def tables(folder: Path) -> Iterator[str]:
    for part, title in TITLES.items():
        file = folder / f"{part}.json"
        if not file.exists():
            continue
        document = json.loads(file.read_text())
        first, *later = (about(d["machine"]) for d in (document, *document.get("runs", [])))
        yield f"## {title}\n\n`{file.name}`: {first}.\n"
        for n, machine in enumerate(later, 1):
            yield f"Run {n}: {machine}.\n"
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in document["rows"]:
            if str(row.get("failure", "")).startswith("not run"):
                continue
            size = " ".join(f"{key}={value}" for key, value in row["size"].items())
            case = row["case"] + (f" (run {row['run']})" if "run" in row else "")
            groups.setdefault((case, size, row["pass"]), []).append(row)
        columns = columns_of(document["rows"])
        yield "| | | | " + " | ".join(columns) + " |"
        yield "|---|---|---|" + "---|" * len(columns)
        for labels, rows in groups.items():
            own = {row["contestant"]: cell(row, part) for row in rows}
            yield f"| {' | '.join([*labels, *[own.get(name, '') for name in columns]])} |"
        yield ""


def about(machine: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def columns_of(rows: list[Row]) -> list[str]:
    found = dict.fromkeys(row["contestant"] for row in rows)
    return [*[name for name in ORDER if name in found], *[n for n in found if n not in ORDER]]


def cell(row: Row, part: str) -> str:
    """The time, with its share of the copy, its ratio to the GEMMs, and memory."""
    if "first_ten_steps" in row:
        return ", ".join(f"{time:.1f}" for time in row["first_ten_steps"]) + " ms"
    time = row.get("median_us")
    if time is None:
        failure = row.get("failure", "")
        named = ("not installed", "took longer")
        return failure and next((n for n in named if failure.startswith(n)), "failed")
    text = f"{time / 1e3:.2f} ms" if time >= 1e3 else f"{time:.1f} us"
    extras = []
    if part == "kernels" and row.get("share_of_copy"):
        shares = [row["share_of_copy"], row.get("share_of_equal_copy")]
        extras.append(" / ".join(f"{100 * share:.0f}" for share in shares if share) + "%")
    extras += ratios(row, part)
    for key, what in MEMORY.items() if part in ("small", "replay") else ():
        if row.get(key):
            extras.append(f"{row[key] / 2**20:.0f} MiB {what}")
    if "host_us_per_unit" in row:
        device, host = row["device_us"] * 1e-3, row["host_us"] * 1e-3
        extras.append(
            f"device {device:.1f}, host {host:.1f}, {row['host_us_per_unit']:.0f} us a unit"
        )
    if "tflops" in row:
        waits = row.get("host_waits")
        extras.append(f"{row['tflops']:.0f} TF/s" + (f", {waits} waits" if waits else ""))
    if row.get("peak_bytes"):
        extras.append(f"{row['peak_bytes'] / 2**30:.1f} GiB at the peak")
    if part.startswith(("blocks", "experts", "model", "hugging_face")) and row.get("saved_bytes"):
        extras.append(f"{row['saved_bytes'] / 2**20:.0f} MiB saved")
    return text + (f" ({', '.join(extras)})" if extras else "")


def ratios(row: Row, part: str) -> list[str]:
    """Its ratios to others' times."""
    found = []
    if row.get("over_floor") and row["contestant"] != "bare GEMMs":
        found.append(f"{row['over_floor']:.2f} x GEMMs")
    if part in ("small", "distributed", "expert_parallel") and row.get("speedup"):
        found.append(f"{row['speedup']:.2f} x torch")
    if "efficiency" in row:
        found.append(f"{row['efficiency']:.2f} of one GPU")
    if row.get("over_off") and row["contestant"] != "opfuser":
        found.append(f"{row['over_off']:.2f} x off")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print("# Figures of one machine\n")
    print("Medians; how they are measured stands in `../README.md`. Percentages are shares of what")
    print("a large device-to-device copy moves per second, and a copy of as many bytes.\n")
    print("\n".join(tables(args.folder)).rstrip())


if __name__ == "__main__":
    main()
