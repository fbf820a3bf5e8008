"""Tensor maps that kernels change (PTX 9.7.9.28 tensormap.replace, 9.7.13.4.3 tensormap.cp_fenceproxy)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.control import require_aligned
from attn4.emulator.isa.memory import address_operand, displaced, generic
from attn4.emulator.isa.registry import (
    Function,
    Modifiers,
    UnsupportedInstruction,
    effect,
    immediate,
    operand_count,
)
from attn4.emulator.ptx.module import Instruction

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]

MAP_BYTES: Final = 128
_COUNTED: Final = 64
"""Bytes of a map that count (`units.tensormap`); the rest is often not initialised."""
_ORDINALS: Final = ("box_dim", "global_dim", "global_stride", "element_stride")
_FIELDS: Final = {
    "rank": (2, 4, 3),
    "elemtype": (2, 7, 4),
    "interleave_layout": (2, 11, 2),
    "swizzle_mode": (2, 13, 2),
    "fill_mode": (2, 15, 1),
}
"""Word, lowest bit and bits of the fields without an ordinal; the rank is one less than the tensor's."""
_TF32: Final = 1 << 16


@effect(
    "tensormap",
    destinations=0,
    types=lambda i: ("u64", "u64", "u64") if "b64" in i.modifiers else ("u64", "u32", "u32"),
)
def tensormap(i: Instruction) -> Function:
    """PTX tensormap.replace: "replaces the field ... of the tensor-map object"; cp_fenceproxy copies it."""
    modifiers = Modifiers(i)
    if modifiers.one_of("replace", "cp_fenceproxy") == "cp_fenceproxy":
        return _copy(i, modifiers)
    modifiers.one_of("tile")
    field = modifiers.one_of("global_address", *_FIELDS, *_ORDINALS)
    modifiers.one_of("global", "shared::cta", default="generic")
    modifiers.one_of("b1024")
    modifiers.one_of("b64" if field in ("global_address", "global_stride") else "b32")
    modifiers.done()
    operand_count(i, 3 if field in _ORDINALS else 2)
    ordinal = immediate(i, i.operands[1]) if field in _ORDINALS else 0
    if ordinal > 4:
        raise UnsupportedInstruction(i, f"dimension {ordinal} of a tensor of at most 5")
    locate = displaced(address_operand(i, 0))

    def run(warp: Warp, mask: Mask, base: Lanes, *sources: Lanes) -> None:
        addresses = locate(base)
        for lane in np.flatnonzero(mask).tolist():
            address = int(addresses[lane])
            memory = generic(warp, address)
            words = memory.read(address, _COUNTED).view(np.uint32).copy()
            _replace(i, words, field, ordinal, int(sources[-1][lane]))
            memory.write(address, words)
        warp.block.grid.changes += 1

    return run


def _replace(i: Instruction, words: Lanes, field: str, ordinal: int, value: int) -> None:
    """Put a value into the words of a map; `units.tensormap` has the places."""

    def put(word: int, low: int, bits: int, part: int) -> None:
        if part >> bits:
            raise UnsupportedInstruction(i, f"{field} {value}")
        kept = int(words[word]) & ~((1 << bits) - 1 << low)
        words[word] = kept | part << low

    if field == "global_address":
        put(0, 0, 32, value & 0xFFFFFFFF)
        put(1, 0, 32, value >> 32)
    elif field == "global_stride":
        put(3 + ordinal, 0, 32, value >> 4 & 0xFFFFFFFF)
        put(7, 4 * ordinal, 4, value >> 36)
    elif field == "global_dim":
        put(8 + ordinal, 0, 32, value - 1 & 0xFFFFFFFF)
    elif field == "box_dim":
        word, low = (13, 24) if ordinal == 0 else (14, 8 * (ordinal - 1))
        put(word, low, 8, value - 1)
    elif field == "element_stride":
        put(13, 3 * ordinal, 3, value - 1)
    elif field == "elemtype":
        # 11 and 12 are tf32, of float32 and of flushed float32, which the map holds as a bit of its own.
        words[2] = int(words[2]) & ~_TF32 | (_TF32 if value in (11, 12) else 0)
        put(*_FIELDS[field], {11: 7, 12: 8}.get(value, value))
    else:
        put(*_FIELDS[field], value)


def _copy(i: Instruction, modifiers: Modifiers) -> Function:
    """tensormap.cp_fenceproxy: "copies size bytes of data starting at src to dst", and fences."""
    modifiers.one_of("global")
    modifiers.one_of("shared::cta")
    for name in ("tensormap::generic", "release"):
        modifiers.one_of(name)
    modifiers.one_of("cta", "cluster", "gpu", "sys")
    modifiers.one_of("sync")
    modifiers.one_of("aligned")
    modifiers.done()
    operand_count(i, 3)
    if immediate(i, i.operands[2]) != MAP_BYTES:
        raise UnsupportedInstruction(i, f"a size other than {MAP_BYTES}")
    target, source = (displaced(address_operand(i, n)) for n in (0, 1))

    def run(warp: Warp, mask: Mask, base: Lanes, from_base: Lanes, _: Lanes) -> None:
        require_aligned(warp, mask, "tensormap.cp_fenceproxy")
        for first in np.flatnonzero(mask.reshape(-1, 32).any(axis=1)) * 32:
            lane = int(first) + int(mask[first : first + 32].argmax())
            to, at = int(target(base)[lane]), int(source(from_base)[lane])
            memory = warp.block.shared
            data = memory.read(at, _COUNTED).copy()
            start = memory.offset(at, MAP_BYTES)
            rest = memory.bytes[start + _COUNTED : start + MAP_BYTES]
            generic(warp, to).write(to, np.concatenate((data, rest)))
        warp.block.grid.changes += 1

    return run
