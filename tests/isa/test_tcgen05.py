"""Tensor memory: allocation, fragments of ld and st, and products of one CTA and of pairs."""

from __future__ import annotations

import numpy as np
import pytest

from attn4.emulator.state.memory import SharedMemory
from attn4.emulator.state.tensor_memory import Access, TensorMemory, TensorMemoryFault
from attn4.emulator.units.matrix import encode_tcgen05
from attn4.emulator.units.swizzle import Swizzle
from attn4.emulator.units.tcgen05 import Cta, copy_matrix, decode_instruction
from attn4.emulator.units.tensormap import DescriptorError
from matrix_operands import SWIZZLES, bits_of, place, values_for

CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "u8": 0, "s8": 1}
KIND = {
    "f16": "f16",
    "bf16": "f16",
    "tf32": "tf32",
    "e4m3": "f8f6f4",
    "e5m2": "f8f6f4",
    "s8": "i8",
    "u8": "i8",
}
RESULT = {"f16": 0, "f32": 1, "s32": 2}


def instruction(m, n, d="f32", a="bf16", b="bf16", transpose_a=0, transpose_b=0, extra=0):
    fields = RESULT[d] << 4 | CODES[a] << 7 | CODES[b] << 10 | transpose_a << 15 | transpose_b << 16
    return fields | n // 8 << 17 | m // 16 << 24 | extra


def full(owner="cta"):
    memory = TensorMemory()
    memory.allocate(512, owner)
    return memory


