from __future__ import annotations

import pytest
import torch
from torch import nn

from opfuser import AddExtraInput, BasicLinear, Bias, L2Normalization, Sequential, SwiGLU
from opfuser.basic.activation import GELU, ReLU, SiLU, Softplus
from opfuser.fused import BackwardActivationBias
from opfuser.op import GradNeeds, OperationContext
from opfuser.testing import assert_not_fused
from tests.fused.examples import BF16, F32, F64, Case, check, leaf, without_bias
from tests.kernels.blocks import small_blocks

NAME = "backward_activation_bias"


def several() -> list[nn.Module]:
    """The first bias goes into the GEMM in forward."""
    linear = [BasicLinear(6, 4), Bias(4), SiLU()]
    return [*linear, Bias(4), Bias(4), ReLU(), L2Normalization()]


def then_sum() -> list[nn.Module]:
    """Under autocast the gradient of a sum with fp32 is fp32, that of the activation is not."""
    return [Bias(6), GELU(), AddExtraInput()]


CASES = {
    "several": Case(several, (33, 6), dtypes=(F64, BF16), times=2),
    "a threshold": Case(lambda: [Bias(6), Softplus(2.0, 1.0)], dtypes=(F32, BF16)),
    "cleared bias": Case(lambda: [without_bias(Bias(6)), SiLU()]),
    "sum under autocast": Case(then_sum, extras=(6,), autocast=True),
}


@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    check(NAME, CASES[case])


@pytest.mark.parametrize("block_by_block", [False, True])
def test_rows_saved_flat(block_by_block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As forward fusions written for te.ops save them."""
    if block_by_block:
        small_blocks(monkeypatch, 8)
    x, dy = torch.randn(6, 4), torch.randn(2, 3, 4)
    ctxs = [OperationContext(), OperationContext()]
    ctxs[0].needs = GradNeeds(True, (True,), ())
    ctxs[1].saved_tensors = (x,)
    fused = BackwardActivationBias(bias=Bias(4), activation=ReLU())
    with torch.no_grad():
        dx, [(db,), ()], _ = fused.fuser_backward(ctxs, dy, basic_op_grad_extra_outputs=[(), ()])
    want = dy * (x > 0).view(2, 3, 4)
    assert torch.equal(dx, want)
    torch.testing.assert_close(db, want.sum((0, 1)))


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_no_work_for_gradients_that_nobody_needs(needs: tuple[bool, bool]) -> None:
    fused = BackwardActivationBias(bias=Bias(6), activation=SiLU())
    ctxs = [OperationContext(), OperationContext()]
    ctxs[0].needs = GradNeeds(needs[0], (needs[1],), ())
    ctxs[1].saved_tensors = (torch.randn(3, 6),)
    with torch.no_grad():
        dx, [(db,), ()], [(), ()] = fused.fuser_backward(
            ctxs, torch.randn(3, 6), basic_op_grad_extra_outputs=[(), ()]
        )
    assert (dx is not None, db is not None) == needs


def test_where_it_is_refused() -> None:
    assert_not_fused(Sequential(Bias(6), SwiGLU()), NAME, leaf(3, 6))
    frozen = Bias(6).requires_grad_(False)
    seq = Sequential(frozen, SiLU(), BasicLinear(6, 4))
    assert_not_fused(seq, NAME, torch.randn(3, 6), code="NO_GRAD")
