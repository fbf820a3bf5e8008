"""Sums in global memory."""

from __future__ import annotations

import cutlass.cute as cute


def add_four(target, values, number):
    """Add four float32 to consecutive words at ``target``, a multiple of 16 bytes: one instruction. Nothing
    is added if ``number`` is negative.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred wanted; setp.ge.s32 wanted, {$r5}, 0;"
        " @wanted red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}; }",
        read_only_args=[target.toint(), *values, number],
    )
