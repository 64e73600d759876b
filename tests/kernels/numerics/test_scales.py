from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.kernels import scales
from opfuser.kernels.launch import recorded
from opfuser.kernels.scales import KeptScales, update_scales
from tests.kernels.codes import E4M3, E5M2, assert_scales, expected_scale

INF, NAN = math.inf, math.nan
HYBRID = E4M3, E4M3, E5M2
# More rows than the kernel takes at once, and around that number.
LENGTHS = 1, 2, 3, 17, 1023, 1024, 1025, 1026, 2050

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def kept(length: int, device: torch.device, amax: list[float], **how: Any) -> KeptScales:
    """In the middle of other memory, of which nothing may be written to."""
    settings: dict[str, Any] = {"dtypes": HYBRID, "margin": 0, "most_recent": False, **how}
    history = torch.rand(length + 2, 3) * 4 * torch.tensor([1.0, 1e3, 1e-6])
    scale = torch.tensor([3.0, 5.0, 7.0]).repeat(3, 1).to(device)
    maxima = torch.tensor(amax).repeat(3, 1).to(device)
    return KeptScales(scale[1], history.to(device)[1:-1], maxima[1], **settings)


def memory(own: KeptScales) -> list[Tensor]:
    """All that its tensors stand in."""
    return [t.new_empty(0).set_(t.untyped_storage()) for t in own[:3]]


def expected_update(own: KeptScales) -> tuple[list[float], list[list[float]]]:
    """Scale and history, number by number."""
    usable = [a if math.isfinite(a) else 0.0 for a in own.amax.tolist()]
    history = own.history.tolist()
    if len(history) == 1:
        history = [[new or old for new, old in zip(usable, history[0])]]
    elif any(usable):
        history = [usable, *history[:-1]]
    new = []
    for n, (column, dtype) in enumerate(zip(zip(*history), own.dtypes)):
        has_nan = any(map(math.isnan, column))
        most = column[0] if own.most_recent else NAN if has_nan else max(column)
        scale = torch.tensor(expected_scale(most, dtype, False)) * 2.0**-own.margin
        new.append(scale.item() if most > 0 else own.scale[n].item())
    return new, history


def check(operations: list[KeptScales]) -> None:
    wanted = [(*expected_update(own), *map(Tensor.clone, memory(own))) for own in operations]
    update_scales(operations)
    for n, (own, (scale, history, *before)) in enumerate(zip(operations, wanted)):
        what = f"operation {n}"
        assert_scales(own.scale, torch.tensor(scale), what)
        assert_scales(own.history, torch.tensor(history), what)
        assert_scales(own.amax, torch.zeros(3), what)
        for now, then in zip(memory(own), before):
            assert_scales(now[:3], then[:3].cpu(), f"{what}, memory before")
            assert_scales(now[-3:], then[-3:].cpu(), f"{what}, memory after")


def test_histories_of_any_length(device: torch.device) -> None:
    operations = [
        kept(length, device, [2.5, 1e4, 3e-7], most_recent=recent)
        for length in LENGTHS
        for recent in (False, True)
    ]
    for _ in range(3):
        check(operations)
        for own in operations:
            own.amax.copy_(torch.tensor([1.5, 1e-4, 0.0]))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_what_is_not_finite_or_was_not_seen(length: int, device: torch.device) -> None:
    seen = (
        [0.0, 0.0, 0.0],
        [INF, NAN, 0.0],
        [INF, 2.0, 0.0],
        [0.0, NAN, 1e-30],
        [1e-45, 3.4e38, 448.0],
        [NAN, NAN, NAN],
    )
    ways = [(amax, recent) for amax in seen for recent in (False, True)]
    check([kept(length, device, amax, most_recent=recent) for amax, recent in ways])


@pytest.mark.parametrize("length", [1, 2, 4])
def test_any_history_of_a_state_dict(length: int, device: torch.device) -> None:
    operations = []
    for entry in (0.0, INF, NAN, 1e-45, 3e38):
        for amax in ([0.0, 0.0, 0.0], [1.0, 0.0, 2.0]):
            operations.append(kept(length, device, amax))
            operations[-1].history[-1] = entry
    check(operations)
    check(operations)


