"""Who adds a residual: the GEMM before the sum, the norm behind it, or the sum itself.

Where A is the size of the sum, sum and norm move 4A in one kernel of a GPU and 5A apart; a CPU has
no such kernel. A GEMM that starts from the residual moves no more than it does without, if it may
write to it, and needs no pass for the sum; else it copies it first, which a GPU takes as long for
as for the sum. So on a GPU a norm goes before a GEMM, and on a CPU the GEMM before a norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..basic.add_extra_input import AddExtraInput
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..fusion import Env, Refusal
from ..op import FusibleOperation

__all__ = ["ordered_in_place", "refused_by_gemm", "refused_by_norm"]


def refused_by_gemm(env: Env, behind: Sequence[FusibleOperation]) -> Refusal | None:
    """Why the GEMM before a sum leaves it to what is behind."""
    if behind and isinstance(behind[0], MakeExtraOutput):
        behind = behind[1:]
    if env.device.type == "cpu" or not behind or type(behind[0]) not in (RMSNorm, LayerNorm):
        return None
    return Refusal("CONFLICT", "on a GPU the norm behind it adds the residual")


def refused_by_norm(add: AddExtraInput | None, env: Env) -> Refusal | None:
    """Why the norm behind a sum leaves it to what is before, where that may be a GEMM."""
    if add is not None and env.device.type == "cpu":
        return Refusal("DEVICE", "on a CPU the GEMM before it adds the residual, not the norm")
    return None


def ordered_in_place(ops: Sequence[FusibleOperation | None], env: Env) -> Refusal | None:
    """Why a kernel that writes to memory of its own cannot add: the caller wants it elsewhere.

    As :class:`AddExtraInput` says: where nothing is recorded for backward, and not for a channel.
    """
    if any(env.needs_backward):
        return None
    for op in ops:
        if isinstance(op, AddExtraInput) and op.in_place and op._extra_input_channels[0] is None:
            return Refusal("IN_PLACE", "the sum is to be written over the extra input")
    return None
