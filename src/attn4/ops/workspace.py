"""Memory of the kernels' own: the tile counter of a dynamic schedule, and what a backward pass works in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BOUNDARY = 32
"""Elements of float32 in 128 bytes."""

_DEFAULT_STREAM = 0
"""CUDA captures every stream but this one."""

_COUNTER_ENTRIES = 2
_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: int) -> Tensor:
    """Two int32 zeros on the GPU ``device``, which must be current. A kernel leaves them zero.

    One buffer per stream: kernels on one stream run one after another. A captured graph may be replayed on
    any stream, beside anything, so a capture gets its own buffer, cleared by a node of the graph. Device -1,
    the CPU, is the emulator's.
    """
    if device < 0:
        return torch.zeros(_COUNTER_ENTRIES, dtype=torch.int32)
    # The public functions build Python objects and check for a GPU each time, ten times the cost.
    stream = torch._C._cuda_getCurrentRawStream(device)
    if stream != _DEFAULT_STREAM and torch._C._cuda_isCurrentStreamCapturing():
        return _zeros(device)
    place = (device, stream)
    found = _counters.get(place)
    if found is None:
        found = _counters[place] = _zeros(device)
    return found


def uninitialised(likes: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous float32 tensors of those shapes and devices, each from a multiple of 128 bytes on."""
    if likes[0].is_cuda:
        # Each allocation there begins at 512 bytes, and is quicker than a view.
        return [torch.empty_like(like) for like in likes]
    rooms = [-(-like.numel() // _BOUNDARY) * _BOUNDARY for like in likes]
    memory = torch.empty(sum(rooms) + _BOUNDARY, dtype=torch.float32)
    start = -(memory.data_ptr() // memory.element_size()) % _BOUNDARY
    found = []
    for like, room in zip(likes, rooms, strict=True):
        found.append(memory.as_strided(like.shape, like.stride(), start))
        start += room
    return found


def _zeros(device: int) -> Tensor:
    return torch.zeros(_COUNTER_ENTRIES, dtype=torch.int32, device=torch.device("cuda", device))
