"""Fences (PTX 9.7.13.4): the machine executes in order, so they change no result; a Watch is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.clocks import DEVICE, FENCED
from attn4.emulator.isa.registry import Function, Modifiers, effect
from attn4.emulator.ptx.module import Instruction

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]

_PROXIES = ("alias", "async", "async::generic", "tensormap::generic")
_PLANES = {"": (FENCED, DEVICE), "global": (DEVICE,), "shared::cta": (FENCED,), "shared::cluster": (FENCED,)}
"""The planes of the clocks that fence.proxy.async raises, by its state space: "the memory ordering is limited
only to operations performed on objects in the state space specified".
"""


@effect("fence", "membar", destinations=0, types=("u64", "u32"))
def fence(i: Instruction) -> Function:
    """PTX 9.7.13.4 membar, fence: "enforces an ordering of memory operations"."""
    modifiers = Modifiers(i)
    proxy = modifiers.one_of(*_PROXIES) if modifiers.flag("proxy") else ""
    initialised = modifiers.flag("mbarrier_init")
    modifiers.flag("sync_restrict::shared::cta")
    modifiers.flag("sync_restrict::shared::cluster")
    space = modifiers.one_of("global", "shared::cta", "shared::cluster", default="")
    modifiers.one_of("sc", "acq_rel", "acquire", "release", default="acq_rel")
    modifiers.one_of("cta", "cluster", "gpu", "sys", "gl", default="gpu")
    modifiers.done()

    def run(warp: Warp, mask: Mask, *_: object) -> None:
        watch = warp.block.grid.watch
        if watch is None:
            return
        if proxy.startswith("async"):
            watch.fence_proxy(warp, mask, _PLANES[space])
        elif initialised:
            watch.fence_mbarrier_init(warp, mask)
        elif not proxy:
            watch.fence_threads(warp, mask)

    return run
