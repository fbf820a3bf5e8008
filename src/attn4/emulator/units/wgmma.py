"""The warpgroup product of sm_90a, wgmma.mma_async (PTX 9.7.15.5): D (64, N) = A (64, K) B (K, N) + D.

    product = Product.of("m64n128k16", "f32", "bf16", "bf16", transpose_b=True)   # or EmulationError
    accumulators = product.multiply(shared, a, b, accumulators, scale_d)

``a`` is a descriptor (int) or the registers of A, uint32 (product.a_registers, 128); ``b`` is a descriptor;
accumulators are uint32 (product.registers, 128), registers in the order of the instruction, threads in the
order of the warpgroup; ``scale_d`` False leaves D out of the sum. The result is a new array of the same
shape. ``multiply`` reads A, B and D when it is called: when that is, is the engine's business. See ``dot``
for the order of summation. Call it under ``numpy.errstate(all="ignore")``.

``fragment_of(matrix)`` and ``matrix_of(fragment)`` map accumulators of 32 bits: register j*4 + 2h + c of
thread (w, g, q) = (t // 32, t % 32 // 4, t % 4) holds row 16w + 8h + g and column 8j + 2q + c (PTX figure
149).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attn4.emulator.faults import EmulationError
from attn4.emulator.state.memory import SharedMemory
from attn4.emulator.units.dot import add_integers, dot
from attn4.emulator.units.formats import FORMATS, INTEGERS, f32_to_f16
from attn4.emulator.units.fused import fused_step, on_chip
from attn4.emulator.units.matrix import Tile, decode_wgmma, gather
from attn4.emulator.units.step import add_step, fits, in_shared, in_words

M = 64
THREADS = 128
STEP_BYTES = 32  # of K in one instruction: k16 of 2 bytes, k8 of 4, k32 of 1

Registers = npt.NDArray[np.uint32]
Index = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Product:
    """One form of the instruction. ``d`` is "f32", "f16" or "s32"; the rest as in PTX."""

    n: int
    k: int
    d: str
    a: str
    b: str
    transpose_a: bool = False
    transpose_b: bool = False
    negate_a: bool = False
    negate_b: bool = False
    saturate: bool = False

    @classmethod
    def of(cls, shape: str, d: str, a: str, b: str, **options: bool) -> Product:
        """From the modifiers of the instruction and the remaining fields by name. Raises EmulationError."""
        match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
        if match is None:
            raise EmulationError(f"wgmma of shape {shape}; m64nNkK exist")
        product = cls(int(match[1]), int(match[2]), d, a, b, **options)
        product._check()
        return product

    @property
    def registers(self) -> int:
        """Accumulator registers a thread: one a value, two float16 values share one."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    @property
    def a_registers(self) -> int:
        """Registers of A a thread, when A is in registers."""
        return 4

    @cached_property
    def a_tile(self) -> Tile:
        """What is read of A in shared memory."""
        return Tile(M, self.k, FORMATS[self.a].bytes, self.transpose_a)

    @cached_property
    def b_tile(self) -> Tile:
        """What is read of B in shared memory."""
        return Tile(self.n, self.k, FORMATS[self.b].bytes, self.transpose_b)

    def multiply(
        self, shared: SharedMemory, a: int | Registers, b: int, accumulators: Registers, scale_d: bool = True
    ) -> Registers:
        """The accumulators after the product."""
        left = gather(shared, decode_wgmma(a), self.a_tile) if isinstance(a, int) else self.a_matrix(a)
        right = gather(shared, decode_wgmma(b), self.b_tile)
        if on_chip() and self.d != "s32":
            return self._fused(left, right, accumulators if scale_d else None)
        product = fragment_of(dot(left, self.a, right, self.b))
        if self.negate_a != self.negate_b:
            np.negative(product, out=product)
        if self.d == "f32":
            total = accumulators.view(np.float32) + product if scale_d else product
            return total.view(np.uint32)
        if self.d == "s32":
            old = accumulators.view(np.int32) if scale_d else np.zeros(product.shape, np.int32)
            return add_integers(old, product, saturate=self.saturate).view(np.uint32)
        return _add_halves(accumulators, product, scale_d)

    @cached_property
    def in_one_call(self) -> bool:
        """Whether `add_to` may be used."""
        plain = self.negate_a == self.negate_b and not self.transpose_a and self.d == "f32"
        return plain and self.a == self.b and fits(self.a, self.k, self.n)

    def add_to(
        self, shared: SharedMemory, a: int | Registers, b: int, matrix: npt.NDArray[np.float32], scale_d: bool
    ) -> bool:
        """Make D, as a matrix (64, N), what it is after the product, in place: the bits of `multiply`.

        False, with nothing done, where an operand is not all there, or the chip's sums are wanted.
        """
        right = in_shared(shared, b, self.b_tile, decode_wgmma)
        if isinstance(a, int):
            left = in_shared(shared, a, self.a_tile, decode_wgmma)
        else:
            left = in_words(self.a_matrix(a))
        if left is None or right is None or on_chip():
            return False
        add_step(self.a, left, right, matrix.ctypes.data, self.n, accumulate=scale_d)
        return True

    def _fused(
        self, left: npt.NDArray[Any], right: npt.NDArray[Any], accumulators: Registers | None
    ) -> Registers:
        """The sum as the chip makes it; see `units.fused`."""
        old = None
        if accumulators is not None and self.d == "f32":
            old = matrix_of(accumulators.view(np.float32))
        elif accumulators is not None:
            halves = np.stack((accumulators & 0xFFFF, accumulators >> 16), axis=1).astype(np.uint16)
            old = matrix_of(halves.reshape(-1, THREADS).view(np.float16))
        negate = self.negate_a != self.negate_b
        bits = fragment_of(fused_step(left, self.a, right, self.b, old, self.d, negate=negate))
        if self.d == "f32":
            return bits
        pairs = bits.reshape(-1, 2, THREADS).astype(np.uint32)
        packed: Registers = pairs[:, 0] | (pairs[:, 1] << np.uint32(16))
        return packed

    def a_matrix(self, registers: Registers) -> npt.NDArray[Any]:
        """A (64, K) as words, from the registers that hold its fragment."""
        words = np.ascontiguousarray(registers.T).view(f"u{FORMATS[self.a].bytes}")
        return words.reshape(-1).take(_a_positions(FORMATS[self.a].bytes))

    def _check(self) -> None:
        if self.a not in FORMATS or self.b not in FORMATS:
            raise EmulationError(f"wgmma of {self.a} and {self.b}: only {', '.join(FORMATS)} are emulated")
        pair = {self.a, self.b}
        same = len(pair) == 1 or pair <= {"e4m3", "e5m2"} or pair <= INTEGERS
        if not same or self.k * FORMATS[self.a].bytes != STEP_BYTES or not 8 <= self.n <= 256 or self.n % 8:
            raise EmulationError(f"wgmma m64n{self.n}k{self.k} of {self.a} and {self.b} does not exist")
        results = ("s32",) if pair <= INTEGERS else ("f32",) if pair <= {"bf16", "tf32"} else ("f32", "f16")
        if self.d not in results:
            raise EmulationError(f"wgmma of {self.a} into {self.d} does not exist, into {results} it does")
        if (self.transpose_a or self.transpose_b) and FORMATS[self.a].bytes != 2:
            raise EmulationError(f"wgmma of {self.a} transposed; only 16-bit operands can be MN-major")


