# --8<-- [start:first]
import torch

from opfuser import GELU, Linear, Residual, RMSNorm, Sequential

model = Sequential(
    Linear(16, 64),
    Residual(RMSNorm(64), Linear(64, 256), GELU(), Linear(256, 64)),
    Linear(64, 1),
)
x = torch.randn(8, 16)
loss = model(x).square().mean()
loss.backward()
# --8<-- [end:first]

# --8<-- [start:steps]
plan = model.plan(x)
for step in plan.forward:
    print(step.indices, type(step.op).__name__)
# --8<-- [end:steps]

# --8<-- [start:list]
encoder = model[:-1]  # shares its modules with model
encoder.append(Linear(64, 8))
head = encoder.pop()
classifier = encoder + Sequential(GELU(), head)
# --8<-- [end:list]
assert classifier(x).shape == (8, 8)

# --8<-- [start:mixed]
mixed = Sequential(Linear(16, 64), torch.nn.Softsign(), Linear(64, 1))
mixed(x)
# --8<-- [end:mixed]

# --8<-- [start:checkpoint]
ours = Sequential(Linear(16, 64), GELU("none"), Linear(64, 1))
theirs = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
ours.load_state_dict(theirs.state_dict())  # and the other way round
torch.testing.assert_close(ours(x), theirs(x))
# --8<-- [end:checkpoint]
theirs.load_state_dict(ours.state_dict())

# --8<-- [start:autocast]
with torch.autocast("cpu", dtype=torch.bfloat16):
    y = model(x)
assert y.dtype == torch.bfloat16
# --8<-- [end:autocast]

# --8<-- [start:accumulation]
linear = Linear(16, 16, accumulate_into_grad=True)
accumulating = Sequential(linear, GELU())
for micro_batch in torch.randn(4, 8, 16):
    accumulating(micro_batch).square().mean().backward()
    # from the second on, the GEMM adds to linear.weight.grad
# --8<-- [end:accumulation]
assert linear.weight.grad is not None

# --8<-- [start:evaluation]
model.eval()
with torch.no_grad():
    y = model(x)  # a plan of its own: no backward, nothing saved
# --8<-- [end:evaluation]

# --8<-- [start:meta]
with torch.device("meta"):
    large = Sequential(Linear(64, 64), RMSNorm(64))
large.to_empty(device="cpu")
for module in large:
    module.reset_parameters()
# --8<-- [end:meta]
assert all(p.isfinite().all() for p in large.parameters())
