"""mbarriers, named barriers and cluster barriers, in tiny PTX kernels under every schedule."""

import numpy as np
import pytest

from attn4.emulator.faults import BarrierFault, DivergedWarp
from emulated.tiny import THREAD, kernel_text, run, words


def test_a_tree_of_barriers_sums_a_block(schedule):
    body = (
        THREAD
        + """
    ld.global.b32 %r4, [%d2];
    mov.u32 %r5, memory;
    shl.b32 %r6, %r0, 2;
    add.s32 %r7, %r5, %r6;
    st.shared.b32 [%r7], %r4;
    mov.u32 %r8, 128;
LOOP:
    bar.sync 0;
    setp.ge.u32 %p1, %r0, %r8;
    @%p1 bra NEXT;
    shl.b32 %r9, %r8, 2;
    add.s32 %r10, %r7, %r9;
    ld.shared.b32 %r11, [%r10];
    ld.shared.b32 %r12, [%r7];
    add.s32 %r13, %r11, %r12;
    st.shared.b32 [%r7], %r13;
NEXT:
    shr.u32 %r8, %r8, 1;
    setp.ne.b32 %p2, %r8, 0;
    @%p2 bra LOOP;
    setp.ne.b32 %p3, %r0, 0;
    @%p3 bra DONE;
    ld.shared.b32 %r14, [%r5];
    ld.param.u64 %d3, [p1];
    mul.wide.u32 %d4, %r1, 4;
    add.s64 %d5, %d3, %d4;
    st.global.b32 [%d5], %r14;
DONE: ret;"""
    )
    values = np.random.default_rng(0).integers(0, 1000, (3, 256), dtype=np.uint32)
    sums = words(3)
    run(kernel_text(body, parameters=2, shared=1024), [values, sums], grid=3, block=256, schedule=schedule)
    assert sums.tolist() == values.sum(axis=1).tolist()


def test_a_branch_on_the_warp_does_not_make_one_warp_wait_for_another(schedule):
    # Warp 1 can only leave its branch after warp 0 has passed the join of the two.
    body = (
        THREAD
        + """
    mov.u32 %r10, memory;
    setp.ne.b32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r10], 1;
READY:
    bar.sync 0;
    setp.lt.u32 %p2, %r0, 32;
    @%p2 bra JOIN;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0, 10000;
    @!%p3 bra WAIT;
JOIN:
    @%p1 bra STORE;
    mbarrier.arrive.shared.b64 _, [%r10];
STORE:
    st.global.b32 [%d2], %r0;
    ret;"""
    )
    out = words(64)
    run(kernel_text(body, shared=8), [out], block=64, schedule=schedule)
    assert out.tolist() == list(range(64))


PRODUCER_CONSUMER = (
    THREAD
    + """
    mov.u32 %r10, memory;
    add.u32 %r11, %r10, 8;
    add.u32 %r12, %r10, 128;
    setp.ne.b32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r10], 32;
    mbarrier.init.shared.b64 [%r11], 32;
READY:
    bar.sync 0;
    mov.u32 %r20, 0;
    and.b32 %r21, %r0, 31;
    shl.b32 %r22, %r21, 2;
    add.u32 %r23, %r12, %r22;
    mov.u32 %r30, 0;
    setp.lt.u32 %p2, %r0, 32;
    @%p2 bra PRODUCE;
CONSUME:
    and.b32 %r24, %r20, 1;
FULL:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r10], %r24;
    @!%p3 bra FULL;
    ld.shared.b32 %r25, [%r23];
    mad.lo.u32 %r30, %r30, 3, %r25;
    mbarrier.arrive.shared.b64 _, [%r11];
    add.u32 %r20, %r20, 1;
    setp.lt.u32 %p4, %r20, 9;
    @%p4 bra CONSUME;
    st.global.b32 [%d2], %r30;
    ret;
PRODUCE:
    and.b32 %r24, %r20, 1;
    xor.b32 %r24, %r24, 1;
EMPTY:
    mbarrier.test_wait.parity.shared.b64 %p3, [%r11], %r24;
    @!%p3 bra EMPTY;
    mad.lo.u32 %r26, %r20, 100, %r21;
    st.shared.b32 [%r23], %r26;
    mbarrier.arrive.shared.b64 _, [%r10];
    add.u32 %r20, %r20, 1;
    setp.lt.u32 %p4, %r20, 9;
    @%p4 bra PRODUCE;
    ret;"""
)


