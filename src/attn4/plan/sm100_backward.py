"""Backward plans for Blackwell: a CTA keeps 128 keys and walks over the queries; scores are transposed.

S^T = K Q^T and dP^T = V dO^T put P^T and dS^T in tensor memory just as the products dV += P^T dO and
dK += dS^T Q want their operand A. dQ = dS K is summed over the CTAs in global memory. A CTA takes its keys
through all query heads of their group, so that dK and dV need no sums outside of it.

A pair of CTAs (``cta_group`` 2) shares the products of 256 keys, each with half of operand B. dQ sums over
those 256 keys, so the CTAs exchange halves of dS and each computes 64 rows of dQ: half of the reductions.
Its dQ lies in the middle of S, because dP of this tile and dQ of the one before are alive together.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn4.machine import Machine
from attn4.plan.layout import Piece, barrier_count, pack, padded, stage_size
from attn4.plan.plan import Channel, Plan, Role, Schedule, TileOrder
from attn4.plan.sm100 import SECTION_BYTES
from attn4.problem import Problem

ROWS = 128
"""Queries of a step, and keys of a CTA."""

HALF = ROWS // 2
"""Queries of a step that one of the two compute warpgroups has; also columns of its half of S and dP."""

COMPUTE_WARPS = 8

DQ_COLUMNS = {1: (32, 2), 2: (8, 4)}
"""Columns of dQ that leave in one bulk reduction, and slots for them, by CTAs in a group."""

MOST_HEAD_DIM = 128
"""Accumulators of dK and dV, S and dP fill the 512 columns of tensor memory at 128."""


ROW_STATS = Piece(name="row_stats", shape=(2, ROWS), dtype="float32", stages=2)
"""Per query the negated log-sum-exp in log2 units, and dlse - rowsum(O dO)."""


def pairs_pay(head_dim: int) -> bool:
    """Whether pairs of CTAs are the default, as they are in FlashAttention-4 from 128 columns on.

    By the model of `attn4.plan.pipeline` a step takes 0.83 of the cycles of single CTAs at 128 columns, 0.93
    at 96 and 1.10 at 64: smaller products leave more of it to waiting.
    """
    return head_dim == MOST_HEAD_DIM


def halves_loadable(head_dim: int) -> bool:
    """Whether each box of the second half of the columns has some of them: others cannot be loaded from
    sequences (see `attn4.plan.choose.unloadable`).

    A box is as wide as the widest swizzle that divides a half: 16, 32, 16 and 64 of 32 to 128 columns.
    """
    half = padded(head_dim) // 2
    return head_dim > 2 * half - (half & -half)


@dataclass(frozen=True, slots=True)
class Layout:
    """What decides a backward plan's storage."""

    head_dim: int
    head_dim_v: int
    dtype: str
    cta_group: int

    @property
    def dedicated(self) -> bool:
        """Head dimensions small enough for P and dS to have columns of their own."""
        return self.head_dim <= 64 and self.head_dim_v <= 64

    def tile(self, name: str, rows: int, columns: int, stages: int = 1) -> Piece:
        """A tile of 16-bit elements."""
        return Piece(name=name, shape=(rows, columns), dtype=self.dtype, stages=stages)


def backward(problem: Problem, machine: Machine, cta_group: int) -> Plan:
    """The backward plan of ``problem`` on a Blackwell ``machine``, in groups of ``cta_group`` CTAs."""
    mask = problem.mask.kind
    layout = Layout(padded(problem.head_dim), padded(problem.head_dim_v), problem.dtype, cta_group)
    pieces = (*single_pieces(layout), ROW_STATS) if cta_group == 1 else pair_pieces(layout)
    channels = backward_channels(layout, pieces)
    words = (
        Piece(name="barriers", shape=(barrier_count(channels),), dtype="int64"),
        Piece(name="tensor_address", shape=(1,), dtype="int32"),
    )
    return Plan(
        arch=machine.name,
        direction="backward",
        dtype=problem.dtype,
        head_dim=layout.head_dim,
        head_dim_v=layout.head_dim_v,
        mask=mask,
        tile_m=ROWS,
        tile_n=ROWS,
        roles=backward_roles(cta_group),
        buffers=(*pack("shared", (*pieces, *words)), *pack("tensor", tensor_pieces(layout))),
        channels=channels,
        schedule=backward_schedule(problem),
        cta_group=cta_group,
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=problem.cu_seqlens_k,
        seqused_q=problem.seqused_q,
        seqused_k=problem.seqused_k,
        lse=problem.lse,
        ping_pong=False,
        deterministic=problem.deterministic,
    )


