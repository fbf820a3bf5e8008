"""Asynchronous operations, as the machine's definitions issue them: what each reads and writes, and when it
is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.clocks import ORDERED, WARP, Column, Mask
from attn4.emulator.hazards.order import Engine
from attn4.emulator.hazards.shared import Chunks
from attn4.emulator.hazards.tensor import Region
from attn4.emulator.state.block import RANK_SHIFT
from attn4.emulator.state.memory import SharedMemory
from attn4.emulator.units.bulk import kept_chunks
from attn4.emulator.units.matrix import Tile, chunk_offsets, decode_tcgen05, decode_wgmma

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.hazards.watch import Watch
    from attn4.emulator.ptx.module import Instruction
    from attn4.emulator.state.barrier import Mbarrier
    from attn4.emulator.units.tcgen05 import Cta
    from attn4.emulator.units.tcgen05 import Product as TensorProduct
    from attn4.emulator.units.tensormap import TensorMap
    from attn4.emulator.units.wgmma import Product

Lanes = NDArray[Any]


class Copies:
    """Copies by the bulk-copy unit and by threads (cp.async), and operands that products read."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def fills(self, warp: Warp, lane: int, address: int, nbytes: int, barrier: int, i: Instruction) -> None:
        """A bulk copy writes a span and completes on the mbarrier at ``barrier``."""
        memory = self._memory(warp, address)
        if memory is None:
            return
        engine = self._completing(warp, lane, barrier, i)
        chunks = self._watch.shared.chunks(memory, address, nbytes)
        self._watch.shared.engine_writes(warp, lane, memory, chunks, engine, i)

    def stores_tile(
        self, warp: Warp, lane: int, tensor: TensorMap, address: int, at: tuple[int, ...], i: Instruction
    ) -> None:
        """A tensor store or reduction reads what it keeps of a tile, in the open group of its thread."""
        memory = self._memory(warp, address)
        if memory is None:
            return
        group = self._watch.bulk_engine(warp, lane)
        chunks = kept_chunks(tensor, warp.block.grid.memory, memory, address, at)
        if not chunks.size:
            return
        places: Chunks = chunks
        if chunks.size * 16 == tensor.tile_bytes:
            places = self._watch.shared.chunks(memory, address, tensor.tile_bytes)
        engine = group.reads, group.issued + 1
        self._watch.shared.engine_reads(warp, lane, memory, places, engine, i)

    def drains(
        self, warp: Warp, lane: int, address: int, nbytes: int, i: Instruction, barrier: int | None = None
    ) -> None:
        """A bulk copy reads a span; it belongs to the thread's open group, or completes on an mbarrier."""
        memory = self._memory(warp, address)
        if memory is None:
            return
        if barrier is None:
            group = self._watch.bulk_engine(warp, lane)
            engine = group.reads, group.issued + 1
        else:
            engine = self._completing(warp, lane, barrier, i)
        chunks = self._watch.shared.chunks(memory, address, nbytes)
        self._watch.shared.engine_reads(warp, lane, memory, chunks, engine, i)

    def small(self, warp: Warp, lane: int, address: int, nbytes: int, i: Instruction) -> None:
        """cp.async of one thread writes through the generic proxy."""
        memory = self._memory(warp, address)
        if memory is None:
            return
        group = self._small_engine(warp, lane)
        engine = group.column, group.issued + 1
        if nbytes % 16:
            self._watch.shared.engine_writes_words(warp, lane, memory, (address, nbytes), engine, i)
        else:
            chunks = self._watch.shared.chunks(memory, address, nbytes)
            self._watch.shared.engine_writes(warp, lane, memory, chunks, engine, i, generic=True)

    def sends(self, warp: Warp, lane: int, address: int, nbytes: int, barrier: int, i: Instruction) -> None:
        """st.async and red.async of a thread write through the generic proxy, and complete on an mbarrier."""
        memory = self._memory(warp, address)
        if memory is None:
            return
        engine = self._completing(warp, lane, barrier, i)
        if nbytes % 16:
            self._watch.shared.engine_writes_words(warp, lane, memory, (address, nbytes), engine, i)
        else:
            chunks = self._watch.shared.chunks(memory, address, nbytes)
            self._watch.shared.engine_writes(warp, lane, memory, chunks, engine, i, generic=True)

    def small_committed(self, warp: Warp, mask: Mask) -> None:
        """cp.async.commit_group."""
        for lane in np.flatnonzero(mask).tolist():
            self._small_engine(warp, lane).issued += 1

    def small_waited(self, warp: Warp, mask: Mask, pending: Lanes | None) -> None:
        """cp.async.wait_group of the lanes; ``pending`` None: wait_all, which needs no commit."""
        clocks = self._watch.of(warp.block.cluster).clocks
        who = self._watch.who(warp)
        for lane in np.flatnonzero(mask).tolist():
            engine = self._small_engine(warp, lane)
            if pending is None:
                engine.issued += 1
            left = 0 if pending is None else int(pending[lane])
            one = np.arange(who.lanes) == lane
            clocks.learn(who, one, engine.column, engine.issued - left, (ORDERED,))

    def small_arrives(self, warp: Warp, mask: Mask, barrier: Mbarrier, rank: int, i: Instruction) -> None:
        """cp.async.mbarrier.arrive: the phase under way says that the copies of the lanes so far are over."""
        self._watch.mbarrier_used(warp, mask, barrier, rank, i)
        order = self._watch.of(warp.block.cluster).order
        sync = order.sync((rank, barrier.address))
        for lane in np.flatnonzero(mask).tolist():
            engine = self._small_engine(warp, lane)
            engine.issued += 1
            order.complete_operation(sync, barrier.phase, engine.column, engine.issued, (ORDERED,))

    def product(
        self, warp: Warp, mask: Mask, product: Product, a: int | tuple[Lanes, ...], b: int, i: Instruction
    ) -> None:
        """Wgmma reads its operands in shared memory, for each of the warps that issue it."""
        memory = warp.block.shared
        places = [chunk_offsets(memory, decode_wgmma(b), product.b_tile)]
        if isinstance(a, int):
            places.append(chunk_offsets(memory, decode_wgmma(a), product.a_tile))
        chunks = np.concatenate([place.reshape(-1) for place in places])
        issuers = []
        for position, number in enumerate(warp.numbers):
            if mask[position * WARP]:
                engine = self._watch.products_of(warp, number)
                issuers.append((engine.column, engine.issued + 1))
        self._watch.shared.warps_read(warp, memory, chunks, issuers, i)

    def tensor_product(
        self,
        warp: Warp,
        lane: int,
        ctas: Sequence[Cta],
        form: tuple[TensorProduct, bool, bool],
        operands: tuple[int, int, int],
        i: Instruction,
    ) -> None:
        """tcgen05.mma reads A and B and writes D. ``form``: what it is, with D, with A in tensor memory."""
        product, accumulates, in_tensor = form
        d, a, b = operands
        engine = self._watch.tensor.pipeline(warp, lane)
        engine.issued += 1
        stamp = engine.column, engine.issued
        for cta in ctas:
            block = warp.block.cluster.blocks[cta.shared.rank]
            places = [chunk_offsets(cta.shared, decode_tcgen05(b), product.b_tile).reshape(-1)]
            if in_tensor:
                region = _rows(product, a), slice(a & 0xFFFF, (a & 0xFFFF) + 8)
                self._watch.tensor.engine_reads(warp, lane, block, region, i)
            else:
                places.append(chunk_offsets(cta.shared, decode_tcgen05(a), product.a_tile).reshape(-1))
            chunks = np.concatenate(places)
            self._watch.shared.engine_reads(warp, lane, cta.shared, chunks, stamp, i)
            columns = slice(d & 0xFFFF, (d & 0xFFFF) + product.d_columns)
            region = _rows(product, d), columns
            self._watch.tensor.engine_writes(warp, lane, block, region, i, adds=accumulates)

    def tensor_copy(
        self,
        warp: Warp,
        lane: int,
        ctas: Sequence[Cta],
        shape: str,
        operands: tuple[int, int],
        i: Instruction,
    ) -> None:
        """tcgen05.cp reads shared memory and writes tensor memory; ``operands``: address, descriptor."""
        target, descriptor = operands
        engine = self._watch.tensor.pipeline(warp, lane)
        engine.issued += 1
        rows, bits = (int(part) for part in shape.split(".")[0].removesuffix("b").split("x"))
        column = target & 0xFFFF
        region: Region = slice(0, 8), slice(column, column + bits // 32)
        for cta in ctas:
            block = warp.block.cluster.blocks[cta.shared.rank]
            chunks = chunk_offsets(cta.shared, decode_tcgen05(descriptor), Tile(rows, bits // 8, 1))
            stamp = engine.column, engine.issued
            self._watch.shared.engine_reads(warp, lane, cta.shared, chunks, stamp, i)
            self._watch.tensor.engine_writes(warp, lane, block, region, i)

    def _memory(self, warp: Warp, address: int) -> SharedMemory | None:
        """The shared memory of an address, None if it is one of another state space."""
        rank = address >> RANK_SHIFT
        blocks = warp.block.cluster.blocks
        return blocks[rank].shared if rank < len(blocks) else None

    def _completing(self, warp: Warp, lane: int, barrier: int, i: Instruction) -> tuple[int, int]:
        """Column and epoch of a copy that completes on an mbarrier, which its issuer must know of."""
        rank = barrier >> RANK_SHIFT
        found = warp.block.mbarrier(barrier)
        one = np.arange(warp.lanes) == lane
        self._watch.mbarrier_used(warp, one, found, rank, i)
        return self._watch.mbarrier_column(warp.block.cluster.blocks[rank], found, rank)

    def _small_engine(self, warp: Warp, lane: int) -> Engine:
        order = self._watch.of(warp.block.cluster).order
        thread = self._watch.who(warp).first + lane
        found = order.engines.get(("cp.async", thread))
        if found is None:
            name = f"cp.async of {self._watch.thread(warp.block.cluster, thread)}"
            missing = "no cp.async.wait_group of that thread, passed on by a barrier, says that it is over"
            found = order.engine(("cp.async", thread), Column(name, missing))
        return found


def _rows(product: TensorProduct, address: int) -> slice:
    """The rows of 16 lanes that D, or A in tensor memory, takes."""
    lanes = product.d_lanes(address)
    return slice(0, 8) if isinstance(lanes, slice) else slice(int(lanes[0]) // 16, 8, 2)