def test_a_ring_of_one_stage_carries_values_from_warp_to_warp(schedule):
    out = words(64)
    run(kernel_text(PRODUCER_CONSUMER, shared=256), [out], block=64, schedule=schedule)
    expected = np.zeros(32, dtype=np.uint32)
    for step in range(9):
        expected = expected * 3 + step * 100 + np.arange(32, dtype=np.uint32)
    assert out[32:].tolist() == expected.tolist()


def test_named_barriers_hand_over_from_arrive_to_sync(schedule):
    body = (
        THREAD
        + """
    mov.u32 %r10, memory;
    shl.b32 %r11, %r0, 2;
    and.b32 %r12, %r11, 127;
    add.u32 %r13, %r10, %r12;
    setp.lt.u32 %p1, %r0, 32;
    @!%p1 bra READ;
    st.shared.b32 [%r13], %r0;
    bar.arrive 1, 64;
    ret;
READ:
    bar.sync 1, 64;
    ld.shared.b32 %r14, [%r13];
    st.global.b32 [%d2], %r14;
    ret;"""
    )
    out = words(64)
    run(kernel_text(body, shared=128), [out], block=64, schedule=schedule)
    assert out[32:].tolist() == list(range(32))


def test_a_barrier_of_the_block_does_not_wait_for_warps_that_exited(schedule):
    body = (
        THREAD
        + """
    setp.ge.u32 %p1, %r0, 32;
    @%p1 ret;
    bar.sync 0;
    st.global.b32 [%d2], 7;
    ret;"""
    )
    out = words(96)
    run(kernel_text(body), [out], block=96, schedule=schedule)
    assert out.tolist() == [7] * 32 + [0] * 64


def test_reductions_over_a_barrier_count_and_combine_predicates(schedule):
    body = (
        THREAD
        + """
    setp.lt.u32 %p1, %r0, 40;
    bar.red.popc.u32 %r4, 0, %p1;
    bar.red.and.pred %p2, 0, %p1;
    bar.red.or.pred %p3, 0, %p1;
    selp.u32 %r5, 1000, 0, %p2;
    selp.u32 %r6, 500, 0, %p3;
    add.u32 %r4, %r4, %r5;
    add.u32 %r4, %r4, %r6;
    st.global.b32 [%d2], %r4;
    ret;"""
    )
    out = words(128)
    run(kernel_text(body), [out], schedule=schedule)
    assert (out == 540).all()


def test_clusters_read_each_others_shared_memory_between_their_barriers(schedule):
    body = (
        THREAD
        + """
    mov.u32 %r10, memory;
    mad.lo.u32 %r11, %r1, 1000, %r0;
    shl.b32 %r12, %r0, 2;
    add.u32 %r13, %r10, %r12;
    st.shared.b32 [%r13], %r11;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 %r14, %cluster_ctarank;
    xor.b32 %r15, %r14, 1;
    mapa.shared::cluster.u32 %r16, %r13, %r15;
    ld.shared::cluster.b32 %r17, [%r16];
    barrier.cluster.arrive;
    barrier.cluster.wait;
    st.global.b32 [%d2], %r17;
    ret;"""
    )
    out = words(256)
    run(kernel_text(body, shared=256), [out], grid=4, block=64, cluster=2, schedule=schedule)
    peers = [1, 0, 3, 2]
    assert out.reshape(4, 64).tolist() == [[peer * 1000 + t for t in range(64)] for peer in peers]


def test_a_warp_that_polls_is_not_held_up_by_the_join_of_the_warps_it_runs_with(schedule):
    body = (
        THREAD
        + """
    setp.lt.u32 %p2, %r0, 32;
    @%p2 bra JOIN;
WAIT:
    ld.acquire.gpu.global.u32 %r4, [%d0+256];
    setp.eq.u32 %p3, %r4, 0;
    @%p3 bra WAIT;
JOIN:
    setp.ne.u32 %p1, %r0, 0;
    @!%p1 st.release.gpu.global.u32 [%d0+256], 1;
    st.global.b32 [%d2], %r0;
    ret;"""
    )
    out = words(65)
    run(kernel_text(body), [out], block=64, schedule=schedule)
    assert out[:64].tolist() == list(range(64))


