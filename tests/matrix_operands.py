"""Operands of products for the tests, in shared memory laid out as PTX draws it."""

from __future__ import annotations

import numpy as np

from attn4.emulator.units.formats import FORMATS, f32_to_bf16
from attn4.emulator.units.matrix import MatrixDescriptor
from attn4.emulator.units.swizzle import Swizzle

SWIZZLES = list(Swizzle)


def bits_of(values, kind):
    """Raw words of float values in a format that holds them exactly."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    if kind == "bf16":
        return f32_to_bf16(values.astype(np.float32))
    if kind == "tf32":
        return values.astype(np.float32).view(np.uint32)
    if kind in ("s8", "u8"):
        return values.astype(np.int8).view(np.uint8)
    table = FORMATS[kind].decode(np.arange(256, dtype=np.uint8))
    return np.array([np.flatnonzero(table == v)[0] for v in values.reshape(-1)], np.uint8).reshape(
        values.shape
    )


def values_for(kind, shape, seed):
    rng = np.random.default_rng(seed)
    low = 0 if kind == "u8" else -6
    return rng.integers(low, 7, shape).astype(np.float64)


def place(shared, address, words, swizzle, mn_major):
    """Write a matrix (rows, depth) as atoms of 8 lines by the swizzle's span; its descriptor.

    Lines of an atom run along the minor dimension. K-major: atoms follow each other down the rows, and along
    K at ``leading`` (one instruction leaves an atom only where there is no swizzle). MN-major: atoms along
    the rows at ``leading``, along K at ``stride``; without a swizzle the two change places.
    """
    lines = words if not mn_major else words.T
    raw = np.ascontiguousarray(lines).view(np.uint8)
    span = swizzle.value
    groups, atoms = -(-raw.shape[0] // 8), -(-raw.shape[1] // span)
    atom = 8 * span
    for line in range(raw.shape[0]):
        for chunk in range(raw.shape[1] // 16):
            across, within = divmod(chunk, span // 16)
            start = address + (line // 8 + across * groups) * atom
            # The line of 128 bytes that a row lies on decides its permutation (PTX 5.5.7).
            number = (line % 8) * span // 128
            where = start + line % 8 * span + (within ^ number % (span // 16)) * 16
            shared.write(where, raw[line, chunk * 16 : chunk * 16 + 16])
    down, right = atom, groups * atom
    assert atoms == 1 or mn_major or swizzle is Swizzle.NONE
    if mn_major:
        leading, stride = (right, down) if swizzle is not Swizzle.NONE else (down, right)
    else:
        leading, stride = (right, down)
    return MatrixDescriptor(address & 0xFFFFFF, leading, stride, swizzle)
