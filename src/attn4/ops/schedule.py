"""What `get_scheduler_metadata` returns, and whether it fits a call; values on the device are never read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attn4.mask import Mask
from attn4.plan.plan import Plan

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
"""Tensors that say how long sequences are, in the order in which kernels take them."""

AGAIN = "call get_scheduler_metadata with the arguments of this call"


@dataclass(frozen=True, slots=True)
class MadeFor:
    """Which calls an order of sequences was made for.

    ``lengths`` are the names of the tensors of lengths. ``target`` is the architecture, or "reference".
    ``tile`` is (queries, keys, heads packed) of the plan, None for the reference. ``text`` says it all in a
    string, as an operator of torch.library takes no other value that is not a number or a tensor.
    """

    batch: int
    mask: Mask
    lengths: tuple[str, ...]
    device: str
    target: str
    tile: tuple[int, int, int] | None
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        mask = [self.mask.left, self.mask.right]
        text = json.dumps([self.batch, mask, self.lengths, self.device, self.target, self.tile])
        object.__setattr__(self, "text", text)

    @classmethod
    def of(cls, text: str) -> MadeFor:
        """What has this ``text``."""
        batch, mask, lengths, device, target, tile = json.loads(text)
        return cls(batch, Mask(*mask), tuple(lengths), device, target, None if tile is None else tuple(tile))


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerMetadata:
    """The order in which the sequences of a batch are worked on, made once and used by many calls.

    ``batch_order``, int32 (batch + 1,): opaque. It decides when a sequence is worked on, never the result: of
    a batch with other lengths it is a slow order, not a wrong one. To change the order that a captured CUDA
    graph uses, copy the ``batch_order`` of new metadata into it.
    """

    batch_order: Tensor
    made_for: MadeFor


def parts(metadata: Any) -> tuple[Tensor | None, MadeFor | None]:
    """The tensor that a kernel reads, and what it was made for; (None, None) without metadata."""
    if metadata is None:
        return None, None
    if not isinstance(metadata, SchedulerMetadata):
        raise TypeError(
            f"scheduler_metadata must be what attn4.get_scheduler_metadata returned, or None, got "
            f"{type(metadata).__name__}; that of other packages means something else"
        )
    return metadata.batch_order, metadata.made_for


def check_call(made_for: MadeFor, batch: int, mask: Mask, lengths: tuple[str, ...], device: str) -> None:
    """Metadata against the call that uses it, on any backend. Raises ValueError that says what differs."""
    theirs = (made_for.batch, made_for.mask, made_for.lengths, made_for.device)
    for name, made, given in zip(
        ("a batch of", "the mask", "calls with", "the device"),
        theirs,
        (batch, mask, lengths, device),
        strict=True,
    ):
        if made != given:
            raise ValueError(
                f"scheduler_metadata was made for {name} {_told(made)}, and this call has {_told(given)}; "
                f"{AGAIN}"
            )


def check_plan(made_for: MadeFor, plan: Plan) -> None:
    """Metadata against the plan of the call that uses it. Raises ValueError."""
    if made_for.target != plan.arch:
        raise ValueError(
            f"scheduler_metadata was made for {made_for.target}, and this call runs on {plan.arch}; {AGAIN}, "
            "backend and arch among them"
        )
    if made_for.tile != tile_of(plan):
        raise ValueError(
            f"scheduler_metadata was made for tiles of {_tile_told(made_for.tile)}, and this call has tiles "
            f"of {_tile_told(tile_of(plan))}; {AGAIN}, the same max_seqlen_q and max_seqlen_k among them"
        )


def tile_of(plan: Plan) -> tuple[int, int, int]:
    """All of a plan, beside the mask, that the order depends on."""
    return (plan.tile_m, plan.tile_n, plan.pack_gqa)


def _tile_told(tile: tuple[int, int, int] | None) -> str:
    assert tile is not None
    packed = f" of {tile[2]} packed heads" if tile[2] > 1 else ""
    return f"{tile[0]} queries{packed} x {tile[1]} keys"


def _told(value: Any) -> str:
    if isinstance(value, Mask):
        return f"{value.kind} ({value.left}, {value.right})"
    if isinstance(value, tuple):
        return ", ".join(value)
    return str(value)
