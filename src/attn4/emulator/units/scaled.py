"""Block-scaled products of sm_100a: tcgen05.mma of kinds mxf8f6f4, mxf4 and mxf4nvf4 (PTX 9.7.16.3.2, 10.7).

    product = decode_scaled("mxf4nvf4", 4, bits, cta_group=1)       # ScaledProduct, or DescriptorError
    product.multiply_scaled(ctas, d, a, b, (scales_of_a, scales_of_b), accumulate=True)

Each element of A is multiplied by the scale of its row and of its block along K, and so is B by those of its
columns. The scales lie in tensor memory, one byte each, with a copy in every quarter of the lanes: that of
row r in lane r % 32 of the quarter and column r // 32, its bytes those of the blocks, from the byte that the
instruction descriptor names. Each quarter reads its own copy. Of a CTA pair each CTA has the scales of its
own rows of A and of all columns of B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attn4.emulator.state.tensor_memory import TensorMemoryFault
from attn4.emulator.units.formats import FORMATS
from attn4.emulator.units.matrix import decode_tcgen05, gather
from attn4.emulator.units.tcgen05 import STEP_BYTES, Cta, Product
from attn4.emulator.units.tensormap import DescriptorError

_ELEMENTS = {
    "mxf8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "mxf4": {1: "e2m1 packed"},
    "mxf4nvf4": {1: "e2m1 packed"},
}
_SCALES = {0: "ue4m3", 1: "ue8m0"}
BLOCKS = {
    "mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
    "mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
}
"""Blocks along K of one instruction, by kind and modifier."""
_QUARTER = 32

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScaledProduct(Product):
    """A decoded instruction descriptor: blocks along K, format of the scales, and where their bytes are."""

    blocks: int
    scale: str
    a_byte: int
    b_byte: int

    @property
    def k(self) -> int:
        """Depth of one instruction: 32 bytes of an operand, of elements that lie two in a byte 64."""
        return 64 if self.a == "e2m1 packed" else STEP_BYTES

    def multiply_scaled(
        self,
        ctas: Sequence[Cta],
        operands: tuple[int, int, int],
        scales: tuple[int, int],
        *,
        accumulate: bool,
        a_in_tensor: bool = False,
    ) -> None:
        """D = A B (+ D), scaled; ``operands``: D, A, B as in `Product.multiply`; addresses of the scales."""
        d, a, b = operands
        words = np.concatenate([gather(cta.shared, decode_tcgen05(b), self.b_tile) for cta in ctas])
        right = FORMATS[self.b].decode(words).astype(np.float64)
        for cta in ctas:
            left = FORMATS[self.a].decode(self._a_of(cta, a, a_in_tensor)).astype(np.float64)
            of_a = self._scales(cta, scales[0], len(left), self.a_byte)
            of_b = self._scales(cta, scales[1], self.n, self.b_byte)
            parts = []
            for quarter in range(4):
                rows = slice(quarter * _QUARTER, (quarter + 1) * _QUARTER)
                parts.append((left[rows] * of_a[quarter][rows]) @ (right * of_b[quarter]).T)
            product = np.concatenate(parts).astype(np.float32)
            if self.negate:
                np.negative(product, out=product)
            lanes, column = self.d_lanes(d), d & 0xFFFF
            old = cta.tensor.read(lanes, column, self.n, cta.owner) if accumulate else None
            cta.tensor.write(lanes, column, self._sum(old, product), cta.owner)

    def _scales(self, cta: Cta, address: int, rows: int, first: int) -> list[Doubles]:
        """The copy of each quarter of the lanes: the scale of each element, (rows, K)."""
        # Programs leave in bits 30 and 31 the byte that the instruction descriptor names.
        if lane := address >> 16 & 0x3FFF:
            raise TensorMemoryFault(f"scales at lane {lane} of tensor memory, not 0")
        columns = -(-rows // _QUARTER)
        words = cta.tensor.read(slice(0, 128), address & 0xFFFF, columns, cta.owner)
        found = []
        for quarter in range(4):
            own = words[quarter * _QUARTER : (quarter + 1) * _QUARTER].T.reshape(-1)[:rows]
            octets = np.ascontiguousarray(own).view(np.uint8).reshape(rows, 4)[:, first : first + self.blocks]
            values = FORMATS[self.scale].decode(np.ascontiguousarray(octets)).astype(np.float64)
            found.append(np.repeat(values, self.k // self.blocks, axis=1))
        return found


@lru_cache(maxsize=256)
def decode_scaled(kind: str, blocks: int, bits: int, cta_group: int) -> ScaledProduct:
    """Read an instruction descriptor (PTX 9.7.16.4.2, tables 43 and 44). Raises DescriptorError."""
    where = f"instruction descriptor {bits:#x} of kind::{kind}"
    if unknown := bits & (0xF | 1 << 6 | 1 << 31 | 7 << 24):
        raise DescriptorError(f"{where}: bits {unknown:#x} (sparsity, reserved, K 96) are not emulated")
    elements = _ELEMENTS[kind]
    a, b = elements.get(bits >> 7 & 7), elements.get(bits >> 10 & (7 if kind == "mxf8f6f4" else 3))
    if a is None or b is None:
        raise DescriptorError(f"{where}: formats {bits >> 7 & 7} * {bits >> 10 & 7} are not emulated")
    m, n = (bits >> 27 & 3) << 7, (bits >> 17 & 63) << 3
    step = 8 * cta_group
    if m != 128 * cta_group or n % step or not step <= n <= 256:
        raise DescriptorError(f"{where}: M {m} and N {n} are not emulated for cta_group::{cta_group}")
    transposed = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    if any(
        t and FORMATS[kind_].name.startswith(("e2", "e3"))
        for t, kind_ in zip(transposed, (a, b), strict=True)
    ):
        raise DescriptorError(f"{where}: an MN-major operand of 4 or 6 bits is not emulated")
    scale = _SCALES[bits >> 23 & 1]
    if scale == "ue4m3" and (kind != "mxf4nvf4" or blocks != 4):
        raise DescriptorError(f"{where}: scales of type {scale} with {blocks} blocks do not exist")
    a_byte, b_byte = bits >> 29 & 3, bits >> 4 & 3
    if any(byte % blocks for byte in (a_byte, b_byte)):
        raise DescriptorError(f"{where}: scales from bytes {a_byte} and {b_byte} on, {blocks} of them")
    negate = bool(bits >> 13 & 1) != bool(bits >> 14 & 1)
    forms: dict[str, Any] = {"blocks": blocks, "scale": scale, "a_byte": a_byte, "b_byte": b_byte}
    return ScaledProduct(cta_group, m, n, "f32", a, b, *transposed, negate=negate, saturate=False, **forms)
