# --8<-- [start:model]
from opfuser import Linear, Residual, RMSNorm, Sequential, SwiGLU


def block():
    return Residual(RMSNorm(1024), Linear(1024, 8192), SwiGLU(), Linear(4096, 1024))


def build():
    return Sequential(*[block() for _ in range(24)])


build.example_inputs = "8x2048x1024:bf16"
# --8<-- [end:model]
