"""Kernels in CuTe-DSL: the only folder that imports cutlass."""

from __future__ import annotations

from attn4.kernels.compile import compile_plan

__all__ = ["compile_plan"]
