"""Litmus tests: a small kernel that is right, and mutants of it in which one synchronisation is missing.

A body is PTX with marks at the ends of lines, each naming mutants, with commas between several:

    bar.sync 0;                  //- no barrier              the line is not in that mutant
    bar.sync 1, 64;              //- wrong: bar.sync 1, 96;  it is replaced
    //+ twice: bar.sync 0;                                   a line of that mutant alone
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from functools import cache
from unittest.mock import patch

import numpy as np

from attn4.emulator import machine as machines
from attn4.emulator.faults import EmulationError
from attn4.emulator.grid import Grid, Limits, Residency, Shape
from attn4.emulator.machine import Machine
from attn4.emulator.ptx.module import Module
from attn4.emulator.ptx.parser import parse
from attn4.emulator.schedule import Adversarial, Random, RoundRobin, Schedule
from attn4.emulator.units.tensormap import TensorMap, encode

SCHEDULES = {
    "round robin": RoundRobin,
    "random 1": lambda: Random(1),
    "random 2": lambda: Random(2, warps_together=2),
    "adversarial": lambda: Adversarial(late=True),
    "eager": lambda: Adversarial(late=False),
}

WORDS = 4096
"""32-bit words of the array that kernels read, and of the one that they write."""
BOX = (8, 16)
"""Columns and rows of the tiles of both tensor maps, of float32: 512 bytes."""
LIMITS = Limits(instructions=10**6, seconds=60, idle_instructions=50_000)


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is wrong with a mutant: the section of the PTX manual whose rule it breaks, and how it is told.

    ``kinds`` are kinds of hazards, of which each schedule must give one. ``barrier`` is the variable that
    the report names, or several of which it names one, where that is expected.
    """

    section: str
    kinds: tuple[str, ...]
    barrier: str = ""


def broken(section: str, *kinds: str, barrier: str = "") -> Mutant:
    """A mutant, written shortly."""
    return Mutant(section, kinds, barrier)


@dataclass(frozen=True, slots=True)
class Litmus:
    """A kernel with its mutants by name. ``shared``: bytes of each shared variable; its address is in a
    register of the same name. ``block``, ``cluster``: threads of a CTA, CTAs of the one cluster.
    """

    name: str
    body: str
    mutants: dict[str, Mutant]
    shared: dict[str, int] = field(default_factory=lambda: {"data": 1024})
    block: int = 64
    cluster: int = 1
    target: str = "sm_90a"
    track_output: bool = False

    def text(self, mutant: str = "") -> str:
        """The module: the kernel that is right, or one of its mutants."""
        assert not mutant or mutant in self.mutants, mutant
        lines = []
        for line in self.body.splitlines():
            code, _, note = line.partition("//")
            if note[:1] in ("-", "+"):
                names, _, other = note[1:].partition(":")
                if mutant and mutant in [name.strip() for name in names.split(",")]:
                    code = other
            lines.append(code)
        return module(self, "\n".join(lines))


def module(litmus: Litmus, body: str) -> str:
    """PTX around a body: registers, the addresses of variables and arrays, and who the thread is."""
    variables = "\n".join(f".shared .align 1024 .b8 {name}[{size}];" for name, size in litmus.shared.items())
    addresses = "\n".join(f"mov.u32 %{name}, {name};" for name in litmus.shared)
    own = ", ".join(f"%{name}" for name in litmus.shared)
    return f"""
.version 8.8
.target {litmus.target}
.address_size 64
.visible .entry litmus(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3)
{{
.reg .pred %p<10>, %zero, %w0, %w1, %lane0, %first; .reg .b16 %h<4>; .reg .b32 %r<60>; .reg .b64 %d<20>;
.reg .b32 %t, %w, %l, %rank, %peer, %own, %other, %s, {own}; .reg .b64 %in, %out, %map, %outmap, %result;
{variables}
{addresses}
mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; and.b32 %l, %t, 31;
mov.u32 %rank, %cluster_ctarank; xor.b32 %peer, %rank, 1;
shl.b32 %own, %t, 2; xor.b32 %other, %own, 128;
setp.eq.u32 %zero, %t, 0; setp.eq.u32 %w0, %w, 0; setp.eq.u32 %w1, %w, 1; setp.eq.u32 %lane0, %l, 0;
setp.eq.u32 %first, %rank, 0;
ld.param.u64 %in, [p0]; ld.param.u64 %out, [p1]; ld.param.u64 %map, [p2]; ld.param.u64 %outmap, [p3];
mad.lo.u32 %s, %rank, 512, %own; cvt.u64.u32 %result, %s; add.u64 %result, %result, %out;
{body}
ret;
}}
"""


