"""Special registers (PTX 10): what ``mov`` reads from %tid, %laneid, %clock and the like."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from attn4.emulator.state.block import extent
from attn4.emulator.state.registers import Lanes, full

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.grid import Grid
    from attn4.emulator.state.block import Block

SpecialRegisters: TypeAlias = dict[str, Callable[["Warp"], Lanes]]


def special_registers(grid: Grid, block: Block) -> SpecialRegisters:
    """The special registers of a CTA, each a function of the warp."""
    cluster = block.cluster
    counts = tuple(n // c for n, c in zip(grid.shape.grid, cluster.shape, strict=True))
    within = tuple(b - c * s for b, c, s in zip(block.index, cluster.index, cluster.shape, strict=True))
    narrow = {
        "%nwarpid": 64,
        "%smid": block.number % grid.residency.sms,
        "%nsmid": grid.residency.sms,
        "%cluster_ctarank": block.rank,
        "%cluster_nctarank": extent(cluster.shape),
        "%dynamic_smem_size": grid.shape.dynamic_shared,
        "%total_smem_size": block.shared.bytes.size,
        "%aggr_smem_size": block.shared.bytes.size,
    }
    shapes = {
        "%ntid": block.threads,
        "%ctaid": block.index,
        "%nctaid": grid.shape.grid,
        "%clusterid": cluster.index,
        "%nclusterid": counts,
        "%cluster_ctaid": within,
        "%cluster_nctaid": cluster.shape,
    }
    for name, shape in shapes.items():
        narrow |= {f"{name}.{axis}": value for axis, value in zip("xyz", shape, strict=True)}
    registers: SpecialRegisters = {name: _fixed(value, "b32") for name, value in narrow.items()}
    registers["%gridid"] = _fixed(1, "b64")
    registers["%is_explicit_cluster"] = _fixed(int(extent(cluster.shape) > 1), "pred")
    return registers | _THREADS | _CLOCKS


def _fixed(value: int, storage: str) -> Callable[[Warp], Lanes]:
    known: dict[int, Lanes] = {}

    def read(warp: Warp) -> Lanes:
        lanes = len(warp.threads)
        if lanes not in known:
            known[lanes] = full(value, storage, lanes)
        return known[lanes]

    return read


def _once(name: str, compute: Callable[[Warp], Lanes]) -> Callable[[Warp], Lanes]:
    def read(warp: Warp) -> Lanes:
        found: Lanes | None = warp.state.get(name)
        if found is None:
            found = warp.state[name] = np.ascontiguousarray(compute(warp), dtype=np.uint32)
            found.flags.writeable = False
        return found

    return read


def _lane(warp: Warp) -> Lanes:
    return warp.threads % np.uint32(32)


def _lanes_from(warp: Warp, first: int, last: int) -> Lanes:
    """Bits of the lanes first..last-1 relative to the own lane; ends beyond the warp are cut."""
    lane = _lane(warp).astype(np.int64)
    low = np.clip(lane + first, 0, 32)
    high = np.clip(lane + last, 0, 32)
    return ((np.int64(1) << high) - (np.int64(1) << low)).astype(np.uint32)


def _thread_y(warp: Warp) -> Lanes:
    return warp.threads // np.uint32(warp.block.threads[0]) % np.uint32(warp.block.threads[1])


_THREADS: SpecialRegisters = {
    "%tid.x": _once("%tid.x", lambda w: w.threads % np.uint32(w.block.threads[0])),
    "%tid.y": _once("%tid.y", _thread_y),
    "%tid.z": _once("%tid.z", lambda w: w.threads // np.uint32(w.block.threads[0] * w.block.threads[1])),
    "%laneid": _once("%laneid", _lane),
    "%warpid": _once("%warpid", lambda w: w.threads // np.uint32(32)),
    "%lanemask_eq": _once("%lanemask_eq", lambda w: _lanes_from(w, 0, 1)),
    "%lanemask_le": _once("%lanemask_le", lambda w: _lanes_from(w, -32, 1)),
    "%lanemask_lt": _once("%lanemask_lt", lambda w: _lanes_from(w, -32, 0)),
    "%lanemask_ge": _once("%lanemask_ge", lambda w: _lanes_from(w, 0, 32)),
    "%lanemask_gt": _once("%lanemask_gt", lambda w: _lanes_from(w, 1, 32)),
}


def _cycles(warp: Warp) -> int:
    """Instructions issued by the grid and by this warp: it never stands still while the warp runs."""
    warp.state["%clock"] = ticks = warp.state.get("%clock", 0) + 1
    return int(warp.machine.clock + warp.executed + ticks)


_CLOCKS: SpecialRegisters = {
    "%clock": lambda w: full(_cycles(w), "b32", w.lanes),
    "%clock_hi": lambda w: full(_cycles(w) >> 32, "b32", w.lanes),
    "%clock64": lambda w: full(_cycles(w), "b64", w.lanes),
    "%globaltimer": lambda w: full(time.monotonic_ns(), "b64", w.lanes),
    "%globaltimer_lo": lambda w: full(time.monotonic_ns(), "b32", w.lanes),
    "%globaltimer_hi": lambda w: full(time.monotonic_ns() >> 32, "b32", w.lanes),
}

VARYING = frozenset(_CLOCKS)
"""Special registers that change while a warp runs; all others stay what they are."""
