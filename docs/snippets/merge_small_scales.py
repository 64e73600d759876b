# --8<-- [start:function]
import torch
from merge_scales import MergedScale

import opfuser
from opfuser import ConstantScale, Sequential
from opfuser.testing import check_fusion


def merge_small_scales(ops, *, env):
    """Merges scales that follow each other as long as fp16 can hold their product."""
    out, run, product = [], [], 1.0

    def close():
        out.extend([MergedScale(run)] if len(run) > 1 else run)

    for op in ops:
        factor = op.scale if type(op) is ConstantScale else None
        if factor is None or abs(product * factor) > 65504:
            close()
            run, product = [], 1.0
        if factor is None:
            out.append(op)
        else:
            run.append(op)
            product *= factor
    close()
    return out


opfuser.register_forward_backward_fusion(merge_small_scales, name="merge_small_scales")
check_fusion("merge_small_scales", [ConstantScale(2.0), ConstantScale(0.3)], torch.randn(5, 6))
# --8<-- [end:function]

scales = [ConstantScale(n) for n in (2.0, 3.0, 60000.0, 0.5, 4.0)]
with opfuser.disable("merge_scales"):
    plan = Sequential(*scales).plan(torch.randn(2, 4))
assert plan.record("merge_small_scales").matches == ((0, 1), (2, 3))
