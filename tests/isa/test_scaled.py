"""Products with 4- and 6-bit operands and with scales for blocks, lanes that are left out, D divided."""

from __future__ import annotations

import numpy as np
import pytest

from attn4.emulator.isa.registry import UnsupportedInstruction
from attn4.emulator.state.memory import SharedMemory
from attn4.emulator.state.tensor_memory import TensorMemory, TensorMemoryFault
from attn4.emulator.units.formats import FORMATS
from attn4.emulator.units.matrix import encode_tcgen05
from attn4.emulator.units.scaled import decode_scaled
from attn4.emulator.units.swizzle import Swizzle
from attn4.emulator.units.tcgen05 import Cta, decode_instruction
from attn4.emulator.units.tensormap import DescriptorError
from isa_lines import bound
from matrix_operands import bits_of, place, values_for

SMALL = {"e2m1": (2, 1, 4), "e2m3": (2, 3, 6), "e3m2": (3, 2, 6)}
"""Bits of the exponent, of the fraction, and of the whole."""
CODES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}


def value(code, kind):
    """What a 4- or 6-bit code stands for, by the definition of the format."""
    exponent, fraction, bits = SMALL[kind]
    e, m = code >> fraction & (1 << exponent) - 1, code & (1 << fraction) - 1
    bias = (1 << exponent - 1) - 1
    magnitude = (1 + m / 2**fraction) * 2.0 ** (e - bias) if e else m / 2**fraction * 2.0 ** (1 - bias)
    return -magnitude if code >> bits - 1 else magnitude


