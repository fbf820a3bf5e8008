"""Loads, stores, atomics, matrices and bulk copies, in tiny PTX kernels."""

import numpy as np
import pytest

from attn4.emulator.grid import Limits
from emulated.tiny import THREAD, kernel_text, run, words


def test_atomics_of_all_blocks_add_up(schedule):
    body = (
        THREAD
        + """
    atom.global.add.u32 %r4, [%d0], 2;
    red.global.max.s32 [%d0+4], %r3;
    red.relaxed.gpu.global.add.f32 [%d0+8], 0f3F800000;
    ret;"""
    )
    out = words(3)
    run(kernel_text(body), [out], grid=5, block=64, schedule=schedule)
    assert out[:2].tolist() == [640, 319]
    assert out[2:].view(np.float32)[0] == 320


LOCK = (
    THREAD
    + """
    setp.ne.b32 %p1, %r0, 0;
    @%p1 ret;
LOCK:
    atom.acquire.gpu.global.cas.b32 %r4, [%d0], 0, 1;
    setp.ne.b32 %p2, %r4, 0;
    @%p2 bra LOCK;
    ld.relaxed.gpu.global.u32 %r5, [%d0+4];
    mad.lo.u32 %r5, %r5, 3, %r1;
    st.relaxed.gpu.global.u32 [%d0+4], %r5;
    atom.release.gpu.global.exch.b32 %r6, [%d0], 0;
    ret;"""
)


def test_a_lock_in_global_memory_serves_blocks_that_are_resident_together(schedule):
    out = words(2)
    run(kernel_text(LOCK), [out], grid=6, block=32, schedule=schedule)
    assert out[0] == 0
    assert out[1] > 0


BULK = (
    THREAD
    + """
    mov.u32 %r10, memory;
    add.u32 %r11, %r10, 128;
    ld.param.u64 %d3, [p1];
    setp.ne.b32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r10], 1;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r11], [%d0], 256, [%r10];
READY:
    bar.sync 0;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0;
    @!%p2 bra WAIT;
    shl.b32 %r12, %r0, 2;
    add.u32 %r13, %r11, %r12;
    ld.shared.b32 %r14, [%r13];
    add.u32 %r14, %r14, 1;
    st.shared.b32 [%r13], %r14;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%d3], [%r11], 256;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d3+256], [%r11], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
DONE:
    bar.sync 0;
    st.shared.b32 [%r13], 0;
    ret;"""
)


def test_bulk_copies_in_and_out_see_what_their_waits_promise(schedule):
    source, out = np.arange(64, dtype=np.uint32), words(128, 5)
    run(kernel_text(BULK, parameters=2, shared=512), [source, out], block=64, schedule=schedule)
    assert out[:64].tolist() == list(range(1, 65))
    assert out[64:].tolist() == list(range(6, 70))


def test_vectors_and_narrow_words_keep_their_order_and_sign():
    body = (
        THREAD
        + """
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d0];
    st.global.v4.b32 [%d0+16], {%r7, %r6, %r5, %r4};
    ld.global.s8 %r8, [%d0+3];
    ld.global.u8 %r9, [%d0+3];
    st.global.v2.b32 [%d0+32], {%r8, %r9};
    ld.global.v2.u16 {%h1, %h2}, [%d0];
    st.global.b16 [%d0+40], %h2;
    st.global.b8 [%d0+42], %r8;
    ret;"""
    )
    out = words(12)
    out[:4] = [0x80112233, 2, 3, 4]
    run(kernel_text(body), [out], block=1)
    assert out[4:8].tolist() == [4, 3, 2, 0x80112233]
    assert out[8:10].tolist() == [0xFFFFFF80, 0x80]
    assert out[10] == 0x00808011


def test_matrices_come_back_from_shared_memory_as_they_were_stored():
    body = (
        THREAD
        + """
    mov.u32 %r10, memory;
    shl.b32 %r11, %r0, 4;
    add.u32 %r12, %r10, %r11;
    mul.lo.u32 %r4, %r0, 65537;
    add.u32 %r5, %r4, 1000; add.u32 %r6, %r4, 2000; add.u32 %r7, %r4, 3000;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r12], {%r4, %r5, %r6, %r7};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r12];
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 %r24, [%r12];
    shl.b32 %r13, %r0, 2;
    add.u32 %r14, %r10, %r13;
    ld.shared.b32 %r15, [%r14];
    mul.wide.u32 %d3, %r0, 16;
    add.s64 %d4, %d0, %d3;
    st.global.v4.b32 [%d4], {%r20, %r23, %r24, %r15};
    ret;"""
    )
    out = words(128)
    run(kernel_text(body, shared=512), [out], block=32)
    lanes = np.arange(32)
    first, last, turned, raw = np.ascontiguousarray(out.reshape(32, 4).T)
    assert first.tolist() == (lanes * 65537).tolist()
    assert last.tolist() == (lanes * 65537 + 3000).tolist()
    assert raw.tolist() == first.tolist()
    matrix = first.view(np.uint16).reshape(8, 8)
    assert turned.view(np.uint16).reshape(8, 8).tolist() == matrix.T.tolist()


def test_blocks_that_wait_for_blocks_after_them_find_them_resident(schedule):
    body = (
        THREAD
        + """
    setp.ne.b32 %p1, %r0, 0;
    @%p1 ret;
    red.relaxed.gpu.global.add.u32 [%d0], 1;
WAIT:
    ld.acquire.gpu.global.u32 %r4, [%d0];
    mov.u32 %r5, %nctaid.x;
    setp.ne.u32 %p2, %r4, %r5;
    @%p2 bra WAIT;
    ret;"""
    )
    out = words(1)
    limits = Limits(idle_instructions=200_000)
    run(kernel_text(body), [out], grid=6, block=1024, sms=1, schedule=schedule, limits=limits)
    assert out[0] == 6


SMALL_COPIES = (
    THREAD
    + """
    mov.u32 %r10, memory;
    add.u32 %r11, %r10, 128;
    and.b32 %r12, %r0, 31;
    shl.b32 %r13, %r12, 4;
    add.u32 %r14, %r11, %r13;
    setp.ne.b32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r10], COUNT;
READY:
    bar.sync 0;
    setp.lt.u32 %p2, %r0, 32;
    @!%p2 bra WAIT;
    cvt.u64.u32 %d3, %r13;
    add.s64 %d4, %d0, %d3;
    cp.async.cg.shared.global [%r14], [%d4], 16;
    cp.async.mbarrier.arriveNOINC.shared.b64 [%r10];
    mbarrier.arrive.shared.b64 _, [%r10];
    ret;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0;
    @!%p3 bra WAIT;
    ld.shared.b32 %r15, [%r14];
    ld.param.u64 %d5, [p1];
    mul.wide.u32 %d6, %r12, 4;
    add.s64 %d5, %d5, %d6;
    st.global.b32 [%d5], %r15;
    ret;"""
)


@pytest.mark.parametrize(("noinc", "count"), [(".noinc", 64), ("", 32)])
def test_small_copies_arrive_at_a_barrier_which_counts_them_only_with_noinc(schedule, noinc, count):
    body = SMALL_COPIES.replace("NOINC", noinc).replace("COUNT", str(count))
    source, out = np.arange(128, dtype=np.uint32), words(32)
    run(kernel_text(body, parameters=2, shared=1024), [source, out], block=64, schedule=schedule)
    assert out.tolist() == list(range(0, 128, 4))
