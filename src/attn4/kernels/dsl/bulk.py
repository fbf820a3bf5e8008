"""Bulk copies of contiguous bytes, without a tensor map; each by one thread."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def load(target, source, count: int, barrier):
    """Start to copy ``count`` bytes from global to shared memory; they are reported on ``barrier``."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target.toint(), source.toint(), Int32(count), barrier.toint()],
    )


def send(cta, target, source, count: int, barrier):
    """Start to copy ``count`` bytes of shared memory to ``target`` in another ``cta`` of the cluster, where
    they are reported on ``barrier``.
    """
    target, barrier = (cute.arch.map_dsmem_ptr(pointer, cta) for pointer in (target, barrier))
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target.toint(), source.toint(), Int32(count), barrier.toint()],
    )


def add(target, source, count: int):
    """Start to add ``count`` bytes of float32 in shared memory to global memory, each sum indivisible."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(count)],
    )
