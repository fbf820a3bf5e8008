"""Fences (PTX 9.7.13.4): the machine executes in order, so they change no result. Hazards are another
matter.
"""

from __future__ import annotations

from attn4.emulator.isa.control import nothing
from attn4.emulator.isa.registry import Function, Modifiers, effect
from attn4.emulator.ptx.module import Instruction

_PROXIES = (
    *("alias", "async", "async.global", "async.shared::cta", "async.shared::cluster"),
    *("async::generic", "tensormap::generic"),
)


@effect("fence", "membar", destinations=0, types=("u64", "u32"))
def fence(i: Instruction) -> Function:
    """PTX 9.7.13.4 membar, fence: "enforces an ordering of memory operations"."""
    modifiers = Modifiers(i)
    if modifiers.flag("proxy"):
        modifiers.one_of(*_PROXIES)
    modifiers.flag("mbarrier_init")
    modifiers.flag("sync_restrict::shared::cta")
    modifiers.flag("sync_restrict::shared::cluster")
    for name in ("global", "shared::cta", "shared::cluster"):
        modifiers.flag(name)
    modifiers.one_of("sc", "acq_rel", "acquire", "release", default="acq_rel")
    modifiers.one_of("cta", "cluster", "gpu", "sys", "gl", default="gpu")
    modifiers.done()
    return nothing