def fragment_of(matrix: npt.NDArray[Any], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
    """Accumulator fragment (N / 2, 128) of a matrix (64, N)."""
    # Every position is inside; with a mode that says so take() writes to ``out`` without a copy.
    return matrix.reshape(-1).take(_positions(matrix.shape[1]), out=out, mode="clip")


def matrix_of(fragment: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Matrix (64, N) of an accumulator fragment (N / 2, 128)."""
    matrix = np.empty((M, 2 * fragment.shape[0]), fragment.dtype)
    matrix.reshape(-1)[_positions(matrix.shape[1])] = fragment
    return matrix


@lru_cache(maxsize=64)
def _positions(n: int) -> Index:
    """Flat index in a (64, n) matrix of each accumulator, (n / 2, 128)."""
    matrix = np.arange(M * n, dtype=np.intp).reshape(4, 2, 8, n // 8, 4, 2)  # w h g j q c
    return np.ascontiguousarray(matrix.transpose(3, 1, 5, 0, 2, 4)).reshape(n // 2, THREADS)


@lru_cache(maxsize=4)
def _a_positions(element_bytes: int) -> Index:
    """Flat index in the words of (128 threads, 4 registers) of each element of A, (64, K).

    Register i of thread (w, g, q) holds row 16w + 8(i % 2) + g and, of the half i // 2 of K, the elements at
    byte 4q.
    """
    each = 4 // element_bytes
    words = np.arange(THREADS * 4 * each, dtype=np.intp).reshape(4, 8, 4, 2, 2, each)  # w g q half h element
    return np.ascontiguousarray(words.transpose(0, 4, 1, 3, 2, 5)).reshape(M, STEP_BYTES // element_bytes)


def _add_halves(accumulators: Registers, product: npt.NDArray[np.float32], scale_d: bool) -> Registers:
    """float16 accumulators: two neighbouring columns share a register, the lower column in the lower half."""
    pairs = product.reshape(-1, 2, THREADS)
    if scale_d:
        old = np.stack((accumulators & 0xFFFF, accumulators >> 16), axis=1).astype(np.uint16)
        pairs = pairs + old.view(np.float16).astype(np.float32)
    bits = f32_to_f16(pairs).astype(np.uint32)
    packed: Registers = bits[:, 0] | (bits[:, 1] << np.uint32(16))
    return packed