CLUSTER = "try_wait.parity.acquire.cluster.shared::cta.b64"
"""A wait for what another CTA of the cluster did."""
TILE = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"


def wait(barrier: str, parity: int | str = 0, form: str = "try_wait.parity.shared.b64") -> str:
    """A loop, in one line, until the phase of that parity is complete."""
    poll = f"mbarrier.{form} ready, [{barrier}], {parity}"
    return "{ .reg .pred ready; AGAIN: " + poll + "; @!ready bra AGAIN; }"


def load(target: str, barrier: str, nbytes: int, source: str = "%in") -> str:
    """A bulk copy from global to shared memory."""
    kind = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return f"{kind} [{target}], [{source}], {nbytes}, [{barrier}];"


@cache
def _module(litmus_text: str) -> Module:
    return parse(litmus_text)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 128 bytes."""
    room = np.zeros(array.nbytes + 128, dtype=np.uint8)
    start = -room.ctypes.data % 128
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[...] = array
    return copy


def _map(array: np.ndarray) -> np.ndarray:
    """The tensor map of 64 columns of float32."""
    tensor = TensorMap(array.ctypes.data, "f32", (64, WORDS // 64), (4, 256), BOX)
    return aligned(np.frombuffer(encode(tensor), dtype=np.uint8))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run reported: (kind, barrier) of each hazard and fault, and all of it in words."""

    found: tuple[tuple[str, str], ...]
    words: str

    def tells(self, mutant: Mutant) -> bool:
        """Whether one of the hazards is what the mutant should be told by."""
        return any(
            kind in mutant.kinds
            and (not mutant.barrier or barrier.partition("+")[0] in mutant.barrier.split())
            for kind, barrier in self.found
        )


def run(litmus: Litmus, mutant: str, schedule: Schedule) -> Outcome:
    """Run a kernel, or a mutant of it, with hazards on."""
    kernel = _module(litmus.text(mutant)).kernels[0]
    machine = Machine(schedule, Residency(), LIMITS, hazards=True, strict=True)
    source, out = aligned(np.zeros(WORDS, np.uint32)), aligned(np.zeros(WORDS, np.uint32))
    arrays = [source, out, _map(source), _map(out)]
    for array, name in zip(arrays, ("in", "out", "map", "outmap"), strict=True):
        written = name != "out" or not litmus.track_output
        machine.memory.register(array, name=name, written=written)
    parameters = struct.pack("<4Q", *(array.ctypes.data for array in arrays))
    shape = Shape((litmus.cluster, 1, 1), (litmus.block, 1, 1), (litmus.cluster, 1, 1))
    grids: list[Grid] = []

    def kept(*arguments, **options) -> Grid:
        grids.append(Grid(*arguments, **options))
        return grids[-1]

    found: list[tuple[str, str]] = []
    words = []
    with patch.object(machines, "Grid", kept):
        try:
            machine.launch(kernel, shape, parameters)
        except EmulationError:
            failure = grids[-1].failure
            if failure is None:
                raise
            found.append((failure.kind, _named(failure.message, litmus)))
            words.append(str(failure))
    for hazard in grids[-1].findings:
        found.append((hazard.kind, hazard.barrier))
        words.append(str(hazard))
    return Outcome(tuple(found), "\n".join(words))


def _named(message: str, litmus: Litmus) -> str:
    """The shared variable that a message names."""
    return next((name for name in litmus.shared if re.search(rf"\b{name}\b", message)), "")
