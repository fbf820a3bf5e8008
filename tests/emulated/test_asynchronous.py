"""Stores and reductions that an mbarrier counts, bulk zeros, wide atomics, tensor maps changed by kernels."""

import struct

import numpy as np
import pytest

from attn4.emulator.faults import Trap
from attn4.emulator.units.swizzle import Swizzle
from attn4.emulator.units.tensormap import TensorMap, decode, encode
from emulated.tiny import THREAD, kernel_text, run, words

EXCHANGE = """
mov.u32 %r10, memory;
mapa.shared::cluster.u32 %r11, %r10, {other};
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r10+512], 1;
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r10+512], {nbytes};
mad.lo.u32 %r12, %r0, 16, %r11;
mul.lo.u32 %r20, %r0, 3;
st.shared.v4.b32 [%r12], {{%r20, %r20, %r20, %r20}};
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r13, %cluster_ctarank;
xor.b32 %r14, %r13, 1;
mapa.shared::cluster.u32 %r15, %r10, %r14;
mad.lo.u32 %r16, %r0, 16, %r15;
add.u32 %r17, %r15, 512;
mad.lo.u32 %r18, %r13, 1000, %r0;
{store}
waiting:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r10+512], 0;
@!%p1 bra waiting;
mad.lo.u32 %r12, %r0, 16, %r10;
ld.shared.b32 %r19, [%r12+{read}];
st.global.b32 [%d2], %r19;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ret;
"""
BYTES = "mbarrier::complete_tx::bytes"


def exchanged(store, nbytes, read, schedule):
    """What each thread finds in its own CTA's memory after its twin of the other CTA stored there."""
    body = EXCHANGE.format(store=store, nbytes=nbytes, read=read, other="%cluster_ctarank")
    body = body.replace("mapa.shared::cluster.u32 %r11, %r10, %cluster_ctarank;", "mov.u32 %r11, %r10;")
    out = words(64)
    run(kernel_text(THREAD + body, shared=520), [out], grid=2, block=32, cluster=2, schedule=schedule)
    return out.reshape(2, 32)


def test_an_asynchronous_store_reaches_the_other_block(schedule):
    store = f"st.async.weak.shared::cluster.{BYTES}.v4.b32 [%r16], {{%r18, %r0, %r13, %r18}}, [%r17];"
    out = exchanged(store, 32 * 16, 12, schedule)
    np.testing.assert_array_equal(out, [np.arange(32) + 1000, np.arange(32)])


def test_an_asynchronous_reduction_reaches_the_other_block(schedule):
    store = f"red.async.relaxed.cluster.shared::cluster.{BYTES}.add.u32 [%r16+4], %r18, [%r17];"
    out = exchanged(store, 32 * 4, 4, schedule)
    np.testing.assert_array_equal(out, [np.arange(32) * 4 + 1000, np.arange(32) * 4])


def test_bulk_zeros_and_128_bit_words():
    body = (
        THREAD
        + """
        .reg .b128 %q<4>;
        mov.u32 %r10, memory;
        mov.u64 %d10, 256;
        cvt.u64.u32 %d11, %r10;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 st.bulk.weak.shared::cta [%d11], %d10, 0;
        bar.sync 0;
        mad.lo.u32 %r12, %r0, 16, %r10;
        cvt.u64.u32 %d12, %r0;
        mov.u64 %d13, 7;
        mov.b128 %q1, {%d12, %d13};
        setp.lt.u32 %p1, %r0, 8;
        @%p1 st.shared.b128 [%r12+512], %q1;
        @%p1 ld.shared.b128 %q2, [%r12+512];
        @!%p1 ld.shared.b128 %q2, [%r10+128];
        mov.b128 {%d14, %d15}, %q2;
        add.u64 %d14, %d14, %d15;
        st.global.b32 [%d2], %d14;
        ret;
        """.replace("st.global.b32 [%d2], %d14", "cvt.u32.u64 %r13, %d14; st.global.b32 [%d2], %r13")
    )
    out = words(32)
    run(kernel_text(body, shared=1024), [out], block=32)
    assert out.tolist() == [n + 7 if n < 8 else 0 for n in range(32)]


