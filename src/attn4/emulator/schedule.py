"""Which warp runs next, for how long, and when asynchronous work completes: everything that the chip leaves
open.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.state.asynchronous import Copy


class Schedule(Protocol):
    """A policy. ``warps_together`` neighbouring warps of a CTA run as one, which is faster and interleaves
    less.
    """

    warps_together: int

    def pick(self, ready: list[Warp], changes: int) -> int:
        """Index of the warp to run next; ``changes`` counts what has been visible to other threads so far."""
        ...

    def quantum(self) -> int:
        """Instructions that it runs before another is picked."""
        ...

    def due(self, copies: list[Copy]) -> int | None:
        """Index of an asynchronous copy to complete now, None to complete none."""
        ...

    def forced(self, copies: list[Copy]) -> int:
        """Index of the copy to complete when no warp can proceed."""
        ...

    def product_at_once(self) -> bool:
        """Whether a product just issued is computed now; otherwise when it is waited for."""
        ...


class RoundRobin:
    """Warps in turn; copies complete in order, one a turn; products when they are waited for."""

    def __init__(self, quantum: int = 256, warps_together: int = 4) -> None:
        self.warps_together = warps_together
        self._quantum = quantum

    def pick(self, ready: list[Warp], changes: int) -> int:  # noqa: ARG002 - the policy needs less
        """The warp that has waited longest."""
        return 0

    def quantum(self) -> int:
        """The same for all."""
        return self._quantum

    def due(self, copies: list[Copy]) -> int | None:  # noqa: ARG002 - the policy needs less
        """The oldest."""
        return 0

    def forced(self, copies: list[Copy]) -> int:  # noqa: ARG002 - the policy needs less
        """The oldest."""
        return 0

    def product_at_once(self) -> bool:
        """Late."""
        return False


class Random:
    """Every choice by a generator of its own, seeded: the same seed gives the same run."""

    def __init__(self, seed: int = 0, warps_together: int = 1) -> None:
        self.warps_together = warps_together
        self._random = random.Random(seed)

    def pick(self, ready: list[Warp], changes: int) -> int:  # noqa: ARG002 - the policy needs less
        """Any."""
        return self._random.randrange(len(ready))

    def quantum(self) -> int:
        """From one segment to long runs, in powers of two."""
        return 1 << self._random.randrange(11)

    def due(self, copies: list[Copy]) -> int | None:
        """Any, in one turn of four."""
        return self._random.randrange(len(copies)) if self._random.random() < 0.25 else None

    def forced(self, copies: list[Copy]) -> int:
        """Any."""
        return self._random.randrange(len(copies))

    def product_at_once(self) -> bool:
        """One in two."""
        return self._random.random() < 0.5


class Adversarial:
    """The warp furthest ahead runs on until it waits; asynchronous work completes at once, or at the last
    moment.

    ``late=None`` lets the seed decide for each copy and product. A warp that ran without changing anything
    that others see stands back until something has changed, so that one that spins does not keep those out
    whom it waits for.
    """

    def __init__(self, seed: int = 0, *, late: bool | None = True, warps_together: int = 1) -> None:
        self.warps_together = warps_together
        self._random = random.Random(seed)
        self._late = late
        self._last: Warp | None = None
        self._changes = -1
        self._idle: set[int] = set()

    def pick(self, ready: list[Warp], changes: int) -> int:
        """The one with most instructions executed among those that are not spinning."""
        if changes != self._changes:
            self._idle.clear()
            self._changes = changes
        elif self._last is not None:
            self._idle.add(id(self._last))
        best = max(range(len(ready)), key=lambda n: (id(ready[n]) not in self._idle, ready[n].executed))
        if id(ready[best]) in self._idle:
            self._idle.clear()
            best = min(range(len(ready)), key=lambda n: ready[n].executed)
        self._last = ready[best]
        return best

    def quantum(self) -> int:
        """Long enough to reach the next wait."""
        return 4096

    def due(self, copies: list[Copy]) -> int | None:
        """None while late; the newest first otherwise."""
        return None if self._is_late() else len(copies) - 1

    def forced(self, copies: list[Copy]) -> int:
        """The newest: copies may complete in any order."""
        return len(copies) - 1

    def product_at_once(self) -> bool:
        """The opposite of late."""
        return not self._is_late()

    def _is_late(self) -> bool:
        return self._late if self._late is not None else self._random.random() < 0.5


def named(name: str, seed: int = 0) -> Schedule:
    """The schedule called ``round_robin``, ``random``, ``adversarial`` or ``eager``. ValueError for another
    name.
    """
    match name:
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(seed)
        case "adversarial":
            return Adversarial(seed)
        case "eager":
            return Adversarial(seed, late=False)
    raise ValueError(f"schedule {name!r}: there are round_robin, random, adversarial and eager")