def padded(codes, bits):
    """Rows of codes as bytes: 16 of them in 16 bytes, the lowest bits first, then padding."""
    out = np.full((codes.shape[0], codes.shape[1]), 0xEE, np.uint8)
    for row in range(codes.shape[0]):
        for chunk in range(codes.shape[1] // 16):
            whole = sum(int(c) << bits * n for n, c in enumerate(codes[row, 16 * chunk :][:16]))
            raw = np.frombuffer(whole.to_bytes(2 * bits, "little"), np.uint8)
            out[row, 16 * chunk : 16 * chunk + len(raw)] = raw
    return out


def codes_of(kind, shape, seed):
    return np.random.default_rng(seed).integers(0, 1 << SMALL[kind][2], shape)


def numbers(codes, kind):
    return np.vectorize(lambda code: value(int(code), kind))(codes)


def memory():
    tensor = TensorMemory()
    tensor.allocate(512, "cta")
    return tensor


@pytest.mark.parametrize("a", ["e2m1", "e2m3", "e3m2", "e4m3"])
@pytest.mark.parametrize("b", ["e2m1", "e3m2", "e5m2"])
def test_narrow_operands_are_read_from_their_padded_places(a, b):
    shared, tensor = SharedMemory(65536), memory()
    values, descriptors = [], []
    for n, (kind, rows) in enumerate(((a, 128), (b, 24))):
        if kind in SMALL:
            codes = codes_of(kind, (rows, 32), n)
            words, real = padded(codes, SMALL[kind][2]), numbers(codes, kind)
        else:
            real = values_for(kind, (rows, 32), n)
            words = bits_of(real, kind)
        values.append(real)
        descriptors.append(encode_tcgen05(place(shared, 0x400 + 0x8000 * n, words, Swizzle.B32, False)))
    bits = 1 << 4 | CODES[a] << 7 | CODES[b] << 10 | 24 // 8 << 17 | 128 // 16 << 24
    product = decode_instruction("f8f6f4", bits, 1)
    product.multiply([Cta(shared, tensor, "cta")], 0, *descriptors, accumulate=False)
    np.testing.assert_array_equal(tensor.words[:, :24].view(np.float32), values[0] @ values[1].T)


def place_scales(tensor, column, codes, first):
    """Bytes (rows, blocks) in four copies; other bytes hold what would be seen if they were read."""
    for quarter in range(4):
        for row in range(len(codes)):
            lane, at = quarter * 32 + row % 32, column + row // 32
            octets = tensor.words[lane : lane + 1, at : at + 1].copy().view(np.uint8)
            octets[0, first : first + codes.shape[1]] = codes[row]
            tensor.write(slice(lane, lane + 1), at, octets.view(np.uint32), "cta")


FORMS = [
    ("mxf8f6f4", 1, "e4m3", "e5m2", "ue8m0", 2, 1),
    ("mxf8f6f4", 1, "e2m1", "e3m2", "ue8m0", 0, 3),
    ("mxf4", 2, "e2m1", "e2m1", "ue8m0", 2, 0),
    ("mxf4nvf4", 2, "e2m1", "e2m1", "ue8m0", 0, 2),
    ("mxf4nvf4", 4, "e2m1", "e2m1", "ue4m3", 0, 0),
    ("mxf4nvf4", 4, "e2m1", "e2m1", "ue8m0", 0, 0),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
@pytest.mark.parametrize("n", [8, 40, 256])
def test_blocks_are_scaled_before_they_are_multiplied(form, n):
    kind, blocks, a, b, scale, a_byte, b_byte = form
    packed = kind != "mxf8f6f4"
    depth = 64 if packed else 32
    shared, tensor = SharedMemory(65536), memory()
    rng = np.random.default_rng(7)
    values, descriptors, factors = [], [], []
    for number, (element, rows, column, first) in enumerate(((a, 128, 300, a_byte), (b, n, 400, b_byte))):
        if packed:
            codes = codes_of("e2m1", (rows, 64), number)
            words, real = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8), numbers(codes, "e2m1")
        elif element in SMALL:
            codes = codes_of(element, (rows, 32), number)
            words, real = padded(codes, SMALL[element][2]), numbers(codes, element)
        else:
            real = values_for(element, (rows, 32), number)
            words = bits_of(real, element)
        values.append(real)
        start = 0x400 + 0x8000 * number
        descriptors.append(encode_tcgen05(place(shared, start, words, Swizzle.B32, False)))
        exponents = (
            rng.integers(120, 134, (rows, blocks))
            if scale == "ue8m0"
            else rng.integers(1, 126, (rows, blocks))
        )
        place_scales(tensor, column, exponents.astype(np.uint8), first)
        if scale == "ue8m0":
            factor = 2.0 ** (exponents - 127.0)
        else:
            factor = FORMATS["e4m3"].decode(exponents.astype(np.uint8)).astype(np.float64)
        factors.append(np.repeat(factor, depth // blocks, axis=1))
    codes = (1, 1) if packed else (CODES[a], CODES[b])
    bits = b_byte << 4 | codes[0] << 7 | codes[1] << 10 | n // 8 << 17 | (scale == "ue8m0") << 23
    bits |= 128 // 16 << 24 | a_byte << 29
    product = decode_scaled(kind, blocks, bits, 1)
    cta = Cta(shared, tensor, "cta")
    expected = (values[0] * factors[0]) @ (values[1] * factors[1]).T
    for accumulate, times in ((False, 1), (True, 2)):
        operands = (0, *descriptors)
        product.multiply_scaled(
            [cta], operands, (300 | a_byte << 30, 400 | b_byte << 30), accumulate=accumulate
        )
        got = tensor.words[:, :n].view(np.float32)
        np.testing.assert_allclose(got, times * expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_scales_begin_at_lane_zero():
    product = decode_scaled("mxf4", 2, 1 << 7 | 1 << 10 | 1 << 17 | 1 << 23 | 8 << 24, 1)
    shared, tensor = SharedMemory(65536), memory()
    descriptor = encode_tcgen05(place(shared, 0x400, np.zeros((128, 32), np.uint8), Swizzle.B32, False))
    operands = (0, descriptor, descriptor)
    with pytest.raises(TensorMemoryFault, match="scales at lane 32"):
        product.multiply_scaled([Cta(shared, tensor, "cta")], operands, (32 << 16, 400), accumulate=False)


@pytest.mark.parametrize(
    ("kind", "blocks", "bits", "message"),
    [
        ("mxf4", 2, 1 << 7 | 1 << 10 | 1 << 17 | 8 << 24, "ue4m3"),
        ("mxf4nvf4", 2, 1 << 7 | 1 << 10 | 1 << 17 | 8 << 24, "ue4m3"),
        ("mxf4", 2, 1 << 10 | 1 << 17 | 1 << 23 | 8 << 24, "formats"),
        ("mxf4", 2, 1 << 7 | 1 << 10 | 1 << 17 | 1 << 23 | 4 << 24, "reserved"),
        ("mxf4", 2, 1 << 7 | 1 << 10 | 1 << 17 | 1 << 23 | 8 << 24 | 1 << 29, "bytes 1 and 0"),
        ("mxf8f6f4", 1, 5 << 10 | 1 << 16 | 1 << 17 | 1 << 23 | 8 << 24, "MN-major"),
        ("mxf8f6f4", 1, 1 << 2 | 1 << 17 | 1 << 23 | 8 << 24, "sparsity"),
    ],
)
def test_descriptors_that_are_not_understood_are_refused(kind, blocks, bits, message):
    with pytest.raises(DescriptorError, match=message):
        decode_scaled(kind, blocks, bits, 1)


def plain_product(tensor):
    shared = SharedMemory(65536)
    a, b = values_for("bf16", (128, 16), 1), values_for("bf16", (16, 16), 2)
    operands = [
        encode_tcgen05(place(shared, 0x400 + 0x8000 * n, bits_of(x, "bf16"), Swizzle.B32, False))
        for n, x in enumerate((a, b))
    ]
    product = decode_instruction("f16", 1 << 4 | 1 << 7 | 1 << 10 | 16 // 8 << 17 | 8 << 24, 1)
    return product, [Cta(shared, tensor, "cta")], operands, a @ b.T


def test_disabled_lanes_keep_what_they_hold():
    tensor = memory()
    product, ctas, operands, expected = plain_product(tensor)
    tensor.write(slice(0, 128), 0, np.full((128, 16), 0x42280000, np.uint32), "cta")
    product.multiply(ctas, 0, *operands, accumulate=False, disabled=(0x80000001, 0, 0xFFFFFFFF, 2))
    left_out = {0, 31, *range(64, 96), 97}
    for lane in range(128):
        row = tensor.words[lane, :16].view(np.float32)
        np.testing.assert_array_equal(row, np.full(16, 42.0) if lane in left_out else expected[lane])


def test_the_old_value_is_divided_by_a_power_of_two():
    tensor = memory()
    product, ctas, operands, expected = plain_product(tensor)
    tensor.write(slice(0, 128), 0, np.full((128, 16), np.float32(48).view(np.uint32), np.uint32), "cta")
    product.multiply(ctas, 0, *operands, accumulate=True, shrink=3)
    np.testing.assert_array_equal(tensor.words[:, :16].view(np.float32), expected + 6)


MMA = "tcgen05.mma.cta_group::1.kind::"


@pytest.mark.parametrize(
    "line",
    [
        "f16 [%r0], %d1, %d2, %r3, {%r4, %r5, %r6, %r7}, %p1",
        "f16 [%r0], %d1, %d2, %r3, {%r4, %r5, %r6, %r7}, %p1, 3",
        "tf32 [%r0], %d1, %d2, %r3, %p1, 15",
        "mxf4nvf4.block_scale.scale_vec::4X [%r0], %d1, %d2, %r3, [%r4], [%r5], %p1",
        "mxf8f6f4.block_scale [%r0], [%r1], %d2, %r3, [%r4+4], [%r5], %p1",
        "mxf4.block_scale.block32.collector::a::fill [%r0], %d1, %d2, %r3, [%r4], [%r5], %p1",
    ],
)
def test_forms_that_exist_are_taken(line):
    assert bound(MMA + line).sources


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("f16 [%r0], %d1, %d2, %r3, {%r4, %r5}, %p1", "disable-output-lane"),
        ("f8f6f4 [%r0], %d1, %d2, %r3, %p1, 3", "scale-input-d"),
        ("f16 [%r0], %d1, %d2, %r3, %p1, 16", "scale-input-d 16"),
        ("mxf4 [%r0], %d1, %d2, %r3, %p1", "block_scale"),
        ("f16.block_scale [%r0], %d1, %d2, %r3, [%r4], [%r5], %p1", "block_scale"),
        ("mxf4nvf4.block_scale [%r0], %d1, %d2, %r3, [%r4], [%r5], %p1", "scale_vec::2X"),
        ("mxf4.block_scale.scale_vec::4X [%r0], %d1, %d2, %r3, [%r4], [%r5], %p1", "scale_vec::4X"),
    ],
)
def test_forms_that_do_not_exist_are_refused(line, message):
    with pytest.raises(UnsupportedInstruction, match=message):
        bound(MMA + line)


def test_every_quarter_of_the_lanes_reads_its_own_copy_of_the_scales():
    shared, tensor = SharedMemory(65536), memory()
    values = [values_for("e4m3", (rows, 32), n) for n, rows in enumerate((128, 16))]
    descriptors = [
        encode_tcgen05(place(shared, 0x400 + 0x8000 * n, bits_of(x, "e4m3"), Swizzle.B32, False))
        for n, x in enumerate(values)
    ]
    for column, steps in ((300, 0), (400, 1)):
        codes = np.repeat(127 + steps * np.arange(4), 32).astype(np.uint32)
        tensor.write(slice(0, 128), column, np.repeat(codes[:, None], 4, axis=1), "cta")
    product = decode_scaled("mxf8f6f4", 1, 16 // 8 << 17 | 1 << 23 | 8 << 24, 1)
    cta = Cta(shared, tensor, "cta")
    product.multiply_scaled([cta], (0, *descriptors), (300, 400), accumulate=False)
    factors = 2.0 ** np.repeat(np.arange(4), 32)[:, None]
    np.testing.assert_array_equal(tensor.words[:, :16].view(np.float32), values[0] @ values[1].T * factors)
