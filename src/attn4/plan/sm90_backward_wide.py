"""Backward plans for Hopper, head dimensions over 128: a CTA keeps 64 keys; warpgroups split the products.

With 64 keys a thread of one warpgroup holds dK or dV of 256 columns in 128 registers, so each of the two has
a warpgroup of its own, and each of these computes the square product that feeds it: S^T = K Q^T, P^T and
dV += P^T dO; dP^T = V dO^T, dS^T and dK += dS^T Q. Operand A of dV and dK never leaves the registers. Through
shared memory P^T goes to the second, in the order of registers, and dS^T to a third warpgroup, which computes
dQ = dS K and adds it to the sums, beside the other two.

Two CTAs share their queries and their dS: each computes half of the columns of dQ over the keys of both, so
that half as much is copied from L2, and half as much added there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn4.machine import Machine
from attn4.plan.layout import Piece, barrier_count, pack, padded, stage_size
from attn4.plan.plan import Channel, Plan, Role, Schedule
from attn4.plan.sm90 import WARPS_PER_GROUP
from attn4.plan.sm90_backward import schedule
from attn4.problem import Problem

KEYS = 64
"""Keys of a CTA."""

QUERIES = 64
"""Queries of a step: rows of dQ, which one warpgroup computes."""

STAGES = 2
"""Slots of the ring of Q, and of what depends on it: statistics, P, dS."""

CLUSTER = 2
"""CTAs that share queries."""

MOST_HEAD_DIM = 256
"""A thread keeps head_dim / 2 words of dK, or head_dim_v / 2 of dV."""

COLUMNS = 64
"""Head dimensions are padded to a multiple: whole rows of the widest swizzle."""

REGISTERS = {192: (24, 200, 200, 88), 256: (24, 208, 216, 64)}
"""Registers a thread of the warpgroups that load, make P, make dS, and reduce dQ, by head dimension.

512 in all. ptxas places accumulators from register 24 on, one behind the other, and operand A behind them:
with 256 columns of dK, dP and dS those are 24 + 128 + 32 + 16, and 200 are not enough.
"""

DQ_COLUMNS = 64
"""Columns of one product of dQ, half as many registers a thread; a step takes one after the other."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Padded head dimensions, and CTAs of a cluster."""

    head_dim: int
    head_dim_v: int
    dtype: str
    cluster: int

    @property
    def dout_stages(self) -> int:
        """Slots of the ring of dO: at 256, dS of two CTAs and half of the other's K take the second."""
        return 1 if self.head_dim == MOST_HEAD_DIM and self.cluster > 1 else 2

    @property
    def peer_columns(self) -> int:
        """Columns of the other CTA's K: its half of them, if those are whole products; else all."""
        halves = self.head_dim % (DQ_COLUMNS * self.cluster) == 0
        return self.head_dim // self.cluster if halves else self.head_dim


