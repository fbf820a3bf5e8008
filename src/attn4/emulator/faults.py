"""What goes wrong while a kernel runs, each with the place where it happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn4.emulator.ptx.module import Instruction


class EmulationError(RuntimeError):
    """A kernel cannot be run on, because it or its launch is wrong."""


class BarrierFault(EmulationError):  # noqa: N818 - the word in use
    """An arrival, a transaction count or a wait that an mbarrier or a named barrier does not allow."""


class DivergedWarp(EmulationError):  # noqa: N818 - the word in use
    """An ``.aligned`` instruction reached by only some of the threads of a warp."""


class Deadlock(EmulationError):  # noqa: N818 - the word in use
    """No thread of the grid can proceed, and no asynchronous work is left to complete."""


class Livelock(EmulationError):  # noqa: N818 - the word in use
    """Threads run, but for a very long time nothing has changed that another thread could see."""


class StepLimit(EmulationError):  # noqa: N818 - the word in use
    """The launch took more instructions or more seconds than it was given."""


class Trap(EmulationError):  # noqa: N818 - the word in use
    """The kernel executed ``trap``."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instruction was executing: the kernel's name, the CTA (x, y, z), and warps within the CTA."""

    kernel: str
    block: tuple[int, int, int]
    warps: tuple[int, ...]
    instruction: Instruction | None

    def __str__(self) -> str:
        name = self.kernel if len(self.kernel) <= 60 else self.kernel[:57] + "..."
        warps = ", ".join(map(str, self.warps))
        where = f"kernel {name}, CTA {self.block}, warp{'s' if len(self.warps) > 1 else ''} {warps}"
        if self.instruction is None:
            return where
        text = self.instruction.text
        text = text if len(text) <= 120 else text[:117] + "..."
        source = f" ({self.instruction.source})" if self.instruction.source else ""
        return f"{where}, PTX line {self.instruction.line}{source}: {text}"