def test_warps_that_run_together_may_name_different_barriers(schedule):
    # Warps n and n + 4 meet at barrier n + 1; warp n + 4 reads what warp n wrote.
    body = (
        THREAD
        + """
    mov.u32 %r10, memory;
    shr.u32 %r11, %r0, 5;
    and.b32 %r12, %r11, 3;
    add.u32 %r13, %r12, 1;
    and.b32 %r14, %r0, 127;
    shl.b32 %r15, %r14, 2;
    add.u32 %r16, %r10, %r15;
    setp.ge.u32 %p1, %r0, 128;
    @%p1 bra READ;
    st.shared.b32 [%r16], %r0;
    bar.sync %r13, 64;
    ret;
READ:
    bar.sync %r13, 64;
    ld.shared.b32 %r17, [%r16];
    st.global.b32 [%d2], %r17;
    ret;"""
    )
    out = words(256)
    run(kernel_text(body, shared=512), [out], block=256, schedule=schedule)
    assert out[128:].tolist() == list(range(128))


def test_a_warp_that_arrives_twice_in_a_phase_of_a_named_barrier_is_a_fault(schedule):
    body = (
        THREAD
        + """
    setp.lt.u32 %p1, %r0, 128;
    @!%p1 bra REST;
    bar.arrive 1, 256;
    bar.arrive 1, 256;
REST:
    st.global.b32 [%d2], %r0;
    ret;"""
    )
    with pytest.raises(BarrierFault, match="twice in one phase"):
        run(kernel_text(body), [words(256)], block=256, schedule=schedule)


def test_a_guarded_barrier_does_not_hold_up_the_warps_that_its_guard_leaves_out(schedule):
    body = (
        THREAD
        + """
    setp.lt.u32 %p1, %r0, 32;
    @%p1 bar.sync 1, 64;
    @!%p1 bar.sync 1, 64;
    st.global.b32 [%d2], %r0;
    ret;"""
    )
    out = words(64)
    run(kernel_text(body), [out], block=64, schedule=schedule)
    assert out.tolist() == list(range(64))


def test_an_aligned_barrier_reached_by_some_lanes_of_warps_that_run_together_is_a_fault(schedule):
    body = THREAD + "and.b32 %r4, %r0, 31; setp.lt.u32 %p1, %r4, 7; @%p1 bar.sync 0; ret;"
    with pytest.raises(DivergedWarp, match="only lanes"):
        run(kernel_text(body), [words(64)], block=64, schedule=schedule)


def test_warps_that_run_as_one_wait_at_barriers_of_their_own(schedule):
    # Warps 0-3 and 4-7 may run as one each. Warp n waits for warp n + 4 at barrier n + 1; warp n + 4 arrives
    # there only after warp n - 1, which is then past its own, has let it: so they cannot all pass at once.
    body = (
        THREAD
        + """
    ld.param.u64 %d3, [p1];
    shr.u32 %r10, %r0, 5;
    and.b32 %r11, %r10, 3;
    add.u32 %r12, %r11, 1;
    add.u32 %r13, %r11, 8;
    setp.ge.u32 %p1, %r10, 4;
    @%p1 bra SECOND;
    bar.sync %r12, 64;
    mul.wide.u32 %d4, %r11, 4;
    add.s64 %d5, %d3, %d4;
    and.b32 %r14, %r0, 31;
    setp.ne.u32 %p2, %r14, 0;
    @%p2 bra LET;
    atom.global.add.u32 %r15, [%d3], 1;
    st.global.b32 [%d5+16], %r15;
LET:
    setp.eq.u32 %p3, %r11, 3;
    @%p3 bra DONE;
    add.u32 %r16, %r13, 1;
    bar.arrive %r16, 64;
    bra DONE;
SECOND:
    setp.eq.u32 %p4, %r11, 0;
    @%p4 bra MEET;
    bar.sync %r13, 64;
MEET:
    bar.sync %r12, 64;
DONE:
    st.global.b32 [%d2], %r10;
    ret;"""
    )
    out, order = words(256), words(8)
    run(kernel_text(body, parameters=2), [out, order], block=256, schedule=schedule)
    assert (out == np.arange(256) // 32).all()
    assert order.tolist() == [4, 0, 0, 0, 0, 1, 2, 3]