def d_places(m, ctas, cta, row, column, n):
    """(lane, column) of an element of D by the data path layouts A, B, D and F (PTX 9.7.16.10.5)."""
    local = row - cta * (m // ctas)
    if m // ctas == 128:
        return local, column
    if ctas == 1:
        return local // 16 * 32 + local % 16, column
    return local + 64 * (column // (n // 2)), column % (n // 2)


def read_d(memory, m, ctas, cta, n, base_lane=0, column=0):
    rows = m // ctas
    out = np.empty((rows, n), np.uint32)
    for row in range(rows):
        for j in range(n):
            lane, c = d_places(m, ctas, cta, row + cta * rows, j, n)
            out[row, j] = memory.words[lane + base_lane, c + column]
    return out


@pytest.mark.parametrize(
    "m,ctas,n", [(128, 1, 64), (128, 1, 8), (64, 1, 24), (256, 2, 64), (128, 2, 64), (256, 2, 256)]
)
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("transposed", [(0, 0), (1, 0), (0, 1)])
def test_a_product_from_shared_memory_equals_numpy(m, ctas, n, swizzle, transposed):
    if any(transposed) and (n // ctas) % 8:
        pytest.skip("an MN-major B has whole 16-byte chunks")
    rows, columns = m // ctas, n // ctas
    a, b = values_for("bf16", (m, 16), 1), values_for("bf16", (n, 16), 2)
    pair = []
    for rank in range(ctas):
        shared = SharedMemory(65536, rank)
        own_a, own_b = a[rank * rows :][:rows], b[rank * columns :][:columns]
        da = place(shared, shared.base, bits_of(own_a, "bf16"), swizzle, transposed[0])
        db = place(shared, shared.base + 32768, bits_of(own_b, "bf16"), swizzle, transposed[1])
        pair.append(Cta(shared, full(rank), rank))
    product = decode_instruction("f16", instruction(m, n, "f32", "bf16", "bf16", *transposed), ctas)
    for accumulate, times in ((False, 1), (True, 2)):
        product.multiply(pair, 32, encode_tcgen05(da), encode_tcgen05(db), accumulate=accumulate)
        for rank, cta in enumerate(pair):
            got = read_d(cta.tensor, m, ctas, rank, n, column=32).view(np.float32)
            np.testing.assert_array_equal(got, times * (a @ b.T)[rank * rows :][:rows])
            assert cta.tensor.written.sum() == rows * n


@pytest.mark.parametrize(
    "a,b,d", [("f16", "f16", "f16"), ("tf32", "tf32", "f32"), ("e4m3", "e5m2", "f32"), ("s8", "u8", "s32")]
)
@pytest.mark.parametrize("in_tensor", [False, True])
def test_every_kind_multiplies_from_shared_and_from_tensor_memory(a, b, d, in_tensor):
    product = decode_instruction(KIND[a], instruction(128, 32, d, a, b), 1)
    left, right = values_for(a, (128, product.k), 1), values_for(b, (32, product.k), 2)
    shared, tensor = SharedMemory(65536), full()
    db = encode_tcgen05(place(shared, 0x400, bits_of(right, b), Swizzle.B32, False))
    words = np.ascontiguousarray(bits_of(left, a)).view(np.uint32)
    tensor.write(slice(0, 128), 256, words, "cta")
    source = 256 if in_tensor else encode_tcgen05(place(shared, 0x8400, bits_of(left, a), Swizzle.B32, False))
    product.multiply([Cta(shared, tensor, "cta")], 0, source, db, accumulate=False, a_in_tensor=in_tensor)
    product.multiply([Cta(shared, tensor, "cta")], 0, source, db, accumulate=True, a_in_tensor=in_tensor)
    got = tensor.words[:, :32]
    if d == "f16":
        assert not (got >> 16).any()
        got = got.astype(np.uint16).view(np.float16)
    else:
        got = got.view(np.float32 if d == "f32" else np.int32)
    np.testing.assert_array_equal(got, 2 * (left @ right.T))


def test_a_pair_reads_each_ctas_rows_of_a_from_its_own_tensor_memory():
    left, right = values_for("bf16", (256, 16), 1), values_for("bf16", (32, 16), 2)
    pair = []
    for rank in range(2):
        cta = Cta(SharedMemory(8192, rank), full(), "cta")
        db = place(cta.shared, cta.shared.base, bits_of(right[16 * rank :][:16], "bf16"), Swizzle.NONE, False)
        cta.tensor.write(slice(0, 128), 64, bits_of(left[128 * rank :][:128], "bf16").view(np.uint32), "cta")
        pair.append(cta)
    decode_instruction("f16", instruction(256, 32), 2).multiply(
        pair, 0, 64, encode_tcgen05(db), accumulate=False, a_in_tensor=True
    )
    for rank in range(2):
        got = pair[rank].tensor.words[:, :32].view(np.float32)
        np.testing.assert_array_equal(got, (left @ right.T)[128 * rank :][:128])


def test_two_products_of_64_rows_share_columns_in_alternate_lanes():
    shared, tensor = SharedMemory(16384), full()
    product = decode_instruction("f16", instruction(64, 16), 1)
    b = values_for("bf16", (16, 16), 2)
    db = encode_tcgen05(place(shared, 0x400, bits_of(b, "bf16"), Swizzle.NONE, False))
    both = [values_for("bf16", (64, 16), seed) for seed in (3, 4)]
    for a, lane in zip(both, (0, 16), strict=True):
        da = encode_tcgen05(place(shared, 0x1400, bits_of(a, "bf16"), Swizzle.NONE, False))
        product.multiply([Cta(shared, tensor, "cta")], lane << 16, da, db, accumulate=False)
    for a, lane in zip(both, (0, 16), strict=True):
        got = read_d(tensor, 64, 1, 0, 16, base_lane=lane).view(np.float32)
        np.testing.assert_array_equal(got, a @ b.T)
    with pytest.raises(TensorMemoryFault, match="lane 32"):
        product.multiply([Cta(shared, tensor, "cta")], 32 << 16, da, db, accumulate=False)


def test_negated_operands_negate_the_product():
    shared, tensor = SharedMemory(16384), full()
    a, b = values_for("bf16", (128, 16), 1), values_for("bf16", (16, 16), 2)
    da = encode_tcgen05(place(shared, 0x1400, bits_of(a, "bf16"), Swizzle.NONE, False))
    db = encode_tcgen05(place(shared, 0x400, bits_of(b, "bf16"), Swizzle.NONE, False))
    for extra, sign in ((1 << 13, -1), (1 << 14, -1), (3 << 13, 1)):
        product = decode_instruction("f16", instruction(128, 16, extra=extra), 1)
        product.multiply([Cta(shared, tensor, "cta")], 0, da, db, accumulate=False)
        np.testing.assert_array_equal(tensor.words[:, :16].view(np.float32), sign * (a @ b.T))


@pytest.mark.parametrize(
    "kind,bits,group,message",
    [
        ("mxf4", instruction(128, 64), 1, "kinds"),
        ("f16", instruction(128, 64, extra=4), 1, "sparsity"),
        ("f16", instruction(128, 64, extra=1 << 23), 1, "reserved"),
        ("f16", instruction(128, 64, extra=8), 1, "saturation"),
        ("f16", instruction(128, 64, a="tf32"), 1, "formats"),
        ("f16", instruction(128, 64, d="s32"), 1, "formats"),
        ("f16", instruction(256, 64), 1, "M 256"),
        ("f16", instruction(64, 64), 2, "M 64"),
        ("f16", instruction(256, 24), 2, "N 24"),
        ("f16", instruction(128, 264), 1, "N 264"),
        ("i8", instruction(128, 40, "s32", "s8", "s8"), 1, "N 40"),
        ("tf32", instruction(128, 64, "f32", "tf32", "tf32", 0, 1), 1, "MN-major"),
    ],
)
def test_instruction_descriptors_that_are_not_understood_are_refused(kind, bits, group, message):
    with pytest.raises(DescriptorError, match=message):
        decode_instruction(kind, bits, group)


def fragment_places(shape, thread, register, half):
    """(lane, column) of a register, by PTX's pictures of the data movement shapes (9.7.16.2.3)."""
    if shape == "32x32b":
        return thread, register
    if shape == "16x32bx2":
        return thread % 16, register + (thread // 16) * half
    if shape == "16x64b":
        return thread // 4 + 8 * (thread & 1), 2 * register + (thread >> 1 & 1)
    if shape == "16x128b":
        return thread // 4 + 8 * (register % 2), register // 2 * 4 + thread % 4
    return thread // 4 + 8 * (register // 2 % 2), register // 4 * 8 + thread % 4 * 2 + register % 2


SHAPES = [("32x32b", 1), ("32x32b", 32), ("16x64b", 1), ("16x64b", 8), ("16x128b", 1), ("16x128b", 4),
          ("16x256b", 1), ("16x256b", 8), ("16x32bx2", 4)]  # fmt: skip


@pytest.mark.parametrize("shape,repeat", SHAPES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("warps", [(0,), (6,), (0, 1, 2, 3), (4, 5)])
@pytest.mark.parametrize("lane", [0, 16])
def test_ld_and_st_follow_the_pictures(shape, repeat, packed, warps, lane):
    access = Access(shape, repeat, packed, half_offset=64)
    memory, written = full(), full()
    memory.words[...] = np.random.default_rng(0).integers(0, 2**32, memory.words.shape, dtype=np.uint32)
    memory.written[...] = True
    address = lane << 16 | 40
    if lane and shape == "32x32b":
        with pytest.raises(TensorMemoryFault, match="lane 16"):
            memory.load(access, warps, address, "cta")
        return
    registers = memory.load(access, warps, address, "cta")
    assert registers.shape == (access.registers, 32 * len(warps))
    written.store(access, warps, address, registers, "cta")
    expected = np.zeros_like(written.written)
    for n, warp in enumerate(warps):
        for thread in range(32):
            for register in range(access.registers):
                row, column = fragment_places(shape, thread, register, 0 if packed else 64)
                row += warp % 4 * 32 + lane
                half = 64 * (thread // 16) if packed and shape == "16x32bx2" else 0
                places = [40 + half + 2 * column, 41 + half + 2 * column] if packed else [40 + column]
                words = [int(memory.words[row, c]) for c in places]
                value = words[0] if not packed else words[0] & 0xFFFF | (words[1] & 0xFFFF) << 16
                assert registers[register, 32 * n + thread] == value
                for c, word in zip(places, words, strict=True):
                    assert written.words[row, c] == (word & 0xFFFF if packed else word)
                    expected[row, c] = True
    np.testing.assert_array_equal(written.written, expected)


def test_a_warp_reaches_only_its_quarter():
    memory, access = full(), Access("32x32b", 1)
    memory.load(access, (5,), 32 << 16, "cta")
    memory.load(access, (5,), 0, "cta")
    with pytest.raises(TensorMemoryFault, match="warp 5 accesses lane 64"):
        memory.load(access, (5,), 64 << 16, "cta")


def test_allocation_blocks_when_full_and_frees_poisoned():
    memory = TensorMemory()
    assert [memory.allocate(n, owner) for n, owner in ((128, "a"), (64, "b"), (256, "a"))] == [0, 128, 256]
    assert memory.allocate(128, "c") is None
    assert memory.allocate(64, "c") == 192
    assert memory.peak == 512
    assert memory.leaks() == {"a": 384, "b": 64, "c": 64}
    memory.write(slice(0, 128), 0, np.zeros((128, 4), np.uint32), "a")
    memory.deallocate(0, 128, "a")
    assert (memory.words[:, :128] == 0xCBCBCBCB).all()
    assert not memory.written.any()
    assert memory.leaks() == {"a": 256, "b": 64, "c": 64}


@pytest.mark.parametrize("columns", [0, 16, 48, 1024])
def test_wrong_numbers_of_columns_are_refused(columns):
    with pytest.raises(TensorMemoryFault, match="allocation of"):
        TensorMemory().allocate(columns, "cta")


def test_columns_of_others_and_freed_columns_are_faults():
    memory = TensorMemory()
    memory.allocate(32, "a"), memory.allocate(32, "b")
    access = Access("32x32b", 2)
    with pytest.raises(TensorMemoryFault, match="belong to CTA b"):
        memory.load(access, (0,), 31, "a")
    with pytest.raises(TensorMemoryFault, match="belong to no one"):
        memory.load(access, (0,), 63, "b")
    with pytest.raises(TensorMemoryFault, match="belong to CTA b"):
        memory.deallocate(32, 32, "a")
    memory.deallocate(0, 32, "a")
    with pytest.raises(TensorMemoryFault, match="belong to no one"):
        memory.store(access, (0,), 0, np.zeros((2, 32), np.uint32), "a")
    with pytest.raises(TensorMemoryFault, match="of 512"):
        memory.read(slice(0, 128), 500, 32, "b")


def test_unwritten_words_are_reported():
    memory = full()
    seen = []
    memory.on_unwritten = seen.append
    memory.write(slice(0, 128), 8, np.ones((128, 2), np.uint32), "cta")
    memory.load(Access("32x32b", 2), (1,), 8, "cta")
    assert not seen
    memory.load(Access("32x32b", 2), (1,), 9, "cta")
    assert seen[0].tolist() == [[lane, 10] for lane in range(32, 64)]
    memory.read(slice(0, 2), 7, 2, "cta")
    assert seen[1].tolist() == [[0, 7], [1, 7]]


@pytest.mark.parametrize("shape,repeat", [("16x256b", 64), ("16x128b", 128), ("32x32b", 3), ("8x32b", 1)])
def test_forms_that_do_not_exist_are_refused(shape, repeat):
    with pytest.raises(TensorMemoryFault):
        Access(shape, repeat)


@pytest.mark.parametrize(
    "shape,rows,depth", [("128x256b", 128, 32), ("128x128b", 128, 16), ("32x128b.warpx4", 32, 16)]
)
def test_cp_puts_a_row_in_a_lane(shape, rows, depth):
    shared, tensor = SharedMemory(16384), full()
    raw = np.random.default_rng(0).integers(0, 256, (rows, depth)).astype(np.uint8)
    descriptor = encode_tcgen05(place(shared, 0x400, raw, Swizzle.NONE, False))
    copy_matrix(Cta(shared, tensor, "cta"), shape, 96, descriptor)
    np.testing.assert_array_equal(
        tensor.words[:, 96 : 96 + depth // 4].copy().view(np.uint8), np.tile(raw, (128 // rows, 1))
    )
    assert tensor.written.sum() == 128 * depth // 4
    with pytest.raises(DescriptorError, match="4x256b"):
        copy_matrix(Cta(shared, tensor, "cta"), "4x256b", 0, descriptor)
