"""How launches are noted, keyed and run."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from opfuser import torch_internals
from opfuser.events import KernelCompiled, record_events, subscribe
from opfuser.kernels.launch import Launch, has_fp4, has_fp8, multiprocessors, recorded, runs

ROOT = Path(__file__).parents[2]


def test_there_are_no_kernels_for_a_cpu() -> None:
    assert not runs(torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_there_are_no_kernels_for_a_dtype(dtype: torch.dtype) -> None:
    with recorded():
        assert not runs(torch.ones(1, dtype=dtype))


def test_a_launch_is_noted_instead_of_run() -> None:
    launch = Launch("nowhere:nothing", {"BLOCK": 8})
    x, y = torch.empty(3, 5, device="meta"), torch.empty(3, dtype=torch.bfloat16, device="meta")
    with recorded() as noted:
        assert runs(x)
        launch((3, 1, 1), (x, None, y), (5,), (0.5,))
    assert not runs(x)
    (one,) = noted
    assert one.launch is launch
    assert (one.grid, one.ints, one.floats) == ((3, 1, 1), (5,), (0.5,))
    assert one.tensors[0] is x
    assert one.traffic == 3 * 5 * 4 + 3 * 2


def test_notes_of_an_inner_block_are_its_own() -> None:
    launch = Launch("nowhere:nothing", {})
    x = torch.empty(1, device="meta")
    with recorded() as outer:
        with recorded() as inner:
            launch((1, 1, 1), (x,))
        assert runs(x)
    assert (len(inner), len(outer)) == (1, 0)


def test_no_programs_need_no_function() -> None:
    Launch("nowhere:nothing", {})((0, 1, 1), (torch.empty(0),))


def test_a_launch_shows_what_it_runs() -> None:
    assert repr(Launch("norm:f", {"BLOCK": 8, "F": "@scalar:swish"}, num_warps=2)) == (
        "norm:f(BLOCK=8, F=@scalar:swish, num_warps=2, num_stages=3)"
    )


@pytest.mark.parametrize(
    ("capability", "fp8", "fp4"),
    [
        ((8, 0), False, False),
        ((8, 6), False, False),
        ((8, 9), True, False),
        ((9, 0), True, False),
        ((10, 0), True, True),
        ((12, 0), True, True),
    ],
)
def test_gpus_that_convert_to_fp8_and_fp4(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fp8: bool, fp4: bool
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "torch.cuda.get_device_capability", lambda index: (asked.append(index), capability)[1]
    )
    index = int("9{}{}".format(*capability))  # what is known of another GPU is not asked again
    on_gpu = SimpleNamespace(is_cuda=True, get_device=lambda: index)
    for _ in range(2):
        assert (has_fp8(on_gpu), has_fp4(on_gpu)) == (fp8, fp4)
    assert asked == [index]
    meta = torch.empty(0, device="meta")
    assert has_fp8(meta), "plans for it are those for a GPU that does"
    assert has_fp4(meta)


def test_triton_is_imported_at_the_first_launch_only() -> None:
    code = "import sys, opfuser; print('triton' in sys.modules, 'opfuser' in sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"]


def test_the_multiprocessors_of_a_device_that_is_not_there() -> None:
    assert multiprocessors(torch.empty(0, device="meta")) == 132


class _Launcher:
    """Like a launcher of Triton: Python around ``launch``, which is in C."""

    def __init__(self, packed: bool, scratch: int) -> None:
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.packed = packed
        self.entered = 0
        self.handed_on: list[tuple[object, ...]] = []
        self.launch = self._launch

    def _launch(self, *args: object) -> None:
        self.handed_on.append(args)

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: object, *args: object
    ) -> None:
        self.entered += 1
        metadata, hooks, own = args[0], args[1:4], args[4:]
        if self.packed:
            self.launch(x, y, z, stream, function, True, metadata, *hooks, None, "signature", own)
        else:
            self.launch(x, y, z, stream, function, True, None, metadata, *hooks, *own)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scratch", [0, 8])
def test_the_launcher_in_c_gets_what_the_one_in_python_hands_on(
    monkeypatch: pytest.MonkeyPatch, packed: bool, scratch: int
) -> None:
    """The one in Python is left out unless it has to allocate memory for the kernel."""
    launcher = _Launcher(packed, scratch)
    kernel = SimpleNamespace(run=launcher, function="binary", packed_metadata=(4, 1, 0))
    grid = (2, 3, 1)
    compiled: list[tuple[object, ...]] = []

    def launch_by_triton(*args: object, **options: object) -> object:
        compiled.append(args)
        return kernel

    monkeypatch.setattr(Launch, "function", {grid: launch_by_triton})
    monkeypatch.setattr("opfuser.kernels.launch.INTERPRETED", False)
    monkeypatch.setattr("torch.cuda.device", nullcontext)
    monkeypatch.setattr(torch_internals, "cuda_device", lambda: -1)
    monkeypatch.setattr(torch_internals, "cuda_stream", lambda device: 7)
    launch = Launch("nowhere:nothing", {})
    x, y = torch.empty(4), torch.empty(4)
    told: list[KernelCompiled] = []
    monkeypatch.setattr("time.perf_counter", lambda: float(10 * len(compiled)))
    subscription = subscribe(told.append, only=KernelCompiled)
    launch(grid, (x, None, y), (5, 1), (0.5,))
    for n in (5, 6, 7, 5):  # integers of one kind, so that one binary serves all
        launch(grid, (x, None, y), (n, 1), (0.5,))
        launched, entered = launcher.handed_on[-1], launcher.entered
        pointers = x.data_ptr(), None, y.data_ptr()
        launcher(*grid, 7, "binary", (4, 1, 0), None, None, None, *pointers, n, 1, 0.5)
        assert launched == launcher.handed_on[-1]
    assert len(compiled) == 1
    assert entered == (4 if scratch else 0) + 3, "three of these calls are the test's own"
    launch(grid, (x, None, y), (16, 1), (0.5,))
    launch(grid, (x, None, y.double()), (5, 1), (0.5,))
    assert len(compiled) == 3
    subscription.remove()
    launch(grid, (x, None, y.half()), (5, 1), (0.5,))
    kinds = ("int", "1"), ("16n", "1"), ("int", "1")
    for event, own, dtype in zip(told, kinds, ("float32", "float32", "float64")):
        arguments = "float32*", "None", f"{dtype}*", *own, "float32"
        assert event == KernelCompiled(launch.name, repr(launch), arguments, x.device, 10.0)
    assert len(told) == 3, "nobody listens to the fourth"
    assert str(told[0]) == (
        "[kernel] nowhere:nothing(float32*, None, float32*, int, 1, float32) took 10.00 s"
    )


SCALE = """
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, y_ptr, n, stride, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i * stride, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, x * factor, mask=i < n)
"""


@pytest.fixture
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    (tmp_path / "scale_for_tests.py").write_text(SCALE)
    monkeypatch.setattr("opfuser.kernels.device.__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "opfuser.kernels.device.scale_for_tests", raising=False)
    return Launch("scale_for_tests:scale", {"BLOCK": 64})


@pytest.mark.gpu
def test_one_launch_serves_every_dtype_alignment_and_stride(scale: Launch) -> None:
    """The binary that is kept for one call is never used for another that needs its own."""
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(2):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for n in (1, 16, 63, 100):
                for offset in (0, 1):
                    for stride in (1, 3, 16):
                        source = torch.randn(2000, device="cuda", generator=generator).to(dtype)
                        x = source[offset:][: n * stride : stride]
                        y = torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)
                        scale((-(-n // 64), 1, 1), (x, y), (n, stride), (2.0,))
                        assert torch.equal(y, 2 * x)


@pytest.mark.gpu
def test_subscribers_are_told_of_what_triton_compiles(scale: Launch) -> None:
    x = torch.ones(64, device="cuda")
    with record_events(only=KernelCompiled) as log:
        for n in (16, 32, 33, 63):
            scale((1, 1, 1), (x, torch.empty_like(x)), (n, 1), (2.0,))
    arguments = [("float32*", "float32*", n, "1", "float32") for n in ("16n", "int")]
    assert [event.arguments for event in log.of(KernelCompiled)] == arguments
    assert all(event.seconds > 0 and event.device == x.device for event in log.of(KernelCompiled))


@pytest.mark.gpu
def test_the_second_call_does_not_go_through_triton(
    scale: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    scale((1, 1, 1), (x, y), (64, 1), (2.0,))
    monkeypatch.delattr(Launch, "function")
    y.zero_()
    scale((1, 1, 1), (x, y), (64, 1), (3.0,))
    assert torch.equal(y, 3 * x)


@pytest.mark.gpu
def test_a_launch_goes_to_the_current_stream_and_into_graphs(scale: Launch) -> None:
    x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    scale((1, 1, 1), (x, y), (64, 1), (2.0,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale((1, 1, 1), (x, y), (64, 1), (2.0,))
    x.fill_(5.0)
    y.zero_()
    graph.replay()
    assert torch.equal(y, torch.full_like(y, 10.0))


@pytest.mark.gpu
def test_a_tensor_of_the_cpu_is_refused_also_once_a_binary_is_kept(scale: Launch) -> None:
    x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    scale((1, 1, 1), (x, y), (64, 1), (2.0,))
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        scale((1, 1, 1), (x, y.cpu()), (64, 1), (2.0,))
