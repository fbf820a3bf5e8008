"""One launch while it runs: CTAs resident on the SMs, warps that are ready, asynchronous work, and the end
of it all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.codegen.program import Program
from attn4.emulator.engine import Warp
from attn4.emulator.faults import Deadlock, EmulationError, Livelock, Place, StepLimit
from attn4.emulator.hazards.fatal import fatal
from attn4.emulator.hazards.findings import Findings, Hazard
from attn4.emulator.hazards.leaks import block_exits
from attn4.emulator.hazards.outputs import watch_outputs
from attn4.emulator.hazards.watch import Watch
from attn4.emulator.report.tally import Tally
from attn4.emulator.schedule import Schedule
from attn4.emulator.state.asynchronous import Copy
from attn4.emulator.state.barrier import ClusterBarrier
from attn4.emulator.state.block import SYSTEM_SHARED_BYTES, Block, Cluster, Dim3, SharedLayout, extent
from attn4.emulator.state.local import local_layout
from attn4.emulator.state.memory import ByteMemory, GlobalMemory, SharedMemory, refuse_unwritten
from attn4.emulator.state.registers import full
from attn4.emulator.state.special_registers import special_registers
from attn4.emulator.units.fused import as_on_chip, on_chip

if TYPE_CHECKING:
    from attn4.emulator.ptx.module import Instruction

Mask = NDArray[np.bool_]

IDLE_TURNS = 4_000
"""Instructions without a change that others see, after which a copy is completed or another CTA admitted."""

STUCK_ROUNDS = 3
"""How often all waits with a time limit may expire, with nothing changed in between, before it is a
deadlock.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A launch: CTAs, threads a CTA and CTAs a cluster as (x, y, z), dynamic shared memory in bytes."""

    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    dynamic_shared: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """When to give up: instructions (of whole warps), seconds, and instructions without a change that
    others see.
    """

    instructions: int = 10**10
    seconds: float = 3600.0
    idle_instructions: int = 2_000_000


@dataclass(frozen=True, slots=True)
class Residency:
    """How many CTAs are resident: on ``sms`` SMs, as many each as shared memory and threads allow.

    When those get nowhere, more are admitted, up to what ``device_sms`` SMs hold: CTAs may wait for others
    that a whole device runs at the same time.
    """

    sms: int = 4
    device_sms: int = 132
    shared_bytes: int = 233472
    threads: int = 2048
    blocks: int = 32


@dataclass(slots=True, repr=False)
class Grid:
    """The state of one launch. ``clock`` counts instructions; ``changes`` what other threads may have seen
    change. ``watch`` looks for hazards and collects them in ``findings``; None: nobody looks. ``failure``
    is what ended it before its time. ``tally`` counts for reports.
    """

    program: Program
    shape: Shape
    memory: GlobalMemory
    symbols: dict[str, int]
    parameters: ByteMemory
    schedule: Schedule
    residency: Residency
    limits: Limits
    hazards: bool = False
    strict: bool = False
    exact: bool = False
    ready: list[Warp] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    resident: list[Cluster] = field(default_factory=list)
    changes: int = 0
    clock: int = 0
    retired: int = 0
    running: Warp | None = None
    findings: Findings = field(default_factory=Findings)
    failure: Hazard | None = None
    watch: Watch | None = field(init=False)
    tally: Tally = field(init=False)
    waiting: Iterator[Cluster] = field(init=False)
    layout: SharedLayout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = SharedLayout.of(self.program.kernel, self.shape.dynamic_shared)
        self.tally = Tally(len(self.program.segments))
        self.watch = Watch(self, self.findings, strict=self.strict) if self.hazards else None
        if self.hazards:
            watch_outputs(self, self.memory)
        self.waiting = self._clusters()

    def run(self) -> None:
        """Run to the end. Raises EmulationError, or what a definition raised, with a note of where it
        happened.
        """
        room = self._room(self.residency.sms)
        with np.errstate(all="ignore"), as_on_chip(self.exact or on_chip()):
            try:
                self._admit(room)
                self._loop(room)
                while self.copies:
                    self._complete(0)
            except Exception as error:
                self._annotate(error)
                raise
        # What is left is counts: memory and registers of the last warp are not kept for them.
        self.running = None

    def issue(self, copy: Copy) -> None:
        """Take on asynchronous work; it completes when the schedule says so, or when it is waited for."""
        self.copies.append(copy)

    def cancel(self) -> Dim3 | None:
        """Take the next cluster that has not started off the launch; the index of its first CTA."""
        cluster = next(self.waiting, None)
        if cluster is None:
            return None
        x, y, z = (n * size for n, size in zip(cluster.index, cluster.shape, strict=True))
        return x, y, z

    def exited(self, warp: Warp, leaving: Mask) -> None:
        """Count the threads that a warp has just ended."""
        block = warp.block
        if self.watch is not None:
            self.watch.left(warp, leaving)
        done = block.cluster.barrier.leave(int(leaving.sum()))
        for barrier in block.named.values():
            if barrier.everyone and barrier.arrived:
                barrier.expected = block.living
                done |= barrier.complete()
        if done:
            block.wake()

    def _loop(self, room: int) -> None:
        started = time.monotonic()
        deadline = started + self.limits.seconds
        schedule = self.schedule
        ready = self.ready
        last_change, idle_since, rounds = (-1, -1), 0, 0
        while self.resident:
            if self.copies:
                self._complete_due()
            if not ready:
                now = (self.changes, self.retired)
                rounds = rounds + 1 if now == last_change else 0
                last_change = now
                self._unblock(rounds)
                continue
            warp = ready.pop(schedule.pick(ready, self.changes))
            self.running = warp
            before, changes = warp.executed, self.changes
            runnable = warp.run(schedule.quantum())
            self.clock += warp.executed - before
            if warp.finished:
                self._retire(warp, room)
            elif runnable:
                ready.append(warp)
            else:
                warp.block.cluster.sleeping.append(warp)
            if self.changes != changes:
                idle_since = self.clock
            elif self.clock - idle_since > min(IDLE_TURNS, self.limits.idle_instructions):
                if self._stir():
                    idle_since = self.clock
                elif self.clock - idle_since > self.limits.idle_instructions:
                    self._give_up()
            if self.clock > self.limits.instructions or time.monotonic() > deadline:
                raise StepLimit(
                    f"{self.clock} instructions in {time.monotonic() - started:.0f} s: a limit is reached"
                )

    def _complete_due(self) -> None:
        copies = self.copies
        chosen = self.schedule.due(copies)
        while chosen is not None and copies:
            if self._complete(chosen):
                return
            chosen = self.schedule.due(copies) if copies else None

    def _unblock(self, rounds: int) -> None:
        """Nobody is ready: complete a copy or admit a CTA, else let waits with a time limit expire, else it
        is a deadlock.
        """
        if self._stir():
            return
        if rounds >= STUCK_ROUNDS:
            raise Deadlock("\n".join(["no thread can proceed:", *self._waits()]))
        for cluster in self.resident:
            for warp in cluster.sleeping:
                warp.expired = True
                self.ready.append(warp)
            cluster.sleeping.clear()

    def _complete(self, index: int) -> bool:
        """Complete a copy, and forget it; false if it was complete already."""
        copy = self.copies.pop(index)
        if copy.done:
            return False
        self.running = None
        copy.complete()
        return True

    def _stir(self) -> bool:
        """Complete a copy, or admit one more cluster; false if there is neither."""
        while self.copies:
            if self._complete(self.schedule.forced(self.copies)):
                self.changes += 1
                return True
        before = len(self.resident)
        self._admit(min(before + 1, self._room(self.residency.device_sms)))
        return len(self.resident) > before

    def _give_up(self) -> None:
        raise Livelock(
            f"{self.limits.idle_instructions} instructions, and nothing changed that others could see:"
            + "\n".join(["", *self._waits()])
        )

    def _waits(self) -> list[str]:
        lines = []
        for cluster in self.resident:
            for block in cluster.blocks:
                for warp in block.warps:
                    lines += [f"  {warp}: {self._path(warp, path)}" for path in warp.paths]
        return lines

    def _path(self, warp: Warp, path: Any) -> str:
        operations = self.program.segments[path.segment].operations
        place = ""
        if operations:
            i = operations[0][1].instruction
            place = f"PTX line {i.line}" + (f" ({i.source})" if i.source else "")
        lanes = np.flatnonzero(path.mask).tolist()
        who = "" if len(lanes) == warp.lanes else f"lanes {_spans(lanes)} "
        doing = f"wait for {path.waiting}" if path.waiting else "run"
        return f"{who}{doing} at {place}"

    def _retire(self, warp: Warp, room: int) -> None:
        block = warp.block
        block.warps.remove(warp)
        self.retired += 1
        if self.watch is not None and not block.warps:
            self.watch.shared.exited(block, warp)
            block_exits(self.watch, block)
        if warp.storage is not None:
            self.program.recycle(warp.storage)
        cluster = block.cluster
        if not any(member.warps for member in cluster.blocks):
            for member in cluster.blocks:
                self.tally.retire(member)
            self.resident.remove(cluster)
            self._admit(room)

    def _admit(self, room: int) -> None:
        while len(self.resident) < room:
            cluster = next(self.waiting, None)
            if cluster is None:
                return
            self.resident.append(cluster)
            for rank in range(extent(cluster.shape)):
                self._block(cluster, rank)
            for block in cluster.blocks:
                self.ready.extend(block.warps)

    def _room(self, sms: int) -> int:
        bound = self.residency
        threads = extent(self.shape.block)
        each = min(
            bound.shared_bytes // max(self.layout.size, 1), bound.threads // max(threads, 1), bound.blocks
        )
        if each == 0:
            raise EmulationError(
                f"a CTA of {threads} threads and {self.layout.size} bytes of shared memory does not fit an SM"
            )
        return max(1, sms * each // extent(self.shape.cluster))

    def _clusters(self) -> Iterator[Cluster]:
        counts = tuple(n // c for n, c in zip(self.shape.grid, self.shape.cluster, strict=True))
        threads = extent(self.shape.block) * extent(self.shape.cluster)
        for z, y, x in itertools.product(*(range(n) for n in reversed(counts))):
            yield Cluster((x, y, z), self.shape.cluster, barrier=ClusterBarrier(threads))

    def _block(self, cluster: Cluster, rank: int) -> None:
        width, height, _ = cluster.shape
        inside = (rank % width, rank // width % height, rank // (width * height))
        index = tuple(c * s + i for c, s, i in zip(cluster.index, cluster.shape, inside, strict=True))
        shared = SharedMemory(self.layout.size - SYSTEM_SHARED_BYTES, rank)
        # A Watch finds such reads itself, when they are issued, and lets the kernel go on.
        shared.on_unwritten = refuse_unwritten if self.watch is None else None
        threads = extent(self.shape.block)
        place = (index[0], index[1], index[2])
        across, down, _ = self.shape.grid
        number = place[0] + across * (place[1] + down * place[2])
        block = Block(self, cluster, number, place, rank, self.shape.block, shared)
        cluster.blocks.append(block)
        addresses = dict(self.symbols)
        addresses |= {name: shared.absolute(offset) for name, offset in self.layout.offsets.items()}
        addresses |= local_layout(self.program.kernel.local)[0]
        lanes = min(self.schedule.warps_together * 32, -(-threads // 32) * 32)
        wide = {name: full(address, "b64", lanes) for name, address in addresses.items()}
        narrow = {name: full(address, "b32", lanes) for name, address in addresses.items()}
        special = special_registers(self, block)
        for first in range(0, threads, lanes):
            numbers = np.arange(first, first + lanes, dtype=np.uint32)
            block.warps.append(Warp(block, self.program, numbers, special, narrow, wide))

    def _annotate(self, error: Exception) -> None:
        place = self._place(error)
        if place is not None:
            error.add_note(str(place))
        self.failure = fatal(error, self.program.kernel.name, place)

    def _place(self, error: Exception) -> Place | None:
        warp = self.running
        if warp is None:
            return None
        instruction = self._raising(error)
        path = warp.current
        numbers = warp.numbers
        if path is not None:
            active = np.flatnonzero(path.mask.reshape(-1, 32).any(axis=1))
            numbers = tuple(numbers[n] for n in active.tolist())
        return Place(self.program.kernel.name, warp.block.index, numbers, instruction)

    def _raising(self, error: Exception) -> Instruction | None:
        traceback = error.__traceback__
        found = None
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self.program.filename:
                found = self.program.instruction_at(traceback.tb_lineno)
            traceback = traceback.tb_next
        return found


def _spans(lanes: list[int]) -> str:
    spans: list[list[int]] = []
    for lane in lanes:
        if spans and spans[-1][1] == lane - 1:
            spans[-1][1] = lane
        else:
            spans.append([lane, lane])
    return ",".join(f"{first}-{last}" if first != last else f"{first}" for first, last in spans)
