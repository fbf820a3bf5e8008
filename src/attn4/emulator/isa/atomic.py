"""Atomic operations on memory (PTX 9.7.13.6 atom, .7 red): lane after lane, in the order of the lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.memory import address_operand, displaced, generic, shared, take_hints
from attn4.emulator.isa.registry import Function, Modifiers, UnsupportedInstruction, effect, value_type
from attn4.emulator.ptx.module import Instruction, Register, Vector
from attn4.emulator.state.memory import ByteMemory, GlobalMemory
from attn4.emulator.units.formats import bf16_to_f32, f32_to_bf16, f32_to_f16, flush_subnormals

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]
Combine = Callable[..., Any]

_STORED = {
    "b32": "u4",
    "u32": "u4",
    "s32": "i4",
    "b64": "u8",
    "u64": "u8",
    "s64": "i8",
    "b16": "u2",
    "f32": "f4",
    "f64": "f8",
    "f16": "f2",
    "f16x2": "f2",
    "bf16": "u2",
    "bf16x2": "u2",
}
_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


@effect("atom", types=lambda i: ("u64", value_type(i)))
def atom(i: Instruction) -> Function:
    """PTX atom: "loads the original value at location a into destination register d, performs a
    reduction".
    """
    return _atomic(i, address=1)


@effect("red", destinations=0, types=lambda i: ("u64", value_type(i)))
def red(i: Instruction) -> Function:
    """PTX red: the reduction of atom, without a result."""
    return _atomic(i, address=0)


def _atomic(i: Instruction, address: int) -> Function:
    modifiers = Modifiers(i)
    take_hints(modifiers)
    modifiers.flag("acq_rel")
    modifiers.flag("noftz")
    space = modifiers.one_of("global", "shared", "shared::cta", "shared::cluster", default="generic")
    operation = modifiers.one_of(*_OPERATIONS)
    count = int(modifiers.one_of("v2", "v4", "v8", default="v1")[1:])
    kind = modifiers.one_of(*_STORED, "b128")
    modifiers.done()
    if kind == "b128":
        return _wide(i, operation, space)
    combine = _combine(i, operation, kind, space)
    locate = displaced(address_operand(i, address))
    stored = np.dtype(_STORED[kind])
    narrow = "b16" if kind in ("b16", "f16", "bf16") else "b64" if kind.endswith("64") else "b32"
    size = {"b16": 2, "b32": 4, "b64": 8}[narrow]
    result = i.operands[0] if address else None
    returns = isinstance(result, (Register, Vector))

    memory = _memory(space)

    def run(warp: Warp, mask: Mask, base: Lanes, *values: Lanes) -> Any:
        addresses = locate(base).tolist()
        old = np.zeros((count, warp.lanes), dtype=f"u{size}")
        if (watch := warp.block.grid.watch) is not None:
            watch.atomic(warp, mask, locate(base), size * count, i)
        for lane in np.flatnonzero(mask).tolist():
            at = addresses[lane]
            target = memory(warp, at)
            for n in range(count):
                operands = [value[lane : lane + 1].view(stored) for value in values[n::count]]
                before = target.load(np.array([at + n * size], dtype=np.uint64), size).reshape(-1)
                old[n, lane] = before.view(f"u{size}")[0]
                after = np.ascontiguousarray(combine(before.view(stored), *operands), dtype=stored)
                if after.tobytes() != before.tobytes():
                    warp.block.grid.changes += 1
                target.store(np.array([at + n * size], dtype=np.uint64), after, size)
        if not returns:
            return None if address == 0 else old[0]
        return old[0] if count == 1 else list(old)

    return run


def _memory(space: str) -> Callable[[Warp, int], ByteMemory | GlobalMemory]:
    """The memory of an address in a state space."""
    if space == "global":
        return lambda warp, _: warp.block.grid.memory
    return generic if space == "generic" else shared


def _wide(i: Instruction, operation: str, space: str) -> Function:
    """atom.exch.b128 and atom.cas.b128: registers are two words of 64 bits a lane."""
    if operation not in ("exch", "cas") or i.opcode != "atom":
        raise UnsupportedInstruction(i, f"{operation} of 128 bits")
    locate = displaced(address_operand(i, 1))
    memory = _memory(space)

    def run(warp: Warp, mask: Mask, base: Lanes, *values: Lanes) -> Lanes:
        addresses = locate(base)
        old = np.zeros((warp.lanes, 2), dtype=np.uint64)
        if (watch := warp.block.grid.watch) is not None:
            watch.atomic(warp, mask, addresses, 16, i)
        for lane in np.flatnonzero(mask).tolist():
            at = addresses[lane : lane + 1]
            address = int(at[0])
            target = memory(warp, address)
            old[lane] = target.load_words(at, 16)[0]
            if operation == "exch" or (old[lane] == values[0][lane]).all():
                target.store(at, values[-1][lane], 16)
        warp.block.grid.changes += 1
        return old

    return run


def _combine(i: Instruction, operation: str, kind: str, space: str) -> Combine:
    floating = kind.startswith(("f", "bf"))
    simple: dict[str, Combine] = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda _, new: new,
        "cas": lambda old, expected, new: np.where(old == expected, new, old),
        "inc": lambda old, bound: np.where(old >= bound, old * 0, old + old.dtype.type(1)),
        "dec": lambda old, bound: np.where((old == 0) | (old > bound), bound, old - old.dtype.type(1)),
    }
    if operation in simple:
        if floating or (operation in ("inc", "dec") and kind != "u32"):
            raise UnsupportedInstruction(i, f"{operation} of type {kind}")
        return simple[operation]
    if not floating:
        return {"add": np.add, "min": np.minimum, "max": np.maximum}[operation]
    function: Combine = {"add": np.add, "min": np.fmin, "max": np.fmax}[operation]
    if operation == "add" and kind in ("f16", "f16x2"):
        return lambda old, new: f32_to_f16(old.astype(np.float32) + new.astype(np.float32)).view(np.float16)
    if kind.startswith("bf16"):
        return lambda old, new: f32_to_bf16(function(bf16_to_f32(old), bf16_to_f32(new)))
    if kind == "f32" and operation == "add" and space != "shared" and not space.startswith("shared::"):
        # "atom.add.f32 on global memory flushes subnormal inputs and results to sign-preserving zero".
        return lambda old, new: _canonical(
            flush_subnormals(function(flush_subnormals(old), flush_subnormals(new)))
        )
    if kind == "f32" and operation == "add":
        return lambda old, new: _canonical(function(old, new))
    return function


def _canonical(values: Any) -> Any:
    """float32 values with every NaN as 0x7fffffff."""
    return np.where(np.isnan(values), np.array(0x7FFFFFFF, np.uint32).view(np.float32), values)