def test_formats_and_margins(device: torch.device) -> None:
    ways = [(dtypes, m) for dtypes in (HYBRID, (E4M3,) * 3) for m in (0, 1, 4, -3, 100)]
    check([kept(3, device, [3.0, 1e-38, 1e30], dtypes=dtypes, margin=m) for dtypes, m in ways])


def mixed(device: torch.device) -> list[KeptScales]:
    ways = (0, True), (4, False)
    settings = [(n, margin, recent) for n in (1, 4, 1030) for margin, recent in ways]
    return [
        kept(length, device, torch.rand(3).tolist(), margin=margin, most_recent=recent)
        for length, margin, recent in settings * 2
    ]


def test_operations_come_and_go(device: torch.device) -> None:
    """What was updated before is written to no more once it is left out."""
    operations = mixed(device)
    check(operations)
    left_out = operations.pop(3)
    left_out.amax.fill_(9.0)
    operations.insert(0, kept(2, device, [1.0, 2.0, 3.0]))
    before = [t.clone() for t in memory(left_out)]
    check(operations)
    check(operations[::-1])
    for now, then in zip(memory(left_out), before):
        assert_scales(now, then.cpu())
    own = operations[2]
    old = own.scale.detach()
    own.scale.data = own.scale.repeat(3, 1)[1]  # as FSDP does with buffers
    own = operations[2] = KeptScales(*own)
    for amax, then in ((1.0, old.clone()), (2.0, old.clone())):
        own.amax.fill_(amax)
        check(operations)
        assert_scales(old, then.cpu())
    held = weakref.ref(own.scale)
    del own, operations[:]
    update_scales([])
    assert held() is None, "what is updated no more is kept"


def test_one_launch_whatever_the_number_of_operations(device: torch.device) -> None:
    operations = mixed(device)
    with recorded() as launches:
        update_scales(operations)
        (first,) = launches
        update_scales(list(operations))
        update_scales(operations[1:])
        update_scales([*operations[2:], operations[0]])
    addresses, numbers = first.tensors
    assert first.grid == (len(operations), 1, 1)
    for own, row, factors in zip(operations, addresses.tolist(), numbers.tolist()):
        assert row[:3] == [t.data_ptr() for t in own[:3]]
        assert row[3:] == [len(own.history), own.most_recent]
        assert factors == [448.0, 448.0, 57344.0, 2.0**-own.margin]
    # The table is made once for the same operations.
    assert launches[1].tensors[0] is addresses
    assert launches[2].tensors[0] is not addresses
    assert launches[3].tensors[0] is not launches[2].tensors[0]


@pytest.mark.gpu
def test_the_host_waits_for_nothing(device: torch.device, no_waiting: Any) -> None:
    if device.type != "cuda":
        pytest.skip("a CPU's launches are waited for")
    operations = mixed(device)
    check(operations)
    for own in operations:
        own.amax.fill_(3.0)
    torch.cuda.synchronize()
    with no_waiting():
        update_scales(operations[:-1])
        update_scales(operations[:-1])
    assert_scales(operations[0].scale, torch.tensor([448 / 3, 448 / 3, 57344 / 3]))


@pytest.mark.gpu
def test_captured_updates_are_replayed(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("only GPUs have graphs")
    own, twin = (kept(4, device, [1.0, 2.0, 3.0]) for _ in range(2))
    for a, b in zip(twin[:3], own[:3]):
        a.copy_(b)
    graph = torch.cuda.CUDAGraph()
    update_scales([kept(4, device, [1.0, 2.0, 3.0])])  # loads kernels
    scales.update_plain([kept(4, device, [1.0, 2.0, 3.0])])
    with torch.cuda.graph(graph):
        update_scales([own])
    for amax in ([1.0, 2.0, 3.0], [5.0, 0.0, 1.0]):
        own.amax.copy_(torch.tensor(amax))
        twin.amax.copy_(torch.tensor(amax))
        graph.replay()
        update_scales([twin])
        for a, b in zip(own[:3], twin[:3]):
            assert_scales(a, b.cpu())
