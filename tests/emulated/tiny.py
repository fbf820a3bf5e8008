"""Small PTX kernels and one way to run them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from attn4.emulator.grid import Grid, Limits, Residency, Shape
from attn4.emulator.machine import Machine
from attn4.emulator.ptx.parser import parse
from attn4.emulator.schedule import Adversarial, Random, RoundRobin, Schedule

SCHEDULES = {
    "round robin": RoundRobin,
    "round robin, warp by warp, short turns": lambda: RoundRobin(quantum=3, warps_together=1),
    "random": lambda: Random(1),
    "random, two warps together": lambda: Random(2, warps_together=2),
    "late": lambda: Adversarial(late=True),
    "at once": lambda: Adversarial(late=False),
    "either": lambda: Adversarial(5, late=None),
}


def kernel_text(body: str, *, parameters: int = 1, shared: int = 0) -> str:
    """A module with one kernel ``k``; ``pn`` is its 64-bit parameter n, ``memory`` static shared memory."""
    declared = ", ".join(f".param .u64 p{n}" for n in range(parameters))
    variable = f".shared .align 128 .b8 memory[{shared}];" if shared else ""
    return f"""
.version 8.6
.target sm_90a
.address_size 64
.visible .entry k({declared})
{{
.reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<60>; .reg .b64 %d<40>; .reg .f32 %f<20>;
{variable}
{body}
}}
"""


THREAD = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %ntid.x;
mad.lo.s32 %r3, %r1, %r2, %r0;
ld.param.u64 %d0, [p0];
mul.wide.u32 %d1, %r3, 4;
add.s64 %d2, %d0, %d1;
"""
"""%r0 the thread in its CTA, %r3 in the grid, %d2 the address of its word in the first array."""


def words(count: int, fill: int = 0) -> np.ndarray:
    """An array of 32-bit words."""
    return np.full(count, fill, dtype=np.uint32)


def run(
    text: str,
    arrays: Sequence[np.ndarray],
    *,
    grid: int = 1,
    block: int = 128,
    cluster: int = 1,
    schedule: Schedule | None = None,
    limits: Limits | None = None,
    sms: int = 4,
    hazards: bool = False,
) -> Grid:
    """Launch the kernel of ``text`` with the addresses of ``arrays`` as its parameters."""
    module = parse(text)
    machine = Machine(schedule or RoundRobin(), Residency(sms=sms), limits or Limits(), hazards=hazards)
    for n, array in enumerate(arrays):
        machine.memory.register(array, name=f"p{n}")
    parameters = struct.pack(f"<{len(arrays)}Q", *(array.ctypes.data for array in arrays))
    shape = Shape((grid, 1, 1), (block, 1, 1), (cluster, 1, 1))
    return machine.launch(module.kernels[0], shape, parameters, module.globals)
