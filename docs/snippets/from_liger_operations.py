# --8<-- [start:model]
import torch

from opfuser import CrossEntropy, Linear, Residual, RMSNorm, Sequential, SwiGLU

gate_and_up, down = Linear(64, 2 * 96, bias=False), Linear(96, 64, bias=False)
model = Sequential(
    # was: LigerRMSNorm, LigerSwiGLUMLP, a sum
    Residual(RMSNorm(64), gate_and_up, SwiGLU(), down),
    # was: LigerRMSNorm, LigerFusedLinearCrossEntropyLoss
    RMSNorm(64),
    Linear(64, 100, bias=False),
    CrossEntropy(ignore_index=-100, label_smoothing=0.1),
)
x, targets = torch.randn(8, 64), torch.randint(100, (8,))
loss = model(x, targets)
loss.backward()
for step in model.plan(x, targets).forward:
    print(step.indices, type(step.op).__name__)
# --8<-- [end:model]
