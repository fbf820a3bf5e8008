"""The tile counter that a persistent kernel with a dynamic schedule takes its work from."""

from __future__ import annotations

import torch
from torch import Tensor

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
    if torch._C._cuda_isCurrentStreamCapturing():
        return _zeros(device)
    place = (device, torch._C._cuda_getCurrentRawStream(device))
    found = _counters.get(place)
    if found is None:
        found = _counters[place] = _zeros(device)
    return found


def _zeros(device: int) -> Tensor:
    return torch.zeros(_COUNTER_ENTRIES, dtype=torch.int32, device=torch.device("cuda", device))
