"""Control flow, guards, schedules and special registers, in tiny PTX kernels under every schedule."""

import numpy as np
import pytest

from attn4.emulator.codegen import machine_code
from attn4.emulator.schedule import Random, RoundRobin
from emulated.tiny import SCHEDULES, THREAD, kernel_text, run, words


def test_vector_add_leaves_threads_past_the_end_alone(schedule):
    body = (
        THREAD
        + """
    ld.param.u64 %d3, [p1]; ld.param.u64 %d4, [p2];
    add.s64 %d5, %d3, %d1; add.s64 %d6, %d4, %d1;
    setp.ge.u32 %p1, %r3, 1000;
    @%p1 bra DONE;
    ld.global.b32 %r4, [%d2];
    ld.global.b32 %r5, [%d5];
    add.s32 %r6, %r4, %r5;
    st.global.b32 [%d6], %r6;
DONE: ret;"""
    )
    a, b, c = np.arange(1000, dtype=np.uint32), np.arange(1000, dtype=np.uint32) * 7, words(1024, 9)
    run(kernel_text(body, parameters=3), [a, b, c[:1000]], grid=8, schedule=schedule)
    assert (c[:1000] == a + b).all()
    assert (c[1000:] == 9).all()


DIVERGENT = (
    THREAD
    + """
    mov.u32 %r4, 0;
    mov.u32 %r5, %r3;
COLLATZ:
    setp.le.u32 %p1, %r5, 1;
    @%p1 bra STORE;
    and.b32 %r6, %r5, 1;
    setp.eq.b32 %p2, %r6, 0;
    @%p2 bra EVEN;
    mad.lo.u32 %r5, %r5, 3, 1;
    bra JOIN;
EVEN:
    shr.u32 %r5, %r5, 1;
JOIN:
    add.u32 %r4, %r4, 1;
    bra COLLATZ;
STORE:
    st.global.b32 [%d2], %r4;
    ret;"""
)


def collatz(n):
    steps = 0
    while n > 1:
        n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
    return steps


def test_lanes_leave_a_loop_one_by_one(schedule):
    out = words(160)
    run(kernel_text(DIVERGENT), [out], grid=2, block=80, schedule=schedule)
    assert out.tolist() == [collatz(n) for n in range(160)]


def test_lanes_that_parted_meet_at_the_post_dominator():
    body = (
        THREAD
        + """
    and.b32 %r4, %r0, 1;
    setp.eq.b32 %p1, %r4, 0;
    @%p1 bra EVEN;
    mov.u32 %r5, 100;
    bra JOIN;
EVEN:
    mov.u32 %r5, 200;
JOIN:
    shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;
    st.global.b32 [%d2], %r6;
    ret;"""
    )
    out = words(64)
    run(kernel_text(body), [out], block=64)
    assert out.tolist() == [100, 200] * 32


def test_guards_select_lanes_of_pure_instructions_and_of_effects(schedule):
    body = (
        THREAD
        + """
    setp.lt.u32 %p1, %r0, 10;
    mov.u32 %r4, 1;
    @%p1 mov.u32 %r4, 2;
    @!%p1 add.u32 %r4, %r4, 5;
    @%p1 ld.global.b32 %r5, [%d2];
    @!%p1 mov.u32 %r5, 0;
    add.u32 %r6, %r4, %r5;
    @!%p1 st.global.b32 [%d2], %r6;
    @%p1 exit;
    add.u32 %r6, %r6, 1000;
    st.global.b32 [%d2], %r6;
    ret;"""
    )
    out = words(96, 50)
    run(kernel_text(body), [out], block=96, schedule=schedule)
    assert out.tolist() == [50] * 10 + [1006] * 86


def test_special_registers_tell_each_thread_where_it_is():
    body = (
        THREAD
        + """
    mov.u32 %r4, %laneid;
    mov.u32 %r5, %warpid;
    mov.u32 %r6, %nctaid.x;
    mov.u32 %r7, %lanemask_lt;
    mov.u64 %d5, %globaltimer;
    mov.u32 %r8, %clock;
    mov.u32 %r9, %clock;
    setp.gt.u32 %p1, %r9, %r8;
    mad.lo.u32 %r4, %r5, 100, %r4;
    mad.lo.u32 %r4, %r6, 10000, %r4;
    @%p1 add.u32 %r4, %r4, %r7;
    st.global.b32 [%d2], %r4;
    ret;"""
    )
    out = words(128)
    run(kernel_text(body), [out], grid=2, block=64)
    thread = np.arange(128) % 64
    lane = thread % 32
    assert out.tolist() == (20000 + thread // 32 * 100 + lane + 2**lane - 1).tolist()


def test_a_seed_gives_the_same_run_again():
    def order(seed):
        body = THREAD + "atom.global.add.u32 %r4, [%d0], 1; st.global.b32 [%d2+4], %r4; ret;"
        out = words(33 * 8)
        run(kernel_text(body), [out], grid=8, block=32, schedule=Random(seed))
        return out.tolist()

    assert order(3) == order(3)
    assert any(order(3) != order(seed) for seed in range(4, 8))


def test_counts_say_how_often_each_instruction_ran():
    grid = run(kernel_text(DIVERGENT), [words(64)], block=64, schedule=RoundRobin())
    assert grid.clock == sum(n * size for n, size in zip(grid.tally.total(), grid.program.sizes, strict=True))


def test_a_guard_may_be_written_by_the_instruction_that_it_guards(schedule):
    body = (
        THREAD
        + """
    setp.lt.u32 %p1, %r0, 10;
    mov.pred %p2, %p1;
    @%p1 setp.ge.u32 %p1|%p2, %r0, 5;
    selp.u32 %r4, 1, 0, %p1;
    selp.u32 %r5, 10, 0, %p2;
    add.u32 %r4, %r4, %r5;
    st.global.b32 [%d2], %r4;
    ret;"""
    )
    out = words(32)
    run(kernel_text(body), [out], block=32, schedule=schedule)
    assert out.tolist() == [10] * 5 + [1] * 5 + [0] * 22


def test_generated_code_is_taken_from_disk_and_damaged_code_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = words(64)
    run(kernel_text(DIVERGENT), [out], block=64)
    kept = list((tmp_path / "attn4" / "emulator").iterdir())
    for damage in (lambda data: data, lambda data: data[: len(data) // 2], lambda data: b"nonsense"):
        for file in kept:
            file.write_bytes(damage(file.read_bytes()))
        again = words(64)
        run(kernel_text(DIVERGENT), [again], block=64)
        assert (again == out).all()


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_vector_functions_change_neither_memory_nor_counts(schedule, monkeypatch):
    outs, grids = [], []
    for vectors in (True, False):
        if not vectors:
            monkeypatch.setattr(machine_code, "available", lambda: False)
        elif not machine_code.available():
            pytest.skip("llvmlite is not installed")
        outs.append(words(192))
        grids.append(
            run(kernel_text(DIVERGENT), [outs[-1]], grid=3, block=64, schedule=SCHEDULES[schedule]())
        )
    assert (outs[0] == outs[1]).all()
    assert grids[0].clock == grids[1].clock
    assert grids[0].tally.total() == grids[1].tally.total()
    assert grids[0].program.vectors is not None
    assert grids[1].program.vectors is None
