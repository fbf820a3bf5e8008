"""Tensor maps and the copies of tiles, against loops that follow PTX element by element."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from attn4.emulator.faults import EmulationError
from attn4.emulator.state.memory import GlobalMemory, MemoryFault, SharedMemory
from attn4.emulator.units import bulk
from attn4.emulator.units.reductions import reduction
from attn4.emulator.units.swizzle import Swizzle
from attn4.emulator.units.tensormap import DescriptorError, TensorMap, decode, encode

WORD = {"u8": "u1", "u16": "u2", "u32": "u4", "s32": "u4", "u64": "u8", "s64": "u8",
        "f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8"}  # fmt: skip
CHUNKS = {Swizzle.NONE: 1, Swizzle.B32: 2, Swizzle.B64: 4, Swizzle.B128: 8}


def tensor(shape, element, seed=0):
    """The view of a tensor, dimension 0 innermost, and its storage, whose strides are multiples of 16."""
    word = np.dtype(WORD[element])
    rows = -(-shape[0] * word.itemsize // 16) * 16 // word.itemsize
    storage = np.random.default_rng(seed).integers(1, 120, (*shape[:0:-1], rows)).astype(word)
    return storage[..., : shape[0]], storage


def make(shape, element, box, swizzle=Swizzle.NONE, written=True):
    view, storage = tensor(shape, element)
    memory = GlobalMemory()
    allocation = memory.register(storage, name="tensor", written=written)
    tensor_map = TensorMap(allocation.base, element, shape, view.strides[::-1], box, swizzle)
    return tensor_map, memory, view


def line_swizzle(offset: int, swizzle: Swizzle) -> int:
    """PTX 5.5.7: chunk j of a span on the 128-byte line i goes to chunk j ^ i, i modulo the span."""
    chunks = CHUNKS[swizzle]
    line, chunk = offset // 128, offset // 16
    return (chunk ^ (line % chunks)) * 16 + offset % 16


def expected_tile(tensor_map: TensorMap, view, coordinates, address: int):
    """(address, value or None outside the tensor, index in the tensor) of each element of a box."""
    size = tensor_map.strides[0]
    for position, index in enumerate(itertools.product(*(range(b) for b in tensor_map.box[::-1]))):
        at = tuple(c + i for c, i in zip(coordinates[::-1], index, strict=True))
        inside = all(0 <= a < n for a, n in zip(at, tensor_map.shape[::-1], strict=True))
        yield line_swizzle(address + position * size, tensor_map.swizzle), at if inside else None


CASES = [
    ((40,), "f32", (16,), (32,), Swizzle.NONE),
    ((64, 20), "bf16", (64, 16), (0, 8), Swizzle.B128),
    ((64, 20), "bf16", (64, 16), (0, -5), Swizzle.B128),
    ((100, 9, 3), "f16", (32, 4, 2), (80, 7, 2), Swizzle.B64),
    ((24, 9, 3), "u8", (32, 4, 2), (0, 2, -1), Swizzle.B32),
    ((16, 5, 4, 3), "s64", (16, 3, 2, 1), (0, 3, -1, 2), Swizzle.B128),
    ((16, 5, 4, 3, 2), "u16", (8, 2, 2, 2, 2), (8, 4, 3, -1, 1), Swizzle.NONE),
    ((16, 5, 4, 3, 2), "f64", (8, 2, 1, 2, 1), (-4, 1, 3, 0, 1), Swizzle.B64),
    ((64, 8), "bf16", (64, 8), (0, 20), Swizzle.B128),
]


@pytest.mark.parametrize("shape,element,box,coordinates,swizzle", CASES)
@pytest.mark.parametrize("offset", [0, 128, 896])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_loaded_tile_lies_where_ptx_says_with_zeros_outside(
    shape, element, box, coordinates, swizzle, offset, rank
):
    tensor_map, memory, view = make(shape, element, box, swizzle)
    shared = SharedMemory(16384, rank)
    address = shared.base + offset
    nbytes = bulk.load_tile(tensor_map, memory, shared, address, coordinates)
    assert nbytes == np.prod(box) * tensor_map.strides[0]
    places = list(expected_tile(tensor_map, view, coordinates, address))
    for place, index in places:
        value = shared.bytes[place - shared.base :][: tensor_map.strides[0]].view(WORD[element])[0]
        assert value == (0 if index is None else view[index])
    assert shared.written.sum() == nbytes
    assert all(shared.written[place - shared.base] for place, _ in places)


@pytest.mark.parametrize("shape,element,box,coordinates,swizzle", CASES)
def test_a_stored_tile_is_clipped_and_the_rest_of_the_tensor_untouched(
    shape, element, box, coordinates, swizzle
):
    tensor_map, memory, view = make(shape, element, box, swizzle, written=False)
    (allocation,) = memory
    shared = SharedMemory(16384)
    shared.write(shared.base, np.random.default_rng(5).integers(120, 250, 16384).astype(np.uint8))
    before, expected = allocation.bytes.copy(), view.copy()
    for place, index in expected_tile(tensor_map, view, coordinates, shared.base + 256):
        if index is not None:
            expected[index] = shared.bytes[place - shared.base :][: tensor_map.strides[0]].view(
                WORD[element]
            )[0]
    bulk.store_tile(tensor_map, memory, shared, shared.base + 256, coordinates)
    np.testing.assert_array_equal(view, expected)
    assert not (allocation.written & (allocation.bytes == before)).any()
    assert ((allocation.bytes != before) <= allocation.written).all()


def test_a_load_then_a_store_of_the_same_box_is_the_identity():
    tensor_map, memory, view = make((64, 100), "bf16", (64, 64), Swizzle.B128)
    shared = SharedMemory(16384)
    before = view.copy()
    bulk.load_tile(tensor_map, memory, shared, 0x1400, (0, 70))
    view[...] = 0
    bulk.store_tile(tensor_map, memory, shared, 0x1400, (0, 70))
    np.testing.assert_array_equal(view[70:], before[70:])
    assert not view[:70].any()


@pytest.mark.parametrize(
    "element,dtype", [("f32", np.float32), ("f16", np.float16), ("s32", np.int32), ("u64", np.uint64)]
)
def test_add_reduces_into_the_tensor(element, dtype):
    tensor_map, memory, view = make((16, 9), element, (16, 4))
    values = np.random.default_rng(1).integers(-50, 50, (4, 16)).astype(dtype)
    view[...] = np.random.default_rng(2).integers(0, 50, view.shape).astype(dtype).view(view.dtype)
    expected = view.view(dtype).copy()
    expected[7:] += values[:2]
    shared = SharedMemory(2048)
    shared.write(0x400, values)
    assert bulk.reduce_tile(tensor_map, memory, shared, 0x400, (0, 7), "add") == 64 * tensor_map.strides[0]
    np.testing.assert_array_equal(view.view(dtype), expected)


def test_bfloat16_add_rounds_once_to_nearest_even():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, (2, 20000)).astype(np.uint16)
    bits = bits[:, ((bits & 0x7F80) != 0x7F80).all(0)]
    old, new = ((row.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for row in bits)
    result = reduction("add", "bf16")(bits[0], bits[1])
    value = (result.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(value - (old + new))
        for step in (-1, 1):
            other = (result.astype(np.int64) + step).astype(np.uint16)
            neighbour = (other.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            distance = np.abs(neighbour - (old + new))
            fine = (error < distance) | ((error == distance) & (result & 1 == 0)) | ~np.isfinite(value)
            assert (fine | ~np.isfinite(distance)).all()


def test_float32_add_flushes_subnormals_with_their_sign():
    bits = np.array([0x00000001, 0x80000001, 0x00800001, 0x00800001], np.uint32)
    others = np.array([0x00000000, 0x80000000, 0x80800000, 0x3F800000], np.uint32)
    assert reduction("add", "f32")(bits, others).tolist() == [0, 0x80000000, 0, 0x3F800000]


@pytest.mark.parametrize(
    "operation,element,old,new,expected",
    [
        ("min", "s32", 5, 0xFFFFFFFF, 0xFFFFFFFF),
        ("min", "u32", 5, 0xFFFFFFFF, 5),
        ("max", "s64", 5, 2**64 - 1, 5),
        ("inc", "u32", 7, 7, 0),
        ("inc", "u32", 6, 7, 7),
        ("dec", "u32", 0, 7, 7),
        ("dec", "u32", 9, 7, 7),
        ("dec", "u32", 3, 7, 2),
        ("and", "b32", 12, 10, 8),
        ("or", "u64", 12, 10, 14),
        ("xor", "b64", 12, 10, 6),
        ("add", "u32", 0xFFFFFFFF, 2, 1),
        ("max", "f16", 0x3C00, 0x7E00, 0x3C00),
        ("min", "bf16", 0x3F80, 0xBF80, 0xBF80),
    ],
)
def test_reduction_of_one_element(operation, element, old, new, expected):
    word = f"u{8 if '64' in element else 4 if '32' in element else 2}"
    assert reduction(operation, element)(np.array([old], word), np.array([new], word)).tolist() == [expected]


@pytest.mark.parametrize(
    "operation,element", [("min", "f32"), ("and", "f16"), ("inc", "s32"), ("mul", "u32")]
)
def test_a_reduction_that_ptx_lacks_is_refused(operation, element):
    with pytest.raises(EmulationError, match=operation):
        reduction(operation, element)


def test_plain_copies_and_reductions_of_spans():
    memory, shared = GlobalMemory(), SharedMemory(1024)
    array = np.arange(64, dtype=np.float32)
    base = memory.register(array, name="x").base
    assert bulk.copy(memory, base + 64, shared, 0x410, 128) == 128
    np.testing.assert_array_equal(shared.read(0x410, 128).view(np.float32), np.arange(16, 48))
    bulk.reduce(shared, 0x410, memory, base, 128, "add", "f32")
    np.testing.assert_array_equal(array[:32], np.arange(32) + np.arange(16, 48))
    other = SharedMemory(1024, rank=1)
    bulk.copy(shared, 0x410, other, other.base, 32)
    np.testing.assert_array_equal(other.bytes[:32], shared.bytes[16:48])
    for addresses, nbytes in (((base + 8, 0x400), 16), ((base, 0x408), 16), ((base, 0x400), 24)):
        with pytest.raises(MemoryFault, match="not multiples of 16"):
            bulk.copy(memory, addresses[0], shared, addresses[1], nbytes)


def test_one_gathered_tile_serves_several_ctas():
    tensor_map, memory, _ = make((64, 16), "bf16", (64, 8), Swizzle.B128)
    pair = [SharedMemory(2048, rank) for rank in range(2)]
    tile = bulk.gather_tile(tensor_map, memory, (0, 3))
    for shared in pair:
        bulk.place_tile(tensor_map, shared, shared.base, tile)
    np.testing.assert_array_equal(pair[0].bytes, pair[1].bytes)


def test_a_tensor_that_begins_before_all_memory_is_brought_back_by_a_coordinate():
    tensor_map, memory, view = make((16, 8), "f32", (16, 4))
    rows = 1 << 30
    far = replace(
        tensor_map,
        address=(tensor_map.address - rows * tensor_map.strides[1]) % bulk.ADDRESS_SPACE,
        shape=(16, rows + 8),
    )
    tile = bulk.gather_tile(far, memory, (0, rows + 2))
    np.testing.assert_array_equal(tile.view(view.dtype).reshape(4, 16), view[2:6])


def test_a_tensor_map_past_its_allocation_is_out_of_bounds():
    tensor_map, memory, _ = make((16, 8), "f32", (16, 4))
    longer = TensorMap(tensor_map.address, "f32", (16, 12), tensor_map.strides, tensor_map.box)
    with pytest.raises(MemoryFault, match="belong to no allocation"):
        bulk.load_tile(longer, memory, SharedMemory(1024), 0x400, (0, 7))


def ragged(tensor_map):
    """The same tensor through a map that begins 64 rows before it, with a second mode of its rows."""
    rows, stride = 64, tensor_map.strides[1]
    return replace(
        tensor_map,
        address=tensor_map.address - rows * stride,
        shape=(*tensor_map.shape[:1], rows, 2 * rows + 1),
        strides=(*tensor_map.strides[:1], stride, stride),
        box=(*tensor_map.box, 1),
    )


def test_to_load_a_box_wholly_outside_reads_the_first_element():
    tensor_map, memory, view = make((16, 8), "f32", (16, 4))
    assert not bulk.gather_tile(tensor_map, memory, (0, 8)).any()
    assert not bulk.gather_tile(tensor_map, memory, (-16, 2)).any()
    far = ragged(tensor_map)
    tile = bulk.gather_tile(far, memory, (0, 63, 6)).view(view.dtype).reshape(4, 16)
    np.testing.assert_array_equal(tile[0], view[5])
    assert not tile[1:].any()
    for outside in ((0, 64, 6), (0, -4, 6), (16, 62, 6), (0, 62, 129)):
        with pytest.raises(MemoryFault, match="wholly outside its tensor"):
            bulk.gather_tile(far, memory, outside)


@pytest.mark.parametrize("write", [bulk.put_tile, partial(bulk.combine_tile, operation="add")])
def test_a_store_wholly_before_its_tensor_is_a_fault_and_past_its_end_nothing(write):
    tensor_map, memory, view = make((16, 8), "f32", (16, 4))
    before, tile = view.copy(), np.ones((4, 64), np.uint8)
    for at in ((16, 2), (0, 8)):
        write(tensor_map, memory, tile, at)
    write(ragged(tensor_map), memory, tile[None], (0, 64, 6))
    np.testing.assert_array_equal(view, before)
    for at in ((-16, 2), (0, -4)):
        with pytest.raises(MemoryFault, match="a box that ends at 0"):
            write(tensor_map, memory, tile, at)


def test_a_tile_past_shared_memory_or_misaligned_is_a_fault():
    tensor_map, memory, _ = make((16, 8), "f32", (16, 4))
    with pytest.raises(MemoryFault) as caught:
        bulk.load_tile(tensor_map, memory, SharedMemory(1024), 0x400 + 896, (0, 0))
    assert caught.value.kind == "out of bounds"
    with pytest.raises(MemoryFault) as caught:
        bulk.load_tile(tensor_map, memory, SharedMemory(1024), 0x410, (0, 0))
    assert caught.value.kind == "misaligned"


def test_unwritten_source_bytes_are_reported_and_clipped_ones_are_not():
    tensor_map, memory, _ = make((16, 8), "f32", (16, 4), written=False)
    (allocation,) = memory
    shared = SharedMemory(1024)
    seen = []
    allocation.on_unwritten = shared.on_unwritten = seen.append
    shared.write(0x400, np.zeros(32, np.float32))
    bulk.store_tile(tensor_map, memory, shared, 0x400, (0, 6))
    assert not seen
    bulk.load_tile(tensor_map, memory, shared, 0x600, (0, 5))
    assert seen[0].addresses.tolist() == list(range(tensor_map.address + 5 * 64, tensor_map.address + 6 * 64))
    bulk.store_tile(tensor_map, memory, shared, 0x480, (0, 0))
    assert seen[1].memory is shared
    assert seen[1].addresses.tolist() == list(range(0x480, 0x580))


@pytest.mark.parametrize("shape,element,box,coordinates,swizzle", CASES)
def test_a_descriptor_survives_encoding(shape, element, box, coordinates, swizzle):
    tensor_map, _, _ = make(shape, element, box, swizzle)
    assert decode(encode(tensor_map)) == tensor_map


def test_descriptor_bits_are_where_the_hardware_has_them():
    tensor_map = TensorMap(
        0x7F12_3456_7890, "bf16", (128, 1000, 8, 2), (2, 256, 1 << 38, 0x50), (64, 128, 1, 3), Swizzle.B128
    )
    words = np.frombuffer(encode(tensor_map), np.uint32).tolist()
    assert words[:2] == [0x3456_7890, 0x7F12]
    assert words[2] == 3 << 4 | 10 << 7 | 3 << 13 | 1 << 1 | 1 << 18
    assert words[3:8] == [16, 1 << 34 & 0xFFFFFFFF, 5, 0, 4 << 4]
    assert words[8:13] == [127, 999, 7, 1, 0]
    assert words[13:15] == [63 << 24, 127 | 0 << 8 | 2 << 16]
    assert decode(encode(tensor_map)[:64] + b"\xcb" * 64) == tensor_map


@pytest.mark.parametrize(
    "word,value,message",
    [
        (2, 1 << 11, "word 2"),
        (2, 1 << 31, "word 2"),
        (2, 7 << 4, "rank 8"),
        (2, 15 << 7, "element type 15"),
        (2, 12 << 7, "element type 12"),
        (13, 1 << 15, "word 13"),
        (2, 1 << 15, "NaN fill"),
        (2, 1 << 16, "NaN fill or tf32"),
        (0, 8, "multiples of 16"),
        (13, 4 << 24, "multiple of 16"),
    ],
)
def test_a_field_that_is_not_understood_is_named(word, value, message):
    tensor_map, _, _ = make((16, 8), "u16", (8, 4))
    words = np.frombuffer(encode(tensor_map), np.uint32).copy()
    if word == 2 and value < 1 << 11:
        words[2] &= ~np.uint32(0xF << 7 if value >= 1 << 7 else 7 << 4)
    words[word] = words[word] & 0xFFFFFF if value == 4 << 24 else words[word]
    words[word] |= value
    with pytest.raises(DescriptorError, match=message):
        decode(words.tobytes())


def test_a_swizzled_box_shorter_than_the_swizzle_is_refused():
    tensor_map = TensorMap(0, "bf16", (64, 8), (2, 128), (32, 8), Swizzle.B128)
    with pytest.raises(DescriptorError, match="64 bytes under a swizzle of 128"):
        encode(tensor_map)


def test_elements_of_4_bits_are_copied_two_a_byte():
    tensor_map, memory, view = make((32, 6), "u8", (16, 4))
    packed = replace(tensor_map, per_byte=2)
    descriptor = np.frombuffer(encode(packed), np.uint32)
    assert (descriptor[8], descriptor[13] >> 24) == (63, 31), "64 elements in a row, 32 in a box"
    assert decode(encode(packed)) == packed
    tile = bulk.gather_tile(packed, memory, (32, 2))
    np.testing.assert_array_equal(tile, view[2:6, 16:32])
    with pytest.raises(MemoryFault, match="begins"):
        bulk.gather_tile(packed, memory, (16, 0))


def test_a_box_that_begins_within_16_bytes_is_a_fault():
    tensor_map, memory, _ = make((64, 8), "bf16", (8, 4))
    shared = SharedMemory(2048)
    for column in (1, 4, -2):
        with pytest.raises(MemoryFault, match=f"begins {2 * column} bytes into a row"):
            bulk.load_tile(tensor_map, memory, shared, 0x400, (column, 0))


def test_wrong_number_of_coordinates_is_refused():
    tensor_map, memory, _ = make((16, 8), "f32", (16, 4))
    with pytest.raises(DescriptorError, match="3 coordinates"):
        bulk.load_tile(tensor_map, memory, SharedMemory(1024), 0x400, (0, 0, 0))
