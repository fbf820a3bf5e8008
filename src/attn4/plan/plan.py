"""How it is done: everything that a kernel is compiled from, and nothing that a call may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn4.mask import MaskKind
from attn4.problem import Direction, DType

Space = Literal["shared", "tensor"]
ChannelKind = Literal["tma", "thread", "mma", "named"]
TileOrder = Literal["linear", "longest_first", "shortest_first"]
KernelKind = Literal["attention", "sort_batches"]


@dataclass(frozen=True, slots=True)
class Role:
    """A set of consecutive warps that run one function. ``registers`` is per thread, after reallocation.

    ``leader_only``: of a pair of CTAs (``cta_group`` 2) only the first runs it, for both.
    """

    name: str
    first_warp: int
    warps: int
    registers: int
    job: str
    leader_only: bool = False


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named piece of shared memory (bytes) or tensor memory (32-bit columns).

    ``offset`` and ``size`` are bytes in shared memory and columns in tensor memory, ``size`` over all
    stages. ``shape`` is one stage in elements. ``borrows`` names the buffer whose storage this one uses.
    """

    name: str
    space: Space
    shape: tuple[int, ...]
    dtype: str
    stages: int
    offset: int
    size: int
    borrows: str | None = None


@dataclass(frozen=True, slots=True)
class Channel:
    """A ring of ``stages`` slots handed from ``producer`` to ``consumers``.

    ``full_arrivals`` complete a full barrier's phase, together with ``transaction_bytes`` if not 0
    (bytes that asynchronous copies report); ``empty_arrivals`` complete an empty barrier's phase.
    ``kind`` says who signals full: the copy engine ("tma"), threads ("thread"), the tensor core
    ("mma"), or that it is a hardware named barrier ("named").
    ``ctas`` of a cluster fill each slot together, so the consumers of all of them give it back.
    """

    name: str
    kind: ChannelKind
    buffer: str | None
    stages: int
    producer: str
    consumers: tuple[str, ...]
    full_arrivals: int
    empty_arrivals: int
    transaction_bytes: int = 0
    ctas: int = 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which order tiles are taken, and by whom.

    ``dynamic``: a persistent grid takes tiles from a counter in global memory. ``section_bytes`` bounds
    K and V of the heads worked on together, so that they stay in L2; 0 is no sections. ``sorted_batches``:
    sequences are taken in the order of a map that a pre-pass kernel has made, those with the longest tiles
    first. ``launch_control``: the grid has a CTA a tile, and tiles are those of CTAs that have not started,
    taken over, instead of a counter's. ``rotated``: of a backward pass, each tile of keys begins at another
    query block, so that tiles that run side by side add to different sums. ``turned_end``, of deterministic
    ones: the last section of heads, but no more than half of all heads, is taken in the other order, and its
    tiles walk from the last query block to the first. Where a key tile may only wait for those after it, the
    longest come last: so the end is that of short ones.
    """

    order: TileOrder = "linear"
    persistent: bool = True
    dynamic: bool = False
    section_bytes: int = 0
    sorted_batches: bool = False
    launch_control: bool = False
    rotated: bool = False
    turned_end: bool = False

    @property
    def counted(self) -> bool:
        """Whether tiles come from the counter in global memory."""
        return self.dynamic and not self.launch_control


RESCALE_THRESHOLD = 8.0
"""In log2 units: a factor of 256 leaves bf16 and fp16 probabilities exact to their own precision."""


@dataclass(frozen=True, slots=True)
class SoftmaxPlan:
    """How the online softmax spends its instructions.

    ``rescale_threshold``: the running maximum moves only when it grows by more than this, in log2 units;
    0 moves it always. ``fma_exp_every``: one 2^x in so many is a polynomial on the FMA units; 0 is none.
    ``branchless_rescale``, of Blackwell: the output is multiplied in every step, by 1 where no maximum moved;
    else a warp none of whose rows moved skips it.
    """

    rescale_threshold: float = 0.0
    fma_exp_every: int = 0
    branchless_rescale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One kernel. Equal plans give equal kernels; a plan holds no shape, stride or length of a call.

    ``head_dim`` and ``head_dim_v`` are padded to the kernel's tile; the true ones arrive with the tensors.
    ``tile_m`` counts query rows of a CTA, ``tile_n`` keys of one step. ``pack_gqa`` query heads of a group
    share a tile (1: not packed). With ``ping_pong`` warpgroups take turns in issuing products.
    ``query_in_registers`` keeps Q there for a tile, so that its products read half as much shared memory.
    Of the backward pass on Hopper: ``scores_first``, a step begins with the next scores, not with dK;
    ``packed_dscores``, the difference of dP and delta is rounded before it is multiplied with P, two elements
    at once; ``staged_gradients``, dK and dV leave through shared memory, else by exchanges of registers.
    With ``early_start`` the first scores of a tile are computed beside the last product of the tile before
    it, and while that one is stored.
    With ``late_release`` keys are released only after half of the exponentials: nothing but a data
    dependence keeps ptxas from moving the wait for the output product above all of them.

    ``tile_m`` rows are ``query_tiles`` tiles of the tensor core, which take turns. ``late_keys`` of a step
    hand their probabilities over last: O += P V begins without them.

    ``cluster`` CTAs of a backward pass, each with ``tile_n`` keys of its own, take the same steps: queries
    are copied to all of them at once, and each computes some columns of dQ over the keys of all,
    ``dq_columns`` in one product where a role of its own does that.

    Of a backward pass ``column_shares`` CTAs take the same keys, each with its share of the columns of dK, dV
    and dQ. ``transposed_dq``: dQ is computed and summed transposed, in parts of head dimensions.

    ``dq_first``: of a backward pass by pairs, dQ of the step before is issued before dP of this one (the
    order of the FlashAttention-4 post), else after it, so that dP is there when P is.

    ``kernel`` "sort_batches" is no attention but a pre-pass of it: plan/sorting.py.
    """

    arch: str
    direction: Direction
    dtype: DType
    head_dim: int
    head_dim_v: int
    mask: MaskKind
    tile_m: int
    tile_n: int
    roles: tuple[Role, ...]
    buffers: tuple[Buffer, ...]
    channels: tuple[Channel, ...]
    schedule: Schedule
    softmax: SoftmaxPlan = SoftmaxPlan()
    cta_group: int = 1
    cluster: int = 1
    dq_columns: int = 0
    pack_gqa: int = 1
    cu_seqlens_q: bool = False
    cu_seqlens_k: bool = False
    seqused_q: bool = False
    seqused_k: bool = False
    lse: bool = True
    ping_pong: bool = True
    late_release: bool = False
    query_in_registers: bool = False
    early_start: bool = False
    scores_first: bool = False
    packed_dscores: bool = False
    staged_gradients: bool = False
    query_tiles: int = 1
    late_keys: int = 0
    deterministic: bool = False
    column_shares: int = 1
    transposed_dq: bool = False
    dq_first: bool = False
    kernel: KernelKind = "attention"

    def role(self, name: str) -> Role:
        """The role of that name."""
        return next(role for role in self.roles if role.name == name)

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def channel(self, name: str) -> Channel:
        """The channel of that name."""
        return next(channel for channel in self.channels if channel.name == name)

    def crosses(self, channel: Channel) -> bool:
        """Whether ``channel`` connects the CTAs of a pair: one of its roles is only the leader's."""
        names = (channel.producer, *channel.consumers)
        return any(role.leader_only for role in self.roles if role.name in names)

    @property
    def dq_parts(self) -> int:
        """Parts in which dQ is summed, by head dimensions; one unless it is transposed."""
        return self.head_dim // self.buffer("dq_slice").shape[0] if self.transposed_dq else 1

    @property
    def may_lack_keys(self) -> bool:
        """Whether a tile may see no key; not in a pair (`plan/channels.py`)."""
        return self.cta_group == 1

    @property
    def row_tile(self) -> int:
        """Query rows of a tile of the tensor core."""
        return self.tile_m // self.query_tiles

    @property
    def score_stages(self) -> int:
        """Score tiles in tensor memory for each query tile: with two, S of the next step is there while the
        softmax of this one runs.
        """
        return self.channel("scores0").stages

    @property
    def output_in_query(self) -> bool:
        """Whether the output leaves through the query's storage, which is then busy until it has left."""
        return any(buffer.name == "out" and buffer.borrows == "query" for buffer in self.buffers)

    @property
    def together(self) -> int:
        """CTAs that take a tile together: those of a pair, or of a cluster."""
        return self.cta_group * self.cluster

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * sum(role.warps for role in self.roles)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the buffers; a borrowed buffer costs nothing."""
        return max((b.offset + b.size for b in self.buffers if b.space == "shared"), default=0)
