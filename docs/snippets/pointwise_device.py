# --8<-- [start:device]
import triton
import triton.language as tl


@triton.jit
def swish(x, constants: tl.constexpr):
    beta: tl.constexpr = constants[0]
    s = tl.sigmoid(beta * x)
    return x * s, s + beta * x * s * (1 - s)


# --8<-- [end:device]
