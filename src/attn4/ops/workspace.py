"""The tile counter that a persistent kernel with a dynamic schedule takes its work from."""

from __future__ import annotations

import torch
from torch import Tensor

_COUNTER_ENTRIES = 2
_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: int) -> Tensor:
    """Two int32 zeros on the GPU ``device``, which must be current. A kernel leaves them zero.

    One buffer per stream: kernels on one stream run one after another. A captured graph may be replayed on
    any stream, beside anything, so a capture gets its own buffer, cleared by a node of the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return _zeros(device)
    # torch.cuda.current_stream builds a Python object, ten times the cost of the raw handle.
    place = (device, torch._C._cuda_getCurrentRawStream(device))
    found = _counters.get(place)
    if found is None:
        found = _counters[place] = _zeros(device)
    return found


def _zeros(device: int) -> Tensor:
    return torch.zeros(_COUNTER_ENTRIES, dtype=torch.int32, device=torch.device("cuda", device))
