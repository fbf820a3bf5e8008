"""Exchange between lanes (PTX "Data Movement": shfl; "Parallel Synchronization": vote, match, redux, elect).

Several hardware warps may run as one array: everything here works on rows of 32 lanes. The manual lets a
thread wait for the others of its membermask; paths of a warp have met again where they can, so a living
member that is not here runs elsewhere, and that is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from attn4.emulator.faults import DivergedWarp
from attn4.emulator.isa.registry import (
    Array,
    Function,
    Modifiers,
    UnsupportedInstruction,
    effect,
    operand_count,
)
from attn4.emulator.ptx.module import Immediate, Instruction, PairDestination
from attn4.emulator.state.active import active_bytes, shared_value

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

WIDTH: Final = 32
UNDEFINED: Final = np.uint32(0xCBCBCBCB)
"""What shfl gives for a lane that does not take part: the value of registers that no one wrote."""

_F32: Final = np.dtype(np.float32)
_I32: Final = np.dtype(np.int32)
_U32: Final = np.dtype(np.uint32)
_LANES: Final = np.arange(WIDTH, dtype=np.uint32)
_BITS: Final = np.uint32(1) << _LANES
_LANES_SIGNED: Final = np.arange(WIDTH, dtype=np.int32)
_NAN: Final = np.array([0x7FFFFFFF], np.uint32)


def _rows(x: Array) -> Array:
    return x.reshape(-1, WIDTH)


def ballot(flags: Array) -> Array:
    """Bool (lanes,) -> a 32-bit mask for each warp, (warps,), lane 0 in bit 0."""
    return np.packbits(flags, bitorder="little").view(_U32)


def warp_aligned(alive: Array, mask: Array) -> bool:
    """Whether a mask holds all or none of the living lanes of each hardware warp."""
    bits = mask.tobytes()
    return (active_bytes(bits).touched & alive).tobytes() == bits


def members(warp: Warp, mask: Array, membermask: Array) -> Array:
    """Check the members that active lanes name, and return ``mask``.

    Raises
    ------
    DivergedWarp
        A lane executes without being a member, or a living member is somewhere else.
    """
    if shared_value(membermask, mask) == 0xFFFFFFFF and warp_aligned(warp.alive, mask):
        return mask
    named = np.where(mask, membermask, np.uint32(0))
    here = np.repeat(ballot(mask), WIDTH)
    outside = mask & ((named & np.tile(_BITS, len(mask) // WIDTH)) == 0)
    if outside.any():
        raise DivergedWarp(f"lane {int(np.flatnonzero(outside)[0])} executes it and is not in its membermask")
    missing = named & np.repeat(ballot(warp.alive), WIDTH) & ~here
    if missing.any():
        lane = int(np.flatnonzero(missing)[0])
        absent = [n for n in range(WIDTH) if int(missing[lane]) >> n & 1]
        raise DivergedWarp(f"membermask {int(named[lane]):#010x} names lanes {absent}, which are not here")
    return mask


def _source_lanes(mode: str, offset: Array, clamp: Array) -> tuple[Array, Array]:
    """Source lane within the warp, its own where out of range, and whether it is in range; like `offset`."""
    offset, clamp = offset.astype(_I32) & np.int32(31), clamp.astype(_I32)
    segment = (clamp >> np.int32(8)) & np.int32(31)
    bound = clamp & np.int32(31)
    lowest = _LANES_SIGNED & segment
    highest = lowest | (bound & ~segment)
    if mode == "up":
        lane = _LANES_SIGNED - offset
        valid = lane >= highest
    elif mode == "down":
        lane = _LANES_SIGNED + offset
        valid = lane <= highest
    elif mode == "bfly":
        lane = _LANES_SIGNED ^ offset
        valid = lane <= highest
    else:
        lane = lowest | (offset & ~segment)
        valid = lane <= highest
    return np.where(valid, lane, _LANES_SIGNED), valid


def _gathered(rows: Array, lane: Array) -> Array:
    """Elements of each row at the positions `lane`, (32,) for all rows or (rows, 32)."""
    return rows.take(lane, axis=1) if lane.ndim == 1 else np.take_along_axis(rows, lane, axis=1)


@effect("shfl", types=("b32", "u32", "u32", "b32"))
def shfl(i: Instruction) -> Function:
    """Data movement shfl.sync: d = a of lane j, which .up, .down, .bfly or .idx say; p: j is in range.

    c holds the bound in bits 0-4 and the mask of the segment in bits 8-12. The value of a source lane that is
    inactive or no member is undefined: `UNDEFINED`.
    """
    operand_count(i, 5)
    modifiers = Modifiers(i)
    modifiers.one_of("sync")
    mode = modifiers.one_of("up", "down", "bfly", "idx")
    modifiers.one_of("b32")
    modifiers.done()
    pair = isinstance(i.operands[0], PairDestination)
    fixed: tuple[Array, Array] | None = None
    if isinstance(i.operands[2], Immediate) and isinstance(i.operands[3], Immediate):
        constants = (np.full(WIDTH, operand.bits(32), _U32) for operand in (i.operands[2], i.operands[3]))
        fixed = _source_lanes(mode, *constants)

    def exchange(
        warp: Warp, mask: Array, a: Array, b: Array, c: Array, membermask: Array
    ) -> Array | tuple[Array, Array]:
        members(warp, mask, membermask)
        values = _rows(a)
        lane, valid = fixed or _source_lanes(mode, _rows(b), _rows(c))
        result = _gathered(values, lane)
        if 0 in mask.tobytes():
            result = np.where(_gathered(_rows(mask), lane), result, UNDEFINED)
        flat = result.reshape(-1)
        if not pair:
            return flat
        return flat, np.broadcast_to(valid, values.shape).reshape(-1)

    return exchange


@effect("vote", types=("pred", "b32"))
def vote(i: Instruction) -> Function:
    """Parallel synchronization vote.sync: .all, .any, .uni of the members' predicates, or their .ballot in d.

    In a ballot, threads that are no members contribute 0.
    """
    operand_count(i, 3)
    modifiers = Modifiers(i)
    modifiers.one_of("sync")
    mode = modifiers.one_of("all", "any", "uni", "ballot")
    modifiers.one_of("b32" if mode == "ballot" else "pred")
    modifiers.done()

    def count(warp: Warp, mask: Array, a: Array, membermask: Array) -> Array:
        members(warp, mask, membermask)
        if mode == "ballot":
            votes: Array = np.repeat(ballot(a & mask), WIDTH) & membermask
            return votes
        inside = np.repeat(ballot(mask), WIDTH) & membermask
        true = np.repeat(ballot(a & mask), WIDTH) & membermask
        result: Array = true != 0 if mode == "any" else true == inside
        return result | (true == 0) if mode == "uni" else result

    return count


@effect("match", types=("T", "b32"))
def match(i: Instruction) -> Function:
    """Parallel synchronization match.sync: .any: the mask of the members that hold the same a.

    .all: membermask if all of them do, and 0 otherwise, with p saying which.
    """
    operand_count(i, 3)
    modifiers = Modifiers(i)
    mode = modifiers.one_of("any", "all")
    modifiers.one_of("sync")
    modifiers.one_of("b32", "b64")
    modifiers.done()
    pair = isinstance(i.operands[0], PairDestination)
    if pair and mode == "any":
        raise UnsupportedInstruction(i, "a predicate comes only with all")

    def compare(warp: Warp, mask: Array, a: Array, membermask: Array) -> Array | tuple[Array, Array]:
        members(warp, mask, membermask)
        values, inside = _rows(a), _rows(np.repeat(ballot(mask), WIDTH) & membermask)
        same = (values[:, :, None] == values[:, None, :]).reshape(-1)
        equal = _rows(ballot(same)) & inside
        if mode == "any":
            return equal.reshape(-1)
        agreed = equal == inside
        result = np.where(agreed, inside, np.uint32(0)).reshape(-1)
        return (result, agreed.reshape(-1)) if pair else result

    return compare


_REDUCTIONS: Final[dict[str, tuple[np.ufunc, tuple[str, ...]]]] = {
    "add": (np.add, ("u32", "s32")),
    "min": (np.minimum, ("u32", "s32", "f32")),
    "max": (np.maximum, ("u32", "s32", "f32")),
    "and": (np.bitwise_and, ("b32",)),
    "or": (np.bitwise_or, ("b32",)),
    "xor": (np.bitwise_xor, ("b32",)),
}


def _groups(mask: Array, membermask: Array) -> list[Array]:
    """Lane numbers of each set of lanes that execute with one membermask."""
    groups: dict[tuple[int, int], list[int]] = {}
    named = membermask.tolist()
    for lane in np.flatnonzero(mask).tolist():
        groups.setdefault((lane // WIDTH, named[lane]), []).append(lane)
    return [np.array(lanes) for lanes in groups.values()]


@effect("redux", types=("T", "b32"))
def redux(i: Instruction) -> Function:
    """Parallel synchronization redux.sync: the reduction of a over all members, in each of them.

    .f32 min and max: "+0.0 > -0.0"; without .NaN "only non-NaN values are considered", and all NaN gives the
    canonical one; with it any NaN does. .abs takes magnitudes.
    """
    operand_count(i, 3)
    modifiers = Modifiers(i)
    modifiers.one_of("sync")
    operation = modifiers.one_of(*_REDUCTIONS)
    function, allowed = _REDUCTIONS[operation]
    kind = modifiers.one_of(*allowed)
    magnitudes = kind == "f32" and modifiers.flag("abs")
    propagate = kind == "f32" and modifiers.flag("NaN")
    modifiers.done()
    inside = _I32 if kind == "s32" else _U32

    def integers(a: Array) -> Array:
        result: Array = function.reduce(a.view(inside), keepdims=True, dtype=inside)
        return result.view(_U32)

    def floats(a: Array) -> Array:
        values = a.view(_F32)
        numbers = values[values == values]
        if len(numbers) == 0 or (propagate and len(numbers) < len(values)):
            return _NAN
        order = np.lexsort((~np.signbit(numbers), numbers))
        chosen = order[:1] if operation == "min" else order[-1:]
        extreme: Array = numbers[chosen]
        return extreme.view(_U32)

    reduce = floats if kind == "f32" else integers

    def compute(warp: Warp, mask: Array, a: Array, membermask: Array) -> Array:
        members(warp, mask, membermask)
        if kind != "f32" and 0 not in mask.tobytes() and shared_value(membermask, mask) == 0xFFFFFFFF:
            rows: Array = function.reduce(_rows(a.view(inside)), axis=1, dtype=inside)
            return np.repeat(rows.view(_U32), WIDTH)
        result = np.zeros_like(a)
        source = a & np.uint32(0x7FFFFFFF) if magnitudes else a
        for lanes in _groups(mask, membermask):
            result[lanes] = reduce(source[lanes])
        return result

    return compute


@effect("elect", types=("b32",))
def elect(i: Instruction) -> Function:
    """Parallel synchronization elect.sync: d is the leader's lane among the members, p true in the leader.

    "Election of a leader thread happens deterministically": the lowest member.
    """
    operand_count(i, 2)
    modifiers = Modifiers(i)
    modifiers.one_of("sync")
    modifiers.done()
    if not isinstance(i.operands[0], PairDestination):
        raise UnsupportedInstruction(i, "a destination d|p is needed")

    constant = i.operands[1]
    everyone = isinstance(constant, Immediate) and constant.bits(32) == 0xFFFFFFFF
    known: dict[bytes, tuple[Array, Array]] = {}

    def choose(warp: Warp, mask: Array, membermask: Array) -> tuple[Array, Array]:
        if not everyone:
            return _leader(warp, mask, membermask)
        key = mask.tobytes() + warp.alive.tobytes()
        found = known.get(key)
        if found is None:
            if len(known) >= _KEPT:
                known.clear()
            found = known[key] = _leader(warp, mask, membermask)
            for array in found:
                array.flags.writeable = False
        return found

    return choose


_KEPT: Final = 1024


def _leader(warp: Warp, mask: Array, membermask: Array) -> tuple[Array, Array]:
    members(warp, mask, membermask)
    lanes = np.tile(_LANES, len(mask) // WIDTH)
    inside = np.repeat(ballot(mask), WIDTH) & membermask
    lowest = inside & (~inside + np.uint32(1))
    leader = np.bitwise_count(lowest - np.uint32(1)).astype(_U32)
    return leader, lanes == leader


@effect("activemask")
def activemask(i: Instruction) -> Function:
    """Parallel synchronization activemask: the mask of the lanes that execute it."""
    operand_count(i, 1)
    modifiers = Modifiers(i)
    modifiers.one_of("b32")
    modifiers.done()
    return lambda _, mask: np.repeat(ballot(mask), WIDTH)
