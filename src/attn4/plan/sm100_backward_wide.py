"""Backward plans for Blackwell with head dimensions over 128: 128 keys of a CTA walk over 64 queries a step.

With 64 queries S^T and dP^T take 64 columns of tensor memory each, and so does a part of dQ, which is
computed transposed, dQ^T = K^T dS^T: its lanes are head dimensions, its columns queries, and the tensor core
works at its full rate. With (192, 128) dK and dV leave room for them. With more, two CTAs that know nothing
of each other take the same keys: each computes all of S and dP, and its own half of the columns of dK, dV
and dQ. That is seven products where five would do, as in the reference, whose dQ has a kernel of its own.

A tile of rows arrives in as many parts as there are shares of its columns. Of K the other CTA's columns serve
S alone: they stay in tensor memory, as operand A, and in shared memory a second block of Q takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn4.machine import Machine
from attn4.plan.layout import BULK_BYTES, DTYPE_BYTES, Piece, barrier_count, pack, padded, stage_size
from attn4.plan.plan import Channel, Plan, Role
from attn4.plan.sm100_backward import COMPUTE_WARPS, backward_roles, backward_schedule
from attn4.problem import Problem

KEYS = 128
"""Keys of a CTA."""

QUERIES = 64
"""Queries of a step."""

LANES = 128
"""Head dimensions of a product dQ^T, of which a part of dQ may use fewer."""

UNEQUAL = (192, 128)
"""Head dimensions whose dK and dV leave room for S and dP in one CTA."""

BLOCKS = 2
"""Of Q, whose tiles are in shared memory at a time."""

SLICE = 16
"""Queries of a part of dQ that leave in one bulk reduction."""

SLICES = 2
"""Slots for them."""

COLUMNS_OUTSIDE = 160
"""Up to this head dimension the last box of 192 columns, 32 wide, lies wholly outside a tensor."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What decides a plan's storage. ``dout_blocks``: of dO, whose tiles are in shared memory at a time."""

    head_dim: int
    head_dim_v: int
    shares: int
    dout_blocks: int
    dtype: str

    @classmethod
    def of(cls, problem: Problem) -> Layout:
        """That of a problem: halves of 192 and 256 are whole swizzles."""
        pair = (padded(problem.head_dim), padded(problem.head_dim_v))
        if pair == UNEQUAL:
            return cls(*pair, 1, 2, problem.dtype)
        if max(pair) <= 192:
            return cls(192, 192, 2, 2, problem.dtype)
        return cls(256, 256, 2, 1, problem.dtype)

    @property
    def columns(self) -> int:
        """Of dK, and of dQ, that a CTA owns."""
        return self.head_dim // self.shares

    @property
    def columns_v(self) -> int:
        """Of dV that a CTA owns."""
        return self.head_dim_v // self.shares

    def tile(self, name: str, rows: int, columns: int, stages: int = 1, borrows: str | None = None) -> Piece:
        """A tile of 16-bit elements."""
        return Piece(name=name, shape=(rows, columns), dtype=self.dtype, stages=stages, borrows=borrows)


