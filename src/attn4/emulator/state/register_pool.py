"""The registers of a CTA, which its warps give back and take by setmaxnreg (PTX 9.7.19.5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

REGISTERS_A_MULTIPROCESSOR = 65536
MOST_A_THREAD = 255


@dataclass(slots=True)
class RegisterPool:
    """Counts a thread, of all warps: each begins with ``launched``, ``free`` is what was given back.

    What the assembler gave the kernel is not in its PTX. It is taken to be the most that fits, so that a
    kernel waits here only if it would wait on the chip as well.
    """

    launched: int
    free: int = 0
    held: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, threads: int, blocks: int, maximum: int | None) -> RegisterPool:
        """The pool of a CTA of which ``blocks`` fit a multiprocessor; ``maximum`` is what .maxnreg says."""
        most = REGISTERS_A_MULTIPROCESSOR // (max(threads, 1) * max(blocks, 1)) // 8 * 8
        return cls(min(most, MOST_A_THREAD, maximum or MOST_A_THREAD))

    def resize(self, warps: Iterable[int], count: int) -> bool:
        """Let each of ``warps`` have ``count`` registers a thread; false, and nothing done, if too few are
        free.
        """
        warps = list(warps)
        wanted = sum(count - self.held.get(warp, self.launched) for warp in warps)
        if wanted > self.free:
            return False
        self.free -= wanted
        self.held |= dict.fromkeys(warps, count)
        return True
