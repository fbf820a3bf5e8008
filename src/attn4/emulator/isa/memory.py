"""Loads, stores and atomics (PTX 9.7.9): state spaces, vectors, and the widths of registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.control import nothing
from attn4.emulator.isa.registry import (
    WIDTHS,
    Function,
    Modifiers,
    UnsupportedInstruction,
    effect,
    value_type,
)
from attn4.emulator.ptx.module import Address, Instruction, Operand, Register, Vector
from attn4.emulator.state.block import RANK_SHIFT
from attn4.emulator.state.local import LOCAL_BASE, LocalView
from attn4.emulator.state.memory import ByteMemory, GlobalMemory

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]
Memory = ByteMemory | GlobalMemory
Space = Callable[["Warp", int], Memory | LocalView]

PARAMETER_BASE = 0x2000_0000
"""Where kernel parameters start, in their own space and as generic addresses.

Generic addresses are what they point at: that of a real buffer, a shared address (below this), or a
parameter's, so that cvta changes nothing. Buffers mostly lie above 2**32, but the heap of a Python that is
not position independent does not: an address that an allocation holds is global, unless it is one of the
launch's parameters.
"""
GLOBAL_START = 1 << 32

SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "const", "local")

# What these say about caches changes no result; what they say about order is the business of hazards.
_ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "mmio")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_CACHES = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
_HINTS = (
    *("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"),
    *(
        "L2::evict_normal",
        "L2::evict_first",
        "L2::evict_last",
        "L2::64B",
        "L2::128B",
        "L2::256B",
        "L2::cache_hint",
    ),
)


def take_hints(modifiers: Modifiers) -> None:
    """Accept the modifiers of a memory access that change no result here."""
    for name in (*_ORDERS, *_SCOPES, *_CACHES, *_HINTS):
        modifiers.flag(name)


def address_operand(i: Instruction, position: int) -> Address:
    """The operand at ``position``, which must be an address."""
    operand = i.operands[position] if position < len(i.operands) else None
    if not isinstance(operand, Address):
        raise UnsupportedInstruction(i, f"operand {position + 1} must be an address")
    return operand


def displaced(address: Address) -> Callable[[Lanes], Lanes]:
    """The function that adds an address's constant offset to its base, in the width of the base."""
    if not address.offset:
        return lambda base: base
    narrow = isinstance(address.base, Register) and address.base.type == "b32"
    offset = np.uint32(address.offset & 0xFFFFFFFF) if narrow else np.uint64(address.offset & (1 << 64) - 1)
    return lambda base: base + offset


def displaced_value(address: Address) -> Callable[[int], int]:
    """As `displaced`, of the base of one lane."""
    narrow = isinstance(address.base, Register) and address.base.type == "b32"
    limit = (1 << 32 if narrow else 1 << 64) - 1
    return lambda base: (base + address.offset) & limit


def is_global(warp: Warp, address: int) -> bool:
    """Whether a generic address is one of global memory."""
    if address >= GLOBAL_START:
        return True
    grid = warp.block.grid
    return not grid.parameters.base <= address < grid.parameters.end and grid.memory.holds(address)


def generic(warp: Warp, address: int) -> Memory:
    """The memory in which a generic address lies."""
    if is_global(warp, address):
        return warp.block.grid.memory
    if address >= PARAMETER_BASE:
        return warp.block.grid.parameters
    return shared(warp, address)


def _anywhere(warp: Warp, address: int) -> Memory | LocalView:
    """The same for loads and stores, which reach local memory, too."""
    if address >= LOCAL_BASE and not is_global(warp, address):
        return local(warp, address)
    return generic(warp, address)


def local(warp: Warp, _: int) -> LocalView:
    """The local memory of the threads of a warp."""
    return warp.block.local_memory.of(warp.threads)


def shared(warp: Warp, address: int) -> ByteMemory:
    """The shared memory of the CTA of the cluster that owns an address."""
    block = warp.block
    rank = address >> RANK_SHIFT
    return block.shared if rank == block.rank else block.cluster.rank(rank).shared


def _space(modifiers: Modifiers) -> Space:
    """The memory of an access, as a function of the warp and one of its addresses."""
    space = modifiers.one_of(*SPACES, default="generic")
    match space:
        case "global" | "const":
            return lambda warp, _: warp.block.grid.memory
        case "shared" | "shared::cta":
            return lambda warp, _: warp.block.shared
        case "shared::cluster":
            return shared
        case "param" | "param::entry":
            return lambda warp, _: warp.block.grid.parameters
        case "local":
            return local
    return _anywhere


def _scattered(space: Space) -> bool:
    return space is _anywhere or space is shared


def _groups(
    space: Space, warp: Warp, mask: Mask, addresses: Lanes
) -> list[tuple[Memory | LocalView, Mask | None]]:
    """The memories that the active lanes touch, each with its lanes; None for all lanes of the warp."""
    first = space(warp, int(addresses[mask.argmax()]))
    lanes = None if mask is warp.everyone else mask
    if not _scattered(space):
        return [(first, lanes)]
    owners: dict[int, tuple[Memory | LocalView, Mask]] = {}
    # Windows are 16 MiB wide, except global memory, which begins at 2**32.
    windows = np.minimum(addresses >> addresses.dtype.type(RANK_SHIFT), addresses.dtype.type(256))
    for window in np.unique(windows[mask]).tolist():
        chosen = mask & (windows == window)
        memory = space(warp, int(addresses[chosen.argmax()]))
        found = owners.get(id(memory))
        owners[id(memory)] = (memory, chosen if found is None else found[1] | chosen)
    if len(owners) == 1:
        return [(first, lanes)]
    return list(owners.values())


