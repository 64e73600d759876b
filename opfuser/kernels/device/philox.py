"""Random numbers from a seed and a position: the same in every tile."""

from __future__ import annotations

import triton
import triton.language as tl

# With seven rounds Philox4x32 passes all tests of BigCrush (Salmon et al., "Parallel Random
# Numbers: As Easy as 1, 2, 3", 2011). They take 7 integer instructions per element; an H200 has
# time for 18 while it moves the 6 bytes of dropout and add in bf16.
ROUNDS = tl.constexpr(7)


@triton.jit
def philox(seed, c0, c1):
    """The four words of Philox4x32 at the counters (c0, c1, 0, 0).

    One multiplication gives all 64 bits of a product; ``tl.philox`` takes two.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    for _ in tl.static_range(ROUNDS):
        p, q = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (q >> 32).to(tl.uint32) ^ c1 ^ k0, (p >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = q.to(tl.uint32), p.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3