def tile_dim(head_dim: int) -> int:
    """The head dimension of a tile."""
    return -(-padded(head_dim) // COLUMNS) * COLUMNS


def backward(problem: Problem, machine: Machine, cluster: int = CLUSTER) -> Plan:
    """The backward plan of ``problem`` on a Hopper ``machine``, by ``cluster`` CTAs (1 or 2) together."""
    tile = Tile(tile_dim(problem.head_dim), tile_dim(problem.head_dim_v), problem.dtype, cluster)
    handed = channels(tile, dealt(problem).persistent)
    barriers = Piece(name="barriers", shape=(barrier_count(handed),), dtype="int64")
    return Plan(
        arch=machine.name,
        direction="backward",
        dtype=problem.dtype,
        head_dim=tile.head_dim,
        head_dim_v=tile.head_dim_v,
        mask=problem.mask.kind,
        tile_m=QUERIES,
        tile_n=KEYS,
        roles=roles(tile),
        buffers=pack("shared", (*pieces(tile), barriers)),
        channels=handed,
        schedule=dealt(problem),
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=problem.cu_seqlens_k,
        seqused_q=problem.seqused_q,
        seqused_k=problem.seqused_k,
        lse=problem.lse,
        cluster=tile.cluster,
        dq_columns=DQ_COLUMNS,
        ping_pong=False,
        deterministic=problem.deterministic,
    )


def dealt(problem: Problem) -> Schedule:
    """Equal tiles are dealt to persistent clusters in advance. Others begin as SMs are free: those of a mask
    lose 30 to 40% if dealt, lengths of sequences are not known, and deterministic sums are waited for.
    """
    persistent = problem.mask.kind == "full" and not (problem.ragged or problem.deterministic)
    return replace(schedule(problem), persistent=persistent, dynamic=False)


def roles(tile: Tile) -> tuple[Role, ...]:
    """A producing warpgroup, then a warpgroup for each of dV, dK and dQ."""
    loading, probability, gradient, reducing = REGISTERS[tile.head_dim]
    group = WARPS_PER_GROUP
    return (
        Role("load", 0, 1, loading, "copies Q, dO and row statistics of each step to shared memory"),
        Role("load_keys", 1, 1, loading, "copies K and V to shared memory, meanwhile"),
        Role("idle", 2, group - 2, loading, "completes the warpgroup that gives registers away"),
        Role("probability", group, group, probability, "S, P, dV"),
        Role("gradient", 2 * group, group, gradient, "dP, dS, dK"),
        Role("reduce", 3 * group, group, reducing, "dQ, and its sums in global memory"),
    )


def pieces(tile: Tile) -> tuple[Piece, ...]:
    """Shared memory but the barriers."""

    def rows(name: str, count: int, columns: int, stages: int = 1) -> Piece:
        return Piece(name=name, shape=(count, columns), dtype=tile.dtype, stages=stages)

    peer = (rows("peer_key", KEYS, tile.peer_columns),) if tile.cluster > 1 else ()
    return (
        rows("key", KEYS, tile.head_dim),
        *peer,
        rows("value", KEYS, tile.head_dim_v),
        rows("query", QUERIES, tile.head_dim, STAGES),
        rows("dout", QUERIES, tile.head_dim_v, tile.dout_stages),
        rows("probabilities", KEYS, QUERIES, STAGES),
        rows("dscores", KEYS * tile.cluster, QUERIES, STAGES),
        Piece(name="row_stats", shape=(2, QUERIES), dtype="float32", stages=STAGES),
    )


def channels(tile: Tile, persistent: bool) -> tuple[Channel, ...]:
    """Every warp gives a slot back with one arrival, at each CTA of a cluster that has filled it.

    P needs no empty barrier: P of step j + 2 follows S of that step, whose Q fills a slot that came back
    after dK of step j, when P of step j had been read. Nor do row statistics, of which each slot is filled
    after one of Q, read for P before P is handed over and for dS before dK; nor the other CTA's K, which
    comes back with this one's.
    """
    size = {piece.name: stage_size("shared", piece.shape, piece.dtype) for piece in pieces(tile)}
    square, warps, ctas = ("probability", "gradient"), WARPS_PER_GROUP, tile.cluster

    def once(name: str, consumers: tuple[str, ...], back: bool = persistent) -> Channel:
        empty = len(consumers) * warps if back else 0
        return Channel(name, "tma", name, 1, "load_keys", consumers, 1, empty, size[name])

    def each_step(name: str, stages: int, empty: int, ctas: int) -> Channel:
        return Channel(name, "tma", name, stages, "load", square, 1, empty, size[name], ctas)

    back = 2 * warps * ctas
    received = size["dscores"] - size["dscores"] // ctas
    return (
        once("key", ("probability", "reduce")),
        once("value", ("gradient",)),
        *((once("peer_key", ("reduce",), back=False),) if ctas > 1 else ()),
        each_step("query", STAGES, back, ctas),
        each_step("row_stats", STAGES, 0, 1),
        each_step("dout", tile.dout_stages, back, ctas),
        Channel("probabilities", "thread", "probabilities", STAGES, "probability", ("gradient",), warps, 0),
        Channel(
            *("dscores", "thread", "dscores", STAGES, "gradient", ("reduce",)),
            *(warps, warps * ctas, received, ctas),
        ),
    )