def _vector(modifiers: Modifiers) -> int:
    return int(modifiers.one_of("v2", "v4", "v8", default="v1")[1:])


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


@effect("ld", "ldu", types=("u64", "u64"))
def ld(i: Instruction) -> Function:
    """PTX 9.7.9.8 ld: "load register variable d from the location specified by the source address
    operand".
    """
    modifiers = Modifiers(i)
    take_hints(modifiers)
    space = _space(modifiers)
    count = _vector(modifiers)
    kind = modifiers.one_of(*WIDTHS)
    modifiers.done()
    address = address_operand(i, 1)
    items = _items(i.operands[0])
    if len(items) != count or WIDTHS[kind] < 8:
        raise UnsupportedInstruction(i, f"{len(items)} destinations of type {kind} for a vector of {count}")
    size = WIDTHS[kind] // 8
    convert = [_widened(kind, item) for item in items]
    locate = displaced(address)
    element = f"u{size}"
    scattered = _scattered(space)

    def words(warp: Warp, mask: Mask, base: Lanes) -> Lanes:
        addresses = locate(base)
        watch = warp.block.grid.watch
        if not scattered:
            lanes = None if mask is warp.everyone else mask
            memory = space(warp, 0)
            if watch is not None and not isinstance(memory, LocalView):
                watch.loads(warp, lanes, memory, addresses, size * count, i)
            return memory.load_words(addresses, size * count, lanes)
        found: Lanes | None = None
        for memory, lanes in _groups(space, warp, mask, addresses):
            if watch is not None and not isinstance(memory, LocalView):
                watch.loads(warp, lanes, memory, addresses, size * count, i)
            part = memory.load_words(addresses, size * count, lanes)
            if found is None or lanes is None:
                found = part
            else:
                found = np.where(lanes if part.ndim == 1 else lanes[:, None], part, found)
        assert found is not None
        return found

    def one(warp: Warp, mask: Mask, base: Lanes, *_: Lanes) -> Lanes:
        return convert[0](words(warp, mask, base))

    def several(warp: Warp, mask: Mask, base: Lanes, *_: Lanes) -> list[Lanes]:
        columns = words(warp, mask, base).view(element).reshape(-1, count)
        rows = np.ascontiguousarray(columns.T)
        return [change(row) for change, row in zip(convert, rows, strict=True)]

    return one if count == 1 else several


def _widened(kind: str, destination: Operand) -> Callable[[Lanes], Lanes]:
    """From a word in memory to the register: zero- or sign-extended to its width (PTX 9.4.1)."""
    bits = WIDTHS[kind]
    wide = WIDTHS[destination.type] if isinstance(destination, Register) else bits
    if wide <= bits:
        return lambda words: words
    signed, target, size = f"i{bits // 8}", f"i{wide // 8}", f"u{wide // 8}"
    if kind.startswith("s"):
        return lambda words: words.view(signed).astype(target).view(size)
    return lambda words: words.astype(size)


@effect("st", destinations=0, types=lambda i: ("u64", value_type(i)))
def st(i: Instruction) -> Function:
    """PTX 9.7.9.12 st: "store the value of operand b in the location specified by the destination
    address".
    """
    modifiers = Modifiers(i)
    take_hints(modifiers)
    space = _space(modifiers)
    count = _vector(modifiers)
    kind = modifiers.one_of(*WIDTHS)
    modifiers.done()
    address = address_operand(i, 0)
    if len(_items(i.operands[1])) != count or WIDTHS[kind] < 8:
        raise UnsupportedInstruction(
            i, f"{len(_items(i.operands[1]))} values of type {kind} for a vector of {count}"
        )
    size = WIDTHS[kind] // 8
    element = np.dtype(f"u{min(size, 8)}")
    locate = displaced(address)

    def run(warp: Warp, mask: Mask, base: Lanes, *values: Lanes) -> None:
        addresses = locate(base)
        if count == 1:
            data = values[0] if values[0].dtype == element else values[0].astype(element)
        else:
            data = np.stack(values[:count], axis=1)
            data = data if data.dtype == element else data.astype(element)
        watch = warp.block.grid.watch
        for memory, lanes in _groups(space, warp, mask, addresses):
            memory.store(addresses, data, size * count, lanes)
            if watch is not None and not isinstance(memory, LocalView):
                watch.stores(warp, lanes, memory, addresses, data, size * count, i)
        warp.block.grid.changes += 1

    return run


@effect("prefetch", "prefetchu", "applypriority", "discard", destinations=0, types=("u64",))
def prefetch(i: Instruction) -> Function:
    """PTX 9.7.9.15-17 prefetch, applypriority, discard: hints on cache lines."""
    modifiers = Modifiers(i)
    modifiers.one_of("global", "local", "param", "const", default="generic")
    modifiers.one_of(
        *("L1", "L2", "L2::evict_last", "L2::evict_normal", "tensormap"),
        default="generic",
    )
    modifiers.flag("b8")
    modifiers.done()
    if i.opcode == "discard":
        raise UnsupportedInstruction(i, "discard makes memory undefined; that is not emulated")
    return nothing


@effect("createpolicy", types=("u64",))
def createpolicy(i: Instruction) -> Function:
    """PTX 9.7.9.18 createpolicy: an opaque cache policy, which nothing here reads."""
    if i.modifiers[:1] not in (("fractional",), ("range",), ("cvt",)):
        raise UnsupportedInstruction(i, "a policy of another form than fractional, range or cvt")
    return lambda warp, *_: np.zeros(warp.lanes, dtype=np.uint64)
