"""From checked arguments to numbers: backend choice, launches on GPUs, autograd."""

from __future__ import annotations

from attn4.ops.attend import attend
from attn4.ops.call import Call, Options

__all__ = ["Call", "Options", "attend"]
