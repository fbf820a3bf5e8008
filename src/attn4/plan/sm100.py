"""Forward plans for Blackwell (sm_100a, sm_103a): two query tiles in turns, S and O in tensor memory.

Per step of 128 keys the mma warp issues, for tile i of the CTA, O_i += P_i V and then the next S_i = Q_i K^T,
while the softmax warpgroup of the other tile works: products and exponentials overlap. A softmax thread owns
a row. The correction warpgroup rescales O, off the softmax's path, and writes the output.

A CTA with one query tile has two slots of scores and takes them in turns, in the same order: O += P(j) V,
then S(j+2), while the softmax works on S(j+1).

Two facts save barriers, both because products complete in the order of issue: a full S says that the product
which read P from the same slot is complete; and S is overwritten by a product that is issued only once P,
which lies in its columns, is full. With one slot that product is O += P V of the step before, so that a full
S also says that O is written; with two it is the one before that, and each O is announced.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn4.machine import Machine
from attn4.plan.feeds import Step, feeds
from attn4.plan.layout import Piece, barrier_count, pack, padded, stage_size
from attn4.plan.plan import RESCALE_THRESHOLD, Channel, Plan, Role, Schedule, SoftmaxPlan
from attn4.problem import Problem

TILE_ROWS = 128
"""Query rows of one tensor-core tile: the lanes of tensor memory."""

TILE_KEYS = 128

LAST_SPLIT = 32
"""Keys of a step whose probabilities come last: O += P V begins on the first three quarters."""

TILE_RECORD_WORDS = 12

SMALL_BYTES = 3 * 1024
"""Kept free for row statistics, tile records and barriers when tiles share out the rest."""

MOST_STAGES = 10
"""Deeper K/V rings hide no more latency: 10 slots of 16 KB are 160 KB in flight."""

LEAST_SLOTS = 3
"""Two slots are read by products in flight, one is filled: with fewer the output borrows Q's storage.

So it does with a ring of one slot, which nothing could fill while products read it.
"""

PAIRED_HEAD_DIMS = ((128, 128), (192, 128))
"""Those of K and of V for which pairs of CTAs are the default in full attention."""

MANY_BLOCKS = 16
"""Row blocks of a head from which on the half pair that an odd number wastes is at most 6% of them."""

SECTION_BYTES = 50 * 2**20
"""K and V of the heads that are worked on together: well inside L2."""

FMA_EXP_EVERY = 8
"""12.5% of the exponentials by polynomial: between the 6% and 19% that the reference takes by shape.

