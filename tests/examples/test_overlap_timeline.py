"""The timeline of a backward pass, from a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG

from examples import overlap_timeline
from examples.overlap_timeline import Kernel, kernels, length, picture


def event(name: str, stream: int, start: float, duration: float, cat: str = "kernel") -> dict:
    return {"name": name, "cat": cat, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_kernels_of_a_trace() -> None:
    trace = {
        "traceEvents": [
            event("at::cuda::sleep::spin_kernel(long)", 7, 20.0, 89.0),
            event("nvjet_tst", 7, 112.0, 5.0),
            event("norm_backward", 7, 110.0, 2.5),
            event("cudaLaunchKernel", 0, 100.0, 3.0, "cuda_runtime"),
            {"name": "process_name", "ph": "M"},
            event("sm90_gemm", 13, 111.0, 9.0),
        ]
    }
    found = kernels(trace)
    assert found == [
        Kernel("norm_backward", 7, 0.0, 2.5),
        Kernel("sm90_gemm", 13, 1.0, 9.0),
        Kernel("nvjet_tst", 7, 2.0, 5.0),
    ]
    assert [k.kind for k in found] == ["other", "GEMM", "GEMM"]
    assert length(found) == 10.0


def test_the_picture_has_a_row_for_each_stream(tmp_path: Path) -> None:
    one = [Kernel("gemm", 7, 0.0, 4.0), Kernel("norm", 7, 4.0, 1.0)]
    two = [Kernel("gemm", 13, 0.0, 4.0), Kernel("norm", 7, 1.0, 1.0)]
    figure = picture({"one stream": one, "overlapped": two})
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [
        "overlapped: stream 7, 4 us",
        "overlapped: stream 13, 4 us",
        "one stream: stream 7, 5 us",
    ]
    FigureCanvasSVG(figure).print_svg(tmp_path / "t.svg")
    assert "<svg" in (tmp_path / "t.svg").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to profile")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    overlap_timeline.main([])
    assert capsys.readouterr().out == "A timeline of streams needs a CUDA device.\n"


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "timeline.svg"
    overlap_timeline.main(["--dim", "256", "--tokens", "512", "--out", str(out)])
    text = out.read_text()
    assert text.count("overlapped: stream") == 2
    assert "one stream" in capsys.readouterr().out
