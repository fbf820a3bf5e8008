"""Backward plans for Hopper: a CTA keeps 128 keys and walks over the queries; scores are transposed.

Each of two warpgroups owns 64 keys: S^T = K Q^T and dP^T = V dO^T leave P^T and dS^T in the registers from
which dV += P^T dO and dK += dS^T Q take their operand A. dS^T goes through shared memory too, where both
warpgroups meet: dQ = dS K sums over all 128 keys, and each warpgroup computes half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn4.machine import Machine
from attn4.plan.layout import Piece, barrier_count, pack, padded, stage_size
from attn4.plan.plan import Channel, Plan, Role, Schedule, TileOrder
from attn4.plan.sm90 import GROUP_THREADS, REGISTERS, TILE_RECORD_WORDS, WARPS_PER_GROUP
from attn4.problem import Problem

SECTION_BYTES = 8 * 2**20
"""Q and dO of the heads of a section; with K, V, the sums of dQ, dK and dV four times as much is in use."""

KEYS = 128
"""Keys of a CTA."""

GROUPS = 2
"""Warpgroups that compute, of 64 keys each."""

STAGES = 2
"""Slots of the rings of Q, dO and K: K of the next tile is there before the last dQ of this one."""

DSCORES = 3
"""Slots of dS: dQ of a step is in flight while dS of the next two are written."""

TURNS = 2
"""Steps whose turns to add to dQ are granted at a time."""

MOST_HEAD_DIM = 128
"""A thread keeps head_dim / 2 words of dK and as many of dV."""


def tile_dim(head_dim: int) -> int:
    """The head dimension of a tile: halves of dQ's columns must be whole swizzle rows."""
    return 64 if padded(head_dim) <= 64 else 128


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of a step, and padded head dimensions."""

    rows: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scores_first: bool

    @property
    def query_stages(self) -> int:
        """Slots of the ring of Q: where dK comes last, one more."""
        return STAGES + self.scores_first


def backward(problem: Problem, machine: Machine) -> Plan:
    """The backward plan of ``problem`` on a Hopper ``machine``."""
    head_dim = tile_dim(max(problem.head_dim, problem.head_dim_v))
    # Measured on an H200: +4 to 9% at 128, +1 to 7% where sums are deterministic, and -1 to -4% at 64.
    scores_first = head_dim == MOST_HEAD_DIM
    tile = Tile(128 if head_dim == 64 else 64, head_dim, head_dim, problem.dtype, scores_first)
    handed = channels(tile, problem.deterministic)
    barriers = Piece(name="barriers", shape=(barrier_count(handed),), dtype="int64")
    return Plan(
        arch=machine.name,
        direction="backward",
        dtype=problem.dtype,
        head_dim=tile.head_dim,
        head_dim_v=tile.head_dim_v,
        mask=problem.mask.kind,
        tile_m=tile.rows,
        tile_n=KEYS,
        roles=roles(problem.deterministic),
        buffers=pack("shared", (*pieces(tile), barriers)),
        channels=handed,
        schedule=schedule(problem),
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=problem.cu_seqlens_k,
        seqused_q=problem.seqused_q,
        seqused_k=problem.seqused_k,
        lse=problem.lse,
        deterministic=problem.deterministic,
        scores_first=scores_first,
        # Measured too: each wins at 64 and nothing at 128.
        packed_dscores=head_dim == 64 and problem.dtype == "bfloat16",
        staged_gradients=head_dim == 64,
    )


def schedule(problem: Problem) -> Schedule:
    """One CTA a key tile: equal ones rotated, as they begin together; others longest first, by L2-sized
    sections of heads. Deterministic sums wait for each other, least in the order that `sm100_backward` takes;
    of a causal mask the end is turned.
    """
    if problem.mask.kind == "full" and not (problem.ragged or problem.deterministic):
        return Schedule("linear", persistent=True, dynamic=True, rotated=True)
    order: TileOrder = "shortest_first" if problem.deterministic else "longest_first"
    turned = problem.deterministic and problem.mask.kind == "causal"
    return Schedule(order, persistent=True, dynamic=True, section_bytes=SECTION_BYTES, turned_end=turned)


def roles(deterministic: bool) -> tuple[Role, ...]:
    """A producing warpgroup, then the warpgroups that compute."""
    computing, producing = REGISTERS[GROUPS]
    return (
        Role("load", 0, 1, producing, "copies Q, dO and row statistics of each step to shared memory"),
        Role("schedule", 1, 1, producing, "takes tiles and announces them"),
        Role("load_keys", 2, 1, producing, "copies K and V of each tile to shared memory"),
        Role("turns", 3, 1, producing, "waits for the turns of deterministic sums, and gives them on")
        if deterministic
        else Role("idle", 3, 1, producing, "completes the warpgroup that gives registers away"),
        Role("differentiate", 4, GROUPS * WARPS_PER_GROUP, computing, "all products, P and dS, sums of dQ"),
    )


def pieces(tile: Tile) -> tuple[Piece, ...]:
    """Shared memory but the barriers."""

    def rows(name: str, count: int, columns: int, stages: int = 1) -> Piece:
        return Piece(name=name, shape=(count, columns), dtype=tile.dtype, stages=stages)

    return (
        rows("key", KEYS, tile.head_dim, STAGES),
        rows("value", KEYS, tile.head_dim_v),
        rows("query", tile.rows, tile.head_dim, tile.query_stages),
        rows("dout", tile.rows, tile.head_dim_v, STAGES),
        rows("dscores", KEYS, tile.rows, DSCORES),
        Piece(name="row_stats", shape=(2, tile.rows), dtype="float32", stages=STAGES),
        Piece(name="tile", shape=(TILE_RECORD_WORDS,), dtype="int32"),
    )


def channels(tile: Tile, deterministic: bool) -> tuple[Channel, ...]:
    """Every computing warp gives a slot back with one arrival.

    dS needs no empty barrier: a warpgroup writes dS of step j + 1 after its turn for dV and dP of that step,
    which the other gave after its products of step j; before those it has waited for its dQ of step j - 2,
    which read that slot. At the end of a tile dK and dV are turned round in the slot that comes next, each
    warp's in the rows that it writes. Nor do row statistics, if there are no more slots of Q: one of these,
    which is filled before theirs, comes back after they have been read. Nor do turns, of which no more are
    granted before all warps have added in the first of them.
    """
    warps = GROUPS * WARPS_PER_GROUP
    size = {piece.name: stage_size("shared", piece.shape, piece.dtype) for piece in pieces(tile)}

    consumers = ("differentiate",)
    following = ("load", "load_keys", *(("turns",) if deterministic else ()), *consumers)
    turns = (
        Channel("granted", "thread", None, TURNS, "turns", consumers, 1, 0),
        Channel("added", "thread", None, TURNS, "differentiate", ("turns",), warps, 0),
    )

    def load(name: str, stages: int, empty: int, role: str = "load") -> Channel:
        return Channel(name, "tma", name, stages, role, consumers, 1, empty, size[name])

    return (
        Channel("tile", "thread", "tile", 1, "schedule", following, 1, warps + len(following) - 1),
        load("key", STAGES, warps, "load_keys"),
        load("value", 1, warps, "load_keys"),
        load("query", tile.query_stages, warps),
        load("row_stats", STAGES, warps if tile.query_stages > STAGES else 0),
        load("dout", STAGES, warps),
        Channel("dscores", "thread", "dscores", DSCORES, "differentiate", ("differentiate",), warps, 0),
        Channel(
            "turn", "named", None, GROUPS, "differentiate", ("differentiate",), GROUPS * GROUP_THREADS, 0
        ),
        *(turns if deterministic else ()),
    )