The same for every mask and tile count, so that a row's result does not depend on them.
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """What decides a forward plan's storage and channels: query tiles of a CTA, padded head dims, CTAs of a
    group; score tiles of a query tile, and whether the softmax warpgroups take turns in exponentiating.
    """

    tiles: int
    head_dim: int
    head_dim_v: int
    dtype: str
    cta_group: int
    score_stages: int = 1
    softmax_turns: bool = False

    @property
    def one_ring(self) -> bool:
        """K and V tiles of one size take turns in one ring of slots."""
        return self.head_dim == self.head_dim_v

    @property
    def key_shape(self) -> tuple[int, int]:
        """Of a pair, each CTA holds half of the keys of K, operand B of S."""
        return (TILE_KEYS // self.cta_group, self.head_dim)

    @property
    def value_shape(self) -> tuple[int, int]:
        """Of a pair, each CTA holds half of the columns of V, operand B of O."""
        return (TILE_KEYS, self.head_dim_v // self.cta_group)


def forward(
    problem: Problem,
    machine: Machine,
    cta_group: int = 1,
    *,
    score_stages: int | None = None,
    softmax_turns: bool = False,
    schedule: Schedule | None = None,
) -> Plan:
    """The forward plan of ``problem`` on a Blackwell ``machine``, in groups of ``cta_group`` CTAs.

    ``score_stages`` and ``softmax_turns`` as in `Layout`; by default two score tiles where there is only one
    query tile. ``schedule`` takes the place of `forward_schedule`'s.
    """
    mask = problem.mask.kind
    head_dim, head_dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    pack_gqa = packed_heads(problem)
    tiles = 1 if head_dim_v > 128 or problem.seqlen_q * pack_gqa <= TILE_ROWS else 2
    stages = score_stages or 3 - tiles
    layout = Layout(tiles, head_dim, head_dim_v, problem.dtype, cta_group, stages, softmax_turns)
    schedule = schedule or forward_schedule(problem)
    pieces, borrowed = shared_pieces(layout, machine, schedule.dynamic)
    channels = forward_channels(layout, pieces, schedule.dynamic, borrowed)
    barriers = Piece(name="barriers", shape=(barrier_count(channels),), dtype="int64")
    return Plan(
        arch=machine.name,
        direction="forward",
        dtype=problem.dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask=mask,
        tile_m=tiles * TILE_ROWS,
        tile_n=TILE_KEYS,
        roles=forward_roles(layout, schedule.dynamic),
        buffers=(*pack("shared", (*pieces, barriers)), *pack("tensor", tensor_pieces(layout))),
        channels=channels,
        schedule=schedule,
        softmax=softmax(layout, machine),
        cta_group=cta_group,
        pack_gqa=pack_gqa,
        query_tiles=tiles,
        late_keys=LAST_SPLIT,
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=problem.cu_seqlens_k,
        seqused_q=problem.seqused_q,
        seqused_k=problem.seqused_k,
        lse=problem.lse,
    )


def pairs_pay(problem: Problem) -> bool:
    """Whether full attention over several row blocks is better off in pairs of CTAs.

    At these head dimensions products read shared memory for 3/4 of the time that they take, or more, and
    copies come on top; a pair halves the bytes of K and V, and has twice as many slots. Below, exponentials
    bind. An odd number of row blocks leaves half a pair without work: worth it if that is little.
    """
    blocks = -(-problem.seqlen_q // (2 * TILE_ROWS))
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    return dims in PAIRED_HEAD_DIMS and (blocks % 2 == 0 or blocks >= MANY_BLOCKS)


def packed_heads(problem: Problem) -> int:
    """Query heads that share a tile: those of a group, where tiles of one head would be half empty.

    The group must divide a tile's rows, for one tensor-map copy to load it.
    """
    fits = problem.group > 1 and TILE_ROWS % problem.group == 0
    return problem.group if fits and problem.seqlen_q <= TILE_ROWS // 2 else 1


def softmax(layout: Layout, machine: Machine) -> SoftmaxPlan:
    """The polynomial helps where 16 exponentials a cycle bind as tightly as the tensor core does.

    Past a head dimension of 128 they do not, and a pair by polynomial is 10 instructions for 2.
    """
    step = Step(tile_m=TILE_ROWS, tile_n=TILE_KEYS, head_dim=layout.head_dim, head_dim_v=layout.head_dim_v)
    bound = feeds(machine, step)
    binds = bound.cycles("exponential") >= bound.cycles("tensor core")
    return SoftmaxPlan(RESCALE_THRESHOLD, FMA_EXP_EVERY if binds and machine.exponentials <= 16 else 0)


def forward_schedule(problem: Problem) -> Schedule:
    """Equal tiles are dealt statically; unequal ones from a counter, longest first, by L2-sized sections."""
    if problem.mask.kind == "full" and not problem.ragged:
        return Schedule()
    return Schedule("longest_first", persistent=True, dynamic=True, section_bytes=SECTION_BYTES)


def forward_roles(layout: Layout, dynamic: bool) -> tuple[Role, ...]:
    """Warpgroups for softmax and correction, and one warpgroup of single warps."""
    softmax_registers, correction, other = forward_registers(layout)
    softmax_job = "a row a thread: maximum, 2^x, sum; P into the columns of S"
    jobs: list[tuple[str, int, int, str]] = [
        (f"softmax{i}", 4, softmax_registers, softmax_job) for i in range(layout.tiles)
    ]
    jobs += [
        ("correction", 4, correction, "rescales O where the maximum grew, normalises it, writes LSE"),
        ("mma", 1, other, "issues S = Q K^T and O += P V"),
        ("store", 1, other, "copies finished output tiles to global memory"),
        ("load", 1, other, "copies Q, K and V to shared memory"),
        ("schedule", 1, other, "takes tiles from the counter and announces them")
        if dynamic
        else ("idle", 1, other, "completes the warpgroup"),
    ]
    roles: list[Role] = []
    first = 0
    for name, warps, registers, job in jobs:
        leader_only = name == "mma" and layout.cta_group == 2
        roles.append(Role(name, first, warps, registers, job, leader_only))
        first += warps
    return tuple(roles)


def forward_registers(layout: Layout) -> tuple[int, int, int]:
    """Registers of a softmax, a correction and any other thread: 512 (one tile: 504) for each lane of a warp.

    A softmax thread holds a row of 128 scores. Found by reading the machine code of all masks and head
    dimensions: nothing is spilled, and no register is moved about in the softmax loop.
    """
    return (216, 144, 144) if layout.tiles == 1 else (176, 96, 64)


def shared_pieces(layout: Layout, machine: Machine, dynamic: bool) -> tuple[tuple[Piece, ...], bool]:
    """The shared buffers but the barriers, and whether the output borrows the query's storage."""
    query = Piece(name="query", shape=(TILE_ROWS, layout.head_dim), dtype=layout.dtype, stages=layout.tiles)
    out = Piece(name="out", shape=(TILE_ROWS, layout.head_dim_v), dtype=layout.dtype, stages=layout.tiles)
    free = machine.shared_memory - SMALL_BYTES - query.size("shared")
    ring = ring_pieces(layout, free - out.size("shared"))
    slots = [piece.stages for piece in ring if piece.borrows is None]
    borrowed = sum(slots) < LEAST_SLOTS or (layout.cta_group == 2 and min(slots) < 2)
    if borrowed:
        ring = ring_pieces(layout, free)
        out = Piece(name=out.name, shape=out.shape, dtype=out.dtype, stages=out.stages, borrows="query")
    small = [Piece(name=f"row_stats{i}", shape=(TILE_ROWS, 2), dtype="float32") for i in range(layout.tiles)]
    if dynamic:
        small.append(Piece(name="tile", shape=(TILE_RECORD_WORDS,), dtype="int32"))
    small.append(Piece(name="tensor_address", shape=(4,), dtype="int32"))
    return (query, *ring, out, *small), borrowed


def ring_pieces(layout: Layout, room: int) -> tuple[Piece, ...]:
    """K and V slots in ``room`` bytes: one ring if their tiles are equal, else two; none if no pair fits."""
    key = stage_size("shared", layout.key_shape, layout.dtype)
    if layout.one_ring:
        stages = min(room // key, MOST_STAGES)
        if stages < 2:
            return ()
        slots = Piece(name="key_value", shape=layout.key_shape, dtype=layout.dtype, stages=stages)
        if layout.key_shape == layout.value_shape:
            return (slots,)
        # Of a pair, half of the keys and half of the columns: other shapes of as many bytes.
        half = layout.value_shape
        return slots, Piece(name="value", shape=half, dtype=layout.dtype, stages=stages, borrows=slots.name)
    value = stage_size("shared", layout.value_shape, layout.dtype)
    pairs = min(max(room, 0) // (key + value), MOST_STAGES // 2)
    if pairs < 1:
        return ()
    keys = pairs + (room - pairs * (key + value) >= key)
    return (
        Piece(name="key", shape=layout.key_shape, dtype=layout.dtype, stages=keys),
        Piece(name="value", shape=layout.value_shape, dtype=layout.dtype, stages=pairs),
    )


def tensor_pieces(layout: Layout) -> tuple[Piece, ...]:
    """Score tiles and an output for each query tile: 512 columns at most.

    P lies within its own scores: in the upper half, or with two in the upper half of the first and the lower
    half of the second, side by side.
    """
    tile, out = (TILE_ROWS, TILE_KEYS), (TILE_ROWS, layout.head_dim_v)
    half = TILE_KEYS // 2
    tiles = range(layout.tiles)
    stages = layout.score_stages
    scores = [Piece(name=f"scores{i}", shape=tile, dtype="float32", stages=stages) for i in tiles]
    probabilities = [
        Piece(
            name=f"probabilities{i}",
            shape=tile,
            dtype=layout.dtype,
            stages=stages,
            borrows=f"scores{i}",
            at=half,
        )
        for i in tiles
    ]
    outputs = [Piece(name=f"output{i}", shape=out, dtype="float32") for i in tiles]
    return (*scores, *outputs, *probabilities)


def forward_channels(
    layout: Layout, pieces: tuple[Piece, ...], dynamic: bool, borrowed: bool
) -> tuple[Channel, ...]:
    """Who hands what to whom; counts are in warps (see plan/channels.py)."""
    pair, slots = layout.cta_group, layout.score_stages
    stages = {piece.name: piece.stages for piece in pieces}
    bytes_of = {piece.name: stage_size("shared", piece.shape, piece.dtype) * pair for piece in pieces}
    # A query slot that lends its bytes to the output comes back only when the output has left.
    readers = ("mma", "store") if borrowed else ("mma",)
    query = Channel(
        "query", "tma", "query", layout.tiles, "load", readers, 1, len(readers), bytes_of["query"]
    )
    rings = ["key_value"] if layout.one_ring else ["key", "value"]
    channels = [
        query,
        *(Channel(name, "tma", name, stages[name], "load", ("mma",), 1, 1, bytes_of[name]) for name in rings),
    ]
    for i in range(layout.tiles):
        softmax_role = f"softmax{i}"
        probabilities = f"probabilities{i}"
        channels += [
            Channel(f"scores{i}", "mma", f"scores{i}", slots, "mma", (softmax_role,), 1, 0),
            Channel(probabilities, "thread", probabilities, slots, softmax_role, ("mma",), 4 * pair, 0),
            Channel(
                f"{probabilities}_last", "thread", probabilities, slots, softmax_role, ("mma",), 4 * pair, 0
            ),
        ]
    if layout.softmax_turns:
        groups = tuple(f"softmax{i}" for i in range(layout.tiles))
        channels.append(Channel("turn", "named", None, layout.tiles, groups[0], groups, 2 * TILE_ROWS, 0))
    for i in range(layout.tiles):
        channels += [
            Channel(f"row_stats{i}", "thread", f"row_stats{i}", 1, f"softmax{i}", ("correction",), 4, 4),
            Channel(f"rescaled{i}", "thread", f"output{i}", 1, "correction", ("mma",), 4 * pair, 0),
            Channel(f"output{i}", "mma", f"output{i}", 1, "mma", ("correction",), 1, 0),
        ]
    channels.append(Channel("out", "thread", "out", layout.tiles, "correction", ("store",), 4, 1))
    if dynamic:
        listeners = (*(f"softmax{i}" for i in range(layout.tiles)), "correction", "mma", "store", "load")
        warps = 4 * (layout.tiles + 1) + 3
        channels.append(Channel("tile", "thread", "tile", 1, "schedule", listeners, 1, warps))
    return tuple(channels)