def backward_schedule(problem: Problem) -> Schedule:
    """One CTA a key tile, by L2-sized sections of heads; `attn4.plan.turns` compares the orders.

    Deterministic sums wait for each other, least where the shortest tiles come first, and equal tiles of
    several heads side by side. Others end together where the longest come first.
    """
    if not problem.deterministic and problem.mask.kind == "full":
        return Schedule("linear", persistent=False)
    order: TileOrder = "shortest_first" if problem.deterministic else "longest_first"
    return Schedule(order, persistent=False, section_bytes=SECTION_BYTES)


def backward_roles(cta_group: int) -> tuple[Role, ...]:
    """Warpgroups for dQ and for the elementwise work; registers are 512 for each lane of a warp."""
    pair = cta_group == 2
    reduce, compute, other = (96, 160, 96) if pair else (104, 152, 104)
    rest = (
        (
            Role(
                "relay",
                14,
                1,
                other,
                "sends half of dS to the peer, and tells the leader that its half has come",
            ),
            Role("idle", 15, 1, other, "completes the warpgroup"),
        )
        if pair
        else (Role("idle", 14, 2, other, "completes the warpgroup"),)
    )
    return (
        Role("reduce", 0, 4, reduce, "adds dQ of a tile to global memory by bulk reductions"),
        Role(
            "compute",
            4,
            COMPUTE_WARPS,
            compute,
            "P^T = 2^(S^T - lse), dS^T = P^T (dP^T - delta), rounds dK, dV",
        ),
        Role("mma", 12, 1, other, "issues the five products of a tile", leader_only=pair),
        Role(
            "load",
            13,
            1,
            other,
            "copies K, V, and per step Q, dO, row statistics to shared memory; dK, dV back",
        ),
        *rest,
    )


def single_pieces(layout: Layout) -> tuple[Piece, ...]:
    """Tiles of a CTA by itself; dK and dV leave through the storage of Q and dO."""
    columns, slots = DQ_COLUMNS[1]
    return (
        layout.tile("key", ROWS, layout.head_dim),
        layout.tile("value", ROWS, layout.head_dim_v),
        layout.tile("query", ROWS, layout.head_dim, stages=2),
        layout.tile("dout", ROWS, layout.head_dim_v),
        layout.tile("dscores_shared", ROWS, ROWS),
        Piece(name="dq_slice", shape=(ROWS, columns), dtype="float32", stages=slots),
        Piece(name="dk_out", shape=(ROWS, layout.head_dim), dtype=layout.dtype, borrows="query"),
        Piece(name="dv_out", shape=(ROWS, layout.head_dim_v), dtype=layout.dtype, borrows="dout"),
    )


