"""The product of sm_100a, tcgen05.mma (PTX 9.7.16.10): kinds f16, tf32, f8f6f4 (8-bit formats) and i8, dense.

    product = decode_instruction("f16", bits, cta_group=1)      # Product; DescriptorError if not understood
    product.multiply([Cta(shared, tensor, owner)], d, a, b, accumulate=True, a_in_tensor=False)
    copy_matrix(cta, "128x256b", address, descriptor)           # tcgen05.cp

``d`` is a tensor-memory address, ``b`` a shared-memory descriptor, ``a`` one of the two. A CTA pair passes
two Ctas, the even rank first: each gives its own half of A's rows and of B's rows (columns of D) at the same
offsets, and gets its half of D's rows. Where D lies in tensor memory (PTX 9.7.16.10.5):

    M 128 of one CTA, M 256 of a pair    lane = row, column = n
    M 64 of one CTA                      lane = (row // 16) 32 + row % 16, from lane 0 or 16
    M 128 of a pair                      64 rows a CTA: lanes 0-63 columns 0..N/2, lanes 64-127 the rest

A float16 D takes the lower half of a word. See ``dot`` for the order of summation. Nothing is asynchronous
here: operands are read, and D is written, when ``multiply`` is called.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attn4.emulator.state.memory import SharedMemory
from attn4.emulator.state.tensor_memory import COLUMNS, TensorMemory, TensorMemoryFault
from attn4.emulator.units.dot import add_integers, dot
from attn4.emulator.units.formats import FORMATS, f32_to_f16
from attn4.emulator.units.matrix import Tile, decode_tcgen05, gather
from attn4.emulator.units.step import Operand, add_step, fits, in_shared, in_words
from attn4.emulator.units.tensormap import DescriptorError

STEP_BYTES = 32
_OPERANDS: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
}
_RESULTS = {0: "f16", 1: "f32", 2: "s32"}
_RESULTS_OF = {"f16": ("f16", "f32"), "tf32": ("f32",), "f8f6f4": ("f16", "f32"), "i8": ("s32",)}

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Cta:
    """What a product needs of a CTA: its shared memory, its SM's tensor memory, and its name there."""

    shared: SharedMemory
    tensor: TensorMemory
    owner: Hashable


