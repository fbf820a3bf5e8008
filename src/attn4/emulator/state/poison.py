"""Global memory of the caller that counts as unwritten until a launch has written it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.state.memory import POISON, ByteMemory, GlobalMemory

Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@dataclass(slots=True)
class Poisoned:
    """Spans by the address of their first byte, each with which of its bytes launches have written.

    The arrays given are kept, so that nothing else comes to lie at their addresses.
    """

    _spans: dict[int, Mask] = field(default_factory=dict)
    _arrays: dict[int, Bytes] = field(default_factory=dict)

    def add(self, memory: Bytes) -> None:
        """Fill contiguous bytes with poison: nobody has written them."""
        memory[:] = POISON
        address = int(memory.ctypes.data)
        self._spans[address], self._arrays[address] = np.zeros(memory.size, np.bool_), memory

    def register(self, memory: GlobalMemory, span: Bytes, name: str) -> ByteMemory:
        """Make a span addressable; of what is poisoned in it only what launches have written is written."""
        base = int(span.ctypes.data)
        parts = list(self._parts(base, base + span.size))
        allocation = memory.register(span, name=name, written=not parts)
        if allocation.written is not None:
            allocation.written[:] = True
            for start, mask in parts:
                allocation.written[start : start + mask.size] = mask
        return allocation

    def keep(self, allocation: ByteMemory) -> None:
        """Note what a launch has written of an allocation."""
        if allocation.written is not None:
            for start, mask in self._parts(allocation.base, allocation.end):
                mask[:] = allocation.written[start : start + mask.size]

    def _parts(self, base: int, end: int) -> list[tuple[int, Mask]]:
        """The masks of what is poisoned from ``base`` to ``end``, each with its offset from ``base``."""
        found = []
        for start, mask in self._spans.items():
            first, last = max(start, base), min(start + mask.size, end)
            if first < last:
                found.append((first - base, mask[first - start : last - start]))
        return found
