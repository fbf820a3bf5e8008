"""The problems that the reference's kernels solve on the emulator, and why each is there.

Sizes are small, and give several tiles to a CTA on the one to four multiprocessors of the device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from attn4.mask import Mask

Window = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One call of flash_attn.cute. ``lens_*`` packs that side; ``page`` puts K and V into pages of that many
    rows, in no order; ``splits`` cuts the keys into parts that a second kernel combines.
    """

    arch: str
    head_dim: int
    head_dim_v: int = 0
    seqlen_q: int = 300
    seqlen_k: int = 300
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    causal: bool = False
    window: Window = (None, None)
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    page: int = 0
    splits: int = 1
    backward: bool = False
    deterministic: bool = False
    dtype: str = "bfloat16"
    sms: int = 2

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def mask(self) -> Mask:
        return Mask.of(self.causal, self.window)

    def rows(self, side: str) -> tuple[int, ...]:
        """Leading extents of a tensor of queries ("q") or keys ("k")."""
        lens, seqlen = (self.lens_q, self.seqlen_q) if side == "q" else (self.lens_k, self.seqlen_k)
        return (sum(lens),) if lens else (self.batch, seqlen)


def starts(lens: tuple[int, ...]) -> list[int]:
    """cu_seqlens of sequences of these lengths."""
    return [0, *itertools.accumulate(lens)]


LENS_Q, LENS_K = (200, 1, 0, 260), (333, 70, 40, 260)


def _blackwell(head_dim: int, **options: object) -> Problem:
    return Problem(arch="sm_100a", head_dim=head_dim, **options)  # type: ignore[arg-type]


def _hopper(head_dim: int, **options: object) -> Problem:
    return Problem(arch="sm_90a", head_dim=head_dim, **options)  # type: ignore[arg-type]


BLACKWELL_FORWARD = {
    "64": _blackwell(64),
    "64 causal": _blackwell(64, causal=True),
    "64 window": _blackwell(64, window=(90, 20), seqlen_q=400, seqlen_k=450),
    "128, a CTA pair": _blackwell(128, seqlen_q=600, seqlen_k=520),
    "128 causal": _blackwell(128, causal=True, seqlen_q=600, seqlen_k=600, heads=1, kv_heads=1, sms=1),
    "128 causal, more keys than queries": _blackwell(128, causal=True, seqlen_q=150, seqlen_k=420),
    "128 window": _blackwell(128, window=(100, 0), seqlen_q=500, seqlen_k=500),
    "128 float16": _blackwell(128, causal=True, dtype="float16"),
    "(192, 128)": _blackwell(192, head_dim_v=128),
    "(192, 128) causal": _blackwell(192, head_dim_v=128, causal=True, seqlen_k=420),
    "256": _blackwell(256),
    "256 causal": _blackwell(256, causal=True, seqlen_k=420),
    "128 grouped": _blackwell(128, heads=8, kv_heads=2, seqlen_q=100, causal=True),
    "64 grouped": _blackwell(64, heads=6, kv_heads=2, seqlen_q=200),
    "128 varlen causal": _blackwell(128, causal=True, lens_q=LENS_Q, lens_k=LENS_K),
    "64 varlen grouped": _blackwell(64, heads=4, kv_heads=1, lens_q=LENS_Q, lens_k=LENS_K),
    "128 paged, pages of a tile": _blackwell(128, batch=2, seqlen_q=130, seqlen_k=512, page=128),
    "128 paged, small pages": _blackwell(128, batch=2, seqlen_q=130, seqlen_k=256, page=16, causal=True),
    "128 split": _blackwell(128, seqlen_q=60, seqlen_k=900, splits=3),
    "64 split causal grouped": _blackwell(
        64, seqlen_q=40, seqlen_k=900, splits=4, heads=4, kv_heads=1, causal=True
    ),
}

BLACKWELL_BACKWARD = {
    "64": _blackwell(64, backward=True),
    "64 causal grouped": _blackwell(64, backward=True, causal=True, heads=4, kv_heads=2),
    "64 deterministic": _blackwell(64, backward=True, causal=True, deterministic=True),
    "128, a CTA pair": _blackwell(128, backward=True),
    "128 causal": _blackwell(128, backward=True, causal=True, seqlen_q=400, seqlen_k=400),
    "128 deterministic": _blackwell(128, backward=True, deterministic=True, causal=True, heads=1, kv_heads=1),
    "128 window": _blackwell(128, backward=True, window=(100, 30)),
    "128 varlen causal": _blackwell(128, backward=True, causal=True, lens_q=LENS_Q, lens_k=LENS_K),
    "(192, 128) causal": _blackwell(192, head_dim_v=128, backward=True, causal=True),
    "256 causal": _blackwell(256, backward=True, causal=True),
}

HOPPER_FORWARD = {
    "64": _hopper(64),
    "128 causal": _hopper(128, causal=True, seqlen_q=500, seqlen_k=500, heads=1, kv_heads=1, sms=1),
    "128 window": _hopper(128, window=(100, 0), seqlen_q=400, seqlen_k=400),
    "256 causal": _hopper(256, causal=True),
    "(192, 128)": _hopper(192, head_dim_v=128),
    "128 grouped": _hopper(128, heads=8, kv_heads=2, seqlen_q=100),
    "128 varlen causal": _hopper(128, causal=True, lens_q=LENS_Q, lens_k=LENS_K),
    "128 paged, pages of a tile": _hopper(128, batch=2, seqlen_q=130, seqlen_k=512, page=128),
    "128 float16": _hopper(128, causal=True, dtype="float16"),
}

HOPPER_BACKWARD = {
    "64": _hopper(64, backward=True),
    "128 causal grouped": _hopper(128, backward=True, causal=True, heads=4, kv_heads=2),
    "128 deterministic": _hopper(128, backward=True, causal=True, deterministic=True),
    "128 varlen": _hopper(128, backward=True, lens_q=LENS_Q, lens_k=LENS_K),
    "256 causal": _hopper(256, backward=True, causal=True),
}

SUITES = {
    "sm_100a forward": BLACKWELL_FORWARD,
    "sm_100a backward": BLACKWELL_BACKWARD,
    "sm_90a forward": HOPPER_FORWARD,
    "sm_90a backward": HOPPER_BACKWARD,
}

PROBLEMS = {
    f"{suite} {name}": problem for suite, problems in SUITES.items() for name, problem in problems.items()
}
