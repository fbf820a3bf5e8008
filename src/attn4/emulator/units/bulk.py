"""The bulk-copy unit: tiles of a tensor map, and plain spans, between global and shared memory.

    load_tile(tensor_map, memory, shared, address, coordinates) -> bytes     cp.async.bulk.tensor, a load
    store_tile(tensor_map, memory, shared, address, coordinates) -> bytes    cp.async.bulk.tensor, a store
    reduce_tile(tensor_map, memory, shared, address, coordinates, "add")     cp.reduce.async.bulk.tensor
    copy(source, source_address, target, target_address, nbytes) -> bytes    cp.async.bulk
    reduce(source, source_address, target, target_address, nbytes, "add", "f32")    cp.reduce.async.bulk

Multicast: ``tile = gather_tile(tensor_map, memory, coordinates)`` once, ``place_tile(tensor_map, shared,
address, tile)`` in each CTA. ``tile_chunk_offsets(tensor_map, shared, address)`` tells, for hazards, which
16-byte chunks of shared memory a tile covers.

``coordinates`` are ints, dimension 0 first, and may be negative or past the end: a load reads zero there, a
store or reduction leaves the element out. To load a box that is wholly outside still reads the tensor's first
element. Each function returns the bytes of the full box, clipped or not.
Raises MemoryFault and DescriptorError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from attn4.emulator.state.memory import Array, ByteMemory, Bytes, GlobalMemory, MemoryFault, SharedMemory
from attn4.emulator.units.reductions import WORDS, reduction
from attn4.emulator.units.swizzle import PERIOD, tile_chunks
from attn4.emulator.units.tensormap import DescriptorError, TensorMap

Memory = ByteMemory | GlobalMemory
TILE_ALIGNMENT = 128  # PTX 5.5.6: of a tile's shared address; 9.7.9.25 asks 16 of plain copies
COPY_ALIGNMENT = 16
ADDRESS_SPACE = 1 << 57
"""Host code encodes 57 bits of a tensor's address. One that begins before its buffer, so that a coordinate
brings it back (a ragged batch), may lie below 0.
"""
OUTSIDE = 0x7FF7  # the NaN for what lies outside a tensor, in 16-bit words of any element; of an H200


@dataclass(frozen=True, slots=True)
class _Window:
    """The part of a box that lies in the tensor, as slices of the tile and as bytes of an allocation."""

    allocation: ByteMemory
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    slices: tuple[slice, ...]

    def view(self, data: Array) -> Array:
        """The window of an allocation's bytes (or of its written mask), uint8 (.., rows, bytes of a row)."""
        return np.ndarray(self.shape, data.dtype, data, self.offset, self.strides)

    def offsets(self) -> npt.NDArray[np.int64]:
        """Offset of each byte of the window in its allocation, flat."""
        total = np.array([self.offset])
        for n, stride in zip(self.shape, self.strides, strict=True):
            total = (total[:, None] + np.arange(n) * stride).reshape(-1)
        return total


def load_tile(
    tensor_map: TensorMap,
    memory: GlobalMemory,
    shared: SharedMemory,
    address: int,
    coordinates: Sequence[int],
) -> int:
    """Copy the box at ``coordinates`` to shared memory, zeros where it leaves the tensor."""
    return place_tile(tensor_map, shared, address, gather_tile(tensor_map, memory, coordinates))


def gather_tile(tensor_map: TensorMap, memory: GlobalMemory, coordinates: Sequence[int]) -> Bytes:
    """The bytes of a box, uint8 (counts[rank-1], .., counts[1], row bytes); zeros, or NaN, outside."""
    tile = np.zeros(_tile_shape(tensor_map), np.uint8)
    if tensor_map.nan_fill:
        tile.reshape(-1).view(np.uint16)[:] = OUTSIDE
    window = _window(tensor_map, memory, coordinates)
    if window is None:
        _read_first(tensor_map, memory)
    else:
        tile[window.slices] = window.view(window.allocation.bytes)
        _check_source(window)
    if tensor_map.tf32:
        _round_to_tf32(tile.reshape(-1).view(np.uint32))
    return tile


