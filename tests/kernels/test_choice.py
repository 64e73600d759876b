"""When a kernel is called, and when plain torch."""

from __future__ import annotations

import pytest
import torch

from opfuser.kernels.choice import kernel_or_plain
from opfuser.kernels.launch import INTERPRETED, recorded

if INTERPRETED:
    pytest.skip("the interpreter's process has kernels on a CPU", allow_module_level=True)

KERNEL, PLAIN = torch.ones(()), torch.zeros(())

always = kernel_or_plain(launch=lambda x: KERNEL, plain=lambda x: PLAIN)
short = kernel_or_plain(
    launch=lambda x: KERNEL, plain=lambda x: PLAIN, accepts=lambda x: len(x) <= 4
)


def test_a_kernel_is_called_where_there_is_one_that_accepts_the_arguments() -> None:
    assert always(torch.ones(4)) is PLAIN
    with recorded():  # as if the CPU had kernels
        assert always(torch.ones(4)) is KERNEL
        assert short(torch.ones(4)) is KERNEL
        assert short(torch.ones(5)) is PLAIN
        assert short(torch.ones(4, dtype=torch.float64)) is PLAIN


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
def test_plain_torch_is_traced_where_there_are_kernels() -> None:
    torch.compiler.reset()
    x = torch.ones(4)
    with recorded():
        for choose in (always, short):
            assert not torch.compile(choose, backend="eager", fullgraph=True)(x)
            assert choose(x) is KERNEL
