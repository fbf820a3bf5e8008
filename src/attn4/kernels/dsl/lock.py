"""Turns between CTAs: a counter in global memory that each waits for, and then moves on. By one thread."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def wait(counter, turn: Int32):
    """Wait until ``counter`` is ``turn``; bulk copies that follow come after all that was there before."""
    seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while seen != turn:
        seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")


def give(counter):
    """Let the next have its turn, when what this thread has copied is complete and waited for."""
    cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