def test_atomics_of_128_bits_exchange_and_compare():
    body = (
        THREAD
        + """
        .reg .b128 %q<4>;
        ld.param.u64 %d5, [p1];
        mov.u64 %d6, 5; mov.u64 %d7, 6; mov.u64 %d8, 77;
        mov.b128 %q1, {%d6, %d7};
        mov.b128 %q2, {%d8, %d8};
        setp.eq.u32 %p0, %r0, 0;
        @%p0 atom.global.cas.b128 %q3, [%d5], %q1, %q2;
        @%p0 atom.global.cas.b128 %q3, [%d5], %q1, %q1;
        @%p0 atom.global.exch.b128 %q3, [%d5+16], %q2;
        ret;
        """
    )
    room = np.empty(12, np.uint64)
    memory = room[(-room.ctypes.data // 8) % 2 :][:4]
    memory[:] = [5, 6, 1, 2]
    run(kernel_text(body, parameters=2), [words(32), memory], block=32)
    assert memory.tolist() == [77, 77, 77, 77]


def test_a_branch_by_an_index_goes_to_its_label(schedule):
    body = (
        THREAD
        + """
        table: .branchtargets one, two, three;
        and.b32 %r4, %r0, 3;
        setp.ne.u32 %p1, %r4, 3;
        mov.u32 %r5, 400;
        @%p1 brx.idx %r4, table;
        bra done;
        one: mov.u32 %r5, 100; bra done;
        two: mov.u32 %r5, 200; bra done;
        three: mov.u32 %r5, 300;
        done:
        add.u32 %r5, %r5, %r0;
        st.global.b32 [%d2], %r5;
        ret;
        """
    )
    out = words(64)
    run(kernel_text(body), [out], block=64, schedule=schedule)
    assert out.tolist() == [100 * (n % 4 + 1) + n for n in range(64)]
    with pytest.raises(Trap):
        run(kernel_text(body.replace("@%p1 brx", "brx")), [words(64)], block=64)


def test_fields_of_a_tensor_map_are_replaced():
    target = TensorMap(
        address=0x123456789AB0,
        element="f32",
        shape=(40, 30, 7),
        strides=(4, 160, 1 << 36),
        box=(8, 5, 2),
        swizzle=Swizzle.B32,
        steps=(1, 2, 1),
        nan_fill=True,
        tf32=True,
    )
    values = [
        ("global_address", "b64", [(None, target.address)]),
        ("rank", "b32", [(None, 2)]),
        ("box_dim", "b32", [(n, b) for n, b in enumerate(target.box)]),
        ("global_dim", "b32", [(n, s) for n, s in enumerate(target.shape)]),
        ("global_stride", "b64", [(n, s) for n, s in enumerate(target.strides[1:])]),
        ("element_stride", "b32", [(n, s) for n, s in enumerate(target.steps)]),
        ("elemtype", "b32", [(None, 11)]),
        ("swizzle_mode", "b32", [(None, 1)]),
        ("fill_mode", "b32", [(None, 1)]),
    ]
    lines = []
    for field, kind, given in values:
        for ordinal, value in given:
            where = "" if ordinal is None else f"{ordinal}, "
            name = f"tensormap.replace.tile.{field}.shared::cta.b1024.{kind}"
            register = "%d20" if kind == "b64" else "%r20"
            lines.append(f"mov.{kind} {register}, {value}; @%p0 {name} [%r10], {where}{register};")
    start = encode(TensorMap(16, "bf16", (64, 9), (2, 128), (64, 3)))
    body = (
        THREAD
        + """
        ld.param.u64 %d5, [p1];
        mov.u32 %r10, memory;
        mul.wide.u32 %d6, %r0, 4;
        add.u64 %d7, %d5, %d6;
        ld.global.b32 %r11, [%d7];
        mad.lo.u32 %r12, %r0, 4, %r10;
        st.shared.b32 [%r12], %r11;
        bar.sync 0;
        setp.eq.u32 %p0, %r0, 0;
        """
        + "\n".join(lines)
        + """
        bar.warp.sync -1;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [%d5], [%r10], 128;
        fence.proxy.tensormap::generic.acquire.gpu [%d5], 128;
        ret;
        """
    )
    memory = np.frombuffer(start, np.uint32).copy()
    run(kernel_text(body, parameters=2, shared=128), [words(32), memory], block=32)
    assert decode(struct.pack("<32I", *memory.tolist())) == target
