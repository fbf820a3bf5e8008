"""A virtual GPU: runs compiled CuTe-DSL kernels, unmodified, on a CPU.

Knows nothing of attention. ``ptx`` turns the text of a module into typed records, ``isa`` defines what each
instruction does to a whole warp, ``state`` is the memory they act on, ``launch`` stands in for the CUDA
runtime. `device` is the door.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from attn4.emulator.gpu import Gpu
    from attn4.emulator.grid import Limits
    from attn4.emulator.schedule import Schedule

__all__ = ["device"]


def device(
    arch: str,
    *,
    schedule: str | Schedule = "round_robin",
    seed: int = 0,
    hazards: bool | Literal["strict"] = False,
    sms: int = 4,
    limits: Limits | None = None,
    processes: int = 1,
    exact: bool = False,
) -> AbstractContextManager[Gpu]:
    """A block in which CuTe-DSL's launches run on an emulated GPU, over CPU tensors.

    In the block, and in this thread (or task) only, a program finds one device: torch.cuda, cuda.bindings and
    CuTe-DSL answer for it, and tensors that are made for it are made on the CPU. What is compiled in the
    block is compiled for it, CPU tensors lying in its global memory; what is launched has ended when the
    launch returns. Leaving the block restores everything. Blocks
    may nest: the innermost counts.

    Parameters
    ----------
    arch
        "sm_90a", "sm_100a" or "sm_103a".
    schedule
        what the chip leaves open: "round_robin", "random", "adversarial", "eager", or a ``Schedule``.
    seed
        of the random and the adversarial schedule: the same seed gives the same run.
    hazards
        whether unordered accesses, lost arrivals, leaks and the like are looked for, at a third of the speed.
        "strict" holds to PTX's rules for tcgen05.fence and .wait those programs, too, that have none.
    sms
        multiprocessors that programs are told of, and whose CTAs are resident at once.
    limits
        when to give up; see ``Limits``.
    processes
        how many share the CTAs of a launch, with the same result: of kernels whose CTAs do not talk to each
        other through global memory, while no hazards are looked for. Others run in one.
    exact
        sum products of warpgroups bit for bit as an H200 does, at a third of the speed.

    Yields
    ------
    gpu
        ``gpu.report`` counts what has run, ``gpu.hazards`` lists what was found.

    Raises
    ------
    ValueError
        An architecture, a schedule or a kind of hazards that does not exist.
    """
    from attn4.emulator.gpu import opened

    return opened(
        arch,
        schedule=schedule,
        seed=seed,
        hazards=hazards,
        sms=sms,
        limits=limits,
        processes=processes,
        exact=exact,
    )
