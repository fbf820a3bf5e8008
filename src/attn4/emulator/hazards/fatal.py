"""A fault that ended a launch, in the words of the hazards that did not."""

from __future__ import annotations

from attn4.emulator.faults import BarrierFault, Deadlock, DivergedWarp, Livelock, Place, StepLimit, Trap
from attn4.emulator.hazards.findings import Hazard
from attn4.emulator.state.tensor_memory import TensorMemoryFault

_KINDS: dict[type[Exception], str] = {
    Deadlock: "deadlock",
    Livelock: "livelock",
    StepLimit: "limit",
    BarrierFault: "barrier",
    DivergedWarp: "divergence",
    TensorMemoryFault: "tensor memory",
    Trap: "trap",
}


def fatal(error: Exception, kernel: str, place: Place | None) -> Hazard:
    """``error``, raised while ``kernel`` ran; ``place`` is None where no warp was running."""
    instruction = place.instruction if place is not None else None
    source = getattr(instruction, "source", None)
    return Hazard(
        kind=_KINDS.get(type(error)) or str(getattr(error, "kind", "error")),
        message=f"{error}" or type(error).__name__,
        kernel=kernel,
        block=place.block if place is not None else (0, 0, 0),
        warp=place.warps[0] if place is not None and place.warps else -1,
        lane=getattr(error, "lane", None),
        line=instruction.line if instruction is not None else 0,
        source=None if source is None else str(source),
    )
