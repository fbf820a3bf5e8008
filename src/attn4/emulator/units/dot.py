"""The arithmetic of one product step, the same for wgmma and tcgen05.

Summation order. Products of operands are exact; the K products of an element (8, 16 or 32 of them) are summed
in float64 and rounded once to float32; that sum is added to the accumulator with one more float32 rounding.
So a result does not depend on the order in which a BLAS sums. An H200 sums in another way, which `fused`
follows bit for bit: the two agree to about the last bit of float32 of the largest term, for 8-bit operands
to 13 bits. Integer sums are exact and wrap or saturate at 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from attn4.emulator.units.formats import FORMATS, INTEGERS

Words = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


def dot(a: Words, a_format: str, b: Words, b_format: str) -> Floats:
    """A B^T of raw words A (M, K) and B (N, K), float32 (M, N), each element rounded once."""
    left, right = FORMATS[a_format].decode(a), FORMATS[b_format].decode(b)
    if a_format in INTEGERS:
        return left @ right.T  # exact: 32 products of at most 2**16 stay below 2**24
    product: Floats = (left.astype(np.float64) @ right.astype(np.float64).T).astype(np.float32)
    return product


def add_integers(
    accumulators: npt.NDArray[np.int32], product: Floats, *, saturate: bool
) -> npt.NDArray[np.int32]:
    """Accumulators plus an exact integer product, wrapped or saturated to 32 bits."""
    total = accumulators.astype(np.int64) + product.astype(np.int64)
    if saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.int32)
