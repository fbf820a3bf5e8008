"""From checked arguments to numbers: backend choice, launches on GPUs, autograd."""

from __future__ import annotations

from attn4.ops import library as library
from attn4.ops.call import Call, Options
from attn4.ops.dispatch import attend

__all__ = ["Call", "Options", "attend"]
