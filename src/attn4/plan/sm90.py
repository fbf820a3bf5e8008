"""Plans for Hopper (sm_90a): one producer warpgroup and two or three warpgroups that attend."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn4.machine import Machine
from attn4.plan.plan import Buffer, Channel, Plan, Role, Schedule, SoftmaxPlan
from attn4.problem import Problem

WARPS_PER_GROUP = 4
TILE_RECORD_WORDS = 12
HEAD_DIM_STEP = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows, keys of one step, attending warpgroups and ring depth of a CTA."""

    rows: int
    keys: int
    groups: int
    stages: int


REGISTERS = {2: (240, 24), 3: (160, 32), 4: (112, 24)}
"""Registers a thread of an attending and of a producing warp, by attending warpgroups.

They are dealt from what the CTA is launched with, 65,536 / threads rounded down to 8: a larger sum never
gets its registers, and the kernel hangs.
"""


def padded(head_dim: int) -> int:
    """The head dimension that a tile holds: rounded up to 32, so that a swizzle atom fits."""
    return -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP


def tile_shape(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """Tile by padded head dimensions: what registers and 227 KB of shared memory hold.

    An attending thread keeps rows*head_dim_v/128/groups words of output, rows*keys/128/groups of scores
    and half as many of probabilities.
    """
    if head_dim <= 64:
        return Tile(192, 128, 3, 2)
    if head_dim <= 96:
        return Tile(128, 128, 2, 2)
    if head_dim <= 128:
        return Tile(128, 176 if mask == "full" else 128, 2, 2)
    if head_dim <= 192:
        return Tile(128, 128 if head_dim_v <= 128 else 96, 2, 2)
    return Tile(128, 64 if mask == "window" else 80, 2, 2)


def forward(problem: Problem, machine: Machine) -> Plan:
    """The plan of the forward pass of ``problem`` on a Hopper ``machine``."""
    mask = problem.mask.kind
    head_dim, head_dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    tile = tile_shape(head_dim, head_dim_v, mask)
    plan = Plan(
        arch=machine.name,
        direction="forward",
        dtype=problem.dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask=mask,
        tile_m=tile.rows,
        tile_n=tile.keys,
        roles=(),
        buffers=(),
        channels=(),
        schedule=schedule(problem),
        softmax=SoftmaxPlan(),
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=problem.cu_seqlens_k,
        seqused_q=problem.seqused_q,
        seqused_k=problem.seqused_k,
        lse=problem.lse,
        ping_pong=head_dim <= 128,
        overlap=True,
    )
    return with_tile(plan, tile)


def schedule(problem: Problem) -> Schedule:
    """Equal tiles are dealt statically; unequal ones from a counter, longest first, by L2-sized sections."""
    ragged = problem.cu_seqlens_q or problem.cu_seqlens_k or problem.seqused_q or problem.seqused_k
    if problem.mask.kind == "full" and not ragged:
        return Schedule(order="linear", persistent=True, dynamic=False)
    return Schedule(order="longest_first", persistent=True, dynamic=True, section_bytes=32 * 2**20)


def with_tile(plan: Plan, tile: Tile) -> Plan:
    """``plan`` with roles, buffers and channels for ``tile``."""
    attending = tile.groups * WARPS_PER_GROUP
    consumer_registers, producer_registers = REGISTERS[tile.groups]
    roles = (
        Role("load", 0, 1, producer_registers, "copies Q, K and V to shared memory"),
        Role("schedule", 1, 1, producer_registers, "takes tiles and announces them"),
        Role("idle", 2, 2, producer_registers, "completes the warpgroup that gives registers away"),
        Role("attend", WARPS_PER_GROUP, attending, consumer_registers, "both products, softmax, output"),
    )
    query = tile.rows * plan.head_dim * 2
    key = tile.keys * plan.head_dim * 2
    value = tile.keys * plan.head_dim_v * 2
    channels = (
        Channel("query", "tma", "query", 1, "load", ("attend",), 1, attending, query),
        Channel("key", "tma", "key", tile.stages, "load", ("attend",), 1, attending, key),
        Channel("value", "tma", "value", tile.stages, "load", ("attend",), 1, attending, value),
        Channel("tile", "thread", "tile", 1, "schedule", ("load", "attend"), 1, attending + 1),
        Channel("turn", "named", None, tile.groups, "attend", ("attend",), 2 * 32 * WARPS_PER_GROUP, 0),
    )
    barrier_words = sum(2 * channel.stages for channel in channels if channel.kind != "named")
    shapes = (
        ("query", (tile.rows, plan.head_dim), plan.dtype, 1, query),
        ("key", (tile.keys, plan.head_dim), plan.dtype, tile.stages, key),
        ("value", (tile.keys, plan.head_dim_v), plan.dtype, tile.stages, value),
        ("tile", (TILE_RECORD_WORDS,), "int32", 1, 4 * TILE_RECORD_WORDS),
        ("barriers", (barrier_words,), "int64", 1, 8 * barrier_words),
    )
    buffers: list[Buffer] = []
    offset = 0
    for name, shape, dtype, stages, stage_bytes in shapes:
        buffers.append(Buffer(name, "shared", shape, dtype, stages, offset, stages * stage_bytes))
        offset += stages * stage_bytes
    return replace(
        plan,
        tile_m=tile.rows,
        tile_n=tile.keys,
        roles=roles,
        buffers=tuple(buffers),
        channels=channels if plan.ping_pong else channels[:-1],
    )
