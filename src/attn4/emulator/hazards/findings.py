"""What was found wrong while a kernel ran on: one entry for each pair of places in the program, counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Hazard:
    """One thing found wrong.

    ``kind`` is "race", "unfenced", "unwritten", "pending register", "leak", "barrier" and so on; ``message``
    one sentence: what, by whom, against whom, and which synchronisation is missing. ``block`` is the CTA,
    ``warp`` its warp (-1: none in particular), ``line`` the PTX line (0: none) and ``source`` the line of the
    source, if the PTX has it. ``other`` says the same of the other access, ``barrier`` the name of the
    variable that the program declared for the barrier or buffer.
    """

    kind: str
    message: str
    kernel: str
    block: tuple[int, int, int]
    warp: int
    lane: int | None
    line: int
    source: str | None
    other: str = ""
    barrier: str = ""

    def __str__(self) -> str:
        name = self.kernel if len(self.kernel) <= 60 else self.kernel[:57] + "..."
        who = f"kernel {name}, CTA {self.block}" + (f", warp {self.warp}" if self.warp >= 0 else "")
        lane = "" if self.lane is None else f", lane {self.lane}"
        line = f", PTX line {self.line}" if self.line else ""
        source = f" ({self.source})" if self.source else ""
        return f"{self.kind}: {self.message} [{who}{lane}{line}{source}]"

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(slots=True)
class Findings:
    """Hazards in the order in which they were found; of one kind at one pair of places the first is kept.

    ``counts`` says beside each how often it was found.
    """

    hazards: list[Hazard] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    _known: dict[tuple[object, ...], int] = field(default_factory=dict)

    def add(self, hazard: Hazard, *, other_line: int = 0) -> None:
        """Count a hazard; keep it if none of its kind is known at its line and at ``other_line``."""
        words = "" if hazard.line else hazard.message
        key = (hazard.kernel, hazard.kind, hazard.line, other_line, words)
        place = self._known.setdefault(key, len(self.hazards))
        if place == len(self.hazards):
            self.hazards.append(hazard)
            self.counts.append(0)
        self.counts[place] += 1

    def __iter__(self) -> Iterator[Hazard]:
        return iter(self.hazards)

    def __len__(self) -> int:
        return len(self.hazards)

    def __str__(self) -> str:
        return "\n".join(
            f"{hazard}" + (f" ({count} times)" if count > 1 else "")
            for hazard, count in zip(self.hazards, self.counts, strict=True)
        )
