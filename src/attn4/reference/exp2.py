"""2^x from multiplications and additions alone, for machines short of special-function units."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (1.0, 0.695146143436, 0.227564394474, 0.077119089663)
"""Degree-3 minimax polynomial of 2^f on [0, 1), lowest power first; its value at 0 is exact."""

_SMALLEST = -127.0
_MANTISSA_BITS = 23


def exp2_polynomial(x: Tensor) -> Tensor:
    """2^x of a float32 tensor, for x <= 127, with a largest relative error of 8.8e-5.

    Cody-Waite range reduction: ``x = n + f`` with integer ``n`` and ``0 <= f < 1``; a polynomial gives 2^f in
    [1, 2), and ``n`` is added to its exponent bits. Below -126 the exponent field has no room left: the
    result is then only known to be less than 2^-125, and it is 0 from -127 down, -inf included.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"exp2_polynomial works on the bits of float32, got {x.dtype}")
    x = x.clamp_min(_SMALLEST)
    whole = x.floor()
    fraction = x - whole
    power = torch.full_like(x, COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        power = power * fraction + coefficient
    bits = power.view(torch.int32) + (whole.to(torch.int32) << _MANTISSA_BITS)
    return bits.view(torch.float32)
