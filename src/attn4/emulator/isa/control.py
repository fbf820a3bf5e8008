"""Control flow and barriers of threads (PTX 9.7.12, 9.7.13): branches themselves are the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.faults import BarrierFault, DivergedWarp, Trap
from attn4.emulator.isa.registry import (
    BLOCKED,
    Function,
    Modifiers,
    UnsupportedInstruction,
    effect,
)
from attn4.emulator.ptx.module import Immediate, Instruction
from attn4.emulator.state.active import active, put, shared_value
from attn4.emulator.state.barrier import Arrival, Arrivals, whole_warps

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]

_NOT_WAITING = -1
_FRESH = (1 << 64) - 1


def require_aligned(warp: Warp, mask: Mask, what: str) -> None:
    """Refuse an ``.aligned`` instruction that part of a warp executes (PTX: "all threads in the warp
    must").
    """
    if not warp.aligned(mask):
        raise DivergedWarp(
            f"{what}: an .aligned instruction, but only lanes {np.flatnonzero(mask).tolist()} execute it"
        )


def nothing(*_: object) -> None:
    """The execution of an instruction that changes no state of this machine."""


def uniform(values: Lanes, mask: Mask) -> int:
    """The value that all active lanes share. Raises BarrierFault if they differ."""
    value = shared_value(values, mask)
    if value is None:
        raise BarrierFault("a barrier number or count differs between the threads of a warp")
    return value


@effect("trap", destinations=0)
def trap(i: Instruction) -> Function:
    """PTX 9.7.19 trap: "Abort execution and generate an interrupt to the host CPU"."""
    Modifiers(i).done()

    def run(warp: Warp, _: Mask) -> NoReturn:
        raise Trap(f"{warp} executed trap")

    return run


@effect("nanosleep", destinations=0, types=("u32",))
def nanosleep(i: Instruction) -> Function:
    """PTX 9.7.19 nanosleep: suspends for "a duration in [0, 2*t]": here for no time at all."""
    modifiers = Modifiers(i)
    modifiers.one_of("u32")
    modifiers.done()
    return nothing


@effect("griddepcontrol", destinations=0)
def griddepcontrol(i: Instruction) -> Function:
    """PTX 9.7.13 griddepcontrol: launches are run in order here, so prerequisite grids "have completed"
    already.
    """
    modifiers = Modifiers(i)
    modifiers.one_of("wait", "launch_dependents")
    modifiers.done()
    return nothing


@effect("setmaxnreg", destinations=0, types=("u32",))
def setmaxnreg(i: Instruction) -> Function:
    """PTX 9.7.19.5 setmaxnreg: .dec releases registers of each warp, .inc "blocks execution until enough
    registers are available in the per-CTA-register-pool". The count is 24 to 256, a multiple of 8.
    """
    modifiers = Modifiers(i)
    modifiers.one_of("inc", "dec")
    modifiers.one_of("sync")
    modifiers.one_of("aligned")
    modifiers.one_of("u32")
    modifiers.done()
    (count,) = i.operands
    if not isinstance(count, Immediate) or not 24 <= count.value <= 256 or count.value % 8:
        raise UnsupportedInstruction(
            i, f"a register count of {count.text}: 24 to 256 in steps of 8 are allowed"
        )

    wanted = count.value

    def run(warp: Warp, mask: Mask, _: Lanes) -> Any:
        require_aligned(warp, mask, "setmaxnreg")
        pool = warp.block.register_pool
        free = pool.free
        rows = np.flatnonzero(mask.reshape(-1, 32).any(axis=1)).tolist()
        warps = [warp.numbers[row] for row in rows]
        if not pool.resize(warps, wanted):
            warp.waiting = f"{wanted} registers a thread; free in the CTA are {free} for one warp"
            return BLOCKED
        if pool.free > free:
            warp.block.wake()
        return None

    return run


def _bar_destinations(i: Instruction) -> int:
    return 1 if "red" in i.modifiers else 0


@effect("bar", "barrier", destinations=_bar_destinations, types=("u32",))
def bar(i: Instruction) -> Function:
    """PTX 9.7.13.1 barrier{.cta}, bar; .2 bar.warp.sync; .4 barrier.cluster."""
    if "warp" in i.modifiers:
        return _warp_sync(i)
    if "cluster" in i.modifiers:
        return _cluster(i)
    modifiers = Modifiers(i)
    modifiers.flag("cta")
    aligned = modifiers.flag("aligned") or i.opcode == "bar"
    kind = modifiers.one_of("sync", "arrive", "red")
    if kind == "red":
        return _reduction(modifiers, aligned)
    modifiers.done()
    if kind == "arrive":
        return _arrive(aligned)
    return _sync(aligned)


def _parted(warp: Warp, mask: Mask, *values: Lanes) -> bool:
    """Whether warps that run together name different barriers; they have been told to go on apart."""
    if all(shared_value(value, mask) is not None for value in values):
        return False
    rows = mask.reshape(-1, 32)
    first = rows.argmax(axis=1)
    warps = np.flatnonzero(rows.any(axis=1))
    named: dict[tuple[int, ...], Mask] = {}
    for n in warps.tolist():
        key = tuple(int(value[32 * n + first[n]]) for value in values)
        lanes = named.setdefault(key, np.zeros(warp.lanes, dtype=np.bool_))
        lanes[32 * n : 32 * n + 32] = rows[n]
    if len(named) < 2:
        return False
    warp.part(list(named.values()))
    return True


def _threads(warp: Warp, mask: Mask, barrier: Lanes, count: tuple[Lanes, ...]) -> tuple[int, int]:
    index = uniform(barrier, mask)
    if not count:
        # Without a count all threads of the CTA take part; those that exited no longer do.
        warp.block.named_barrier(index).everyone = True
        return index, warp.block.living
    warp.block.named_barrier(index).everyone = False
    expected = uniform(count[0], mask)
    if expected % 32 or expected <= 0:
        raise BarrierFault(f"barrier {index}: {expected} threads, not a positive multiple of the warp size")
    return index, expected


def _named(warp: Warp, mask: Mask, barrier: Lanes, count: tuple[Lanes, ...]) -> list[tuple[int, int, Mask]]:
    """The barriers that the warps of ``mask`` name: index, threads expected, and the lanes that name it."""
    if all(shared_value(value, mask) is not None for value in (barrier, *count)):
        return [(*_threads(warp, mask, barrier, count), mask)]
    lanes_of: dict[tuple[int, int], Mask] = {}
    for n in active(mask).warps:
        lanes = np.zeros(warp.lanes, dtype=np.bool_)
        lanes[32 * n : 32 * n + 32] = mask[32 * n : 32 * n + 32]
        named = _threads(warp, lanes, barrier, count)
        lanes_of[named] = lanes_of[named] | lanes if named in lanes_of else lanes
    return [(*named, lanes) for named, lanes in lanes_of.items()]


def _arrive(aligned: bool) -> Function:
    """PTX: "bar.arrive does not cause the executing thread to wait for threads of other participating
    warps".
    """

    def run(warp: Warp, mask: Mask, barrier: Lanes, *count: Lanes) -> None:
        if aligned:
            require_aligned(warp, mask, "bar.arrive")
        for index, expected, lanes in _named(warp, mask, barrier, count):
            named = warp.block.named_barrier(index)
            if (watch := warp.block.grid.watch) is not None:
                watch.named_arrives(warp, lanes, index, named.phase)
            if named.arrive(whole_warps(lanes) * 32, expected, warp, waits=False):
                warp.block.wake()

    return run


def _waits(warp: Warp) -> NDArray[np.int64]:
    """For each lane the phase of the named barrier that it waits to complete; -1: none."""
    found: NDArray[np.int64] | None = warp.state.get("named barrier")
    if found is None:
        found = warp.state["named barrier"] = np.full(warp.lanes, _NOT_WAITING, dtype=np.int64)
    return found


def _sync(aligned: bool) -> Function:
    """PTX: "bar.sync ... causes the executing thread to wait for all non-exited threads of participating
    warps".
    """

    def run(warp: Warp, mask: Mask, barrier: Lanes, *count: Lanes) -> Any:
        found = _named(warp, mask, barrier, count)
        waits = [_arrived(warp, lanes, index, expected, aligned, None) for index, expected, lanes in found]
        if not all(wait.over for wait in waits):
            warp.waiting = waits[0] if len(waits) == 1 else Arrivals(tuple(waits))
            ready = [lanes for (_, _, lanes), wait in zip(found, waits, strict=True) if wait.over]
            if ready and warp.expired:
                # Warps that run as one wait for each other, unless nobody can proceed.
                warp.part(ready)
            return BLOCKED
        for index, _, lanes in found:
            _released(warp, lanes, index)
        return None

    return run


def _arrived(
    warp: Warp, mask: Mask, index: int, expected: int, aligned: bool, votes: tuple[int, int] | None
) -> Arrival:
    """Count those of the lanes that have not arrived at a barrier yet; what they all wait for."""
    waits = _waits(warp)
    named = warp.block.named_barrier(index)
    waiting = shared_value(waits, mask)
    fresh = mask if waiting == _FRESH else mask & (waits == _NOT_WAITING) if waiting is None else None
    if fresh is not None and (fresh is mask or fresh.any()):
        if aligned:
            require_aligned(warp, mask, "bar.sync")
        put(waits, fresh, named.phase)
        if votes is not None:
            named.votes.append(votes)
        if (watch := warp.block.grid.watch) is not None:
            watch.named_arrives(warp, fresh, index, named.phase)
        if named.arrive(whole_warps(fresh) * 32, expected, warp):
            warp.block.wake()
    return Arrival(named, int(waits[mask].max()) if waiting is None else int(waits[active(mask).first]))


def _released(warp: Warp, mask: Mask, index: int) -> None:
    """Let lanes go on whose barrier is complete."""
    put(_waits(warp), mask, _NOT_WAITING)
    if (watch := warp.block.grid.watch) is not None:
        watch.named_passed(warp, mask, index, warp.block.named_barrier(index).phase)


def _reduction(modifiers: Modifiers, aligned: bool) -> Function:
    """PTX: "bar.red performs a reduction operation across threads": .popc counts, .and and .or test the
    predicates.
    """
    operation = modifiers.one_of("popc", "and", "or")
    modifiers.one_of("u32" if operation == "popc" else "pred")
    modifiers.done()

    def run(warp: Warp, mask: Mask, barrier: Lanes, *rest: Lanes) -> Any:
        if _parted(warp, mask, barrier, *rest[:-1]):
            return BLOCKED
        index, expected = _threads(warp, mask, barrier, rest[:-1])
        votes = (int(rest[-1][mask].sum()), int(mask.sum()))
        arrival = _arrived(warp, mask, index, expected, aligned, votes)
        if not arrival.over:
            warp.waiting = arrival
            return BLOCKED
        _released(warp, mask, index)
        some, every, total = warp.block.named_barrier(index).result
        if operation == "popc":
            return np.full(warp.lanes, total, dtype=np.uint32)
        return np.full(warp.lanes, every if operation == "and" else some)

    return run


def _warp_sync(i: Instruction) -> Function:
    """bar.warp.sync: "wait until all non-exited threads corresponding to membermask have executed" it."""
    modifiers = Modifiers(i)
    modifiers.one_of("warp")
    modifiers.one_of("sync")
    modifiers.done()

    def run(warp: Warp, mask: Mask, members: Lanes) -> Any:
        watch = warp.block.grid.watch
        if warp.aligned(mask):
            if watch is not None:
                watch.warp_sync(warp, mask)
            return None
        lane = np.arange(warp.lanes, dtype=np.uint32) % 32
        arrived: Mask = warp.state.setdefault("warp barrier", np.zeros(warp.lanes, dtype=np.bool_))
        released: Mask = warp.state.setdefault("warp barrier passed", np.zeros(warp.lanes, dtype=np.bool_))
        if released[mask].all():
            released &= ~mask
            return None
        arrived |= mask & ~released
        first = members.reshape(-1, 32)[np.arange(warp.lanes // 32), mask.reshape(-1, 32).argmax(axis=1)]
        touched = np.repeat(mask.reshape(-1, 32).any(axis=1), 32)
        expected = touched & warp.alive & ((np.repeat(first, 32) >> lane & 1) == 1)
        if (expected & ~arrived).any():
            warp.waiting = "bar.warp.sync"
            return BLOCKED
        arrived &= ~expected
        released |= expected & ~mask
        if watch is not None:
            watch.warp_sync(warp, expected)
        warp.block.wake()
        return None

    return run


def _cluster(i: Instruction) -> Function:
    """barrier.cluster: "arrive ... marks the arrival", "wait causes the executing thread to wait for all"
    of them.
    """
    modifiers = Modifiers(i)
    modifiers.one_of("cluster")
    kind = modifiers.one_of("arrive", "wait")
    relaxed = modifiers.one_of("release", "acquire", "relaxed", default="release") == "relaxed"
    aligned = modifiers.flag("aligned")
    modifiers.done()

    def arrive(warp: Warp, mask: Mask) -> None:
        if aligned:
            require_aligned(warp, mask, "barrier.cluster.arrive")
        barrier = warp.block.cluster.barrier
        phases = _cluster_phases(warp)
        if (phases[mask] != _NOT_WAITING).any():
            raise BarrierFault("barrier.cluster.arrive twice without a wait between")
        phases[mask] = barrier.phase
        if (watch := warp.block.grid.watch) is not None:
            watch.cluster_arrives(warp, mask, barrier.phase, relaxed=relaxed)
        if barrier.arrive(int(mask.sum())):
            warp.block.wake()

    def wait(warp: Warp, mask: Mask) -> Any:
        if aligned:
            require_aligned(warp, mask, "barrier.cluster.wait")
        barrier = warp.block.cluster.barrier
        phases = _cluster_phases(warp)
        if (phases[mask] == _NOT_WAITING).any():
            raise BarrierFault("barrier.cluster.wait without an arrive before it")
        if (phases[mask] >= barrier.phase).any():
            warp.waiting = Arrival(barrier, int(phases[mask].max()))
            return BLOCKED
        phases[mask] = _NOT_WAITING
        if (watch := warp.block.grid.watch) is not None:
            watch.cluster_passed(warp, mask, barrier.phase)
        return None

    return arrive if kind == "arrive" else wait


def _cluster_phases(warp: Warp) -> NDArray[np.int64]:
    found: NDArray[np.int64] | None = warp.state.get("cluster barrier")
    if found is None:
        found = warp.state["cluster barrier"] = np.full(warp.lanes, _NOT_WAITING, dtype=np.int64)
    return found
