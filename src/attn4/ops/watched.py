"""Whether tensors are just numbers, or somebody looks at what is done with them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


def watched(*tensors: Tensor) -> bool:
    """Whether these tensors are for PyTorch's dispatcher to handle.

    Subclasses (FakeTensor, DTensor, ...), tensors without data, and all tensors inside of a mode that sees
    each operation (tracing, FLOP counting) or of torch.jit.trace.
    """
    return (
        bool(torch._C._len_torch_dispatch_stack())
        or torch._C._get_tracing_state() is not None
        or any(type(x) not in _PLAIN or x.is_meta for x in tensors)
    )


def transformed() -> bool:
    """Whether functorch's transforms are active, or forward-mode differentiation is."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
