# --8<-- [start:audit]
import torch
from audit_model import Model

from opfuser.report.audit import audit

with torch.device("meta"):
    x, scale, shift = (torch.randn(8, 256, 64, requires_grad=True) for _ in range(3))
    todo = audit(Model(), (x, scale, shift))
for missed in todo.missed_fusions:
    print(missed.fused_op, missed.recommendation, missed.estimate.calls_per_step)
text = todo.as_yaml()  # the document that opfuser audit writes
# --8<-- [end:audit]
assert text.startswith("schema: opfuser.fusion_todo/1")

# --8<-- [start:candidate]
candidate = todo.missed_fusions[0]
print(candidate.existing_kernel.lookup)
print(*candidate.existing_kernel.evidence, sep="\n")
print(candidate.instances[0].op_loc)
print(candidate.instances[0].module_segment.strip())
# --8<-- [end:candidate]
