"""Tensor memory and tcgen05 products as kernels issue them, under every schedule."""

import numpy as np
import pytest

from attn4.emulator.state.tensor_memory import TensorMemoryFault
from attn4.emulator.units.formats import f32_to_bf16
from attn4.emulator.units.matrix import MatrixDescriptor, encode_tcgen05
from attn4.emulator.units.swizzle import Swizzle
from emulated.tiny import THREAD, kernel_text, run, words

M, N, K = 128, 16, 16
MEMORY = 0x400
"""Offset of the first static shared variable."""
A_OFFSET, B_OFFSET = 1024, 1024 + M * K * 2
A = encode_tcgen05(MatrixDescriptor(MEMORY + A_OFFSET, M * 16, 128, Swizzle.NONE))
B = encode_tcgen05(MatrixDescriptor(MEMORY + B_OFFSET, N * 16, 128, Swizzle.NONE))
FORM = 1 << 4 | 1 << 7 | 1 << 10 | N >> 3 << 17 | M >> 4 << 24
"""float32 += bfloat16 * bfloat16."""

REGISTERS = ", ".join(f"%r{30 + n}" for n in range(N))

PRODUCT = (
    THREAD
    + f"""
    ld.param.u64 %d3, [p1];
    mov.u32 %r10, memory;
    add.u32 %r11, %r10, 16;
    add.u32 %r12, %r10, 24;
    shr.u32 %r13, %r0, 5;
    setp.ne.u32 %p1, %r0, 0;
    setp.ne.u32 %p4, %r13, 0;
    @%p4 bra READY;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r11], 1;
    mbarrier.init.shared.b64 [%r12], 1;
READY:
    bar.sync 0;
    ld.shared.b32 %r14, [%r10];
    @%p1 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r11], {(M + N) * K * 2};
    add.u32 %r15, %r10, {A_OFFSET};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r15], [%d0], {(M + N) * K * 2}, [%r11];
LOADED:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r11], 0;
    @!%p2 bra LOADED;
    @%p1 bra DONE;
    mov.b64 %d7, {A};
    mov.b64 %d8, {B};
    mov.b32 %r16, {FORM};
    setp.eq.u32 %p3, %r0, 99;
    tcgen05.mma.cta_group::1.kind::f16 [%r14], %d7, %d8, %r16, %p3;
    tcgen05.mma.cta_group::1.kind::f16 [%r14], %d7, %d8, %r16, 1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r12];
DONE:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r12], 0;
    @!%p2 bra DONE;
    tcgen05.fence::after_thread_sync;
    shl.b32 %r17, %r13, 21;
    add.u32 %r18, %r14, %r17;
    tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {{{REGISTERS}}}, [%r18];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r18+{N}], {{%r30}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r31}}, [%r18+{N}];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %d5, %r0, {N * 4};
    add.s64 %d6, %d3, %d5;
"""
    + "\n".join(f"st.global.b32 [%d6+{4 * n}], %r{30 + n};" for n in range(N))
    + """
    bar.sync 0;
    @%p4 ret;
    FREE
    ret;"""
)
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r14, 32;"


def laid_out(matrix):
    """Rows of 16 bfloat16 as the layout without swizzle has them: 8 rows of 16 bytes, then the next 8."""
    words = f32_to_bf16(matrix.astype(np.float32))
    return words.reshape(-1, 2, 8).transpose(1, 0, 2).reshape(-1)


def product(text, schedule):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 8, (rows, K)).astype(np.float32) for rows in (M, N))
    image = np.concatenate([laid_out(a), laid_out(b)])
    out = np.zeros((M, N), dtype=np.float32)
    run(text, [image, out], block=128, schedule=schedule)
    return out, 2 * a @ b.T


def test_a_product_is_accumulated_loaded_and_stored_by_each_warp_in_its_lanes(schedule):
    text = kernel_text(PRODUCT.replace("FREE", FREE), parameters=2, shared=A_OFFSET + (M + N) * K * 2)
    out, expected = product(text, schedule)
    assert (out[:, 0] == expected[:, 0]).all()
    assert (out[:, 1] == expected[:, 0]).all()
    assert (out[:, 2:] == expected[:, 2:]).all()


def test_tensor_memory_used_after_it_was_given_back_is_a_fault(schedule):
    late = FREE + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r31}, [%r18];"
    text = kernel_text(PRODUCT.replace("FREE", late), parameters=2, shared=A_OFFSET + (M + N) * K * 2)
    with pytest.raises(TensorMemoryFault, match="belong to no one"):
        product(text, schedule)


def test_commits_of_a_thread_are_signalled_in_the_order_of_issue(schedule):
    body = (
        THREAD
        + """
    mov.u32 %r10, memory;
    setp.ne.b32 %p1, %r0, 0;
    @%p1 ret;
    mbarrier.init.shared.b64 [%r10], 1;
    mbarrier.init.shared.b64 [%r10+8], 1;
    fence.mbarrier_init.release.cluster;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r10];
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r10+8];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r10+8], 0;
    @!%p2 bra WAIT;
    mbarrier.test_wait.parity.shared.b64 %p3, [%r10], 0;
    selp.u32 %r11, 1, 0, %p3;
    st.global.b32 [%d2], %r11;
    ret;"""
    )
    out = words(32)
    run(kernel_text(body, shared=16), [out], block=32, schedule=schedule)
    assert out[0] == 1
