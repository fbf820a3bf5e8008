"""mma.sync (PTX 9.7.14.5.14): the product of a warp, operands and result in registers; dense, not scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.control import require_aligned
from attn4.emulator.isa.registry import (
    WIDTHS,
    Function,
    Modifiers,
    UnsupportedInstruction,
    effect,
    operand_count,
)
from attn4.emulator.isa.rounding import canonical
from attn4.emulator.ptx.module import Instruction, Vector
from attn4.emulator.units.dot import add_integers, dot
from attn4.emulator.units.formats import FORMATS, INTEGERS, f32_to_f16
from attn4.emulator.units.fused import fused_step, on_chip

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]

N: Final = 8
_DEPTHS: Final = {
    "f16": (8, 16),
    "bf16": (8, 16),
    "tf32": (4, 8),
    "e4m3": (16, 32),
    "e5m2": (16, 32),
    "s8": (16, 32),
    "u8": (16, 32),
    "f64": (4, 8, 16),
}
_SHAPES: Final = ("m8n8k4", *(f"m16n8k{depth}" for depth in (4, 8, 16, 32)))


@dataclass(frozen=True, slots=True)
class Product:
    """One mma: rows, depth, types of the result, the operands and the addend."""

    m: int
    k: int
    d: str
    a: str
    b: str
    c: str
    saturate: bool

    @property
    def elements(self) -> int:
        """Elements of A or B in a register."""
        return 1 if self.a == "f64" else 32 // WIDTHS.get(self.a, 8)

    @property
    def groups(self) -> int:
        """Parts of K of which a quarter lies in one register of a thread."""
        return self.k // (4 * self.elements)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Registers of D, A, B and C."""
        halves = self.m // 8
        return _registers(self.d, halves), self.groups * halves, self.groups, _registers(self.c, halves)

    def left(self, registers: Lanes) -> Lanes:
        """A, (warps, M, K), from (registers, lanes): thread (g, q) holds rows g and g + 8, quarter q."""
        parts = registers.view(self._word()).reshape(self.groups, self.m // 8, -1, 8, 4, self.elements)
        return np.ascontiguousarray(parts.transpose(2, 1, 3, 0, 4, 5)).reshape(-1, self.m, self.k)

    def right(self, registers: Lanes) -> Lanes:
        """B transposed, (warps, N, K): thread (g, q) holds column g."""
        parts = registers.view(self._word()).reshape(self.groups, -1, N, 4, self.elements)
        return np.ascontiguousarray(parts.transpose(1, 2, 0, 3, 4)).reshape(-1, N, self.k)

    def _word(self) -> str:
        return "f8" if self.a == "f64" else f"u{4 // self.elements}"

    def multiply(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes:
        """The registers of D of those of A, B and C, each (registers, lanes)."""
        left, right = self.left(a), self.right(b)
        if self.a == "f64":
            return _scattered(left @ right.swapaxes(1, 2) + _gathered(c.view(np.float64)))
        if on_chip() and self.d != "s32":
            return self._fused(left, right, c)
        product = np.stack([dot(x, self.a, y, self.b) for x, y in zip(left, right, strict=True)])
        if self.d == "s32":
            total = add_integers(_gathered(c.view(np.int32)), product, saturate=self.saturate)
            return _scattered(total).view(np.uint32)
        result = _scattered(self._addend(c).astype(np.float32) + product)
        return result.view(np.uint32) if self.d == "f32" else _paired(f32_to_f16(result))

    def _addend(self, c: Lanes) -> Lanes:
        """C, (warps, M, N), float16 or float32."""
        if self.c == "f32":
            return _gathered(c.view(np.float32))
        pairs = np.ascontiguousarray(c).view(np.float16).reshape(len(c), -1, 2)
        return _gathered(np.ascontiguousarray(pairs.transpose(0, 2, 1)).reshape(2 * len(c), -1))

    def _fused(self, left: Lanes, right: Lanes, c: Lanes) -> Lanes:
        """The sum as an H200 makes it; see `units.fused`."""
        addend = self._addend(c)
        step = _eight_bit_step if self.a in ("e4m3", "e5m2") else fused_step
        bits = np.stack(
            [
                step(x, self.a, y, self.b, z, self.d, negate=False)
                for x, y, z in zip(left, right, addend, strict=True)
            ]
        )
        return _scattered(bits) if self.d == "f32" else _paired(_scattered(bits))


def _eight_bit_step(
    a: Lanes, a_format: str, b: Lanes, b_format: str, addend: Lanes, d: str, *, negate: bool
) -> Lanes:
    """8-bit operands, which sm_90 makes float16 for two products in turn: of the elements of K whose numbers
    modulo 4 are 0 or 1, then of the others; C is added to the sum of both.
    """
    wide, other = (
        FORMATS[kind].decode(x).astype(np.float16).view(np.uint16)
        for x, kind in ((a, a_format), (b, b_format))
    )
    first = np.arange(a.shape[1]) % 4 < 2
    total = None
    for part in (first, ~first):
        bits = fused_step(wide[:, part], "f16", other[:, part], "f16", total, "f32", negate=negate)
        total = bits.view(np.float32)
    assert total is not None
    result = canonical((total + addend.astype(np.float32)).reshape(-1)).reshape(total.shape)
    return result if d == "f32" else f32_to_f16(result.view(np.float32))


def _paired(halves: Lanes) -> Lanes:
    """Registers of two neighbouring columns each, of float16 bits (2 registers, lanes)."""
    pairs = halves.reshape(len(halves) // 2, 2, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(pairs).view(np.uint32).reshape(len(halves) // 2, -1)


def _registers(kind: str, halves: int) -> int:
    return halves if kind == "f16" else 2 * halves


def _gathered(registers: Lanes) -> Lanes:
    """C, (warps, M, N), from (registers, lanes): rows g and g + 8, columns 2 q and 2 q + 1."""
    parts = registers.reshape(-1, 2, registers.shape[1] // 32, 8, 4)
    return np.ascontiguousarray(parts.transpose(2, 0, 3, 4, 1)).reshape(parts.shape[2], -1, N)


def _scattered(matrices: Lanes) -> Lanes:
    """The registers of D of (warps, M, N), the way back."""
    parts = matrices.reshape(len(matrices), -1, 8, 4, 2)
    return np.ascontiguousarray(parts.transpose(1, 4, 0, 2, 3)).reshape(-1, len(matrices) * 32)


def _product(i: Instruction) -> Product:
    modifiers = Modifiers(i)
    modifiers.one_of("sync")
    modifiers.one_of("aligned")
    shape = modifiers.one_of(*_SHAPES)
    modifiers.one_of("row")
    modifiers.one_of("col")
    modifiers.one_of("rn", default="rn")
    saturate = modifiers.flag("satfinite")
    d = modifiers.one_of("f16", "f32", "s32", "f64")
    a, b = (modifiers.one_of(*_DEPTHS) for _ in range(2))
    c = modifiers.one_of("f16", "f32", "s32", "f64")
    modifiers.done()
    m, k = int(shape[1 : shape.index("n")]), int(shape.rpartition("k")[2])
    pair = {a, b}
    same = len(pair) == 1 or pair <= {"e4m3", "e5m2"} or pair <= INTEGERS
    results = {"s8": ("s32",), "u8": ("s32",), "f64": ("f64",), "bf16": ("f32",), "tf32": ("f32",)}
    allowed = results.get(a, ("f16", "f32"))
    if (
        not same
        or k not in _DEPTHS[a]
        or not {d, c} <= {*allowed}
        or (m == 8) != (shape == "m8n8k4")
        or (m == 8 and a != "f64")
        or (saturate and a not in INTEGERS)
    ):
        raise UnsupportedInstruction(i, f"a product {shape} of {a} and {b} into {d}, plus {c}")
    return Product(m, k, d, a, b, c, saturate)


def _types(i: Instruction) -> tuple[str, ...]:
    kinds = [modifier for modifier in i.modifiers if modifier in ("f16", "f32", "s32", "f64")]
    sizes = [len(x.items) if isinstance(x, Vector) else 1 for x in i.operands[1:]]
    word = "f64" if kinds and kinds[0] == "f64" else "b32"
    addend = {"f16": "b32"}.get(kinds[-1], kinds[-1]) if kinds else "b32"
    return (*[word] * sum(sizes[:2]), addend)


@effect("mma", types=_types)
def mma(i: Instruction) -> Function:
    """PTX mma.sync: "Perform a MxNxK matrix multiply and accumulate operation, D = A*B+C" by a whole warp.

    Summed as `units.dot` says; float64 in the order of numpy.
    """
    operand_count(i, 4)
    product = _product(i)
    sizes = [len(x.items) if isinstance(x, Vector) else 1 for x in i.operands]
    if tuple(sizes) != product.counts:
        raise UnsupportedInstruction(i, f"{sizes} registers, {list(product.counts)} are needed")
    _, first, second, _ = sizes

    def run(warp: Warp, mask: Mask, *sources: Lanes) -> Any:
        require_aligned(warp, mask, "mma.sync")
        a, b, c = (
            np.stack(part) for part in (sources[:first], sources[first:][:second], sources[-sizes[3] :])
        )
        result = product.multiply(a, b, c)
        if product.d == "f64":
            result = result.view(np.uint64)
        return result[0] if len(result) == 1 else list(result)

    return run


@effect("movmatrix", types=("b32",))
def movmatrix(i: Instruction) -> Function:
    """PTX movmatrix: "transpose a matrix in registers across the warp": 8x8 of 16 bits."""
    operand_count(i, 2)
    modifiers = Modifiers(i)
    for name in ("sync", "aligned", "m8n8", "trans", "b16"):
        modifiers.one_of(name)
    modifiers.done()

    def run(warp: Warp, mask: Mask, a: Lanes) -> Lanes:
        require_aligned(warp, mask, "movmatrix")
        matrices = a.view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)
        return np.ascontiguousarray(matrices).view(np.uint32).reshape(-1)

    return run
