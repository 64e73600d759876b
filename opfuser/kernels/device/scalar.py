"""Scalar functions with their derivatives: ``f(x, P)`` is the pair (value, derivative), in fp32.

``x`` is an fp32 tile and ``P`` the tuple of the function's parameters. The compiler drops whichever
result a kernel leaves unused. In plain torch the functions are subclasses of
``opfuser.kernels.scalar.ScalarFunction`` with the same names. A NaN comes out as a NaN, and a clamp
passes at its limits what ``torch.clamp`` passes there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...torch_internals import CLAMP_PASSES_AT_LIMITS

LOG2E = tl.constexpr(1.4426950408889634)
HUGE = tl.constexpr(3.4028234e38)
PASSES_AT_LIMITS = tl.constexpr(CLAMP_PASSES_AT_LIMITS)


@triton.jit
def chain(dy, derivative):
    """``dy f'(x)``; where f is flat nothing passes, an infinite gradient neither."""
    return tl.where(derivative == 0.0, 0.0, dy * derivative)


@triton.jit
def identity(x, P: tl.constexpr):
    """``x``."""
    return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def scale(x, P: tl.constexpr):
    """``s x`` for P = (s,)."""
    return x * P[0], tl.full(x.shape, P[0], tl.float32)


@triton.jit
def _inverse(x):
    """``1 / x`` for x from 1, within two units in the last place; 0 from 2⁶⁴ on.

    Two instructions; a division takes five, for the sake of other x.
    """
    return tl.rsqrt(x * x)


@triton.jit
def _logistic(u):
    """``1 / (1 + 2^-u)``, and what is left to 1: both to a few units in the last place.

    Where u < -64 both are 0: it is the product of the second with others that small that matters.
    exp2 is one instruction, exp is five.
    """
    e = tl.exp2(-u)
    s = _inverse(1.0 + e)
    return s, tl.minimum(e, HUGE) * s


@triton.jit
def sigmoid(x, P: tl.constexpr):
    """``σ(x)``."""
    s, rest = _logistic(x * LOG2E)
    return s, s * rest


@triton.jit
def _tanh(x):
    """Hyperbolic tangent and its derivative, both within a few units in the last place.

    Near 0 a polynomial in x² (Chebyshev fit, relative error 8e-8 up to |x| = 0.6), since
    (1 - e) / (1 + e) with ``e = exp(-2 |x|)`` loses digits there.
    """
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2E))
    inverse = 1.0 / (1.0 + e)
    z = x * x
    p = 0.021116216 - 0.00627639009 * z
    p = -0.0538751387 + p * z
    p = 0.13332924 + p * z
    p = -0.333333304 + p * z
    near = x + x * z * p
    far = (1.0 - e) * inverse
    t = tl.where(size < 0.6, near, tl.where(x < 0, -far, far))
    return t, tl.where(size < 0.6, 1.0 - near * near, 4.0 * e * inverse * inverse)


@triton.jit
def tanh(x, P: tl.constexpr):
    """``tanh(x)``."""
    return _tanh(x)


@triton.jit
def softplus(x, P: tl.constexpr):
    """``log(1 + e^z) / β``, z = βx, and x where z > threshold, for P = (β, threshold).

    As ``max(z, 0) + log1p(e)`` with ``e = exp(-|z|)`` and ``log1p(e) = 2 atanh(e / (2 + e))``, that
    by a polynomial (Chebyshev fit on [0, 1/3], relative error 8e-8): the logarithm of 1 + e
    would lose e.
    """
    z = x * P[0]
    e = tl.exp2(tl.abs(z) * -LOG2E)
    s = e / (2.0 + e)
    q = s * s
    p = 0.14116978 + 0.134337745 * q
    p = 0.200038354 + p * q
    p = 0.333333198 + p * q
    value = (tl.where(z <= 0.0, 0.0, z) + 2.0 * (s + s * q * p)) * (1.0 / P[0])
    larger = _inverse(1.0 + e)
    slope = tl.where(z < 0.0, e * larger, larger)
    linear = z > P[1]
    return tl.where(linear, x, value), tl.where(linear, 1.0, slope)


@triton.jit
def relu(x, P: tl.constexpr):
    """``max(x, 0)``, of derivative 0 at 0."""
    return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)


