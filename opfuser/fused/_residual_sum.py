"""What adds a residual: the GEMM before the sum, the norm after it, a chain, or the sum itself.

Where A is the size of the sum, sum and norm move 4A in one kernel of a GPU and 5A apart; a CPU has
no such kernel. A GEMM that starts from the residual moves no more than it does without, if it may
write to it, and needs no pass for the sum; else it copies it first, which a GPU takes as long for
as for the sum. So on a GPU a norm goes before a GEMM, and on a CPU the GEMM before a norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..basic.add_extra_input import AddExtraInput
from ..basic.bias import Bias
from ..basic.constant_scale import ConstantScale
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..core.fusion import Env, Refusal
from ..op import FusibleOperation

Kinds = Sequence[type[FusibleOperation]]


def left_to_norm(env: Env, behind: Sequence[FusibleOperation]) -> Refusal | None:
    """Why a GEMM leaves the sum after it to the norm behind, maybe beyond the tap of the sum."""
    if env.device.type == "cpu":
        return None
    if behind and isinstance(behind[0], MakeExtraOutput):
        behind = behind[1:]
    if behind and type(behind[0]) in (RMSNorm, LayerNorm):
        return Refusal("CONFLICT", "on a GPU the norm after it adds the residual")
    return None


def left_to_gemm(add: AddExtraInput | None, env: Env) -> Refusal | None:
    """Why a norm that is joined with the linear operation behind it leaves the sum to a GEMM."""
    if add is not None and env.device.type == "cpu":
        return Refusal("DEVICE", "on a CPU the GEMM before it adds the residual, not the norm")
    return None


def chain_refusal(kinds: Kinds) -> Refusal | None:
    """Why a chain leaves operations to the linear operation that may stand before them.

    A GEMM does these on the way, in both passes, and writes what it would write without them.
    """
    by_gemm = (Bias, AddExtraInput), (ConstantScale, AddExtraInput)
    return _TO_LINEAR if tuple(kinds) in by_gemm else None


def chain_and_norm_refusal(ops: Sequence[FusibleOperation], kinds: Kinds) -> Refusal | None:
    """Why a chain before a norm leaves ``ops`` to others; ``kinds`` are those that change anything.

    A bias alone: 2A moved forward by a GEMM instead of 3A. A factor, with a sum or without: it is
    part of the gradient GEMMs too, 2A less in backward, and the norm's kernel would save no more
    than that forward. But not a bias with a sum: in the GEMM or in the norm's kernel it is 4A
    forward, and 6A where no GEMM can add it, as behind one that is reduced over ranks.
    """
    if len(ops) == 1 and isinstance(ops[0], AddExtraInput):
        return Refusal("CONFLICT", "left to the fusions of a sum and a norm")
    by_gemm = (Bias,), (ConstantScale,), (ConstantScale, AddExtraInput)
    return _TO_LINEAR if tuple(kinds) in by_gemm else None


_TO_LINEAR = Refusal("CONFLICT", "left to the linear operation that may stand before it")