def pair_pieces(layout: Layout) -> tuple[Piece, ...]:
    """Tiles of one CTA of a pair: B is split by rows here and by columns there, so Q, dO and K come twice.

    ``dscores_shared`` has all keys of the pair, and of the queries the half whose dQ this CTA computes; the
    other half of its own keys leaves from ``dscores_peer``. dK and dV leave through the storage of K and V.
    """
    d, dv = layout.head_dim, layout.head_dim_v
    columns, slots = DQ_COLUMNS[2]
    return (
        layout.tile("key", ROWS, d),
        layout.tile("key_columns", 2 * ROWS, d // 2),
        layout.tile("value", ROWS, dv),
        layout.tile("query", ROWS // 2, d),
        layout.tile("query_columns", ROWS, d // 2),
        layout.tile("dout", ROWS // 2, dv),
        layout.tile("dout_columns", ROWS, dv // 2),
        layout.tile("dscores_shared", 2 * ROWS, HALF),
        layout.tile("dscores_peer", ROWS, HALF),
        Piece(name="dq_slice", shape=(ROWS, columns), dtype="float32", stages=slots),
        ROW_STATS,
        Piece(name="dk_out", shape=(ROWS, d), dtype=layout.dtype, borrows="key"),
        Piece(name="dv_out", shape=(ROWS, dv), dtype=layout.dtype, borrows="value"),
    )


def tensor_pieces(layout: Layout) -> tuple[Piece, ...]:
    """S, dV, dP, dK own columns; P, dS and dQ borrow as far as they must.

    Each half of the queries of P and dS lies in the half of S and dP that the same warpgroup has read:
    nobody overwrites what the other warpgroup still has to read. Of a pair the halves of P are at both ends,
    and dQ, whose columns must follow each other, is in the middle. It takes half as many columns there: lanes
    64 to 127 hold the second half of the columns of its 64 rows.
    """
    own = {
        name: Piece(name=name, shape=(ROWS, columns), dtype="float32")
        for name, columns in (
            ("scores", ROWS),
            ("dv", layout.head_dim_v),
            ("dprobabilities", ROWS),
            ("dk", layout.head_dim),
        )
    }
    pair = layout.cta_group == 2

    def operand(name: str, owner: str, second: int) -> tuple[Piece, ...]:
        borrows = None if layout.dedicated else owner
        return tuple(
            Piece(
                name=f"{name}{half}",
                shape=(ROWS, HALF),
                dtype=layout.dtype,
                borrows=borrows,
                at=0 if borrows is None else half * second,
            )
            for half in range(2)
        )

    dq = Piece(
        name="dq",
        shape=(ROWS // layout.cta_group, layout.head_dim),
        dtype="float32",
        borrows="scores" if pair else "dprobabilities",
        at=HALF // 2 if pair else 0,
    )
    return (
        *own.values(),
        *operand("probabilities", "scores", ROWS - HALF // 2 if pair else HALF),
        *operand("dscores", "dprobabilities", HALF),
        dq,
    )


def backward_channels(layout: Layout, pieces: tuple[Piece, ...]) -> tuple[Channel, ...]:
    """Who hands what to whom; counts are in warps (see plan/channels.py).

    P and dS in tensor memory need no barrier of their own to come back: products complete in the order of
    issue, so the next S is full only after dV += P^T dO has read P, the next dP only after dK and dQ have
    read dS, and both are waited for by the role that writes there. dQ has one, as what lies there next
    overwrites it, and of a pair so has dS in shared memory, which dQ reads while the next dP is full. K and V
    arrive once. Statistics have two slots, and come after the slot of Q, of a pair that of its columns, of
    the step before: it is free when dK of two steps ago is complete, and so its dS was there, for which the
    statistics had been read.
    """
    pair = layout.cta_group
    by_name = {piece.name: piece for piece in pieces}

    def load(name: str, consumer: str, empty: int) -> Channel:
        piece = by_name[name]
        size = stage_size("shared", piece.shape, piece.dtype) * (pair if consumer == "mma" else 1)
        return Channel(name, "tma", name, piece.stages, "load", (consumer,), 1, empty, size)

    once = [load(name, "mma", 0) for name in ("key", "value", "key_columns") if name in by_name]
    each = [
        load(name, "mma", 1) for name in ("query", "query_columns", "dout", "dout_columns") if name in by_name
    ]
    warps = COMPUTE_WARPS * pair
    return (
        *once,
        *each,
        load("row_stats", "compute", 0),
        Channel("scores", "mma", "scores", 1, "mma", ("compute",), 1, 0),
        # Two halves with columns of another buffer between them have no name together.
        Channel("probabilities", "thread", None, 1, "compute", ("mma",), warps, 0),
        Channel("dprobabilities", "mma", "dprobabilities", 1, "mma", ("compute",), 1, 0),
        Channel("dscores", "thread", "dscores_shared", 1, "compute", ("mma",), warps, pair - 1),
        *(exchange(by_name["dscores_peer"]) if pair == 2 else ()),
        Channel("dq", "mma", "dq", 1, "mma", ("reduce",), 1, 4 * pair),
        Channel("dq_slice", "named", None, 1, "reduce", ("reduce",), 128, 0),
        Channel("dv", "mma", "dv", 1, "mma", ("compute",), 1, 0),
        Channel("dk", "mma", "dk", 1, "mma", ("compute",), 1, 0),
        *(
            Channel(name, "thread", name, 1, "compute", ("load",), COMPUTE_WARPS, 0)
            for name in ("dv_out", "dk_out")
        ),
    )


def exchange(half: Piece) -> tuple[Channel, ...]:
    """How the halves of dS change sides: a CTA's own dS is there; the peer's half has come; both CTAs have
    both. The first two end in the relay of one CTA, which says the third to the leader.
    """
    size = stage_size("shared", half.shape, half.dtype)
    return (
        Channel("dscores_own", "thread", half.name, 1, "compute", ("relay",), COMPUTE_WARPS, 0),
        Channel("dscores_peer", "tma", half.name, 1, "relay", ("relay",), 1, 0, size),
        Channel("dscores_whole", "thread", None, 1, "relay", ("mma",), 2, 0),
    )
