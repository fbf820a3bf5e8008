"""What is wrong with a kernel or its launch ends in an error that says where."""

import pytest

from attn4.emulator.faults import (
    BarrierFault,
    Deadlock,
    DivergedWarp,
    EmulationError,
    Livelock,
    StepLimit,
    Trap,
)
from attn4.emulator.grid import Limits
from attn4.emulator.isa.registry import UnsupportedInstruction
from attn4.emulator.state.memory import MemoryFault
from emulated.tiny import THREAD, kernel_text, run, words


def test_a_trip_to_nowhere_ends_in_a_report_of_who_waits_for_what(schedule):
    body = (
        THREAD
        + """
    mov.u32 %r10, memory;
    setp.ne.b32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r10], 2;
    mbarrier.arrive.shared.b64 _, [%r10];
READY:
    bar.sync 0;
    setp.lt.u32 %p2, %r0, 32;
    @%p2 bra OTHER;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0;
    @!%p3 bra WAIT;
    ret;
OTHER:
    bar.sync 3, 64;
    ret;"""
    )
    with pytest.raises(Deadlock) as caught:
        run(kernel_text(body, shared=8), [words(64)], block=64, schedule=schedule)
    text = str(caught.value)
    assert "parity 0 of mbarrier memory at 0x400 in phase 0 (1 of 2 arrivals outstanding)" in text
    assert "arrived last: warp 0" in text
    assert "barrier 3 in phase 0 (32 of 64 threads arrived)" in text
    assert "PTX line" in text


def test_a_spin_on_memory_that_nobody_writes_is_a_livelock(schedule):
    body = (
        THREAD
        + """
SPIN:
    ld.relaxed.gpu.global.u32 %r4, [%d0];
    setp.eq.u32 %p1, %r4, 0;
    @%p1 bra SPIN;
    ret;"""
    )
    with pytest.raises(Livelock):
        run(
            kernel_text(body),
            [words(64)],
            block=64,
            schedule=schedule,
            limits=Limits(idle_instructions=2000),
        )


def test_a_loop_without_end_stops_at_the_limit():
    body = (
        THREAD
        + """
SPIN:
    st.global.u32 [%d2], %r0;
    bra SPIN;"""
    )
    with pytest.raises(StepLimit):
        run(kernel_text(body), [words(32)], block=32, limits=Limits(instructions=5000))


@pytest.mark.parametrize(
    "body, fault, message",
    [
        ("mbarrier.arrive.shared.b64 _, [memory];", BarrierFault, "no mbarrier was initialised"),
        (
            "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [memory], 3;"
            "bar.sync 0; mbarrier.arrive.shared.b64 _, [memory];",
            BarrierFault,
            "takes only",
        ),
        ("setp.eq.u32 %p1, %r0, 5; @%p1 bra IN; ret; IN: bar.sync 0;", None, ""),
        ("setp.eq.u32 %p1, %r0, 5; @!%p1 bra OUT; bar.sync 0; OUT: bar.sync 1;", DivergedWarp, "lanes [5]"),
        ("bar.sync 1, 40;", BarrierFault, "multiple of the warp size"),
        ("ld.global.b32 %r4, [%d2+4000];", MemoryFault, "belong to no allocation"),
        ("ld.global.b32 %r4, [%d2+1];", MemoryFault, "not a multiple of 4"),
        ("st.shared.b32 [memory+4096], %r0;", MemoryFault, "outside"),
        ("ld.shared.b32 %r4, [memory+8];", MemoryFault, "no one wrote"),
        ("st.shared.u16 [memory], 7; ld.shared.b32 %r4, [memory];", MemoryFault, "no one wrote"),
        ("trap;", Trap, "executed trap"),
        ("barrier.cluster.wait;", BarrierFault, "without an arrive"),
    ],
)
def test_faults_name_the_kernel_the_block_the_warp_and_the_line(body, fault, message):
    text = kernel_text(THREAD + body + "\nret;", shared=64)
    if fault is None:
        run(text, [words(64)], block=64)
        return
    with pytest.raises(fault, match=message.replace("[", r"\[")) as caught:
        run(text, [words(64)], block=64)
    (note,) = caught.value.__notes__
    assert "kernel k, CTA (0, 0, 0), warp" in note
    assert "PTX line" in note


def test_what_is_not_emulated_is_refused_by_name_and_line():
    text = kernel_text(
        "ld.global.b32 %r1, [%d0];\ntex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%d0, {%f1,%f2}];\nret;"
    )
    with pytest.raises(UnsupportedInstruction, match=r"line \d+: tex\.2d.*opcode tex is not known"):
        run(text, [words(1)])


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"block": 2048}, "the limit is 1024"),
        ({"grid": 3, "cluster": 2}, "no multiple of cluster"),
        ({"grid": 0}, "at least 1"),
    ],
)
def test_launches_that_no_device_takes_are_refused(keywords, message):
    with pytest.raises(EmulationError, match=message):
        run(kernel_text("ret;"), [words(1)], **keywords)
