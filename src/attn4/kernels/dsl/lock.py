"""Turns between CTAs: a counter in global memory that each waits for, and then moves on. By one thread."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def wait(counter, turn: Int32):
    """Wait until ``counter`` is ``turn``; accesses that follow come after all that was there before."""
    seen = now(counter)
    while seen != turn:
        seen = now(counter)


def wait_to_copy(counter, turn: Int32):
    """As `wait`, of bulk copies that follow."""
    wait(counter, turn)
    cute.arch.fence_proxy("async.global")


def now(counter):
    """What ``counter`` is; accesses that follow come after all that was there before it was."""
    return cute.arch.load(counter, Int32, sem="acquire", scope="gpu")


def give(counter):
    """Let the next have its turn, when what this thread has copied is complete and waited for."""
    cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
