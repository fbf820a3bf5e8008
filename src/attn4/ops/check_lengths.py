"""What legal sequence lengths are. Values are read only where that costs no synchronisation: on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from attn4.ops.call import batch_of
from attn4.reference import Lengths

Side = tuple[str, Tensor, Tensor | None, Tensor | None]
"""Its letter, what is laid out like it, and its two length tensors."""


def check_lengths(q: Tensor, k: Tensor, lengths: Lengths) -> None:
    """``cu_seqlens_*`` and ``seqused_*`` against the tensors that they describe, values apart."""
    batch = batch_of(q, lengths.cu_seqlens_q)
    for side, x, cu_seqlens, seqused in _sides(q, k, lengths):
        if cu_seqlens is not None:
            check_vector(f"cu_seqlens_{side}", cu_seqlens, batch + 1, x.device)
        if seqused is not None:
            check_vector(f"seqused_{side}", seqused, batch, x.device)


def check_values(q: Tensor, k: Tensor, lengths: Lengths) -> None:
    """What length tensors on the CPU hold; those of a GPU stay unread."""
    if q.device.type != "cpu" or not lengths.given:
        return
    batch = batch_of(q, lengths.cu_seqlens_q)
    for side, x, cu_seqlens, seqused in _sides(q, k, lengths):
        capacity = [x.shape[-3]] * batch
        if cu_seqlens is not None:
            capacity = _checked_segments(f"cu_seqlens_{side}", cu_seqlens.tolist(), x.shape[-3])
        if seqused is not None:
            _check_used(f"seqused_{side}", seqused.tolist(), capacity)


def check_max_seqlen(name: str, value: Any) -> Any:
    """The hint: None or an int, or the symbol of one in a graph.

    A tensor would have to be read back from the GPU at each call.
    """
    if isinstance(value, Tensor):
        raise ValueError(
            f"{name} is a tensor; pass an int (an upper bound that you know on the host) or None: it is only "
            "a hint, the result depends on cu_seqlens and seqused alone"
        )
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int or None, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name}={value} must not be negative; pass an upper bound of the lengths, or None")
    return value


def _sides(q: Tensor, k: Tensor, lengths: Lengths) -> tuple[Side, Side]:
    return (
        ("q", q, lengths.cu_seqlens_q, lengths.seqused_q),
        ("k", k, lengths.cu_seqlens_k, lengths.seqused_k),
    )


def check_vector(name: str, x: Any, entries: int, device: torch.device) -> None:
    """A tensor of lengths must be an int32 vector of so many entries on ``device``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be an int32 tensor, got {type(x).__name__}")
    if x.dtype != torch.int32:
        raise ValueError(f"{name} has dtype {x.dtype}; it must be int32: use {name}.int()")
    if x.dim() != 1 or x.shape[0] != entries:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; with {_sequences(name, entries)} it must be ({entries},)"
        )
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but the tensors are on {device}: use {name}.to(q.device)")


def _sequences(name: str, entries: int) -> str:
    return f"{entries - 1 if name.startswith('cu_') else entries} sequences"


def _checked_segments(name: str, bounds: list[int], total: int) -> list[int]:
    """The length of each segment."""
    if bounds[0] != 0:
        raise ValueError(f"{name}[0] is {bounds[0]}; packed sequences begin at row 0")
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"{name} decreases from {bounds[index]} to {bounds[index + 1]} at entry {index + 1}; "
                "it is a running sum of lengths, see torch.cumsum"
            )
    if bounds[-1] > total:
        raise ValueError(f"{name}[-1] is {bounds[-1]}, but the packed tensor has only {total} rows")
    return lengths


def _check_used(name: str, used: list[int], capacity: list[int]) -> None:
    for index, (count, limit) in enumerate(zip(used, capacity, strict=True)):
        if not 0 <= count <= limit:
            raise ValueError(f"{name}[{index}] is {count}; sequence {index} has room for 0 to {limit} rows")
