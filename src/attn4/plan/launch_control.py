"""Plans whose CTAs take over the tiles of CTAs that have not started: cluster launch control (Blackwell).

The grid has a CTA a tile. Whoever is done asks the hardware to cancel one that waits for a free SM, and does
its tile: what the counter in global memory does, without the counter. On a free machine the model of the
schedule sees no difference, as whoever is free first takes the next tile either way; so plans take the
counter, which both machines have, which knows ragged batches, and which was measured. Launch control pays
where something else holds some of the SMs: a CTA of a persistent grid that cannot start keeps its first tile,
a long one, until another CTA is done with all (docs/measured-facts.md).
"""

from __future__ import annotations

from dataclasses import replace

from attn4.plan.layout import BARRIER_BYTES, Piece, barrier_count
from attn4.plan.plan import Buffer, Channel, Plan

RESPONSE_WORDS = 4
"""The opaque response to a request: 16 bytes (PTX ISA, clusterlaunchcontrol.try_cancel)."""


def with_launch_control(plan: Plan) -> Plan:
    """``plan``, its tiles taken over instead of counted. Raises ValueError where that cannot be."""
    wrong = _obstacle(plan)
    if wrong is not None:
        raise ValueError(f"Launch control was asked for, but {wrong}; leave the plan as it is.")
    response = Piece(name="response", shape=(RESPONSE_WORDS,), dtype="int32")
    size = response.size("shared")
    role = "schedule"
    channel = Channel(response.name, "tma", response.name, 1, role, (role,), 1, 0, size)
    channels = (*plan.channels, channel)
    count = barrier_count(channels)
    # The barriers are the last of the shared buffers, and begin where a response may.
    old = plan.buffer("barriers")
    place = Buffer(response.name, "shared", response.shape, response.dtype, 1, old.offset, size)
    barriers = replace(old, shape=(count,), offset=old.offset + size, size=count * BARRIER_BYTES)
    return replace(
        plan,
        schedule=replace(plan.schedule, launch_control=True),
        channels=channels,
        buffers=(*(buffer for buffer in plan.buffers if buffer is not old), place, barriers),
    )


def _obstacle(plan: Plan) -> str | None:
    """Why the tiles of ``plan`` cannot be taken over."""
    if not any(buffer.space == "tensor" for buffer in plan.buffers) or plan.direction != "forward":
        return f"{plan.arch} {plan.direction} is no forward pass on Blackwell"
    if plan.cu_seqlens_q:
        return "the number of tiles of packed sequences, and so the grid, is not known on the host"
    if plan.cta_group != 1:
        return "a pair of CTAs would have to take over a pair, which is not built"
    if not plan.schedule.dynamic:
        return "its tiles are dealt in advance: no warp announces them; plan it with a dynamic schedule"
    return None