@dataclass(frozen=True)
class Product:
    """A decoded instruction descriptor, for one CTA or a pair."""

    ctas: int
    m: int
    n: int
    d: str
    a: str
    b: str
    transpose_a: bool
    transpose_b: bool
    negate: bool
    saturate: bool

    @cached_property
    def k(self) -> int:
        """Depth of one instruction: 32 bytes of an operand."""
        return STEP_BYTES // FORMATS[self.a].bytes

    @cached_property
    def rows(self) -> int:
        """Rows of A and D in each CTA."""
        return self.m // self.ctas

    @cached_property
    def a_tile(self) -> Tile:
        """What is read of A in each CTA's shared memory."""
        size = FORMATS[self.a].bytes
        return Tile(self.rows, STEP_BYTES // size, size, self.transpose_a)

    @cached_property
    def b_tile(self) -> Tile:
        """What is read of B in each CTA's shared memory."""
        size = FORMATS[self.b].bytes
        return Tile(self.n // self.ctas, STEP_BYTES // size, size, self.transpose_b)

    def operand_bytes(self, a_in_tensor: bool) -> int:
        """What is read of A and B in the shared memory of all CTAs."""
        tiles = (self.b_tile,) if a_in_tensor else (self.a_tile, self.b_tile)
        return self.ctas * STEP_BYTES * sum(tile.rows for tile in tiles)

    @cached_property
    def d_columns(self) -> int:
        """Columns of tensor memory that D takes."""
        return self.n // 2 if self._halved else self.n

    @cached_property
    def _halved(self) -> bool:
        return self.ctas == 2 and self.m == 128

    def multiply(
        self,
        ctas: Sequence[Cta],
        d: int,
        a: int,
        b: int,
        *,
        accumulate: bool,
        a_in_tensor: bool = False,
        shrink: int = 0,
        disabled: Sequence[int] = (),
    ) -> None:
        """D = A B (+ D / 2**shrink) in the tensor memory of each CTA.

        ``disabled``: words of 32 bits, four a CTA, whose bits are the lanes that are not to be written.
        """
        usual = self._in_one_call and not (shrink or any(disabled))
        if usual and self._multiply_at_once(ctas, d, a, b, accumulate, a_in_tensor):
            return
        right = np.concatenate([gather(cta.shared, decode_tcgen05(b), self.b_tile) for cta in ctas])
        lanes = self.d_lanes(d)
        for number, cta in enumerate(ctas):
            left = self._a_of(cta, a, a_in_tensor)
            product = dot(left, self.a, right, self.b)
            if self.negate:
                np.negative(product, out=product)
            if self._halved:
                product = np.concatenate((product[:, : self.n // 2], product[:, self.n // 2 :]))
            column = d & 0xFFFF
            old = cta.tensor.read(lanes, column, self.d_columns, cta.owner) if accumulate else None
            if old is not None and shrink:
                old = self._shrunk(old, shrink)
            total = self._sum(old, product)
            masks = disabled[4 * number : 4 * number + 4]
            if any(masks):
                bits = np.unpackbits(np.array(masks, np.uint32).view(np.uint8), bitorder="little") == 0
                chosen = np.arange(128)[lanes]
                kept = bits[chosen]
                cta.tensor.write(chosen[kept], column, total[kept], cta.owner)
            else:
                cta.tensor.write(lanes, column, total, cta.owner)

    def _shrunk(self, words: Words, shift: int) -> Words:
        """D divided by a power of two."""
        if self.d == "f32":
            return np.ldexp(words.view(np.float32), -shift).view(np.uint32)
        halves = np.ldexp((words & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32), -shift)
        return f32_to_f16(halves).astype(np.uint32)

    @cached_property
    def _in_one_call(self) -> bool:
        plain = (
            not (self.negate or self.transpose_a) and self.d == "f32" and (self._halved or self.rows == 128)
        )
        return plain and self.a == self.b and fits(self.a, self.k, self.n // self.ctas)

    def _multiply_at_once(
        self, ctas: Sequence[Cta], d: int, a: int, b: int, accumulate: bool, a_in_tensor: bool
    ) -> bool:
        """The same by `units.step`; false, with nothing done, where an operand is not all there."""
        if a_in_tensor and self._halved:
            return False
        right = [in_shared(cta.shared, b, self.b_tile, decode_tcgen05) for cta in ctas]
        column, lanes = d & 0xFFFF, self.d_lanes(d)
        # From one CTA's columns of B to the other's: further columns of D, or its other lanes.
        distance = 64 * COLUMNS if self._halved else self.n // self.ctas
        for cta in ctas:
            cta.tensor.check(column, self.d_columns, cta.owner)
            if cta.tensor.on_unwritten is not None:
                return False
        left = [self._left(cta, a, a_in_tensor) for cta in ctas]
        if any(operand is None for operand in (*left, *right)):
            return False
        for cta, rows in zip(ctas, left, strict=True):
            start = cta.tensor.address + 4 * column
            for n, columns in enumerate(right):
                assert rows is not None
                assert columns is not None
                add_step(self.a, rows, columns, start + 4 * distance * n, COLUMNS, accumulate=accumulate)
            cta.tensor.written[lanes, column : column + self.d_columns] = True
        return True

    def _left(self, cta: Cta, a: int, a_in_tensor: bool) -> Operand | None:
        if not a_in_tensor:
            return in_shared(cta.shared, a, self.a_tile, decode_tcgen05)
        return in_words(cta.tensor.read(self.d_lanes(a), a & 0xFFFF, STEP_BYTES // 4, cta.owner))

    def d_lanes(self, address: int) -> slice | npt.NDArray[np.intp]:
        """Lanes of D, or of A in tensor memory, in the order of their rows. Raises TensorMemoryFault."""
        lane = address >> 16
        if lane not in ((0, 16) if self.rows == 64 and not self._halved else (0,)):
            raise TensorMemoryFault(f"a product of M {self.m} at lane {lane} of tensor memory")
        if self.rows == 64 and not self._halved:
            rows = np.arange(64)
            return rows // 16 * 32 + rows % 16 + lane
        return slice(0, 128)

    def _a_of(self, cta: Cta, a: int, a_in_tensor: bool) -> npt.NDArray[Any]:
        if not a_in_tensor:
            return gather(cta.shared, decode_tcgen05(a), self.a_tile)
        if self._halved or self.transpose_a or self.a in ("e2m1", "e2m3", "e3m2"):
            raise DescriptorError(
                "A in tensor memory for M 128 of a pair, transposed, or of 4 or 6 bits, is not emulated"
            )
        words = cta.tensor.read(self.d_lanes(a), a & 0xFFFF, STEP_BYTES // 4, cta.owner)
        return np.ascontiguousarray(words).view(f"u{FORMATS[self.a].bytes}")

    def _sum(self, old: Words | None, product: Floats) -> Words:
        if self.d == "s32":
            before = np.zeros(product.shape, np.int32) if old is None else old.view(np.int32)
            return add_integers(before, product, saturate=self.saturate).view(np.uint32)
        if self.d == "f32":
            return (product if old is None else old.view(np.float32) + product).view(np.uint32)
        if old is not None:
            product = product + (old & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)
        return f32_to_f16(product).astype(np.uint32)


@lru_cache(maxsize=256)
def decode_instruction(kind: str, bits: int, cta_group: int) -> Product:
    """Read an instruction descriptor (PTX 9.7.16.4.2, table 42). Raises DescriptorError."""
    where = f"instruction descriptor {bits:#x} of kind::{kind}"
    if kind not in _OPERANDS:
        raise DescriptorError(f"{where}: kinds {', '.join(_OPERANDS)} are emulated")
    if unknown := bits & (0x7 | 1 << 6 | 1 << 23 | 7 << 29):
        raise DescriptorError(
            f"{where}: bits {unknown:#x} (sparsity, reserved, reuse shift) are not emulated"
        )
    if (kind != "i8" and bits & 8) or (kind == "i8" and bits & (3 << 13)):
        raise DescriptorError(f"{where}: saturation is of integers, negation of floats")
    a, b = (_OPERANDS[kind].get(bits >> shift & 7) for shift in (7, 10))
    d = _RESULTS.get(bits >> 4 & 3)
    if a is None or b is None or d not in _RESULTS_OF[kind]:
        formats = f"{bits >> 4 & 3} += {bits >> 7 & 7} * {bits >> 10 & 7}"
        raise DescriptorError(f"{where}: formats {formats} are not emulated")
    m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    transposed = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    if any(t and x.startswith(("tf", "e2", "e3")) for t, x in zip(transposed, (a, b), strict=True)):
        raise DescriptorError(f"{where}: an MN-major operand of tf32, or of 4 or 6 bits, is not emulated")
    # PTX 9.7.16.2.1, table 39.
    step = 8 * cta_group if kind != "i8" else 8 if cta_group == 1 and n <= 32 else 16 * cta_group
    if m not in (64 * cta_group, 128 * cta_group) or n % step or not step <= n <= 256:
        raise DescriptorError(f"{where}: M {m} and N {n} do not exist for cta_group::{cta_group}")
    negate = bool(bits >> 13 & 1) != bool(bits >> 14 & 1)
    return Product(cta_group, m, n, d, a, b, *transposed, negate=negate, saturate=bool(bits & 8))


def copy_matrix(cta: Cta, shape: str, address: int, descriptor: int) -> None:
    """tcgen05.cp into one CTA's tensor memory (PTX 9.7.16.9.2).

    Row r of the K-major source goes to lane r, 4 bytes a column. With warpx4 the 32 rows go to each quarter
    of the lanes; with warpx2 the first and the second 32 rows each go to two of them. Raises DescriptorError
    for the other shapes.
    """
    forms = {
        "128x256b": (128, 32, (0, 1, 2, 3)),
        "128x128b": (128, 16, (0, 1, 2, 3)),
        "64x128b.warpx2::02_13": (64, 16, (0, 1, 0, 1)),
        "64x128b.warpx2::01_23": (64, 16, (0, 0, 1, 1)),
        "32x128b.warpx4": (32, 16, (0, 0, 0, 0)),
    }
    if shape not in forms:
        raise DescriptorError(f"tcgen05.cp .{shape} is not emulated; {', '.join(forms)} are")
    rows, depth, parts = forms[shape]
    if address >> 16:
        raise TensorMemoryFault(f"tcgen05.cp .{shape} to lane {address >> 16}; it fills the lanes from 0 on")
    raw = gather(cta.shared, decode_tcgen05(descriptor), Tile(rows, depth, 1))
    words = np.ascontiguousarray(raw).view(np.uint32).reshape(rows // 32, 32, -1)
    cta.tensor.write(
        slice(0, 128), address & 0xFFFF, np.concatenate([words[part] for part in parts]), cta.owner
    )