def _round_to_tf32(words: npt.NDArray[np.uint32]) -> None:
    """Round float32 to nearest even, in place; every NaN becomes one. An H200 flushes nothing here."""
    finite = (words & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    nan = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    words[finite] += np.uint32(0xFFF) + (words[finite] >> np.uint32(13) & np.uint32(1))
    words &= np.uint32(0xFFFFE000)
    words[nan] = 0x7FFFE000


def place_tile(tensor_map: TensorMap, shared: SharedMemory, address: int, tile: Bytes) -> int:
    """Write a tile of ``gather_tile`` to shared memory under the map's swizzle."""
    chunks = tile_chunk_offsets(tensor_map, shared, address)
    shared.put_chunks(chunks, tile.reshape(-1).view(np.complex128))
    return tensor_map.tile_bytes


def store_tile(
    tensor_map: TensorMap,
    memory: GlobalMemory,
    shared: SharedMemory,
    address: int,
    coordinates: Sequence[int],
) -> int:
    """Copy a tile from shared memory to the box at ``coordinates``, less what lies outside the tensor."""
    tile = fetch_tile(tensor_map, memory, shared, address, coordinates)
    return put_tile(tensor_map, memory, tile, coordinates)


def fetch_tile(
    tensor_map: TensorMap,
    memory: GlobalMemory,
    shared: SharedMemory,
    address: int,
    coordinates: Sequence[int],
) -> Bytes:
    """The bytes of a tile in shared memory, as ``gather_tile``; unwritten ones that are kept are reported."""
    return _fetch_tile(tensor_map, shared, address, _window(tensor_map, memory, coordinates))


def covered_chunks(
    tensor_map: TensorMap, memory: GlobalMemory, coordinates: Sequence[int]
) -> tuple[ByteMemory, npt.NDArray[np.int64]] | None:
    """The allocation that a box lies in, and the 16-byte chunks of it that the box touches; for hazards."""
    window = _window(tensor_map, memory, coordinates)
    if window is None:
        return None
    rows = np.array([window.offset])
    for n, stride in zip(window.shape[:-1], window.strides[:-1], strict=True):
        rows = (rows[:, None] + np.arange(n) * stride).reshape(-1)
    chunks = rows[:, None] // 16 + np.arange(-(-window.shape[-1] // 16))
    return window.allocation, chunks.reshape(-1)


def kept_chunks(
    tensor_map: TensorMap,
    memory: GlobalMemory,
    shared: SharedMemory,
    address: int,
    coordinates: Sequence[int],
) -> npt.NDArray[np.int64]:
    """Index in ``shared.chunks`` of the chunks of a tile of which a store keeps something; for hazards."""
    window = _window(tensor_map, memory, coordinates)
    chunks = tile_chunk_offsets(tensor_map, shared, address)
    if window is None:
        return chunks[:0]
    rows = chunks.reshape(*_tile_shape(tensor_map)[:-1], -1)
    row = window.slices[-1]
    return rows[(*window.slices[:-1], slice(row.start // 16, -(-row.stop // 16)))].reshape(-1)


def four_rows(tensor_map: TensorMap) -> TensorMap:
    """The map of a tile made of four rows of a matrix (PTX 5.5.5.2, 5.5.5.3). Raises DescriptorError."""
    if tensor_map.rank != 2 or tensor_map.box[1] != 1 or tensor_map.steps:
        raise DescriptorError(
            f"four rows of a tensor map with box {tensor_map.box}, not of a row of a matrix"
        )
    return replace(tensor_map, box=(tensor_map.box[0], 4))


def gather_rows(tensor_map: TensorMap, memory: GlobalMemory, coordinates: Sequence[int]) -> Bytes:
    """The tile of `four_rows`: ``coordinates`` are the first column and the numbers of the rows."""
    column, *rows = coordinates
    return np.concatenate([gather_tile(tensor_map, memory, (column, row)) for row in rows])


def scatter_rows(
    tensor_map: TensorMap, memory: GlobalMemory, tile: Bytes, coordinates: Sequence[int]
) -> None:
    """Write the tile of `four_rows` to rows of a matrix, one after another."""
    column, *rows = coordinates
    for number, row in enumerate(rows):
        put_tile(tensor_map, memory, tile[number : number + 1], (column, row))


def put_tile(tensor_map: TensorMap, memory: GlobalMemory, tile: Bytes, coordinates: Sequence[int]) -> int:
    """Write a tile of ``fetch_tile`` to the box at ``coordinates``."""
    _refuse_below(tensor_map, coordinates)
    window = _window(tensor_map, memory, coordinates)
    if window is not None:
        window.view(window.allocation.bytes)[...] = tile[window.slices]
        _mark_written(window)
    return tensor_map.tile_bytes


def reduce_tile(
    tensor_map: TensorMap,
    memory: GlobalMemory,
    shared: SharedMemory,
    address: int,
    coordinates: Sequence[int],
    operation: str,
) -> int:
    """Combine a tile of shared memory into the box at ``coordinates``; ``reductions`` has the operations."""
    tile = fetch_tile(tensor_map, memory, shared, address, coordinates)
    return combine_tile(tensor_map, memory, tile, coordinates, operation)


def combine_tile(
    tensor_map: TensorMap, memory: GlobalMemory, tile: Bytes, coordinates: Sequence[int], operation: str
) -> int:
    """Combine a tile of ``fetch_tile`` into the box at ``coordinates``."""
    element = tensor_map.element
    combine = reduction(operation, "f32 of tensor" if element == "f32" else element)
    _refuse_below(tensor_map, coordinates)
    window = _window(tensor_map, memory, coordinates)
    if window is None:
        return tensor_map.tile_bytes
    if any(s == 0 and n > 1 for s, n in zip(window.strides, window.shape, strict=True)):
        raise DescriptorError("reduction into a tensor map with stride 0: the elements of a box overlap")
    _check_source(window)
    target = window.view(window.allocation.bytes)
    old = np.ascontiguousarray(target).view(WORDS[tensor_map.element])
    new = np.ascontiguousarray(tile[window.slices]).view(WORDS[tensor_map.element])
    target[...] = combine(old, new).view(np.uint8)
    _mark_written(window)
    return tensor_map.tile_bytes


def copy(source: Memory, source_address: int, target: Memory, target_address: int, nbytes: int) -> int:
    """Copy a span, a multiple of 16 bytes, between any two memories (PTX 9.7.9.25, cp.async.bulk)."""
    check_span(source_address, target_address, nbytes)
    target.write(target_address, source.read(source_address, nbytes))
    return nbytes


def reduce(
    source: Memory,
    source_address: int,
    target: Memory,
    target_address: int,
    nbytes: int,
    operation: str,
    element: str,
) -> int:
    """Combine a span into another; ``element`` as in PTX, "f16", "u32", ... (PTX 9.7.9.25)."""
    check_span(source_address, target_address, nbytes)
    combine = reduction(operation, element)
    word = WORDS[element]
    new, old = source.read(source_address, nbytes), target.read(target_address, nbytes)
    target.write(target_address, combine(old.view(word), new.view(word)))
    return nbytes


def tile_chunk_offsets(tensor_map: TensorMap, shared: SharedMemory, address: int) -> npt.NDArray[np.int64]:
    """Index in ``shared.chunks`` of each 16-byte chunk of a tile at ``address``, in the tile's order."""
    if address % TILE_ALIGNMENT:
        message = f"{shared.name}: a tile at {address:#x}, not a multiple of {TILE_ALIGNMENT}"
        raise MemoryFault("misaligned", message, address=address, nbytes=tensor_map.tile_bytes)
    shared.offset(address, tensor_map.tile_bytes)
    phase = address % PERIOD
    # Rows fill the swizzle's span, so a tile's chunks are permuted among themselves and stay in bounds.
    chunks = tile_chunks(tensor_map.tile_bytes // 16, phase // 16, tensor_map.swizzle)
    return chunks + (address - phase - shared.base) // 16


def _fetch_tile(tensor_map: TensorMap, shared: SharedMemory, address: int, window: _Window | None) -> Bytes:
    """A tile of shared memory; reports the unwritten bytes among those that ``window`` keeps."""
    chunks = tile_chunk_offsets(tensor_map, shared, address)
    if shared.on_unwritten is not None and window is not None and not shared.chunks_written(chunks):
        kept = (chunks[:, None] * 16 + np.arange(16)).reshape(_tile_shape(tensor_map))[window.slices]
        shared.check_written(kept.reshape(-1))
    return shared.chunks[chunks].view(np.uint8).reshape(_tile_shape(tensor_map))


def _tile_shape(tensor_map: TensorMap) -> tuple[int, ...]:
    return (*tensor_map.counts[:0:-1], tensor_map.row_bytes)


def _window(tensor_map: TensorMap, memory: GlobalMemory, coordinates: Sequence[int]) -> _Window | None:
    """Where a box and its tensor meet, None if nowhere."""
    if len(coordinates) != tensor_map.rank:
        raise DescriptorError(f"{len(coordinates)} coordinates for a tensor map of rank {tensor_map.rank}")
    if tensor_map.per_byte > 1 and not coordinates[0] % tensor_map.per_byte:
        coordinates = (coordinates[0] // tensor_map.per_byte, *coordinates[1:])
    across = coordinates[0] * tensor_map.strides[0]
    if across % COPY_ALIGNMENT:
        # Not in PTX; an H200 stops with "an illegal instruction was encountered".
        message = (
            f"a box begins {across} bytes into a row of its tensor, not at a multiple of {COPY_ALIGNMENT}"
        )
        address = tensor_map.address + across
        raise MemoryFault("misaligned", message, address=address, nbytes=tensor_map.row_bytes)
    steps = tensor_map.steps or (1,) * tensor_map.rank
    low = [-(min(0, c) // step) for c, step in zip(coordinates, steps, strict=True)]
    high = [
        min(count, -((c - n) // step))
        for count, n, c, step in zip(tensor_map.counts, tensor_map.shape, coordinates, steps, strict=True)
    ]
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return None
    strides = [stride * step for stride, step in zip(tensor_map.strides, steps, strict=True)]
    origin = sum(c * s for c, s in zip(coordinates, tensor_map.strides, strict=True))
    first = origin + sum(lo * s for lo, s in zip(low, strides, strict=True))
    extent = sum((h - lo - 1) * s for lo, h, s in zip(low, high, strides, strict=True)) + strides[0]
    start = (tensor_map.address + first) % ADDRESS_SPACE
    allocation = memory.find(start, extent)
    size = tensor_map.strides[0]
    low[0], high[0] = low[0] * size, high[0] * size
    return _Window(
        allocation,
        start - allocation.base,
        tuple(h - lo for lo, h in zip(low, high, strict=True))[::-1],
        (*strides[:0:-1], 1),
        tuple(slice(lo, h) for lo, h in zip(low, high, strict=True))[::-1],
    )


def _read_first(tensor_map: TensorMap, memory: GlobalMemory) -> None:
    """What an H200 does to load a box that is wholly outside its tensor, which may begin at no memory."""
    address = tensor_map.address % ADDRESS_SPACE
    try:
        memory.find(address, COPY_ALIGNMENT)
    except MemoryFault as fault:
        message = f"a box lies wholly outside its tensor, so that the first element is read: {fault}"
        raise MemoryFault(fault.kind, message, address=address, nbytes=COPY_ALIGNMENT) from fault


def _refuse_below(tensor_map: TensorMap, coordinates: Sequence[int]) -> None:
    """Raise MemoryFault for a store that lies wholly before its tensor in some dimension.

    Not in PTX; an H200 stops with "an illegal instruction was encountered". Past the end is no fault.
    """
    for dimension, (first, n) in enumerate(zip(coordinates, tensor_map.box, strict=True)):
        if first + n <= 0:
            message = f"a store of a box that ends at {first + n} in dimension {dimension} of its tensor"
            raise MemoryFault(
                "out of bounds", message, address=tensor_map.address, nbytes=tensor_map.tile_bytes
            )


def _check_source(window: _Window) -> None:
    memory = window.allocation
    if memory.on_unwritten is None or memory.written is None:
        return
    if not window.view(memory.written).all():
        memory.check_written(window.offsets())


def _mark_written(window: _Window) -> None:
    if window.allocation.written is not None:
        window.view(window.allocation.written)[...] = True


def check_span(source_address: int, target_address: int, nbytes: int) -> None:
    """Raise MemoryFault unless addresses and size of a plain copy are multiples of 16 (PTX 9.7.9.25.4.1)."""
    for address in (source_address, target_address):
        if address % COPY_ALIGNMENT or nbytes % COPY_ALIGNMENT:
            message = f"a bulk copy of {nbytes} bytes at {address:#x}, not multiples of {COPY_ALIGNMENT}"
            raise MemoryFault("misaligned", message, address=address, nbytes=nbytes)
