"""Accesses to shared memory, as the machine's definitions and units make them, checked against its shadow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.clocks import FENCED, ORDERED, WARP, Mask
from attn4.emulator.hazards.shadow import STAMP, WORD, Conflict, Shadow, Threads
from attn4.emulator.hazards.shadow import Engine as EngineAccess
from attn4.emulator.state.block import OFFSET_MASK
from attn4.emulator.state.memory import SHARED_START, SharedMemory

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.hazards.watch import Watch
    from attn4.emulator.ptx.module import Instruction
    from attn4.emulator.state.block import Block

Lanes = NDArray[Any]
Chunks = slice | NDArray[Any]


class SharedAccesses:
    """Reads and writes of shared memory by threads and by engines."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def load(
        self,
        warp: Warp,
        mask: Mask | None,
        memory: SharedMemory,
        addresses: Lanes,
        nbytes: int,
        i: Instruction,
    ) -> None:
        """A load by the lanes of ``mask`` (None: all) of ``nbytes`` each."""
        access = self._threads(warp, mask, memory, addresses, nbytes, i)
        shadow = self._shadow(warp, memory)
        self._tell(warp, shadow.read(access), i, memory, "reads", nbytes)
        if memory.rank != warp.block.rank:
            self._remote_threads(warp, shadow, memory, access, i)
        if shadow.partial:
            self._unwritten_bytes(warp, mask, memory, addresses, nbytes, i)

    def store(
        self,
        warp: Warp,
        mask: Mask | None,
        memory: SharedMemory,
        addresses: Lanes,
        nbytes: int,
        i: Instruction,
    ) -> None:
        """A store by the lanes of ``mask`` (None: all) of ``nbytes`` each."""
        access = self._threads(warp, mask, memory, addresses, nbytes, i)
        shadow = self._shadow(warp, memory)
        self._tell(warp, shadow.write(access), i, memory, "writes", nbytes)
        if memory.rank != warp.block.rank:
            self._remote_threads(warp, shadow, memory, access, i)

    def same_address(
        self,
        warp: Warp,
        mask: Mask | None,
        memory: SharedMemory,
        addresses: Lanes,
        data: Lanes,
        nbytes: int,
        i: Instruction,
    ) -> None:
        """Lanes of one store that write different values to one address: which one stays is left open."""
        wanted = np.ascontiguousarray(data).reshape(-1).view(np.uint8).reshape(len(addresses), nbytes)
        kept = memory.bytes.take(
            (addresses.astype(np.int64) - memory.base)[:, None] + np.arange(nbytes), mode="clip"
        )
        differs = (kept != wanted).any(axis=1)
        if mask is not None:
            differs &= mask
        if differs.any():
            lane = int(differs.argmax())
            where = self.name(warp.block, int(addresses[lane]) & OFFSET_MASK)
            message = f"lanes of one {i.name} write different values to shared memory at {where}"
            thread = self._watch.who(warp).first + lane
            self._watch.report("race", message, warp, thread, i, barrier=where)

    def engine_reads(
        self,
        warp: Warp,
        lane: int,
        memory: SharedMemory,
        chunks: Chunks,
        engine: tuple[int, int],
        i: Instruction,
    ) -> None:
        """An operation of the async proxy, issued by ``lane``, reads chunks. ``engine``: column and epoch."""
        access = self._engine(warp, lane, chunks, engine, i)
        shadow = self._shadow(warp, memory)
        self._tell(warp, shadow.engine_read(access), i, memory, "reads", 0, lane)
        if memory.rank != warp.block.rank:
            self._remote(warp, shadow, memory, engine, i)

    def engine_writes(
        self,
        warp: Warp,
        lane: int,
        memory: SharedMemory,
        chunks: Chunks,
        engine: tuple[int, int],
        i: Instruction,
        *,
        generic: bool = False,
    ) -> None:
        """An asynchronous operation writes chunks; ``generic``: through the generic proxy."""
        access = self._engine(warp, lane, chunks, engine, i, ORDERED if generic else FENCED)
        shadow = self._shadow(warp, memory)
        self._tell(warp, shadow.engine_write(access), i, memory, "writes", 0, lane)
        if memory.rank != warp.block.rank:
            self._remote(warp, shadow, memory, engine, i)

    def warps_read(
        self,
        warp: Warp,
        memory: SharedMemory,
        chunks: NDArray[Any],
        issuers: list[tuple[int, int]],
        i: Instruction,
    ) -> None:
        """One operation that several warps issue reads chunks. ``issuers``: the column and epoch of each."""
        access = self._engine(warp, 0, chunks, issuers[0], i)
        who = self._watch.who(warp)
        rows = self._watch.of(warp.block.cluster).clocks.rows[who.warps]
        if len(rows) > 1:
            access = replace(access, known=rows.min(axis=0), thread=-1)
        shadow = self._shadow(warp, memory)
        self._tell(warp, shadow.engine_read(access), i, memory, "reads", 0)
        for column, epoch in issuers[1:]:
            shadow.record_engine_read(replace(access, column=column, epoch=epoch))

    def engine_writes_words(
        self,
        warp: Warp,
        lane: int,
        memory: SharedMemory,
        span: tuple[int, int],
        engine: tuple[int, int],
        i: Instruction,
    ) -> None:
        """An asynchronous operation writes a span of less than a chunk through the generic proxy."""
        offset, nbytes = span[0] - memory.base, span[1]
        words = slice(offset // WORD, (offset + nbytes) // WORD)
        access = self._engine(warp, lane, words, engine, i, ORDERED)
        self._tell(warp, self._shadow(warp, memory).engine_write_words(access), i, memory, "writes", 0, lane)

    def chunks(self, memory: SharedMemory, address: int, nbytes: int) -> slice:
        """The chunks of a span of shared memory."""
        first = address - memory.base
        return slice(first // 16, -(-(first + nbytes) // 16))

    def name(self, block: Block, offset: int) -> str:
        """The variable that holds a shared offset, as the program declared it, or the offset."""
        return block.grid.layout.variable(offset) or f"{offset:#x}"

    def _unwritten_bytes(
        self,
        warp: Warp,
        mask: Mask | None,
        memory: SharedMemory,
        addresses: Lanes,
        nbytes: int,
        i: Instruction,
    ) -> None:
        """Tell of bytes that no one wrote in words of which a part was written."""
        lanes = np.arange(len(addresses)) if mask is None else np.flatnonzero(mask)
        offsets = (addresses[lanes].astype(np.int64) - memory.base)[:, None] + np.arange(nbytes)
        written = memory.written
        missing = written is not None and np.argwhere(~written[offsets])
        if missing is not False and len(missing):
            row, item = missing[0].tolist()
            where = self.name(warp.block.cluster.blocks[memory.rank], int(offsets[row, item]) + SHARED_START)
            message = f"{i.name} reads shared memory at {where}, which no one wrote"
            thread = self._watch.who(warp).first + int(lanes[row])
            self._watch.report("unwritten", message, warp, thread, i, barrier=where)

    def _remote_threads(
        self, warp: Warp, shadow: Shadow, memory: SharedMemory, access: Threads, i: Instruction
    ) -> None:
        clocks = self._watch.of(warp.block.cluster).clocks
        for lane in access.lanes.tolist():
            thread = access.who.first + lane
            self._remote(warp, shadow, memory, (thread, int(clocks.epochs[thread // WARP])), i)

    def _remote(
        self, warp: Warp, shadow: Shadow, memory: SharedMemory, actor: tuple[int, int], i: Instruction
    ) -> None:
        """An access to another CTA's shared memory, which must still be there; it may not exit before."""
        shadow.remote[actor[0]] = actor[1] << STAMP | self._watch.number(i)
        block = warp.block.cluster.blocks[memory.rank]
        if not block.warps:
            thread = self._watch.who(warp).first
            message = f"{i.name} accesses shared memory of {block}, which has exited"
            self._watch.report("exited", message, warp, thread, i)

    def exited(self, block: Block, warp: Warp) -> None:
        """The last thread of a CTA has exited: what others did to its shared memory must be over."""
        watched = self._watch.of(block.cluster)
        shadow: Shadow | None = watched.shadows.get(block.rank)
        if shadow is None or not shadow.remote:
            return
        known = watched.clocks.known_to_block(block.rank)[ORDERED]
        for column, number in shadow.unknown_to(known):
            who = self._watch.actor(block.cluster, column)
            missing = self._watch.missing(block.cluster, column)
            instruction = self._watch.instructions[number]
            message = f"{block} exits while {who} may still access its shared memory: {missing}"
            other = f"{instruction.name} by {who}, {self._watch.place(number)}"
            self._watch.report("exited", message, warp, None, instruction, other)

    def _shadow(self, warp: Warp, memory: SharedMemory) -> Shadow:
        watched = self._watch.of(warp.block.cluster)
        found: Shadow | None = watched.shadows.get(memory.rank)
        if found is None:
            found = watched.shadows[memory.rank] = Shadow(memory.bytes.size, watched.clocks)
        return found

    def _threads(
        self,
        warp: Warp,
        mask: Mask | None,
        memory: SharedMemory,
        addresses: Lanes,
        nbytes: int,
        i: Instruction,
    ) -> Threads:
        lanes = np.arange(len(addresses)) if mask is None else np.flatnonzero(mask)
        offsets = addresses[lanes].astype(np.int64) - memory.base
        words = (offsets // WORD)[:, None]
        parts = None
        if nbytes > WORD:
            words = words + np.arange(nbytes // WORD)
        elif nbytes < WORD:
            parts = ((1 << nbytes) - 1 << offsets % WORD).astype(np.uint8)
        collective = i.opcode == "ldmatrix"
        return Threads(self._watch.who(warp), lanes, words, self._watch.number(i), parts, collective)

    def _engine(
        self,
        warp: Warp,
        lane: int,
        chunks: Chunks,
        engine: tuple[int, int],
        i: Instruction,
        proxy: int = FENCED,
    ) -> EngineAccess:
        thread = self._watch.who(warp).first + lane
        known = self._watch.of(warp.block.cluster).clocks.row(thread)
        if isinstance(chunks, np.ndarray):
            chunks = chunks.reshape(-1)
        return EngineAccess(engine[0], engine[1], thread, known, chunks, self._watch.number(i), proxy)

    def _tell(
        self,
        warp: Warp,
        conflicts: list[Conflict],
        i: Instruction,
        memory: SharedMemory,
        does: str,
        nbytes: int,
        issuer: int = 0,
    ) -> None:
        watch = self._watch
        cluster = warp.block.cluster
        for conflict in conflicts:
            if (
                conflict.column >= 0
                and watch.is_strong(i)
                and watch.is_strong(watch.instructions[conflict.number])
            ):
                continue
            block = cluster.blocks[memory.rank]
            where = self.name(block, conflict.offset + (memory.base & 0xFFFFFF))
            lane = issuer if conflict.lane is None else conflict.lane
            thread = watch.who(warp).first + lane
            if conflict.column < 0:
                message = f"{i.name} reads shared memory at {where}, which no one wrote"
                watch.report("unwritten", message, warp, thread, i, barrier=where)
                continue
            who = watch.actor(cluster, conflict.column)
            did = "wrote" if conflict.wrote else "read"
            at = watch.place(conflict.number)
            subject = f"{i.name}" + (f" of {nbytes} bytes" if nbytes else "")
            if conflict.ordered:
                kind, missing = "unfenced", "no fence.proxy.async lies between the two"
            else:
                kind, missing = "race", watch.missing(cluster, conflict.column)
            message = f"{subject} {does} shared memory at {where} that {who} {did}: {missing}"
            other = f"{watch.instructions[conflict.number].name} by {who}, {at}"
            watch.report(kind, message, warp, thread, i, other, barrier=where, number=conflict.number)
