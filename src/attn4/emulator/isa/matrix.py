"""ldmatrix and stmatrix (PTX 9.7.14.5.15, .16): matrices between shared memory and fragments, 8x8 of 16-bit
elements, and on sm_100 transposed ones of bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.control import require_aligned
from attn4.emulator.isa.memory import address_operand, displaced
from attn4.emulator.isa.registry import Function, Modifiers, UnsupportedInstruction, effect
from attn4.emulator.ptx.module import Instruction, Vector

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]


def _shape(i: Instruction, fragments: int) -> tuple[int, bool]:
    """Number of matrices, and whether they are transposed."""
    modifiers = Modifiers(i)
    modifiers.one_of("sync")
    modifiers.one_of("aligned")
    modifiers.one_of("m8n8")
    count = int(modifiers.one_of("x1", "x2", "x4")[1:])
    transposed = modifiers.flag("trans")
    modifiers.one_of("shared", "shared::cta", default="shared")
    modifiers.one_of("b16")
    modifiers.done()
    items = i.operands[fragments]
    if (len(items.items) if isinstance(items, Vector) else 1) != count:
        raise UnsupportedInstruction(i, f"{count} registers are needed for .x{count}")
    return count, transposed


def _rows(warp: Warp, mask: Mask, addresses: Lanes, count: int) -> tuple[Lanes, Mask]:
    """Lane l gives the address of row l % 8 of matrix l / 8; lanes past the last matrix give none."""
    return addresses, mask & (warp.threads % np.uint32(32) < 8 * count)


def _bytes_shape(i: Instruction, fragments: int, shape: str, counts: tuple[str, ...]) -> int:
    """Number of matrices of 8-bit elements, which are always transposed."""
    modifiers = Modifiers(i)
    modifiers.one_of("sync")
    modifiers.one_of("aligned")
    modifiers.one_of(shape)
    count = int(modifiers.one_of(*counts)[1:])
    modifiers.one_of("trans")
    modifiers.one_of("shared", "shared::cta", default="shared")
    modifiers.one_of("b8")
    modifiers.done()
    items = i.operands[fragments]
    needed = 2 * count if shape == "m16n16" else count
    if (len(items.items) if isinstance(items, Vector) else 1) != needed:
        raise UnsupportedInstruction(i, f"{needed} registers are needed for .x{count}")
    return count


def _gathered(rows: Lanes, count: int) -> Lanes:
    """Registers of 16x16 matrices of bytes, transposed: from (warps, rows, 16) to (registers, lanes).

    Thread (g, q) holds, of the columns g and g + 8, the rows 4q and 4q + 1 in its first register, 4q + 2 and
    4q + 3 in its second; the two rows of a column are neighbours (CuTe's SM100_U8x8_LDSM_T says the same).
    """
    parts = rows[:, : 16 * count].reshape(-1, count, 4, 2, 2, 2, 8)  # warp matrix q register row half g
    registers = np.ascontiguousarray(parts.transpose(1, 3, 0, 6, 2, 5, 4)).reshape(-1).view(np.uint32)
    return registers.reshape(2 * count, -1)


def _scattered(fragments: tuple[Lanes, ...]) -> Lanes:
    """Rows of 16x8 matrices of bytes that are stored transposed: (warps, rows, 16) of registers.

    Thread (g, q) holds rows 2q and 2q + 1 of columns g and g + 8; the two rows of a column are neighbours.
    """
    parts = (
        np.stack(fragments).view(np.uint8).reshape(len(fragments), -1, 8, 4, 2, 2)
    )  # matrix w g q half row
    return np.ascontiguousarray(parts.transpose(1, 0, 3, 5, 4, 2)).reshape(-1, 8 * len(fragments), 16)


def _store_bytes(i: Instruction) -> Function:
    """stmatrix.m16n8.trans.b8: see `_scattered`."""
    count = _bytes_shape(i, 1, "m16n8", ("x1", "x2", "x4"))
    locate = displaced(address_operand(i, 0))

    def run(warp: Warp, mask: Mask, base: Lanes, *fragments: Lanes) -> None:
        require_aligned(warp, mask, "stmatrix")
        rows = np.zeros((warp.lanes // 32, 32, 16), dtype=np.uint8)
        rows[:, : 8 * count] = _scattered(fragments)
        addresses, lanes = _rows(warp, mask, locate(base), count)
        warp.block.shared.store(addresses, rows, 16, lanes)
        if (watch := warp.block.grid.watch) is not None:
            watch.stores(warp, lanes, warp.block.shared, addresses, rows, 16, i)
        warp.block.grid.changes += 1

    return run


def _load_bytes(i: Instruction) -> Function:
    """ldmatrix.m16n16.trans.b8: see `_gathered`; lane l gives the address of row l % 16 of matrix l / 16."""
    count = _bytes_shape(i, 0, "m16n16", ("x1", "x2"))
    locate = displaced(address_operand(i, 1))

    def run(warp: Warp, mask: Mask, base: Lanes) -> Any:
        require_aligned(warp, mask, "ldmatrix")
        addresses, lanes = _rows(warp, mask, locate(base), 2 * count)
        if (watch := warp.block.grid.watch) is not None:
            watch.loads(warp, lanes, warp.block.shared, addresses, 16, i)
        rows = warp.block.shared.load_words(addresses, 16, lanes).view(np.uint8).reshape(-1, 32, 16)
        return list(_gathered(rows, count))

    return run


@effect("stmatrix", destinations=0, types=("u32",))
def stmatrix(i: Instruction) -> Function:
    """PTX stmatrix: "collectively store one or more matrices across all threads in a warp"."""
    if "b8" in i.modifiers:
        return _store_bytes(i)
    count, transposed = _shape(i, 1)
    locate = displaced(address_operand(i, 0))

    def run(warp: Warp, mask: Mask, base: Lanes, *fragments: Lanes) -> None:
        require_aligned(warp, mask, "stmatrix")
        # (matrix, warp, 8, 8): a lane holds two neighbours of row lane / 4, or with .trans of a column.
        matrices = np.stack(fragments).view(np.uint16).reshape(count, -1, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        rows = np.zeros((warp.lanes // 32, 32, 8), dtype=np.uint16)
        rows[:, : 8 * count] = matrices.swapaxes(0, 1).reshape(-1, 8 * count, 8)
        addresses, lanes = _rows(warp, mask, locate(base), count)
        warp.block.shared.store(addresses, rows, 16, lanes)
        if (watch := warp.block.grid.watch) is not None:
            watch.stores(warp, lanes, warp.block.shared, addresses, rows, 16, i)
        warp.block.grid.changes += 1

    return run


@effect("ldmatrix", types=("u32",))
def ldmatrix(i: Instruction) -> Function:
    """PTX ldmatrix: "collectively load one or more matrices across all threads in a warp from shared
    memory".
    """
    if "b8" in i.modifiers:
        return _load_bytes(i)
    count, transposed = _shape(i, 0)
    locate = displaced(address_operand(i, 1))

    def run(warp: Warp, mask: Mask, base: Lanes) -> Any:
        require_aligned(warp, mask, "ldmatrix")
        addresses, lanes = _rows(warp, mask, locate(base), count)
        if (watch := warp.block.grid.watch) is not None:
            watch.loads(warp, lanes, warp.block.shared, addresses, 16, i)
        rows = warp.block.shared.load_words(addresses, 16, lanes).view(np.uint16).reshape(-1, 32, 8)
        matrices = rows[:, : 8 * count].reshape(-1, count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        registers = np.ascontiguousarray(matrices.swapaxes(0, 1)).view(np.uint32).reshape(count, -1)
        return registers[0] if count == 1 else list(registers)

    return run
