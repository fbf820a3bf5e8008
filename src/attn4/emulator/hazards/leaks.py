"""What a CTA leaves behind when its last thread has exited: memory that is still in use, or still held.

Shared memory ends with its CTA. So the exit is checked like a write to all of it, by one who knows what any
thread of the CTA knew: copies in flight, products, and accesses of other CTAs must be known to be over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.clocks import ALWAYS, ORDERED, WARP, Row
from attn4.emulator.hazards.findings import Hazard

if TYPE_CHECKING:
    from attn4.emulator.hazards.order import Sync
    from attn4.emulator.hazards.watch import Watch
    from attn4.emulator.state.block import Block


def block_exits(watch: Watch, block: Block) -> None:
    """Report what is left when a CTA is over."""
    known = _known(watch, block)
    _shared_memory(watch, block, known)
    _mbarriers(watch, block, known)
    for owner, columns in block.tensor_columns_held().items():
        if owner == block.index:
            _report(watch, block, f"{columns} columns of tensor memory are held: tcgen05.dealloc is missing")


def _known(watch: Watch, block: Block) -> Row:
    """What all threads of a CTA know together, and did."""
    clocks = watch.of(block.cluster).clocks
    row = clocks.known_to_block(block.rank)
    first = block.rank * clocks.warps_a_block * WARP
    row[ORDERED, first : first + clocks.warps_a_block * WARP] = ALWAYS
    return row


def _shared_memory(watch: Watch, block: Block, known: Row) -> None:
    shadow = watch.of(block.cluster).shadows.get(block.rank)
    if shadow is None:
        return
    for conflict in shadow.freed(known):
        if conflict.column in shadow.remote:
            continue  # Told by the watch of shared memory.
        where = watch.shared.name(block, conflict.offset + (block.shared.base & 0xFFFFFF))
        does = "write" if conflict.wrote else "read"
        who = watch.actor(block.cluster, conflict.column)
        missing = watch.missing(block.cluster, conflict.column)
        message = f"{who} may still {does} shared memory at {where} when its CTA has exited: {missing}"
        _report(watch, block, message, conflict.number, where=where)


def _mbarriers(watch: Watch, block: Block, known: Row) -> None:
    """Arrivals from elsewhere, and those that a commit has promised, come before the exit, too."""
    watched = watch.of(block.cluster)
    for offset, barrier in block.mbarriers.items():
        if barrier.transactions < 0:
            # Bytes announced and never sent are no fault: a pipeline's tail announces a fill that it drops.
            message = f"{-barrier.transactions} bytes came to {barrier} that nobody had announced at its exit"
            _report(watch, block, message, where=barrier.name)
        sync = watched.order.syncs.get((block.rank, offset))
        if sync is None:
            continue
        late = _late(sync, known[ORDERED])
        if late.size:
            where = watch.shared.name(block, offset)
            who = watch.actor(block.cluster, int(late[0]))
            message = (
                f"an arrival of {who} at the mbarrier at {where} may come when its CTA has exited: "
                f"no thread of the CTA waits for it"
            )
            kind = "exited" if late[0] < watched.clocks.threads else "leak"
            _report(watch, block, message, where=where, other=str(barrier), kind=kind)


def _late(sync: Sync, known: NDArray[np.int32]) -> NDArray[np.intp]:
    arrived = np.maximum(sync.pending[ORDERED], sync.done[ORDERED])
    for column, epoch in sync.promised.items():
        arrived[column] = max(arrived[column], epoch)
    return np.flatnonzero(arrived > known[: len(arrived)])


def _report(
    watch: Watch,
    block: Block,
    message: str,
    number: int | None = None,
    *,
    where: str = "",
    other: str = "",
    kind: str = "leak",
) -> None:
    i = None if number is None else watch.instructions[number]
    line = 0 if i is None else i.line
    source = None if i is None or i.source is None else str(i.source)
    name = watch.grid.program.kernel.name
    watch.findings.add(Hazard(kind, message, name, block.index, -1, None, line, source, other, where))
