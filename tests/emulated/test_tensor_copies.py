"""Tiles of tensors between global and shared memory, as kernels issue them."""

import numpy as np
import pytest

from attn4.emulator.isa.registry import UnsupportedInstruction
from attn4.emulator.units.swizzle import Swizzle
from attn4.emulator.units.tensormap import DescriptorError, TensorMap, encode
from emulated.tiny import THREAD, kernel_text, run
from isa_lines import bound

BOX = (8, 16)
TILE_BYTES = 8 * 16 * 4


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 128 bytes."""
    room = np.zeros(array.nbytes + 128, dtype=np.uint8)
    start = -room.ctypes.data % 128
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def descriptor(array: np.ndarray, swizzle: Swizzle = Swizzle.NONE) -> np.ndarray:
    """The tensor map of a float32 matrix with boxes of 16 rows and 8 columns."""
    rows, columns = array.shape
    tensor = TensorMap(array.ctypes.data, "f32", (columns, rows), (4, columns * 4), BOX, swizzle)
    return aligned(np.frombuffer(encode(tensor), dtype=np.uint8))


SETUP = (
    THREAD
    + """
    ld.param.u64 %d3, [p1];
    mov.u32 %r10, memory;
    add.u32 %r11, %r10, 1024;
    setp.ne.b32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r10], 1;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mov.u32 %r20, %cluster_ctarank;
"""
)

WAIT = """
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0;
    @!%p2 bra WAIT;
"""

COPY = (
    SETUP
    + """
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 512;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r11], [%d0, {4, -2}], [%r10];
"""
    + WAIT
    + """
    @%p1 bra DONE;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d3, {4, 14}], [%r11];
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d3, {-4, 0}], [%r11];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE: ret;"""
)


def test_a_tile_is_filled_with_zeros_on_its_way_in_and_clipped_on_its_way_out(schedule):
    source = aligned(np.arange(20 * 16, dtype=np.float32).reshape(20, 16))
    target = aligned(np.full((20, 16), 0.5, dtype=np.float32))
    maps = [descriptor(source), descriptor(target)]
    held = [np.frombuffer(m, dtype=np.uint8) for m in maps]
    text = kernel_text(COPY, parameters=4, shared=2048)
    run(text, [*held, source, target], block=32, schedule=schedule)
    tile = np.zeros((16, 8), dtype=np.float32)
    tile[2:] = source[:14, 4:12]
    expected = np.full((20, 16), 0.5, dtype=np.float32)
    expected[14:, 4:12] = tile[:6]
    expected[:16, :4] += tile[:, 4:]
    assert (target == expected).all()


MULTICAST = (
    SETUP
    + """
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 1024;
    shl.b32 %r21, %r20, 9;
    add.u32 %r22, %r11, %r21;
    shl.b32 %r23, %r20, 3;
    mov.b16 %h1, 3;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r22], [%d0, {%r23, 0}], [%r10], %h1;
"""
    + WAIT
    + """
    shl.b32 %r12, %r0, 4;
    add.u32 %r13, %r11, %r12;
    ld.shared.v4.b32 {%r14, %r15, %r16, %r17}, [%r13];
    mul.wide.u32 %d5, %r3, 16;
    add.s64 %d6, %d3, %d5;
    st.global.v4.b32 [%d6], {%r14, %r15, %r16, %r17};
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;"""
)


def test_a_tile_sent_to_both_blocks_of_a_cluster_completes_on_the_barrier_of_each(schedule):
    source = aligned(np.arange(16 * 16, dtype=np.float32).reshape(16, 16))
    out = np.zeros((2, 2, 16, 8), dtype=np.float32)
    held = np.frombuffer(descriptor(source), dtype=np.uint8)
    text = kernel_text(MULTICAST, parameters=3, shared=4096)
    run(text, [held, out, source], grid=2, block=64, cluster=2, schedule=schedule)
    halves = np.stack([source[:, :8], source[:, 8:]])
    assert (out == halves).all()


def test_a_swizzled_tile_lies_where_the_hardware_puts_it():
    body = (
        SETUP
        + """
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 512;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r11], [%d0, {0, 0}], [%r10];
"""
        + WAIT
        + """
    shl.b32 %r12, %r0, 4;
    add.u32 %r13, %r11, %r12;
    ld.shared.v4.b32 {%r14, %r15, %r16, %r17}, [%r13];
    mul.wide.u32 %d5, %r3, 16;
    add.s64 %d6, %d3, %d5;
    st.global.v4.b32 [%d6], {%r14, %r15, %r16, %r17};
    ret;"""
    )
    source = aligned(np.arange(16 * 8, dtype=np.float32).reshape(16, 8))
    out = np.zeros((32, 4), dtype=np.float32)
    held = np.frombuffer(descriptor(source, Swizzle.B32), dtype=np.uint8)
    run(kernel_text(body, parameters=3, shared=2048), [held, out, source], block=32)
    chunks = source.reshape(32, 4)
    # 32 bytes: bit 4 of an address is exchanged with bit 7.
    expected = [chunks[n ^ (n >> 3 & 1)] for n in range(32)]
    assert (out == np.array(expected)).all()


FOUR_ROWS = (
    SETUP
    + """
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 128;
    cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes
        [%r11], [%d0, {4, 7, 2, -1, 19}], [%r10];
"""
    + WAIT
    + """
    @%p1 bra DONE;
    cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%d3, {8, 1, 30, 0, 12}], [%r11];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE: ret;"""
)


@pytest.mark.parametrize("swizzle", [Swizzle.NONE, Swizzle.B32])
def test_four_rows_are_gathered_and_scattered(schedule, swizzle):
    source = aligned(np.arange(20 * 16, dtype=np.float32).reshape(20, 16))
    target = aligned(np.full((20, 16), 0.5, dtype=np.float32))
    maps = []
    for array in (source, target):
        tensor = TensorMap(array.ctypes.data, "f32", (16, 20), (4, 64), (8, 1), swizzle)
        maps.append(aligned(np.frombuffer(encode(tensor), dtype=np.uint8)))
    text = kernel_text(FOUR_ROWS, parameters=4, shared=2048)
    run(text, [*maps, source, target], block=32, schedule=schedule)
    expected = np.full((20, 16), 0.5, dtype=np.float32)
    expected[1, 8:], expected[0, 8:], expected[12, 8:] = source[7, 4:12], 0, source[19, 4:12]
    np.testing.assert_array_equal(target, expected)


def test_a_box_of_more_than_a_row_gathers_no_rows():
    source = aligned(np.zeros((20, 16), dtype=np.float32))
    text = kernel_text(FOUR_ROWS, parameters=4, shared=2048)
    with pytest.raises(DescriptorError, match="four rows"):
        run(text, [descriptor(source), descriptor(source), source, aligned(source)], block=32)


@pytest.mark.parametrize(
    "line",
    [
        "cp.async.bulk.prefetch.L2.global.im2col [%d1], %r2",
        "cp.async.bulk.prefetch.tensor.3d.L2.global.im2col [%d1, {%r1, %r2, %r3}]",
    ],
)
def test_a_prefetch_of_another_form_is_refused(line):
    assert bound(line.replace(".im2col", "")).sources
    with pytest.raises(UnsupportedInstruction, match="im2col"):
        bound(line)
