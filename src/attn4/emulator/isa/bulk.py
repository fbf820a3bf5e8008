"""Asynchronous copies (PTX 9.7.9.25): tiles of tensors, spans of bytes, and the older cp.async.

One builder for the opcode ``cp``; the form is told by its modifiers. A copy is issued by every active lane,
which is one lane in practice, and completes when the schedule says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.control import nothing
from attn4.emulator.isa.mbarrier import copies_arrived
from attn4.emulator.isa.memory import address_operand, displaced, generic, shared
from attn4.emulator.isa.registry import Function, Modifiers, UnsupportedInstruction, effect, flatten
from attn4.emulator.ptx.module import Address, Instruction
from attn4.emulator.state.asynchronous import BulkGroups, Copy
from attn4.emulator.state.block import OFFSET_MASK, RANK_SHIFT
from attn4.emulator.state.memory import ByteMemory, GlobalMemory, SharedMemory
from attn4.emulator.units import bulk
from attn4.emulator.units.reductions import WORDS, reduction
from attn4.emulator.units.tensormap import TensorMap, decode

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]
Emit = Callable[["Warp", int, list[int]], None]

_DESCRIPTOR_BYTES = 128
_COMPLETION = "mbarrier::complete_tx::bytes"


def _types(i: Instruction) -> tuple[str, ...]:
    """Addresses are 64 bits wide where they are immediate, all that follows a bracket 32."""
    types: list[str] = []
    for operand in i.operands:
        if isinstance(operand, Address):
            types += ["u64", *["s32"] * len(list(flatten(operand.coordinates)))]
        else:
            types.append("u32")
    return tuple(types) or ("u32",)


@effect("cp", destinations=0, types=_types)
def cp(i: Instruction) -> Function:
    """PTX 9.7.9.25 cp.async, cp.async.bulk, cp.reduce.async.bulk, their groups and prefetches."""
    modifiers = Modifiers(i)
    reduces = modifiers.flag("reduce")
    modifiers.one_of("async")
    if not modifiers.flag("bulk"):
        return _small(i, modifiers)
    if modifiers.flag("commit_group"):
        modifiers.done()
        return _commit
    if modifiers.flag("wait_group"):
        read = modifiers.flag("read")
        modifiers.done()
        return lambda warp, mask, pending: _wait(warp, mask, pending, read)
    if modifiers.flag("prefetch"):
        return _prefetch(modifiers)
    if modifiers.flag("tensor"):
        return _tensor(i, modifiers, reduces=reduces)
    return _span(i, modifiers, reduces=reduces)


def _prefetch(modifiers: Modifiers) -> Function:
    """cp.async.bulk.prefetch, of a span or a tile: a hint that changes no result."""
    if modifiers.flag("tensor"):
        modifiers.one_of("1d", "2d", "3d", "4d", "5d")
        modifiers.one_of("tile", "tile::gather4", default="tile")
    modifiers.one_of("L2")
    modifiers.one_of("global")
    modifiers.flag("L2::cache_hint")
    modifiers.done()
    return nothing


def groups(warp: Warp, lane: int) -> BulkGroups:
    """The bulk async-groups of a thread."""
    threads: dict[int, BulkGroups] = warp.state.setdefault("bulk groups", {})
    found = threads.get(lane)
    if found is None:
        found = threads[lane] = BulkGroups()
    return found


def _commit(warp: Warp, mask: Mask) -> None:
    """PTX: "Commits all prior initiated but uncommitted cp.async.bulk instructions" of each thread."""
    for lane in np.flatnonzero(mask).tolist():
        groups(warp, lane).commit()
        if (watch := warp.block.grid.watch) is not None:
            watch.bulk_engine(warp, lane).issued += 1


def _wait(warp: Warp, mask: Mask, pending: Lanes, read: bool) -> None:
    """PTX: "Wait until at most N of the most recent bulk async-groups are pending"; .read: until sources are
    read.
    """
    issued: dict[int, BulkGroups] = warp.state.get("bulk groups", {})
    for lane, each in issued.items():
        if mask[lane]:
            each.wait(int(pending[lane]), read=read)
            if (watch := warp.block.grid.watch) is not None:
                watch.bulk_waited(warp, lane, int(pending[lane]), read=read)


class _Operands:
    """The sources of an instruction by operand: the value of one lane, and an address with its offset
    added.
    """

    def __init__(self, i: Instruction) -> None:
        self._starts: list[int] = []
        self._locate: list[Callable[[Lanes], Lanes]] = []
        self._coordinates: list[int] = []
        at = 0
        for operand in i.operands:
            self._starts.append(at)
            self._locate.append(displaced(operand) if isinstance(operand, Address) else lambda base: base)
            width = len(list(flatten([operand])))
            self._coordinates.append(width - 1)
            at += width

    def value(self, position: int, lane: int, sources: tuple[Lanes, ...]) -> int:
        at = self._starts[position]
        return int(self._locate[position](sources[at][lane : lane + 1])[0])

    def coordinates(self, position: int, lane: int, sources: tuple[Lanes, ...]) -> tuple[int, ...]:
        at = self._starts[position] + 1
        chosen = sources[at : at + self._coordinates[position]]
        return tuple(int(column[lane : lane + 1].view(np.int32)[0]) for column in chosen)


def _phases(warp: Warp, barriers: Iterable[int]) -> dict[int, int]:
    """The phases in which a copy finds the barriers that it completes on, for a watch to compare."""
    if warp.block.grid.watch is None:
        return {}
    return {barrier: warp.block.mbarrier(barrier).phase for barrier in barriers}


def _signal(warp: Warp, barrier: int, nbytes: int, issued: dict[int, int], i: Instruction) -> None:
    """Count bytes on the barrier, and wake whoever waits if that completes its phase."""
    warp.block.grid.changes += 1
    if (watch := warp.block.grid.watch) is not None:
        watch.lifetimes.delivered(warp, warp.block.mbarrier(barrier), issued[barrier], i)
    if warp.block.mbarrier(barrier).deliver(nbytes, f"a copy issued by {warp}"):
        warp.block.wake()


def _own(warp: Warp, address: int) -> SharedMemory:
    memory = shared(warp, address)
    assert isinstance(memory, SharedMemory)
    return memory


def _of_space(space: str, warp: Warp, address: int) -> ByteMemory | GlobalMemory:
    return warp.block.grid.memory if space == "global" else shared(warp, address)


def descriptor(warp: Warp, address: int) -> TensorMap:
    """The tensor map at a generic address."""
    return decode(generic(warp, address).read(address, _DESCRIPTOR_BYTES).tobytes())


def _targets(address: int, barrier: int, ctas: int | None, pair: bool) -> Iterator[tuple[int, int]]:
    """Destination and barrier in each CTA; ``ctas`` is the multicast mask.

    "The mbarrier signal is also multicast to the same CTA-relative offset as mbar"; with .cta_group::2 it
    goes to the CTA of the destination's pair that has the parity of the barrier's own.
    """
    if ctas is None:
        yield address, barrier
        return
    for rank in range(16):
        if ctas >> rank & 1:
            home = (rank & ~1) | (barrier >> RANK_SHIFT & 1) if pair else rank
            yield rank << RANK_SHIFT | address & OFFSET_MASK, home << RANK_SHIFT | barrier & OFFSET_MASK


def _tensor(i: Instruction, modifiers: Modifiers, *, reduces: bool) -> Function:
    """PTX: "Initiates an asynchronous copy operation on tensor data from one state space to another"."""
    modifiers.one_of("1d", "2d", "3d", "4d", "5d")
    rows = modifiers.flag("tile::gather4") or (not reduces and modifiers.flag("tile::scatter4"))
    modifiers.flag("tile")
    hinted = modifiers.flag("L2::cache_hint")
    operands = _Operands(i)
    if modifiers.flag("bulk_group"):
        modifiers.one_of("global")
        modifiers.one_of("shared::cta")
        operation = modifiers.one_of("add", "min", "max", "inc", "dec", "and", "or", "xor") if reduces else ""
        modifiers.done()
        return _tensor_store(i, operands, operation, rows=rows)
    if reduces:
        raise UnsupportedInstruction(i, "a reduction that does not complete by bulk_group")
    modifiers.one_of(_COMPLETION)
    modifiers.one_of("shared::cta", "shared::cluster")
    modifiers.one_of("global")
    multicast = modifiers.flag("multicast::cluster")
    pair = modifiers.one_of("cta_group::1", "cta_group::2", default="cta_group::1") == "cta_group::2"
    modifiers.done()
    if len(i.operands) != 3 + multicast + hinted:
        raise UnsupportedInstruction(i, f"{len(i.operands)} operands")

    def issue(warp: Warp, lane: int, sources: tuple[Lanes, ...]) -> None:
        target, barrier = operands.value(0, lane, sources), operands.value(2, lane, sources)
        tensor = descriptor(warp, operands.value(1, lane, sources))
        at = operands.coordinates(1, lane, sources)
        gather = bulk.gather_rows if rows else bulk.gather_tile
        source, tensor = tensor, bulk.four_rows(tensor) if rows else tensor
        ctas = operands.value(3, lane, sources) if multicast else None
        warp.block.grid.tally.add(warp, lane, "bulk load bytes", tensor.tile_bytes)
        if (watch := warp.block.grid.watch) is not None:
            watch.device.reads_tile(warp, lane, tensor, at, i)
            for address, signalled in _targets(target, barrier, ctas, pair):
                watch.copies.fills(warp, lane, address, tensor.tile_bytes, signalled, i)

        issued = _phases(warp, (signalled for _, signalled in _targets(target, barrier, ctas, pair)))

        def complete() -> None:
            tile = gather(source, warp.block.grid.memory, at)
            for address, signalled in _targets(target, barrier, ctas, pair):
                nbytes = bulk.place_tile(tensor, _own(warp, address), address, tile)
                _signal(warp, signalled, nbytes, issued, i)

        warp.block.grid.issue(Copy(f"a tensor load issued by {warp} at PTX line {i.line}", complete))

    return _by_lane(issue)


def _tensor_store(i: Instruction, operands: _Operands, operation: str, *, rows: bool) -> Function:
    """The source is read before the group's wait with .read is over, the destination written before that
    without.
    """

    def issue(warp: Warp, lane: int, sources: tuple[Lanes, ...]) -> None:
        tensor = descriptor(warp, operands.value(0, lane, sources))
        at = operands.coordinates(0, lane, sources)
        address = operands.value(1, lane, sources)
        memory = warp.block.grid.memory
        counted = "bulk reduce bytes" if operation else "bulk store bytes"
        warp.block.grid.tally.add(warp, lane, counted, tensor.tile_bytes)
        staged: list[NDArray[np.uint8]] = []

        def read() -> None:
            whole, origin = (bulk.four_rows(tensor), (0, 0)) if rows else (tensor, at)
            staged.append(bulk.fetch_tile(whole, memory, _own(warp, address), address, origin))

        def write() -> None:
            warp.block.grid.changes += 1
            if rows:
                bulk.scatter_rows(tensor, memory, staged[0], at)
            elif operation:
                bulk.combine_tile(tensor, memory, staged[0], at, operation)
            else:
                bulk.put_tile(tensor, memory, staged[0], at)

        if (watch := warp.block.grid.watch) is not None and not rows:
            watch.copies.stores_tile(warp, lane, tensor, address, at, i)
            watch.device.writes_tile(warp, lane, tensor, at, i)
        copy = Copy(f"a tensor store issued by {warp} at PTX line {i.line}", write, read)
        groups(warp, lane).open.append(copy)
        warp.block.grid.issue(copy)

    def run(warp: Warp, mask: Mask, *sources: Lanes) -> None:
        lanes = np.flatnonzero(mask)
        issue(warp, int(lanes[0]), sources)
        rest = lanes[1:]
        if not operation and rest.size and all((s[rest] == s[lanes[0]]).all() for s in sources):
            # Stores of one tile to one place: the lanes wait for the same copy. A Watch is told of the first
            # lane's: in kernels that are right on silicon the elected lane alone says that it is over.
            copy = groups(warp, int(lanes[0])).open[-1]
            for lane in rest.tolist():
                groups(warp, lane).open.append(copy)
        else:
            for lane in rest.tolist():
                issue(warp, lane, sources)
        warp.block.grid.changes += 1

    return run


def _span(i: Instruction, modifiers: Modifiers, *, reduces: bool) -> Function:
    """cp.async.bulk and cp.reduce.async.bulk: "copy size bytes from srcMem to dstMem"."""
    modifiers.flag("L2::cache_hint")
    by_group = modifiers.flag("bulk_group")
    if not by_group:
        modifiers.one_of(_COMPLETION)
    multicast = modifiers.flag("multicast::cluster")
    operation = modifiers.one_of("add", "min", "max", "inc", "dec", "and", "or", "xor") if reduces else ""
    modifiers.flag("noftz")
    element = (
        modifiers.one_of("f16", "bf16", "f32", "f64", "u32", "s32", "u64", "s64", "b32", "b64")
        if reduces
        else ""
    )
    into, source_space = (modifiers.one_of("global", "shared::cta", "shared::cluster") for _ in range(2))
    counted = f"bulk {'reduce' if reduces else 'store' if into == 'global' else 'load'} bytes"
    modifiers.done()
    address_operand(i, 0), address_operand(i, 1)
    operands = _Operands(i)

    def issue(warp: Warp, lane: int, sources: tuple[Lanes, ...]) -> None:
        target, source = operands.value(0, lane, sources), operands.value(1, lane, sources)
        nbytes = operands.value(2, lane, sources)
        bulk.check_span(source, target, nbytes)
        barrier = 0 if by_group else operands.value(3, lane, sources)
        ctas = operands.value(4, lane, sources) if multicast else None
        data: list[NDArray[np.uint8]] = []
        targets = [] if by_group else list(_targets(target, barrier, ctas, pair=False))
        issued = _phases(warp, (signalled for _, signalled in targets))
        warp.block.grid.tally.add(warp, lane, counted, nbytes)

        def read() -> None:
            data.append(_of_space(source_space, warp, source).read(source, nbytes).copy())

        def write() -> None:
            warp.block.grid.changes += 1
            for address, signalled in _targets(target, barrier, ctas, pair=False):
                memory = _of_space(into, warp, address)
                if operation:
                    _reduce(memory, address, data[0], operation, element)
                else:
                    memory.write(address, data[0])
                if not by_group:
                    _signal(warp, signalled, nbytes, issued, i)

        if (watch := warp.block.grid.watch) is not None:
            watch.copies.drains(warp, lane, source, nbytes, i, None if by_group else barrier)
            watch.device.span(warp, lane, (source, target), nbytes, i)
            if not by_group:
                for address, signalled in targets:
                    watch.copies.fills(warp, lane, address, nbytes, signalled, i)
        copy = Copy(f"a bulk copy issued by {warp} at PTX line {i.line}", write, read)
        if by_group:
            groups(warp, lane).open.append(copy)
        warp.block.grid.issue(copy)

    return _by_lane(issue)


def _reduce(memory: Any, address: int, data: NDArray[np.uint8], operation: str, element: str) -> None:
    word = WORDS[element]
    combined = reduction(operation, element)(memory.read(address, data.size).view(word), data.view(word))
    memory.write(address, combined)


def _by_lane(issue: Callable[[Warp, int, tuple[Lanes, ...]], None]) -> Function:
    def run(warp: Warp, mask: Mask, *sources: Lanes) -> None:
        for lane in np.flatnonzero(mask).tolist():
            issue(warp, lane, sources)
        warp.block.grid.changes += 1

    return run


def _small(i: Instruction, modifiers: Modifiers) -> Function:
    """cp.async (non-bulk): copied at once; its groups have nothing to wait for, but a Watch is told."""
    if modifiers.flag("mbarrier"):
        return copies_arrived(i, modifiers)
    if modifiers.flag("commit_group"):
        modifiers.done()
        return _commit_small
    if modifiers.flag("wait_all"):
        modifiers.done()
        return lambda warp, mask: _wait_small(warp, mask, None)
    if modifiers.flag("wait_group"):
        modifiers.done()
        return _wait_small
    modifiers.one_of("ca", "cg")
    modifiers.one_of("shared", "shared::cta")
    modifiers.one_of("global")
    hinted = modifiers.flag("L2::cache_hint")
    modifiers.one_of("L2::64B", "L2::128B", "L2::256B", default="L2::64B")
    modifiers.done()
    operands = _Operands(i)
    sized = len(i.operands) - hinted > 3

    def issue(warp: Warp, lane: int, sources: tuple[Lanes, ...]) -> None:
        nbytes = operands.value(2, lane, sources)
        given = operands.value(3, lane, sources) if sized else nbytes
        # "src-size ... remaining bytes in the destination are filled with zeros".
        data = np.zeros(nbytes, dtype=np.uint8)
        if given:
            data[:given] = warp.block.grid.memory.read(operands.value(1, lane, sources), given)
        warp.block.shared.write(operands.value(0, lane, sources), data)
        if (watch := warp.block.grid.watch) is not None:
            watch.copies.small(warp, lane, operands.value(0, lane, sources), nbytes, i)

    return _by_lane(issue)


def _commit_small(warp: Warp, mask: Mask) -> None:
    """cp.async.commit_group: each thread's group of copies since the last."""
    if (watch := warp.block.grid.watch) is not None:
        watch.copies.small_committed(warp, mask)


def _wait_small(warp: Warp, mask: Mask, pending: Lanes | None) -> None:
    """cp.async.wait_group, and .wait_all, which needs no commit."""
    if (watch := warp.block.grid.watch) is not None:
        watch.copies.small_waited(warp, mask, pending)
