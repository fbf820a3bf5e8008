"""The warpgroup product against float64, operands laid out by PTX's swizzle pictures."""

from __future__ import annotations

import numpy as np
import pytest

from attn4.emulator.faults import EmulationError
from attn4.emulator.state.memory import MemoryFault, SharedMemory
from attn4.emulator.units.formats import FORMATS
from attn4.emulator.units.matrix import (
    MatrixDescriptor,
    Tile,
    chunk_offsets,
    decode_tcgen05,
    decode_wgmma,
    encode_tcgen05,
    encode_wgmma,
    gather,
)
from attn4.emulator.units.swizzle import Swizzle
from attn4.emulator.units.tensormap import DescriptorError
from attn4.emulator.units.wgmma import Product, fragment_of, matrix_of
from matrix_operands import SWIZZLES, bits_of, place, values_for


def slow_fragment(matrix):
    """Accumulators of each thread as PTX's figure of the D fragment of m64nNk16 names them."""
    out = np.empty((matrix.shape[1] // 2, 128), matrix.dtype)
    for thread in range(128):
        for register in range(out.shape[0]):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register // 2 % 2)
            column = register // 4 * 8 + thread % 4 * 2 + register % 2
            out[register, thread] = matrix[row, column]
    return out


def slow_a_registers(words):
    """A (64, K) in registers: four a thread, by the figures of the A fragments of k16, k8 and k32."""
    each = 4 // words.itemsize
    out = np.empty((4, 128, each), words.dtype)
    for thread in range(128):
        for register in range(4):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 2)
            first = (register // 2) * 4 * each + thread % 4 * each
            out[register, thread] = words[row, first : first + each]
    return out.reshape(4, -1).view(np.uint32)


FORMS = [
    ("m64n8k16", "f32", "bf16", "bf16"),
    ("m64n64k16", "f32", "f16", "f16"),
    ("m64n256k16", "f32", "bf16", "bf16"),
    ("m64n96k16", "f16", "f16", "f16"),
    ("m64n40k8", "f32", "tf32", "tf32"),
    ("m64n32k32", "f32", "e4m3", "e5m2"),
    ("m64n16k32", "f16", "e5m2", "e5m2"),
    ("m64n24k32", "s32", "s8", "u8"),
]


def random_accumulators(product, seed=9):
    values = np.random.default_rng(seed).integers(-9, 9, (64, product.n))
    if product.d == "f32":
        return values, slow_fragment(values.astype(np.float32)).view(np.uint32)
    if product.d == "s32":
        return values, slow_fragment(values.astype(np.int32)).view(np.uint32)
    halves = slow_fragment(values.astype(np.float16).view(np.uint16)).astype(np.uint32)
    return values, halves[0::2] | halves[1::2] << 16


def result_matrix(product, registers):
    if product.d == "f32":
        return matrix_of(registers.view(np.float32))
    if product.d == "s32":
        return matrix_of(registers.view(np.int32))
    halves = np.stack((registers & 0xFFFF, registers >> 16), 1).reshape(-1, 128).astype(np.uint16)
    return matrix_of(halves).view(np.float16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("in_registers", [False, True])
def test_the_product_equals_numpy_for_every_format_and_swizzle(form, swizzle, in_registers):
    product = Product.of(*form)
    shared = SharedMemory(65536, rank=1)
    a = values_for(product.a, (64, product.k), 1)
    b = values_for(product.b, (product.n, product.k), 2)
    b_descriptor = encode_wgmma(place(shared, shared.base, bits_of(b, product.b), swizzle, False))
    left = slow_a_registers(bits_of(a, product.a))
    if not in_registers:
        left = encode_wgmma(place(shared, shared.base + 32768, bits_of(a, product.a), swizzle, False))
    old, registers = random_accumulators(product)
    for scale_d in (True, False):
        result = product.multiply(shared, left, b_descriptor, registers, scale_d)
        assert result.shape == (product.registers, 128)
        np.testing.assert_array_equal(result_matrix(product, result), a @ b.T + (old if scale_d else 0))


@pytest.mark.parametrize("transpose_a,transpose_b", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mn_major_operands_are_read_transposed(transpose_a, transpose_b, swizzle, kind):
    product = Product.of("m64n128k16", "f32", kind, kind, transpose_a=transpose_a, transpose_b=transpose_b)
    shared = SharedMemory(65536)
    a, b = values_for(kind, (64, 16), 1), values_for(kind, (128, 16), 2)
    left = encode_wgmma(place(shared, 0x400, bits_of(a, kind), swizzle, transpose_a))
    right = encode_wgmma(place(shared, 0x8400, bits_of(b, kind), swizzle, transpose_b))
    result = product.multiply(shared, left, right, np.zeros((64, 128), np.uint32), scale_d=False)
    np.testing.assert_array_equal(result_matrix(product, result), a @ b.T)


def test_k_steps_within_a_swizzled_row_advance_by_32_bytes():
    """64 bfloat16 a row, 128-byte swizzle: four descriptors, two 16-byte units apart, as CuTe has them."""
    product = Product.of("m64n64k16", "f32", "bf16", "bf16")
    shared = SharedMemory(65536)
    a, b = values_for("bf16", (64, 64), 1), values_for("bf16", (64, 64), 2)
    left = encode_wgmma(place(shared, 0x400, bits_of(a, "bf16"), Swizzle.B128, False))
    right = encode_wgmma(place(shared, 0x4400, bits_of(b, "bf16"), Swizzle.B128, False))
    registers = np.zeros((32, 128), np.uint32)
    for step in range(4):
        registers = product.multiply(shared, left + 2 * step, right + 2 * step, registers, scale_d=step > 0)
    np.testing.assert_array_equal(result_matrix(product, registers), a @ b.T)


@pytest.mark.parametrize("negate_a,negate_b", [(True, False), (False, True), (True, True)])
def test_operands_are_negated(negate_a, negate_b):
    product = Product.of("m64n8k16", "f32", "bf16", "bf16", negate_a=negate_a, negate_b=negate_b)
    shared = SharedMemory(8192)
    a, b = values_for("bf16", (64, 16), 1), values_for("bf16", (8, 16), 2)
    right = encode_wgmma(place(shared, 0x400, bits_of(b, "bf16"), Swizzle.NONE, False))
    old, registers = random_accumulators(product)
    result = product.multiply(shared, slow_a_registers(bits_of(a, "bf16")), right, registers)
    sign = -1 if negate_a != negate_b else 1
    np.testing.assert_array_equal(result_matrix(product, result), sign * (a @ b.T) + old)


def test_a_step_is_summed_exactly_then_rounded_once():
    """2**24 + 1 - 2**24 in one step: float32 summed in order would lose the 1."""
    product = Product.of("m64n8k16", "f32", "bf16", "bf16")
    shared = SharedMemory(8192)
    a = np.zeros((64, 16))
    a[:, :3] = 4096, 1, -4096
    b = np.zeros((8, 16))
    b[:, :3] = 4096, 1, 4096
    right = encode_wgmma(place(shared, 0x400, bits_of(b, "bf16"), Swizzle.NONE, False))
    left = slow_a_registers(bits_of(a, "bf16"))
    result = product.multiply(shared, left, right, np.zeros((4, 128), np.uint32))
    assert (result.view(np.float32) == 1).all()


def test_tf32_operands_lose_their_low_thirteen_bits():
    product = Product.of("m64n8k8", "f32", "tf32", "tf32")
    shared = SharedMemory(8192)
    a = np.full((64, 8), 1 + 2.0**-10 + 2.0**-11 + 2.0**-23)
    right = encode_wgmma(place(shared, 0x400, bits_of(np.eye(8), "tf32"), Swizzle.NONE, False))
    result = product.multiply(
        shared, slow_a_registers(bits_of(a, "tf32")), right, np.zeros((4, 128), np.uint32)
    )
    assert (result.view(np.float32) == 1 + 2.0**-10).all()


@pytest.mark.parametrize("kind,exponent,mantissa,largest", [("e4m3", 4, 3, 448), ("e5m2", 5, 2, 57344)])
def test_8_bit_floats_decode_as_their_fields_say(kind, exponent, mantissa, largest):
    values = FORMATS[kind].decode(np.arange(256, dtype=np.uint8))
    bias = 2 ** (exponent - 1) - 1
    for code in range(128):
        e, m = code >> mantissa, code & (1 << mantissa) - 1
        value = (m / 2**mantissa + (e > 0)) * 2.0 ** (max(e, 1) - bias)
        if (kind == "e4m3" and code == 127) or (kind == "e5m2" and code > 124):
            value = np.nan
        elif kind == "e5m2" and code == 124:
            value = np.inf
        np.testing.assert_array_equal(values[[code, code + 128]], [value, -value])
    assert np.nanmax(values[np.isfinite(values)]) == largest


def test_random_floats_stay_within_two_roundings():
    product = Product.of("m64n128k16", "f32", "f16", "f16")
    shared = SharedMemory(65536)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, 16)).astype(np.float16) for n in (64, 128))
    right = encode_wgmma(place(shared, 0x400, b.view(np.uint16), Swizzle.B128, False))
    old = rng.standard_normal((64, 128)).astype(np.float32)
    registers = fragment_of(old).view(np.uint32)
    result = result_matrix(
        product, product.multiply(shared, slow_a_registers(a.view(np.uint16)), right, registers)
    )
    exact = a.astype(np.float64) @ b.astype(np.float64).T + old
    size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T + np.abs(old)
    assert (np.abs(result - exact) <= 2.0**-23 * size).all()


def test_infinities_and_nans_reach_the_accumulators():
    product = Product.of("m64n8k16", "f32", "f16", "f16")
    shared = SharedMemory(8192)
    a, b = np.zeros((64, 16)), np.ones((8, 16))
    a[3, 5], a[4, 5], b[7, 5] = np.inf, np.nan, 0
    right = encode_wgmma(place(shared, 0x400, bits_of(b, "f16"), Swizzle.NONE, False))
    with np.errstate(all="ignore"):
        left = slow_a_registers(bits_of(a, "f16"))
        result = result_matrix(product, product.multiply(shared, left, right, np.zeros((4, 128), np.uint32)))
        np.testing.assert_array_equal(result, a @ b.T)


@pytest.mark.parametrize("saturate,expected", [(True, 2**31 - 1), (False, -(2**31) + 3)])
def test_integer_sums_saturate_or_wrap(saturate, expected):
    product = Product.of("m64n8k32", "s32", "s8", "s8", saturate=saturate)
    shared = SharedMemory(8192)
    a, b = np.zeros((64, 32)), np.zeros((8, 32))
    a[:, 0], b[:, 0] = 2, 2
    right = encode_wgmma(place(shared, 0x400, bits_of(b, "s8"), Swizzle.NONE, False))
    old = np.full((4, 128), 2**31 - 1, np.int32).view(np.uint32)
    result = product.multiply(shared, slow_a_registers(bits_of(a, "s8")), right, old)
    assert (result.view(np.int32) == expected).all()


@pytest.mark.parametrize("n", [8, 64, 256])
def test_fragment_and_matrix_are_inverse_and_follow_the_figure(n):
    matrix = np.arange(64 * n, dtype=np.float32).reshape(64, n)
    np.testing.assert_array_equal(fragment_of(matrix), slow_fragment(matrix))
    np.testing.assert_array_equal(matrix_of(fragment_of(matrix)), matrix)


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
@pytest.mark.parametrize("codec", [(encode_wgmma, decode_wgmma), (encode_tcgen05, decode_tcgen05)])
def test_gather_reads_what_was_placed_and_chunk_offsets_cover_it(swizzle, mn_major, kind, codec):
    encode, decode = codec
    shared = SharedMemory(65536, rank=3)
    depth = 32 // np.dtype(kind).itemsize
    words = np.random.default_rng(0).integers(0, 255, (128, depth)).astype(kind)
    descriptor = decode(encode(place(shared, shared.base + 2048, words, swizzle, mn_major)))
    tile = Tile(128, depth, words.itemsize, mn_major)
    np.testing.assert_array_equal(gather(shared, descriptor, tile), words)
    touched = np.zeros(shared.chunks.size, np.bool_)
    touched[chunk_offsets(shared, descriptor, tile)] = True
    np.testing.assert_array_equal(np.repeat(touched, 16), shared.written)


def test_unwritten_operand_bytes_are_reported():
    product = Product.of("m64n8k16", "f32", "bf16", "bf16")
    shared = SharedMemory(8192)
    right = encode_wgmma(place(shared, 0x400, bits_of(np.ones((8, 16)), "bf16"), Swizzle.NONE, False))
    seen = []
    shared.on_unwritten = seen.append
    left = slow_a_registers(bits_of(np.ones((64, 16)), "bf16"))
    product.multiply(shared, left, right, np.zeros((4, 128), np.uint32))
    assert not seen
    product.multiply(shared, left, right + 2, np.zeros((4, 128), np.uint32))
    assert seen


def test_a_matrix_outside_shared_memory_is_a_fault():
    product = Product.of("m64n8k16", "f32", "bf16", "bf16")
    shared = SharedMemory(1024)
    left, old = np.zeros((4, 128), np.uint32), np.zeros((4, 128), np.uint32)
    for address in (0, 0x780, 0x4000):
        right = encode_wgmma(MatrixDescriptor(address, 128, 128, Swizzle.NONE))
        with pytest.raises(MemoryFault, match="matrix descriptor"):
            product.multiply(shared, left, right, old)


@pytest.mark.parametrize(
    "bits,message",
    [
        (1 << 49, "base offset"),
        (1 << 52, "not understood"),
        (1 << 14, "not understood"),
        (1 << 61, "understood"),
    ],
)
def test_descriptor_bits_that_are_not_understood_are_named(bits, message):
    with pytest.raises(DescriptorError, match=message):
        decode_wgmma(bits)


def test_a_tcgen05_descriptor_wants_its_version_and_a_known_layout():
    good = encode_tcgen05(MatrixDescriptor(0x400, 16, 1024, Swizzle.B128))
    assert good == 0x40 | 1 << 16 | 64 << 32 | 1 << 46 | 2 << 61
    for bits, message in (
        (good ^ 1 << 46, "bits 46-48"),
        (good | 1 << 61, "swizzling modes"),
        (good | 1 << 52, "absolute"),
    ):
        with pytest.raises(DescriptorError, match=message):
            decode_tcgen05(bits)


@pytest.mark.parametrize(
    "form,options",
    [
        (("m64n12k16", "f32", "bf16", "bf16"), {}),
        (("m64n264k16", "f32", "bf16", "bf16"), {}),
        (("m64n64k8", "f32", "bf16", "bf16"), {}),
        (("m64n64k16", "f16", "bf16", "bf16"), {}),
        (("m64n64k16", "f32", "bf16", "f16"), {}),
        (("m64n64k32", "f32", "s8", "s8"), {}),
        (("m64n64k256", "s32", "b1", "b1"), {}),
        (("m32n64k16", "f32", "bf16", "bf16"), {}),
        (("m64n64k32", "f32", "e4m3", "e4m3"), {"transpose_b": True}),
    ],
)
def test_forms_that_do_not_exist_are_refused(form, options):
    with pytest.raises(EmulationError, match="wgmma"):
        Product.of(*form, **options)
