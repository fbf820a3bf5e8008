"""Byte memories: loads and stores of lanes, bounds, alignment, and the record of what was written."""

from __future__ import annotations

import numpy as np
import pytest

from attn4.emulator.state.memory import POISON, GlobalMemory, MemoryFault, SharedMemory

LANES = np.arange(32)


def shared_with_pattern(rank: int = 0) -> SharedMemory:
    memory = SharedMemory(4096, rank)
    memory.write(memory.base, np.random.default_rng(3).integers(0, 256, 4096).astype(np.uint8))
    return memory


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("rank", [0, 5])
def test_load_gives_each_lane_the_bytes_at_its_address(nbytes, dtype, rank):
    memory = shared_with_pattern(rank)
    order = np.random.default_rng(nbytes).permutation(32)
    addresses = (memory.base + 64 + order * nbytes).astype(dtype)
    expected = np.stack([memory.bytes[64 + n * nbytes : 64 + (n + 1) * nbytes] for n in order])
    np.testing.assert_array_equal(memory.load(addresses, nbytes), expected)


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16, 32])
def test_store_writes_active_lanes_only_and_marks_their_bytes(nbytes):
    memory = SharedMemory(4096)
    mask = LANES % 3 == 0
    values = np.random.default_rng(1).integers(0, 256, (32, nbytes)).astype(np.uint8)
    addresses = np.where(mask, memory.base + LANES * nbytes, 1).astype(np.uint32)
    memory.store(addresses, values, nbytes, mask)
    expected = np.full((4096 // nbytes, nbytes), POISON, np.uint8)
    expected[:32][mask] = values[mask]
    np.testing.assert_array_equal(memory.bytes, expected.reshape(-1))
    written = np.zeros((4096 // nbytes, nbytes), np.bool_)
    written[:32][mask] = True
    np.testing.assert_array_equal(memory.written, written.reshape(-1))


def test_inactive_lanes_may_hold_any_address():
    memory = shared_with_pattern()
    addresses = np.full(32, 3, np.uint32)
    addresses[7] = memory.base + 8
    mask = LANES == 7
    np.testing.assert_array_equal(memory.load(addresses, 4, mask)[7], memory.bytes[8:12])


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("place", ["below", "past", "zero", "high"])
def test_an_access_outside_the_memory_is_a_fault_that_names_its_lane(nbytes, rank, dtype, place):
    memory = SharedMemory(1024, rank)
    addresses = (memory.base + LANES * 0).astype(dtype)
    wrong = {"below": memory.base - nbytes, "past": memory.end, "zero": 0, "high": 0xFFFFFF00}[place]
    addresses[9] = wrong
    for access in (
        lambda: memory.load(addresses, nbytes),
        lambda: memory.store(addresses, np.zeros((32, nbytes), np.uint8), nbytes),
        lambda: memory.store(addresses, np.zeros((32, nbytes), np.uint8), nbytes, LANES > 4),
    ):
        with pytest.raises(MemoryFault, match="lane 9") as caught:
            access()
        assert (caught.value.kind, caught.value.address) == ("out of bounds", wrong)


@pytest.mark.parametrize("nbytes", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_a_misaligned_access_is_a_fault(nbytes, dtype):
    memory = SharedMemory(1024)
    addresses = (memory.base + LANES * nbytes).astype(dtype)
    addresses[2] += nbytes // 2
    with pytest.raises(MemoryFault, match="lane 2") as caught:
        memory.load(addresses, nbytes)
    assert caught.value.kind == "misaligned"


def test_a_last_partial_word_is_out_of_bounds():
    memory = SharedMemory(1030)
    memory.load(np.full(32, memory.base + 1028, np.uint32), 2)
    with pytest.raises(MemoryFault):
        memory.load(np.full(32, memory.base + 1028, np.uint32), 4)


def test_unwritten_bytes_are_reported_with_lane_and_address():
    memory = SharedMemory(1024)
    memory.store((memory.base + LANES * 4).astype(np.uint32), LANES.astype(np.uint16), 2)
    memory.store((memory.base + LANES[:5] * 4 + 2).astype(np.uint32), LANES[:5].astype(np.uint16), 2)
    seen = []
    memory.on_unwritten = seen.append
    memory.load((memory.base + LANES * 4).astype(np.uint32), 4, LANES < 6)
    (report,) = seen
    assert report.memory is memory
    assert report.lanes.tolist() == [5, 5]
    assert report.addresses.tolist() == [memory.base + 22, memory.base + 23]
    memory.load((memory.base + LANES[:5] * 4).astype(np.uint32), 4)
    assert len(seen) == 1


def test_a_read_span_reports_unwritten_bytes_and_a_write_clears_them():
    memory = SharedMemory(64)
    seen = []
    memory.on_unwritten = seen.append
    memory.write(memory.base + 4, np.arange(3, dtype=np.uint32))
    assert memory.read(memory.base + 4, 12).view(np.uint32).tolist() == [0, 1, 2]
    assert not seen
    memory.read(memory.base, 8)
    assert seen[0].addresses.tolist() == list(range(memory.base, memory.base + 4))


def test_global_lanes_read_and_write_several_allocations():
    memory = GlobalMemory()
    arrays = [np.arange(64, dtype=np.uint32) + 100 * n for n in range(3)]
    bases = [memory.register(array, name=f"a{n}").base for n, array in enumerate(arrays)]
    which, item = LANES % 3, LANES * 2
    addresses = np.array([bases[w] + 4 * i for w, i in zip(which, item, strict=True)], np.uint64)
    np.testing.assert_array_equal(memory.load_words(addresses, 4), item + 100 * which)
    mask = LANES != 4
    memory.store(addresses, (LANES + 1000).astype(np.uint32), 4, mask)
    for lane in range(32):
        assert arrays[which[lane]][item[lane]] == (
            1000 + lane if mask[lane] else item[lane] + 100 * which[lane]
        )


def test_a_store_with_one_stray_lane_writes_nothing():
    memory = GlobalMemory()
    array = np.zeros(64, np.uint32)
    base = memory.register(array, name="out").base
    addresses = np.uint64(base) + LANES.astype(np.uint64) * 4
    addresses[31] = base + 64 * 4
    with pytest.raises(MemoryFault, match=r"lane 31.*nearest below, out"):
        memory.store(addresses, np.ones(32, np.uint32), 4)
    assert not array.any()


def test_a_buffer_aligned_worse_than_the_access_is_read_right():
    memory = GlobalMemory()
    storage = np.arange(512, dtype=np.uint8)
    start = (-storage.ctypes.data) % 16 + 4
    allocation = memory.register(storage[start : start + 200], name="odd")
    addresses = (
        np.uint64(allocation.base + 4)
        + LANES[:16].astype(np.uint64) * 8
        - np.uint64((allocation.base + 4) % 8)
    )
    expected = np.stack([storage[int(a) - storage.ctypes.data :][:8] for a in addresses])
    np.testing.assert_array_equal(memory.load(addresses, 8), expected)
    memory.store(addresses, np.zeros((16, 8), np.uint8), 8)
    assert not memory.load(addresses, 8).any()
    with pytest.raises(MemoryFault) as caught:
        memory.load(addresses + np.uint64(4), 8)
    assert caught.value.kind == "misaligned"


def test_an_address_of_no_allocation_is_a_fault_that_names_the_nearest():
    memory = GlobalMemory()
    with pytest.raises(MemoryFault, match="no allocation lies below"):
        memory.load(np.full(32, 64, np.uint64), 4)
    allocation = memory.register(np.zeros(16, np.uint8), name="keys")
    with pytest.raises(MemoryFault, match="keys"):
        memory.read(allocation.base + 8, 16)
    memory.release(allocation)
    with pytest.raises(MemoryFault):
        memory.read(allocation.base, 1)


def test_overlapping_and_scattered_buffers_are_refused():
    memory = GlobalMemory()
    array = np.zeros(64, np.uint32)
    memory.register(array[8:16], name="middle")
    for part in (array, array[:9], array[15:], array[9:10]):
        with pytest.raises(ValueError, match="overlaps middle"):
            memory.register(part, name="other")
    memory.register(array[16:], name="after")
    with pytest.raises(ValueError, match="contiguous"):
        memory.register(np.zeros((4, 4))[:, 1], name="column")


def test_spans_that_overlap_become_one_allocation():
    memory = GlobalMemory()
    packed = np.arange(300, dtype=np.uint8)
    spans = [("k", packed[100:250]), ("other", packed[260:]), ("q", packed[:150]), ("v", packed[200:260])]
    spans.append(("part of q", packed[20:40]))
    whole, rest = memory.register_spans(spans)
    assert (whole.name, whole.base, whole.bytes.size) == ("q + part of q + k + v", packed.ctypes.data, 260)
    assert rest.name == "other"
    whole.write(whole.base + 120, np.array([7], np.uint8))
    assert packed[120] == 7


def test_an_output_is_tracked_and_an_input_is_not():
    memory = GlobalMemory()
    output = memory.register(np.zeros(64, np.uint8), name="out", written=False)
    inputs = memory.register(np.zeros(64, np.uint8), name="in")
    seen = []
    for allocation in memory:
        allocation.on_unwritten = seen.append
    memory.load(np.full(32, inputs.base, np.uint64), 4)
    assert not seen
    memory.load(np.full(32, output.base, np.uint64), 4)
    assert seen[0].memory is output
