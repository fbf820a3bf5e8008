"""CTAs spread over processes: the same memory, counts and errors as in one."""

import os

import numpy as np
import pytest

from attn4.emulator import spread
from attn4.emulator.codegen.program import program
from attn4.emulator.grid import Grid, Shape
from attn4.emulator.machine import Machine
from attn4.emulator.ptx.parser import parse
from attn4.emulator.state.memory import MemoryFault
from emulated.tiny import THREAD, kernel_text, words

SQUARES = THREAD + "mul.lo.u32 %r4, %r3, %r3; st.global.u32 [%d2], %r4; ret;"
SAME_WORD = THREAD + "st.global.u32 [%d0], %r1; ret;"
COUNTER = THREAD + "atom.global.add.u32 %r4, [%d0], 1; ret;"
PAST_THE_END = (
    THREAD + "setp.eq.u32 %p0, %r1, 3; @%p0 add.s64 %d2, %d2, 65536; st.global.u32 [%d2], %r4; ret;"
)


@pytest.fixture
def in_this_process(monkeypatch):
    """How often a grid ran in this process."""
    ran, run, here = [], Grid.run, os.getpid()
    monkeypatch.setattr(Grid, "run", lambda grid: (ran.append(os.getpid() == here), run(grid))[1])
    return ran


def launched(body, array, processes, ctas=6):
    module = parse(kernel_text("mov.u32 %r4, 7;" + body))
    machine = Machine()
    machine.memory.register(array, name="p0")
    parameters = np.array([array.ctypes.data], np.uint64).tobytes()
    grid = machine.grid(module.kernels[0], Shape((ctas, 1, 1), (64, 1, 1)), parameters)
    spread.run(grid, processes)
    return grid


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_memory_and_counts_are_those_of_one_process(processes, in_this_process):
    alone, together = words(384), words(384)
    one = launched(SQUARES, alone, 1)
    many = launched(SQUARES, together, processes)
    assert in_this_process == [True]
    assert (together == np.arange(384) ** 2).all()
    assert (together == alone).all()
    assert (many.clock, many.retired) == (one.clock, one.retired)
    assert many.tally.total() == one.tally.total()
    assert {w: v.tolist() for w, v in many.tally.by_warp().items()} == {
        w: v.tolist() for w, v in one.tally.by_warp().items()
    }


def test_where_processes_disagree_the_launch_runs_in_one(in_this_process):
    alone, together = words(1), words(1)
    launched(SAME_WORD, alone, 1)
    launched(SAME_WORD, together, 3)
    assert in_this_process == [True, True]
    assert together[0] == alone[0]


def test_a_kernel_with_atomics_is_not_spread(in_this_process):
    array = words(1)
    grid = launched(COUNTER, array, 3)
    assert spread.talks(grid.program).opcode == "atom"
    assert in_this_process == [True]
    assert array[0] == 384


def test_an_error_is_that_of_one_process():
    messages = []
    for processes in (1, 3):
        array = words(384)
        with pytest.raises(MemoryFault) as caught:
            launched(PAST_THE_END, array, processes)
        address = f"{array.ctypes.data + 4 * 192 + 65536:#x}"
        messages.append((str(caught.value).replace(address, "there"), caught.value.__notes__[0]))
        assert address in str(caught.value)
    assert messages[0][1] == messages[1][1]
    assert "CTA (3, 0, 0)" in messages[0][1]


@pytest.mark.parametrize(
    ("instruction", "talks"),
    [
        ("red.global.add.u32 [%d0], 1;", True),
        ("red.add.u32 [%d0], 1;", True),
        ("red.shared.add.u32 [%r0], 1;", False),
        ("ld.acquire.gpu.global.u32 %r1, [%d0];", True),
        ("ld.volatile.global.u32 %r1, [%d0];", True),
        ("ld.global.u32 %r1, [%d0];", False),
        ("st.release.gpu.global.u32 [%d0], %r1;", True),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [%r1], %r2;", True),
        ("cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], %r2;", False),
    ],
)
def test_what_lets_ctas_talk_is_known(instruction, talks):
    kernel = parse(kernel_text(instruction + " ret;")).kernels[0]
    assert (spread.talks(program(kernel)) is not None) is talks
