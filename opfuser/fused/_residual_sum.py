"""What adds a residual: the GEMM before the sum, the norm after it, a chain, or the sum itself.

Where A is the size of the sum, sum and norm move 4A in one kernel of a GPU and 5A apart; a CPU has
no such kernel. A GEMM that starts from the residual moves no more than it does without, if it may
write to it, and needs no pass for the sum; else it copies it first, which a GPU takes as long for
as for the sum. So on a GPU a norm goes before a GEMM, and on a CPU the GEMM before a norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..basic.add_extra_input import AddExtraInput
from ..basic.bias import Bias
from ..basic.constant_scale import ConstantScale
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..core.fusion import Env, Refusal
from ..op import FusibleOperation

_TO_GEMM = Refusal("CONFLICT", "left to the linear operation that may stand before it")


@dataclass(frozen=True)
class Taker:
    """A kind of kernel that may add a residual; where it leaves that to another, the reason.

    Attributes:
        on_cpu: on a CPU.
        before_norm: elsewhere, where a norm follows, maybe behind the tap of the sum.
        alone: where there would be nothing but the sum before the norm.
        by_gemm: operations that it leaves to the linear operation that may stand before them, if
            they are all that changes anything.
    """

    on_cpu: Refusal | None = None
    before_norm: Refusal | None = None
    alone: Refusal | None = None
    by_gemm: tuple[tuple[type[FusibleOperation], ...], ...] = ()

    def refuses(
        self,
        ops: Sequence[FusibleOperation | None],
        env: Env,
        *,
        behind: Sequence[FusibleOperation] = (),
        changing: Sequence[type[FusibleOperation]] = (),
    ) -> Refusal | None:
        """Why it leaves ``ops`` to another.

        Args:
            ops: the operations that it would take, None for those that are absent.
            behind: what follows them.
            changing: the classes of those that change anything.
        """
        if any(isinstance(op, AddExtraInput) for op in ops):
            if env.device.type == "cpu":
                no = self.on_cpu
            else:
                no = self.before_norm if _begin_with_norm(behind) else None
            no = no or (self.alone if len(ops) == 1 else None)
            if no is not None:
                return no
        return _TO_GEMM if tuple(changing) in self.by_gemm else None


def _begin_with_norm(ops: Sequence[FusibleOperation]) -> bool:
    if ops and isinstance(ops[0], MakeExtraOutput):
        ops = ops[1:]
    return bool(ops) and type(ops[0]) in (RMSNorm, LayerNorm)


# A GEMM can start from the residual, and write over it.
GEMM = Taker(before_norm=Refusal("CONFLICT", "on a GPU the norm after it adds the residual"))

# A norm together with the linear behind it.
NORM_AND_GEMM = Taker(
    on_cpu=Refusal("DEVICE", "on a CPU the GEMM before it adds the residual, not the norm")
)

# A GEMM does these on the way, in both passes, and writes what it would write without them.
CHAIN = Taker(by_gemm=((Bias, AddExtraInput), (ConstantScale, AddExtraInput)))

# A bias alone: 2A moved forward by a GEMM instead of 3A. A factor, with a sum or without: it is
# part of the gradient GEMMs too, 2A less in backward, and the norm's kernel would save no more than
# that forward. But not a bias with a sum: in the GEMM or in the norm's kernel it is 4A forward, and
# 6A where no GEMM can add it, as behind one that is reduced over ranks.
CHAIN_AND_NORM = Taker(
    alone=Refusal("CONFLICT", "left to the fusions of a sum and a norm"),
    by_gemm=((Bias,), (ConstantScale,), (ConstantScale, AddExtraInput)),
)
