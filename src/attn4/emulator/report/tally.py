"""What is counted while a launch runs: visits of segments by each warp, and what only the units know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.state.block import Block

Visits = list[int]


class Tally:
    """The counts of one launch, by the number of a warp in its CTA, all CTAs together."""

    __slots__ = ("_known", "_segments", "_visits", "amounts", "peak_tensor_columns")

    def __init__(self, segments: int) -> None:
        self._segments = segments
        self._visits: dict[tuple[int, ...], Visits] = {}
        self._known: dict[tuple[int, bytes], Visits] = {}
        self.amounts: dict[int, dict[str, float]] = {}
        self.peak_tensor_columns = 0

    def visits(self, first: int, bits: bytes) -> Visits:
        """Where the visits of segments are counted by the lanes ``bits``, the first of them that of thread
        ``first``: once for all the warps that are among them.
        """
        found = self._known.get((first, bits))
        if found is None:
            present = np.frombuffer(bits, dtype=np.bool_).reshape(-1, 32).any(axis=1)
            warps = tuple((first // 32 + np.flatnonzero(present)).tolist())
            found = self._visits.setdefault(warps, [0] * self._segments)
            self._known[first, bits] = found
        return found

    def add(self, warp: Warp, lane: int, name: str, amount: float = 1) -> None:
        """Count ``amount`` of a class for the hardware warp that holds a lane."""
        counted = self.amounts.setdefault(warp.numbers[lane // 32], {})
        counted[name] = counted.get(name, 0) + amount

    def retire(self, block: Block) -> None:
        """Note what a CTA that has ended used at most."""
        if block.uses_tensor_memory:
            self.peak_tensor_columns = max(self.peak_tensor_columns, block.tensor_memory.peak)

    def merge(self, other: Tally) -> None:
        """Add the counts of other CTAs of the launch."""
        for warps, visits in other._visits.items():
            mine = self._visits.setdefault(warps, [0] * self._segments)
            mine[:] = [a + b for a, b in zip(mine, visits, strict=True)]
        for warp, counted in other.amounts.items():
            known = self.amounts.setdefault(warp, {})
            for name, amount in counted.items():
                known[name] = known.get(name, 0) + amount
        self.peak_tensor_columns = max(self.peak_tensor_columns, other.peak_tensor_columns)

    def by_warp(self) -> dict[int, Any]:
        """The visits of each segment by each warp, int64 (segments,)."""
        totals: dict[int, Any] = {}
        for warps, visits in self._visits.items():
            counts = np.array(visits, dtype=np.int64)
            for warp in warps:
                totals[warp] = totals.get(warp, 0) + counts
        return dict(sorted(totals.items()))

    def total(self) -> list[int]:
        """The visits of each segment by all warps."""
        counts = np.zeros(self._segments, dtype=np.int64)
        for warps, visits in self._visits.items():
            counts += len(warps) * np.array(visits, dtype=np.int64)
        found: list[int] = counts.tolist()
        return found
