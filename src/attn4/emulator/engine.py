"""Warps: which lanes are where in the program, and how they part and meet.

A `Warp` here is one or more hardware warps that run as one array of lanes (`Schedule.warps_together`). Its
lanes follow *paths*; a branch that parts them makes a join at the immediate post-dominator, where the parts
wait for each other. Two warps never depend on each other at a join: when all paths of a group wait, whole
hardware warps that have arrived go on without the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.codegen.segments import NOWHERE
from attn4.emulator.isa.registry import BLOCKED
from attn4.emulator.state.active import active, active_bytes
from attn4.emulator.state.barrier import may_be_over
from attn4.emulator.state.registers import Lanes, poisoned
from attn4.emulator.vector.memory import WINDOWS

if TYPE_CHECKING:
    from attn4.emulator.codegen.layout import Storage
    from attn4.emulator.codegen.program import Program
    from attn4.emulator.grid import Grid
    from attn4.emulator.state.block import Block
    from attn4.emulator.state.special_registers import SpecialRegisters

Mask = NDArray[np.bool_]

PARTED: Final = -2
"""What a segment returns when the warp has set the paths itself."""


@dataclass(slots=True, eq=False)
class Join:
    """Where paths meet again: ``expected`` lanes in all, of which ``arrived`` are there."""

    segment: int
    expected: Mask
    arrived: Mask
    outer: Join | None


@dataclass(slots=True, eq=False)
class Path:
    """Lanes at one place of the program. ``bits`` is the mask as bytes, ``warps`` the hardware warps it
    touches.
    """

    segment: int
    mask: Mask
    join: Join | None
    bits: bytes = b""
    warps: int = 0
    waiting: object = ""

    def __post_init__(self) -> None:
        self.bits = self.mask.tobytes()
        self.warps = len(active_bytes(self.bits).warps)


@dataclass(slots=True, eq=False, repr=False)
class Warp:
    """Hardware warps that run as one: ``threads`` are their thread numbers in the CTA.

    ``expired`` tells waits with a time limit that it is over. ``state`` holds what definitions keep for
    each warp. ``everyone`` is the mask in use while all lanes run together, None while they do not.
    ``numbers`` are the hardware warps, counted in the CTA.
    """

    block: Block
    program: Program
    threads: NDArray[np.uint32]
    special: SpecialRegisters
    symbol_b32: dict[str, Lanes]
    symbol_b64: dict[str, Lanes]
    registers: list[Lanes] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    alive: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    whole: bytes = b""
    executed: int = 0
    expired: bool = False
    waiting: object = ""
    state: dict[Any, Any] = field(default_factory=dict)
    current: Path | None = None
    everyone: Mask | None = None
    storage: Storage | None = None
    context: int = 0
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        lanes = len(self.threads)
        self.numbers = tuple(thread // 32 for thread in self.threads[::32].tolist())
        count = self.block.threads[0] * self.block.threads[1] * self.block.threads[2]
        self.storage = storage = self.program.storage(lanes)
        self.registers = self._views(storage) if storage else poisoned(self.program.registers, lanes)
        self.alive = self.threads < count
        self.whole = b"\x01" * lanes
        self.paths = [Path(0, self.alive.copy(), None)]

    def _views(self, storage: Storage) -> list[Any]:
        """The registers that Python touches, as views of the storage; None for all others."""
        self.context = storage.context
        storage.attach(WINDOWS["shared"], self.block.shared)
        storage.attach(WINDOWS["param"], self.block.grid.parameters)
        for kind, name in storage.layout.fixed:
            value = {"b32": self.symbol_b32, "b64": self.symbol_b64}.get(kind)
            found = self.special[name](self) if value is None else value[name]
            storage.fixed((kind, name))[:] = found
        return storage.views

    @property
    def machine(self) -> Grid:
        """The grid that runs this warp: global memory, clock, asynchronous work."""
        return self.block.grid

    @property
    def lanes(self) -> int:
        """The width of the registers: 32 for each hardware warp."""
        return len(self.threads)

    @property
    def finished(self) -> bool:
        """Whether all lanes have exited."""
        return not self.paths

    @property
    def may_proceed(self) -> bool:
        """Whether what a path waits for may have happened."""
        return any(may_be_over(path.waiting) for path in self.paths)

    def run(self, budget: int) -> bool:
        """Execute up to about ``budget`` instructions a lane; false if all paths wait."""
        functions = self.program.functions(len(self.threads))
        changes = self.block.grid.changes
        for path in list(self.paths):
            if budget <= 0:
                break
            if path in self.paths and (not path.waiting or self.expired or may_be_over(path.waiting)):
                budget = self._follow(path, functions.full, functions.some, budget)
        self.expired = False
        if len(self.paths) > 1:
            self._merge()
        if budget <= 0 or not self.paths:
            if self.joins and self.block.grid.changes == changes:
                self._release()
            if len(self.paths) > 1:
                self.paths.append(self.paths.pop(0))
            return True
        if any(not path.waiting for path in self.paths):
            return True
        if self.block.grid.changes != changes:
            # What one path waited for may have been done by another since.
            return True
        return self._release()

    def _merge(self) -> None:
        """Join paths that wait at one place in one phase; other waits keep notes of their own."""
        together: dict[tuple[object, ...], Path] = {}
        for path in list(self.paths):
            key = (path.segment, id(path.join), getattr(path.waiting, "phase", id(path)))
            other = together.setdefault(key, path)
            if other is not path:
                self.paths.remove(path)
                merged = Path(path.segment, path.mask | other.mask, path.join)
                merged.waiting = path.waiting
                self.paths[self.paths.index(other)] = together[key] = merged

    def _follow(self, path: Path, full: list[Any], some: list[Any], budget: int) -> int:
        code = full if path.bits == self.whole else some
        visits = self.block.grid.tally.visits(int(self.threads[0]), path.bits)
        sizes = self.program.sizes
        registers, mask, bits = self.registers, path.mask, path.bits
        segment = path.segment
        join = path.join.segment if path.join else NOWHERE
        if self.storage is not None:
            self.storage.active[:] = mask
        self.current = path
        self.everyone = mask if code is full else None
        path.waiting = ""
        spent = 0
        while spent < budget:
            following = code[segment](self, registers, mask, bits)
            if following is BLOCKED:
                path.waiting = self.waiting
                break
            spent += sizes[segment]
            visits[segment] += 1
            if following < 0:
                self.executed += spent * path.warps
                return budget - spent if following == PARTED else 0
            segment = path.segment = following
            if segment == join:
                self._arrive(path)
                break
        self.executed += spent * path.warps
        return budget - spent

    def diverge(self, mask: Mask, taken: Mask, target: int, following: int, meeting: int) -> int:
        """Part the current path: ``taken`` of ``mask`` goes to ``target``, the rest to ``following``."""
        path = self.current
        assert path is not None
        self.paths.remove(path)
        join = path.join
        if meeting != NOWHERE and (join is None or join.segment != meeting):
            join = Join(meeting, mask.copy(), np.zeros_like(mask), path.join)
            self.joins.append(join)
        for part, segment in ((mask & ~taken, following), (taken & mask, target)):
            if join is not None and segment == join.segment:
                join.arrived = join.arrived | part
            else:
                self.paths.append(Path(segment, part, join))
        if join is not None:
            self._complete(join)
        return PARTED

    def part(self, masks: list[Mask]) -> None:
        """Let the lanes of ``masks`` go on apart from the instruction that is executing, as the others do."""
        path = self.current
        assert path is not None
        self.paths.remove(path)
        rest = path.mask.copy()
        for mask in masks:
            rest &= ~mask
        parts = [*masks, rest] if rest.any() else masks
        self.paths += [Path(path.segment, mask, path.join) for mask in parts]

    def split(self, mask: Mask, guarded: Mask) -> bool:
        """Let the hardware warps of ``mask`` that a guard leaves out go on without those that are to wait;
        true if there are such.
        """
        waiting = np.repeat(guarded.reshape(-1, 32).any(axis=1), 32) & mask
        if (waiting == mask).all():
            return False
        self.part([waiting])
        return True

    def leave(self, mask: Mask, leaving: Mask, following: int) -> int:
        """End the threads of ``leaving``; the rest of ``mask`` goes on at ``following``."""
        path = self.current
        assert path is not None
        self.paths.remove(path)
        self.alive = self.alive & ~leaving
        rest = mask & ~leaving
        if rest.any():
            self._enter(Path(following, rest, path.join))
        for join in list(self.joins):
            join.expected = join.expected & ~leaving
            self._complete(join)
        self.block.grid.exited(self, leaving)
        return PARTED

    def _enter(self, path: Path) -> None:
        self.paths.append(path)
        if path.join is not None and path.segment == path.join.segment:
            self._arrive(path)

    def _arrive(self, path: Path) -> None:
        self.paths.remove(path)
        join = path.join
        assert join is not None
        join.arrived = join.arrived | path.mask
        self._complete(join)

    def _complete(self, join: Join) -> None:
        if join.arrived.tobytes() != join.expected.tobytes() or join not in self.joins:
            return
        self.joins.remove(join)
        if b"\x01" in join.expected.tobytes():
            self._enter(Path(join.segment, join.expected, join.outer))

    def _release(self) -> bool:
        """Let whole hardware warps that wait at a join for other warps go on; true if any did."""
        for join in list(self.joins):
            missing = (join.expected & ~join.arrived).reshape(-1, 32).any(axis=1)
            free = join.arrived & ~np.repeat(missing, 32)
            if free.any():
                join.expected = join.expected & ~free
                join.arrived = join.arrived & ~free
                self._enter(Path(join.segment, free, join.outer))
                return True
        return False

    def aligned(self, mask: Mask) -> bool:
        """Whether ``mask`` holds all or none of the living lanes of each hardware warp."""
        if mask is self.everyone:
            return True
        lanes = active(mask)
        living = lanes.touched & self.alive
        return living.tobytes() == mask.tobytes()

    def __str__(self) -> str:
        numbers = self.numbers
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        return f"warp {span} of CTA {self.block.index}"
