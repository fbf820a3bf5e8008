"""Stores that complete later: st.async, red.async (PTX 9.7.9.13, 9.7.13.8), and st.bulk (9.7.9.14)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.memory import address_operand, displaced, shared
from attn4.emulator.isa.registry import (
    WIDTHS,
    Function,
    Modifiers,
    UnsupportedInstruction,
    effect,
    operand_count,
    value_type,
)
from attn4.emulator.ptx.module import Instruction, Vector
from attn4.emulator.state.asynchronous import Copy
from attn4.emulator.state.memory import SharedMemory
from attn4.emulator.units.reductions import WORDS, reduction

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]

_COMPLETION: Final = "mbarrier::complete_tx::bytes"
_STORED: Final = ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
_REDUCED: Final = ("u32", "s32", "u64", "b32", "b64")


def _types(i: Instruction) -> tuple[str, ...]:
    values = len(i.operands[1].items) if isinstance(i.operands[1], Vector) else 1
    return ("u64", *[value_type(i)] * values, "u64")


def _taken(i: Instruction) -> Modifiers:
    """The modifiers that both have: those of the completion and of the order, which is weak here."""
    modifiers = Modifiers(i)
    modifiers.one_of("async")
    for name in ("weak", "relaxed", "cluster"):
        modifiers.flag(name)
    modifiers.one_of("shared::cluster")
    modifiers.one_of(_COMPLETION)
    return modifiers


@effect("st", destinations=0, types=_types, form="async")
def st_async(i: Instruction) -> Function:
    """PTX st.async: "initiates an asynchronous store operation"; its bytes are counted on the mbarrier."""
    modifiers = _taken(i)
    count = int(modifiers.one_of("v2", "v4", default="v1")[1:])
    kind = modifiers.one_of(*_STORED)
    modifiers.done()
    operand_count(i, 3)
    if (len(i.operands[1].items) if isinstance(i.operands[1], Vector) else 1) != count:
        raise UnsupportedInstruction(i, f"a vector of {count} values is needed")
    word = f"u{WIDTHS[kind] // 8}"
    return _later(i, count, lambda _, new: new, word)


@effect("red", destinations=0, types=_types, form="async")
def red_async(i: Instruction) -> Function:
    """PTX red.async: "initiates an asynchronous reduction operation" on a word of a CTA of the cluster."""
    modifiers = _taken(i)
    operation = modifiers.one_of("inc", "dec", "min", "max", "add", "and", "or", "xor")
    kind = modifiers.one_of(*_REDUCED)
    modifiers.done()
    operand_count(i, 3)
    return _later(i, 1, reduction(operation, kind), WORDS[kind])


def _later(i: Instruction, count: int, combine: Any, word: str) -> Function:
    locate, locate_barrier = displaced(address_operand(i, 0)), displaced(address_operand(i, 2))
    size = np.dtype(word).itemsize

    def run(warp: Warp, mask: Mask, base: Lanes, *sources: Lanes) -> None:
        addresses, barriers = locate(base), locate_barrier(sources[-1])
        block = warp.block
        watch = block.grid.watch
        for lane in np.flatnonzero(mask).tolist():
            address, barrier = int(addresses[lane]), int(barriers[lane])
            values = np.array([source[lane] for source in sources[:count]]).view(word)

            issued = block.mbarrier(barrier).phase if watch is not None else 0
            if watch is not None:
                watch.copies.sends(warp, lane, address, values.nbytes, barrier, i)

            def complete(
                address: int = address, barrier: int = barrier, values: Lanes = values, issued: int = issued
            ) -> None:
                if watch is not None:
                    watch.lifetimes.delivered(warp, block.mbarrier(barrier), issued, i)
                memory = shared(warp, address)
                if address % (size * count):
                    memory.load_words(np.array([address], np.uint64), size * count)
                old = memory.bytes[memory.offset(address, values.nbytes) :][: values.nbytes].view(word)
                memory.write(address, combine(old, values))
                block.grid.changes += 1
                if block.mbarrier(barrier).deliver(values.nbytes, f"a {i.opcode}.async of {warp}"):
                    block.wake()

            block.grid.issue(Copy(f"a {i.opcode}.async issued by {warp} at PTX line {i.line}", complete))
        block.grid.changes += 1

    return run


@effect("st", destinations=0, types=("u64", "u64", "u64"), form="bulk")
def st_bulk(i: Instruction) -> Function:
    """PTX st.bulk: "initializes a region of shared memory" with zeros."""
    modifiers = Modifiers(i)
    modifiers.one_of("bulk")
    modifiers.flag("weak")
    modifiers.one_of("shared::cta", default="generic")
    modifiers.done()
    operand_count(i, 3)
    locate = displaced(address_operand(i, 0))

    def run(warp: Warp, mask: Mask, base: Lanes, size: Lanes, value: Lanes) -> None:
        addresses = locate(base)
        for lane in np.flatnonzero(mask).tolist():
            address, nbytes = int(addresses[lane]), int(size[lane])
            if address % 8 or nbytes % 8 or value[lane]:
                raise UnsupportedInstruction(i, f"{nbytes} bytes at {address:#x}, of value {value[lane]}")
            memory = shared(warp, address)
            memory.write(address, np.zeros(nbytes, np.uint8))
            if (watch := warp.block.grid.watch) is not None and isinstance(memory, SharedMemory):
                one = np.arange(warp.lanes) == lane
                for at in range(address, address + nbytes, 8):
                    watch.shared.store(warp, one, memory, np.full(warp.lanes, at, np.uint64), 8, i)
        warp.block.grid.changes += 1

    return run
