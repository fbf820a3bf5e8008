"""What is timed: the cells of each case set, and how many operations a cell counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from attn4.mask import Mask
from attn4.problem import DType, Problem

Passes = Literal["forward", "backward", "both"]
"""What is timed of a case; ``both`` is a forward pass and its backward pass in one stretch of time."""

TOKENS = 16_384
"""Tokens of a full-size cell, over all sequences of the batch."""

HIDDEN = 2_048
"""Width of a full-size cell: query heads times head dimension."""

WINDOW = 1_024
"""Keys to the left of the diagonal in the ``window`` set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One self-attention cell. ``seqlens`` holds the length of each sequence of the batch.

    A ``packed`` case is (total, heads, head_dim) with ``cu_seqlens``; otherwise all sequences have one
    length and the layout is (batch, seqlen, heads, head_dim). ``host`` asks for the host's cost of a call
    instead of the device's time. ``head_dim_v`` is that of V and the output where it is another.
    """

    case_set: str
    head_dim: int
    heads: int
    kv_heads: int
    seqlens: tuple[int, ...]
    mask: Mask = field(default_factory=Mask)
    packed: bool = False
    host: bool = False
    dtype: DType = "bfloat16"
    direction: Passes = "forward"
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        if not self.seqlens:
            raise ValueError("a case needs at least one sequence")
        if not self.packed and len(set(self.seqlens)) != 1:
            raise ValueError(f"sequences of several lengths {self.seqlens} need packed=True")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are not a multiple of {self.kv_heads} kv heads")

    @property
    def batch(self) -> int:
        """Sequences in the batch."""
        return len(self.seqlens)

    @property
    def dim_v(self) -> int:
        """Head dimension of V and the output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def dims(self) -> str:
        """``128``, or ``192,128`` where that of V is another."""
        return str(self.head_dim) if self.dim_v == self.head_dim else f"{self.head_dim},{self.dim_v}"

    @property
    def seqlen(self) -> int:
        """The longest sequence."""
        return max(self.seqlens)

    @property
    def tokens(self) -> int:
        """Tokens over all sequences."""
        return sum(self.seqlens)

    @property
    def mask_name(self) -> str:
        """``full``, ``causal`` or ``window(left,right)``, with ``inf`` for a side without a bound."""
        if self.mask.kind != "window":
            return self.mask.kind
        left, right = ("inf" if bound is None else str(bound) for bound in (self.mask.left, self.mask.right))
        return f"window({left},{right})"

    @property
    def set_name(self) -> str:
        """The case set, and what is timed where the set itself does not say so."""
        said = self.direction in {"forward", self.case_set}
        return self.case_set if said else f"{self.case_set}-{self.direction}"

    @property
    def name(self) -> str:
        """Unique within the case sets and directions, such as ``forward-d128-causal-4k``."""
        heads = "" if self.heads == self.kv_heads else f"-{self.heads}:{self.kv_heads}"
        packed = "-packed" if self.packed else ""
        return f"{self.set_name}-d{self.dims}{heads}-{self.mask_name}-{short_length(self.seqlen)}{packed}"

    def problem(self) -> Problem:
        """The same case as the planner sees it, without the log-sum-exp; of both passes the backward one."""
        return Problem(
            batch=self.batch,
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.dim_v,
            dtype=self.dtype,
            mask=self.mask,
            cu_seqlens_q=self.packed,
            cu_seqlens_k=self.packed,
            lse=False,
            direction="forward" if self.direction == "forward" else "backward",
        )