@triton.jit
def squared_relu(x, P: tl.constexpr):
    """``max(x, 0)²``."""
    r = tl.where(x <= 0.0, 0.0, x)
    return r * r, 2.0 * r


@triton.jit
def swish(x, P: tl.constexpr):
    """``x σ(βx)`` for P = (β,)."""
    s, rest = _logistic(x * (P[0] * LOG2E))
    value = x * s
    return value, s + value * (P[0] * rest)


@triton.jit
def gelu_erf(x, P: tl.constexpr):
    """``x Φ(x)``.

    ``Φ(-|x|) exp(x²/2)`` is t times a polynomial in ``t = 1 / (1 + 0.46 |x|)`` (least relative
    error, 1.0e-7, up to |x| = 13.3), and the exponential serves the derivative also: 19
    instructions, where erf alone takes 25.
    """
    e = tl.exp2(x * x * (-0.5 * LOG2E))
    t = _inverse(1.0 + 0.46 * tl.abs(x))
    p = -0.22030816972255707 + 0.03819076716899872 * t
    p = 0.5057196021080017 + p * t
    p = -0.5354313254356384 + p * t
    p = 0.1812235713005066 + p * t
    p = 0.01038928609341383 + p * t
    p = 0.1539974808692932 + p * t
    p = 0.18267355859279633 + p * t
    p = 0.18354518711566925 + p * t
    tail = p * t * e
    cdf = tl.where(x < 0.0, tail, 1.0 - tail)
    return x * cdf, cdf + x * (0.3989422804014327 * e)


@triton.jit
def gelu_tanh(x, P: tl.constexpr):
    """``x/2 (1 + tanh u) = x σ(2u)``, without the cancellation in 1 + tanh."""
    c1: tl.constexpr = 1.5957691216057308  # 2 √(2/π)
    c3: tl.constexpr = 0.07135481627260025  # 0.044715 of that
    square = x * x
    s, rest = _logistic(x * (c1 * LOG2E + c3 * LOG2E * square))
    value = x * s
    return value, s + value * ((c1 + 3.0 * c3 * square) * rest)


@triton.jit
def soft_cap(x, P: tl.constexpr):
    """``c tanh(x / c)`` for P = (c,)."""
    t, slope = _tanh(x * (1.0 / P[0]))
    return P[0] * t, slope


@triton.jit
def soft_capped_swish(x, P: tl.constexpr):
    """``c tanh(x / c) σ(x)`` for P = (c,)."""
    t, slope = _tanh(x * (1.0 / P[0]))
    s, rest = _logistic(x * LOG2E)
    value = P[0] * t * s
    return value, slope * s + value * rest


@triton.jit
def soft_capped_squared_relu(x, P: tl.constexpr):
    """``(c tanh(max(x, 0) / c))²`` for P = (c,)."""
    z = tl.where(x <= 0.0, 0.0, x) * (1.0 / P[0])
    t, slope = _tanh(z)
    # A square has twice the error of its root. Of the errors of e and of the quotient, (1 - t) / t
    # gets into this t, and all of them into that of _tanh, which takes fewer registers.
    e = tl.exp2(z * (-2.0 * LOG2E))
    t = tl.where(z < 0.6, t, 1.0 - 2.0 * e * (1.0 / (1.0 + e)))
    root = P[0] * t
    return root * root, 2.0 * root * slope


@triton.jit
def _stops(x, limit: tl.constexpr):
    """Whether a clamp from above to ``limit`` stops the gradient."""
    if PASSES_AT_LIMITS:
        return x > limit
    else:  # noqa: RET505 - Triton compiles one branch, and would compile what follows too
        return x >= limit


@triton.jit
def clamped_swish(x, P: tl.constexpr):
    """``c σ(αc)``, c = min(x, limit), for P = (α, limit)."""
    c = tl.where(x > P[1], P[1], x)
    value, slope = swish(c, P)
    return value, tl.where(_stops(x, P[1]), 0.0, slope)


@triton.jit
def shifted_clamp(x, P: tl.constexpr):
    """``min(max(x, -limit), limit) + offset``, for P = (limit, offset)."""
    limit: tl.constexpr = P[0]
    below = tl.where(x < -limit, -limit, x)
    stopped = _stops(-x, limit) | _stops(x, limit)
    return tl.where(x > limit, limit, below) + P[1], tl.where(stopped, 0.0, 1.0)
