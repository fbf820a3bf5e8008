"""Plans for Hopper (sm_90a): one producing warpgroup and two to four warpgroups that attend.

Which of the tiles that fit is fastest was measured on an H200: docs/log.md has the races.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn4.machine import Machine
from attn4.plan.layout import Piece, barrier_count, pack, padded
from attn4.plan.plan import RESCALE_THRESHOLD, Buffer, Channel, Plan, Role, Schedule, SoftmaxPlan
from attn4.problem import Problem

WARPS_PER_GROUP = 4
GROUP_THREADS = 128

TILE_RECORD_WORDS = 12

SHORT = 2048
"""Query length up to which smaller tiles win at head dimensions up to 64."""

MOST_PACKED = 64
"""Query heads that are packed into a tile at most; each such number is a kernel of its own."""

SECTION_BYTES = 32 * 2**20
"""K and V of the heads that are worked on together: well inside an L2 of 50 MB."""

REGISTERS = {2: (240, 24), 3: (160, 32), 4: (112, 24)}
"""Registers a thread of an attending and of a producing warp, by attending warpgroups.

They are dealt from what the CTA is launched with, 65,536 / threads rounded down to 8: a larger sum never
gets its registers, and the kernel hangs.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows, keys of one step, attending warpgroups and ring depth of a CTA; how a warpgroup works.

    ``early_start`` wants room for the next tile's queries: registers, or ``query_stages`` of 2.
    ``lazy_rescale``: a maximum moves only if it grows by more than ``RESCALE_THRESHOLD``. The tiles that have
    it gain 1 to 4% where queries and keys are normal, and lose 11% (D 128) where scores spread eight times as
    wide, so that in many steps some row of a warp moves its maximum.
    """

    rows: int
    keys: int
    groups: int
    stages: int
    query_in_registers: bool = False
    late_release: bool = False
    ping_pong: bool = True
    query_stages: int = 1
    early_start: bool = False
    lazy_rescale: bool = False


def forward(problem: Problem, machine: Machine) -> Plan:
    """The plan of the forward pass of ``problem`` on a Hopper ``machine``."""
    plan = Plan(
        arch=machine.name,
        direction="forward",
        dtype=problem.dtype,
        head_dim=padded(problem.head_dim),
        head_dim_v=padded(problem.head_dim_v),
        mask=problem.mask.kind,
        tile_m=0,
        tile_n=0,
        roles=(),
        buffers=(),
        channels=(),
        schedule=schedule(problem),
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=problem.cu_seqlens_k,
        seqused_q=problem.seqused_q,
        seqused_k=problem.seqused_k,
        lse=problem.lse,
    )
    tile = tile_shape(problem)
    return with_tile(replace(plan, pack_gqa=packed_heads(problem, tile)), tile, machine)


def tile_shape(problem: Problem) -> Tile:
    """The tile by padded head dimensions: what registers and shared memory hold.

    An attending thread keeps rows * head_dim_v / 128 / groups words of output, rows * keys / 128 / groups of
    scores, half as many of probabilities, and rows * head_dim / 256 / groups of queries if they stay there.
    """
    head_dim, head_dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    if head_dim <= 64:
        return narrow_tile(problem)
    if head_dim <= 128:
        return Tile(128, 128, 2, 2, query_in_registers=True, late_release=True, lazy_rescale=True)
    if head_dim <= 192:
        keys = 128 if head_dim_v <= 128 else 96
        return Tile(128, keys, 2, 2, late_release=True, ping_pong=False)
    keys = 64 if problem.mask.kind == "window" else 80
    return Tile(128, keys, 2, 2, late_release=True, ping_pong=False)


def packed_heads(problem: Problem, tile: Tile) -> int:
    """Query heads of a group that share a tile: all of them where that at least halves the tiles, else 1."""
    group = problem.group
    ragged = problem.cu_seqlens_q or problem.seqused_q
    if ragged or group == 1 or tile.rows % group or group > MOST_PACKED:
        return 1
    apart = group * -(-problem.seqlen_q // tile.rows)
    together = -(-problem.seqlen_q * group // tile.rows)
    return group if apart >= 2 * together > 0 else 1


def narrow_tile(problem: Problem) -> Tile:
    """Tiles for head dimensions up to 64, where rows are cheap: how many depends on how many there are.

    192 rows share each key longest, but leave the last third of a tile empty at 1024. Of a ragged batch only
    a hint of the longest length is known, which must not change a result: its tiles keep 128 keys.
    """
    ragged = problem.cu_seqlens_q or problem.seqused_q
    if problem.seqlen_q > SHORT:
        if problem.mask.kind == "full" and not ragged:
            return Tile(192, 128, 3, 2, query_stages=2, early_start=True)
        return Tile(192, 128, 3, 2)
    if problem.mask.kind in ("full", "causal") and not ragged:
        return Tile(256, 64, 4, 4, late_release=True, query_stages=2, early_start=True, lazy_rescale=True)
    return Tile(128, 128, 2, 2, query_in_registers=True, late_release=True)


def schedule(problem: Problem) -> Schedule:
    """Equal tiles are dealt statically; unequal ones from a counter, longest first, by L2-sized sections."""
    if problem.mask.kind == "full" and not problem.ragged:
        return Schedule(order="linear", persistent=True, dynamic=False)
    return Schedule(order="longest_first", persistent=True, dynamic=True, section_bytes=SECTION_BYTES)


def with_tile(plan: Plan, tile: Tile, machine: Machine) -> Plan:
    """``plan`` with roles, buffers and channels for ``tile``."""
    plan = replace(
        plan,
        tile_m=tile.rows,
        tile_n=tile.keys,
        ping_pong=tile.ping_pong,
        query_in_registers=tile.query_in_registers,
        late_release=tile.late_release,
        early_start=tile.early_start,
        softmax=SoftmaxPlan(RESCALE_THRESHOLD if tile.lazy_rescale else 0.0),
        roles=roles(tile),
    )
    handed = channels(plan, tile)
    return replace(plan, channels=handed, buffers=buffers(plan, tile, barrier_count(handed), machine))


def roles(tile: Tile) -> tuple[Role, ...]:
    """A producing warpgroup of four warps, then the warpgroups that attend."""
    attending, producing = REGISTERS[tile.groups]
    return (
        Role("load", 0, 1, producing, "copies Q, K and V to shared memory"),
        Role("schedule", 1, 1, producing, "takes tiles and announces them"),
        Role("idle", 2, 2, producing, "completes the warpgroup that gives registers away"),
        Role("attend", 4, tile.groups * WARPS_PER_GROUP, attending, "both products, softmax, output"),
    )


def channels(plan: Plan, tile: Tile) -> tuple[Channel, ...]:
    """Every attending warp releases a slot with one arrival."""
    warps = tile.groups * WARPS_PER_GROUP
    row = plan.head_dim * 2
    consumers = ("attend",)
    handed = (
        Channel("query", "tma", "query", tile.query_stages, "load", consumers, 1, warps, tile.rows * row),
        Channel("key", "tma", "key", tile.stages, "load", consumers, 1, warps, tile.keys * row),
        Channel(
            "value", "tma", "value", tile.stages, "load", consumers, 1, warps, tile.keys * plan.head_dim_v * 2
        ),
        Channel("tile", "thread", "tile", 1, "schedule", ("load", *consumers), 1, warps + 1),
    )
    if not tile.ping_pong:
        return handed
    return (*handed, Channel("turn", "named", None, tile.groups, "attend", consumers, 2 * GROUP_THREADS, 0))


def buffers(plan: Plan, tile: Tile, barriers: int, machine: Machine) -> tuple[Buffer, ...]:
    """Shared memory: a staging area for the output too, where there is room for one."""
    pieces: tuple[Piece, ...] = (
        Piece(name="query", shape=(tile.rows, plan.head_dim), dtype=plan.dtype, stages=tile.query_stages),
        Piece(name="key", shape=(tile.keys, plan.head_dim), dtype=plan.dtype, stages=tile.stages),
        Piece(name="value", shape=(tile.keys, plan.head_dim_v), dtype=plan.dtype, stages=tile.stages),
        Piece(name="tile", shape=(TILE_RECORD_WORDS,), dtype="int32"),
        Piece(name="barriers", shape=(barriers,), dtype="int64"),
    )
    output = Piece(name="output", shape=(tile.rows, plan.head_dim_v), dtype=plan.dtype)
    if sum(piece.size("shared") for piece in (output, *pieces)) <= machine.shared_memory:
        pieces = (output, *pieces)
    return pack("shared", pieces)