def short_length(tokens: int) -> str:
    """``16k`` for 16384; lengths that are no multiple of 1024 are written out."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def visible_pairs(seqlen_q: int, seqlen_k: int, mask: Mask) -> int:
    """How many (query, key) pairs the mask lets meet in one head of one sequence."""
    shift = seqlen_k - seqlen_q
    pairs = 0
    for query in range(seqlen_q):
        first = 0 if mask.left is None else max(0, query + shift - mask.left)
        last = seqlen_k - 1 if mask.right is None else min(seqlen_k - 1, query + shift + mask.right)
        pairs += max(0, last - first + 1)
    return pairs


def counted_pairs(case: Case) -> float:
    """Pairs in one head of the whole batch, by the convention of published figures.

    Sequences of equal length count S^2 pairs, halved when causal (the diagonal counts half); packed batches
    and windows count every visible pair.
    """
    if case.packed or case.mask.kind == "window":
        return float(sum(visible_pairs(seqlen, seqlen, case.mask) for seqlen in case.seqlens))
    pairs = float(case.batch * case.seqlen**2)
    return pairs / 2 if case.mask.kind == "causal" else pairs


def flops(case: Case) -> float:
    """Floating-point operations counted for a case.

    Two products forward, QK^T and PV, and five backward: QK^T, dO V^T, P^T dO, dS^T Q and dS K.
    """
    forward = case.head_dim + case.dim_v
    backward = 3 * case.head_dim + 2 * case.dim_v
    counted = {"forward": forward, "backward": backward, "both": forward + backward}[case.direction]
    return 2.0 * counted_pairs(case) * counted * case.heads


def tensor_bytes(case: Case) -> int:
    """Bytes of Q, K, V and the output, and of their gradients where those are computed."""
    width = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[case.dtype]
    forward = case.tokens * (case.head_dim + case.dim_v) * (case.heads + case.kv_heads) * width
    return forward if case.direction == "forward" else 2 * forward


def skewed_lengths(total: int, longest: int) -> tuple[int, ...]:
    """Short sequences of 64 to 447 tokens and at the end one of ``longest``, ``total`` tokens together.

    The long one comes last: a schedule that takes tiles in order then ends with all of the work on few of its
    processors.
    """
    if not 0 < longest <= total:
        raise ValueError(f"the longest of {total} tokens must be in 1..{total}, not {longest}")
    lengths: list[int] = []
    rest = total - longest
    while rest:
        length = min(rest, 64 + 149 * len(lengths) % 384)
        lengths.append(length)
        rest -= length
    return (*lengths, longest)


CAUSAL = Mask(right=0)


def _dense(case_set: str, head_dim: int, seqlen: int, mask: Mask, group: int = 1) -> Case:
    heads = HIDDEN // head_dim
    return Case(
        case_set=case_set,
        head_dim=head_dim,
        heads=heads,
        kv_heads=heads // group,
        seqlens=(seqlen,) * (TOKENS // seqlen),
        mask=mask,
    )


def _forward() -> tuple[Case, ...]:
    return tuple(
        _dense("forward", head_dim, seqlen, mask)
        for head_dim in (64, 128, 256)
        for mask in (Mask(), CAUSAL)
        for seqlen in (1024, 4096, 16384)
    )


def _backward() -> tuple[Case, ...]:
    return tuple(directed(case, "backward") for case in _forward())


def _both() -> tuple[Case, ...]:
    return tuple(directed(case, "both") for case in _forward())


def _wide() -> tuple[Case, ...]:
    """Head dimension 192, and that of multi-head latent attention, whose V and output have 128."""
    return tuple(
        replace(_dense("wide", 192, seqlen, mask), heads=heads, kv_heads=heads, head_dim_v=head_dim_v)
        for heads, head_dim_v in ((10, None), (16, 128))
        for mask in (Mask(), CAUSAL)
        for seqlen in (1024, 4096, 16384)
    )


def directed(case: Case, direction: Passes) -> Case:
    """The same cell in that direction; a set called after a direction is called after the new one."""
    named = case.case_set in get_args(Passes)
    return replace(case, direction=direction, case_set=direction if named else case.case_set)


def _gqa() -> tuple[Case, ...]:
    wide = [
        _dense("gqa", 128, seqlen, mask, 8) for mask in (Mask(), CAUSAL) for seqlen in (1024, 4096, 16384)
    ]
    return (*wide, _dense("gqa", 64, 4096, CAUSAL, 8), _dense("gqa", 256, 4096, CAUSAL, 8))


def _varlen() -> tuple[Case, ...]:
    return tuple(
        Case(
            case_set="varlen",
            head_dim=head_dim,
            heads=HIDDEN // head_dim,
            kv_heads=HIDDEN // head_dim,
            seqlens=skewed_lengths(TOKENS, TOKENS // 2),
            mask=mask,
            packed=True,
        )
        for head_dim in (64, 128, 256)
        for mask in (Mask(), CAUSAL)
    )


def _schedule() -> tuple[Case, ...]:
    """Where the order of work shows: few causal heads, and batches whose longest sequence comes last."""

    def cell(head_dim: int, heads: int, seqlens: tuple[int, ...], mask: Mask) -> Case:
        return Case(
            case_set="schedule",
            head_dim=head_dim,
            heads=heads,
            kv_heads=heads,
            seqlens=seqlens,
            mask=mask,
            packed=len(set(seqlens)) > 1,
        )

    causal = ((16, (4096,)), (4, (16384,)))
    ragged = ((64,) * 255 + (8192,), (4096, 12288), (256,) * 63 + (16384,))
    return tuple(
        each
        for head_dim in (64, 128)
        for each in (
            *(cell(head_dim, heads, lengths, CAUSAL) for heads, lengths in causal),
            *(cell(head_dim, 16, lengths, mask) for lengths in ragged for mask in (Mask(), CAUSAL)),
        )
    )


def _window() -> tuple[Case, ...]:
    mask = Mask(left=WINDOW, right=0)
    return tuple(
        _dense("window", head_dim, seqlen, mask) for head_dim in (64, 128, 256) for seqlen in (4096, 16384)
    )


def _quick() -> tuple[Case, ...]:
    def small(
        head_dim: int, seqlens: tuple[int, ...], mask: Mask, kv_heads: int = 4, packed: bool = False
    ) -> Case:
        return Case(
            case_set="quick",
            head_dim=head_dim,
            heads=4,
            kv_heads=kv_heads,
            seqlens=seqlens,
            mask=mask,
            packed=packed,
        )

    return (
        small(64, (128, 128), Mask()),
        small(128, (192,), CAUSAL),
        small(64, (160,), CAUSAL, kv_heads=2),
        small(64, (17, 3, 130), CAUSAL, packed=True),
        small(64, (200,), Mask(left=64, right=0)),
    )


def _host() -> tuple[Case, ...]:
    return tuple(
        Case(
            case_set="host",
            head_dim=128,
            heads=4,
            kv_heads=4,
            seqlens=(128,),
            mask=CAUSAL,
            packed=packed,
            host=True,
        )
        for packed in (False, True)
    )


_SETS = {
    "forward": _forward,
    "backward": _backward,
    "both": _both,
    "wide": _wide,
    "gqa": _gqa,
    "varlen": _varlen,
    "window": _window,
    "schedule": _schedule,
    "quick": _quick,
    "host": _host,
}

CASE_SETS = tuple(_SETS)
"""Names of the case sets."""


def cases(name: str) -> tuple[Case, ...]:
    """The cells of one case set."""
    if name not in _SETS:
        raise ValueError(f"no case set {name!r}; there are {', '.join(CASE_SETS)}")
    return _SETS[name]()