def backward(problem: Problem, machine: Machine) -> Plan:
    """The backward plan of ``problem``, whose head dimension is over 128, on a Blackwell ``machine``."""
    layout = Layout.of(problem)
    pieces = shared_pieces(layout)
    handed = channels(pieces)
    words = (
        # A word would do; barriers begin at a multiple of 16 bytes, too.
        Piece(name="tensor_address", shape=(BULK_BYTES // DTYPE_BYTES["int32"],), dtype="int32"),
        Piece(name="barriers", shape=(barrier_count(handed),), dtype="int64"),
    )
    return Plan(
        arch=machine.name,
        direction="backward",
        dtype=problem.dtype,
        head_dim=layout.head_dim,
        head_dim_v=layout.head_dim_v,
        mask=problem.mask.kind,
        tile_m=QUERIES,
        tile_n=KEYS,
        roles=roles(),
        buffers=(*pack("shared", (*pieces, *words)), *pack("tensor", tensor_pieces(layout))),
        channels=handed,
        schedule=backward_schedule(problem),
        column_shares=layout.shares,
        transposed_dq=True,
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=problem.cu_seqlens_k,
        seqused_q=problem.seqused_q,
        seqused_k=problem.seqused_k,
        lse=problem.lse,
        ping_pong=False,
        deterministic=problem.deterministic,
    )


def roles() -> tuple[Role, ...]:
    """Those of a CTA of fewer columns: half as many scores a thread, and more descriptors of products."""
    registers = {"reduce": 104, "compute": 144}
    jobs = {"mma": "issues the products of a step"}
    return tuple(
        replace(role, registers=registers.get(role.name, 120), job=jobs.get(role.name, role.job))
        for role in backward_roles(1)
    )


def shared_pieces(layout: Layout) -> tuple[Piece, ...]:
    """Shared memory but the barriers; dK and dV leave through the storage of Q and dO."""
    columns, columns_v = layout.columns, layout.columns_v
    return (
        layout.tile("key", KEYS, columns),
        layout.tile("value", KEYS, columns_v, layout.shares),
        layout.tile("query", QUERIES, columns, layout.shares * BLOCKS),
        layout.tile("dout", QUERIES, columns_v, layout.shares * layout.dout_blocks),
        layout.tile("dscores_shared", KEYS, QUERIES),
        Piece(name="dq_slice", shape=(dq_rows(layout), SLICE), dtype="float32", stages=SLICES),
        Piece(name="row_stats", shape=(2, QUERIES), dtype="float32", stages=BLOCKS),
        *kept_pieces(layout),
        layout.tile("dk_out", KEYS, columns, borrows="query"),
        layout.tile("dv_out", KEYS, columns_v, borrows="dout"),
    )


def kept_pieces(layout: Layout) -> tuple[Piece, ...]:
    """The other CTA's columns of K on their way to tensor memory, where the second block of Q goes."""
    if layout.shares == 1:
        return ()
    shape = (KEYS, layout.columns)
    second = layout.shares * stage_size("shared", (QUERIES, layout.columns), layout.dtype)
    return (Piece(name="key_other", shape=shape, dtype=layout.dtype, borrows="query", at=second),)


def dq_rows(layout: Layout) -> int:
    """Head dimensions of a part of dQ: half of all, by two CTAs or one after the other by one."""
    return layout.head_dim // 2


def tensor_pieces(layout: Layout) -> tuple[Piece, ...]:
    """S, dP, dV, dK and a part of dQ; halves of P and dS borrow what the same warpgroup has read."""

    def own(name: str, columns: int) -> Piece:
        return Piece(name=name, shape=(KEYS, columns), dtype="float32")

    def halves(name: str, owner: str) -> tuple[Piece, ...]:
        half = QUERIES // 2
        return tuple(
            Piece(name=f"{name}{i}", shape=(KEYS, half), dtype=layout.dtype, borrows=owner, at=i * half)
            for i in range(2)
        )

    return (
        own("scores", QUERIES),
        own("dprobabilities", QUERIES),
        own("dv", layout.columns_v),
        own("dk", layout.columns),
        Piece(name="dq", shape=(LANES, QUERIES), dtype="float32"),
        *(
            (Piece(name="kept_keys", shape=(KEYS, layout.columns), dtype=layout.dtype),)
            if layout.shares > 1
            else ()
        ),
        *halves("probabilities", "scores"),
        *halves("dscores", "dprobabilities"),
    )


def channels(pieces: tuple[Piece, ...]) -> tuple[Channel, ...]:
    """Who hands what to whom; counts are in warps (see plan/channels.py).

    P needs no barrier to come back, as products complete in the order of issue: the next S is full only after
    dV += P^T dO has read P. So it is with dS in tensor memory, which the next dP overwrites; in shared memory
    dS has one, for the next dP does not wait for dQ. Statistics have a slot for each block of Q, and come
    after it: a free slot says that dK is complete, for which the statistics had been read.
    """
    by_name = {piece.name: piece for piece in pieces}

    def load(name: str, consumer: str, empty: int) -> Channel:
        piece = by_name[name]
        size = stage_size("shared", piece.shape, piece.dtype)
        return Channel(name, "tma", name, piece.stages, "load", (consumer,), 1, empty, size)

    def computed(name: str, buffer: str | None, empty: int = 0) -> Channel:
        return Channel(name, "thread", buffer, 1, "compute", ("mma",), COMPUTE_WARPS, empty)

    def multiplied(name: str, consumer: str, empty: int = 0) -> Channel:
        return Channel(name, "mma", name, 1, "mma", (consumer,), 1, empty)

    kept = (
        (
            load("key_other", "reduce", 0),
            Channel("kept_keys", "thread", "kept_keys", 1, "reduce", ("mma", "load"), 4, 0),
        )
        if "key_other" in by_name
        else ()
    )
    return (
        load("key", "mma", 0),
        load("value", "mma", 0),
        *kept,
        load("query", "mma", 1),
        load("dout", "mma", 1),
        load("row_stats", "compute", 0),
        multiplied("scores", "compute"),
        computed("probabilities", None),
        multiplied("dprobabilities", "compute"),
        computed("dscores", "dscores_shared", empty=1),
        multiplied("dq", "reduce", empty=4),
        Channel("dq_slice", "named", None, 1, "reduce", ("reduce",), LANES, 0),
        multiplied("dv", "compute"),
        multiplied("dk", "compute"),
        *(
            Channel(name, "thread", name, 1, "compute", ("load",), COMPUTE_WARPS, 0)
            for name in ("dv_out", "dk_out")
        ),
    )
