"""What a call hands to a forward kernel of either machine."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32

DTYPES = {"bfloat16": BFloat16, "float16": Float16}


@dataclass(frozen=True)
class Outputs:
    """Where results go; ``lse`` is None in a kernel without it."""

    out: cute.Tensor
    lse: cute.Tensor | None
    counter: cute.Tensor | None


@dataclass(frozen=True)
class Scalars:
    """Numbers of a call: score scale in log2 units and the window's bounds."""

    scale_log2: Float32
    window_left: Int32
    window_right: Int32
