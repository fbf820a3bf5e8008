"""Byte memories that know what was written: shared, global, local and parameter memory.

    shared = SharedMemory(size, rank=0)            # valid addresses (rank << 24) | 0x400 ... + size
    memory = GlobalMemory(); memory.register(array, name="q")   # valid addresses: those of the array's bytes
    words = memory.load_words(addresses, 4, mask)  # uint32 (lanes,); 16 bytes: uint64 (lanes, 2)
    bytes = memory.load(addresses, 4, mask)        # the same as uint8 (lanes, 4)
    memory.store(addresses, values, 4, mask)       # values: any dtype, contiguous, 4 bytes a lane
    memory.read(address, nbytes); memory.write(address, data)   # one span

Addresses are uint32 or uint64 arrays, absolute. ``mask`` is a bool array of active lanes, or None for all of
them; what ``load`` gives inactive lanes means nothing. An access must be aligned to its size and lie in one
allocation: otherwise ``MemoryFault``. Setting ``on_unwritten`` makes every read of a byte that no one wrote
call it with an ``Unwritten``; without it such reads give the poison 0xCB (or, in a caller's buffer, what the
buffer held).
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attn4.emulator.faults import EmulationError

POISON = 0xCB
SHARED_START = 0x400  # the first bytes of a CTA's window are reserved by the system
RANK_SHIFT = 24
SIZES = (1, 2, 4, 8, 16, 32)
_ALL_WRITTEN = {n: int.from_bytes(b"\1" * min(n, 8), "little") for n in SIZES}
_CHUNK_WRITTEN = np.frombuffer(b"\1" * 16, np.complex128)[0]

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]


class MemoryFault(EmulationError):  # noqa: N818
    """An access that the chip would trap.

    ``kind`` is "out of bounds" or "misaligned", or "unwritten" for a read of what no one wrote, which the
    chip would not trap; ``lane`` is None for a copy of a span.
    """

    def __init__(
        self, kind: str, message: str, *, address: int, nbytes: int, lane: int | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.address, self.nbytes, self.lane = kind, address, nbytes, lane


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A read of bytes that no one wrote: their absolute addresses, and the lane of each (None for a span)."""

    memory: ByteMemory
    addresses: npt.NDArray[np.int64]
    lanes: npt.NDArray[np.int64] | None


def refuse_unwritten(read: Unwritten) -> None:
    """Stop at a read of bytes that no one wrote. Raises MemoryFault."""
    address, nbytes = int(read.addresses[0]), read.addresses.size
    lane = None if read.lanes is None else int(read.lanes[0])
    message = f"{nbytes} bytes of {read.memory.name} from {address:#x} on, which no one wrote, are read"
    raise MemoryFault("unwritten", message, address=address, nbytes=nbytes, lane=lane)


class ByteMemory:
    """A contiguous range of addresses over a uint8 array; ``written`` is the mask of what was written.

    ``tracked=False`` counts all of it as written: ``written`` is None.
    """

    __slots__ = (
        "_chunk_flags",
        "_flags",
        "_views",
        "base",
        "bytes",
        "chunks",
        "end",
        "matrices",
        "name",
        "on_unwritten",
        "written",
    )

    def __init__(self, name: str, data: Bytes, base: int, *, tracked: bool) -> None:
        self.name = name
        self.bytes = data
        self.base = base
        self.end = base + data.size
        self.written: Mask | None = np.zeros(data.size, np.bool_) if tracked else None
        self.on_unwritten: Callable[[Unwritten], None] | None = None
        self.matrices: dict[Any, Any] = {}
        # complex128 is numpy's only plain 16-byte element: copied as bits, which is all that is asked of it.
        self.chunks = data[: data.size // 16 * 16].view(np.complex128)
        self._views = {n: _words(data, n) for n in SIZES}
        # The mask in words of each size, so that a store marks its bytes with one assignment, too.
        flags = None if self.written is None else self.written.view(np.uint8)
        self._flags = {} if flags is None else {n: _words(flags, n) for n in SIZES}
        self._chunk_flags = (
            self.chunks if flags is None else flags[: flags.size // 16 * 16].view(np.complex128)
        )

    def load_words(self, addresses: Array, nbytes: int, mask: Mask | None = None) -> Array:
        """Native words of the lanes: unsigned (lanes,); for 16 and 32 bytes uint64 (lanes, nbytes // 8)."""
        if mask is not None:
            addresses = np.where(mask, addresses, addresses.dtype.type(self.base))
        if self.base % nbytes:
            words = _words(self.bytes[self._checked(addresses, nbytes)].reshape(-1), nbytes)
        else:
            try:
                index = self._index(addresses, nbytes)
                words = self._views[nbytes].take(index, axis=0)
            except IndexError:
                raise self._fault(addresses, nbytes) from None
            if self.on_unwritten is None or not self._flags or self._all_written(index, nbytes, mask):
                return words
        if self.on_unwritten is not None:
            lanes = np.arange(addresses.size) if mask is None else np.flatnonzero(mask)
            offsets = self._byte_offsets(addresses[lanes], nbytes)
            self.check_written(offsets.reshape(-1), np.repeat(lanes, nbytes))
        return words

    def load(self, addresses: Array, nbytes: int, mask: Mask | None = None) -> Bytes:
        """Bytes of the lanes, uint8 (lanes, nbytes)."""
        return self.load_words(addresses, nbytes, mask).view(np.uint8).reshape(-1, nbytes)

    def store(self, addresses: Array, values: Array, nbytes: int, mask: Mask | None = None) -> None:
        """Write ``nbytes`` of ``values`` a lane; of lanes with one address the highest wins."""
        words = _words(np.ascontiguousarray(values).reshape(-1).view(np.uint8), nbytes)
        if mask is not None:
            addresses, words = addresses[mask], words[mask]
        if self.base % nbytes:
            return self._scatter(addresses, words, nbytes, mask)
        try:
            index = self._index(addresses, nbytes)
            self._views[nbytes][index] = words
        except IndexError:
            raise self._fault(addresses, nbytes, mask) from None
        if self._flags:
            self._flags[nbytes][index] = _ALL_WRITTEN[nbytes]
        return None

    def read(self, address: int, nbytes: int) -> Bytes:
        """A view of ``nbytes`` bytes at ``address``; reads of unwritten bytes are reported."""
        start = self.offset(address, nbytes)
        if self.on_unwritten is not None and self.written is not None:
            self.check_written(np.arange(start, start + nbytes))
        return self.bytes[start : start + nbytes]

    def write(self, address: int, data: Array) -> None:
        """Write the bytes of a contiguous array at ``address``."""
        source = data.reshape(-1).view(np.uint8)
        start = self.offset(address, source.size)
        self.bytes[start : start + source.size] = source
        if self.written is not None:
            self.written[start : start + source.size] = True

    def offset(self, address: int, nbytes: int) -> int:
        """Offset of a span in ``bytes``. Raises MemoryFault unless all of it lies in this memory."""
        if address < self.base or address + nbytes > self.end:
            raise self._out_of_bounds(address, nbytes, None)
        return address - self.base

    def put_chunks(self, index: Array, chunks: Array) -> None:
        """Write 16-byte chunks (complex128) at ``index`` of ``chunks``. Raises IndexError past the end."""
        self.chunks[index] = chunks
        if self._flags:
            self._chunk_flags[index] = _CHUNK_WRITTEN

    def chunks_written(self, index: Array) -> bool:
        """Whether all bytes of 16-byte chunks were written."""
        return not self._flags or bool((self._chunk_flags.take(index) == _CHUNK_WRITTEN).all())

    def check_chunks(self, index: Array) -> None:
        """Report the unwritten bytes among 16-byte chunks, as ``check_written``."""
        if self.on_unwritten is None or not self._flags:
            return
        missing = self._chunk_flags.take(index) != _CHUNK_WRITTEN
        if missing.any():
            self.check_written((index[missing][:, None] * 16 + np.arange(16)).reshape(-1))

    def check_written(self, offsets: Array, lanes: Array | None = None) -> None:
        """Report those of ``offsets`` (in ``bytes``) that no one wrote to ``on_unwritten``, if it is set."""
        if self.on_unwritten is None or self.written is None:
            return
        bad = ~self.written[offsets]
        if bad.any():
            readers = None if lanes is None else lanes[bad]
            self.on_unwritten(Unwritten(self, offsets[bad] + self.base, readers))

    def _index(self, addresses: Array, nbytes: int) -> Array:
        """Index of each lane's word. What is misaligned or below the base becomes an index beyond any array.

        The offset is rotated, not shifted: bits that alignment wants zero land at the top, so that one range
        check by numpy stands for alignment and both bounds. Single bytes are checked here, with the same
        IndexError.
        """
        offset = addresses - addresses.dtype.type(self.base)
        shift = nbytes.bit_length() - 1
        if shift:
            offset = (offset >> shift) | (offset << (8 * offset.itemsize - shift))
        elif offset.max(initial=0) >= self.bytes.size:
            raise IndexError
        index: Array = offset.view(np.int64) if offset.dtype == np.uint64 else offset
        return index

    def _byte_offsets(self, addresses: Array, nbytes: int) -> Array:
        offsets: Array = (addresses.astype(np.int64) - self.base)[:, None] + np.arange(nbytes)
        return offsets

    def _scatter(self, addresses: Array, words: Array, nbytes: int, mask: Mask | None) -> None:
        offsets = self._checked(addresses, nbytes, mask)
        self.bytes[offsets] = words.view(np.uint8).reshape(-1, nbytes)
        if self.written is not None:
            self.written[offsets] = True

    def _checked(self, addresses: Array, nbytes: int, mask: Mask | None = None) -> Array:
        """Byte offsets (lanes, nbytes): the slow way, for a buffer that is aligned worse than the access."""
        offsets = self._byte_offsets(addresses, nbytes)
        inside = offsets.min(initial=0) >= 0 and offsets.max(initial=0) < self.bytes.size
        if not inside or (addresses % nbytes).any():
            raise self._fault(addresses, nbytes, mask)
        return offsets

    def _all_written(self, index: Array, nbytes: int, mask: Mask | None) -> bool:
        whole = self._flags[nbytes].take(index, axis=0) == _ALL_WRITTEN[nbytes]
        if nbytes > 8:
            whole = whole.all(axis=1)
        return bool(whole.all() if mask is None else whole[mask].all())

    def _fault(self, addresses: Array, nbytes: int, mask: Mask | None = None) -> MemoryFault:
        """The fault of the first lane whose access is wrong; ``mask`` where it compressed ``addresses``."""
        lanes = np.arange(addresses.size) if mask is None else np.flatnonzero(mask)
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            if address % nbytes:
                return _misaligned(self.name, address, nbytes, lane)
            if address < self.base or address + nbytes > self.end:
                return self._out_of_bounds(address, nbytes, lane)
        raise AssertionError("no lane is at fault")

    def _out_of_bounds(self, address: int, nbytes: int, lane: int | None) -> MemoryFault:
        who = "a copy" if lane is None else f"lane {lane}"
        where = f"{address:#x}, outside {self.base:#x}..{self.end:#x}"
        message = f"{self.name}: {who} accesses {nbytes} bytes at {where}"
        return MemoryFault("out of bounds", message, address=address, nbytes=nbytes, lane=lane)


class SharedMemory(ByteMemory):
    """Shared memory of one CTA: ``size`` poisoned bytes from address (rank << 24) | 0x400."""

    __slots__ = ("rank",)

    def __init__(self, size: int, rank: int = 0) -> None:
        data = np.full(-(-size // 128) * 128, POISON, np.uint8)[:size]
        base = (rank << RANK_SHIFT) | SHARED_START
        super().__init__(f"shared memory of CTA {rank}", data, base, tracked=True)
        self.rank = rank

    def absolute(self, offset: int) -> int:
        """Address of an offset in the CTA's window (as matrix descriptors hold it, without the rank)."""
        return (self.rank << RANK_SHIFT) | offset


class GlobalMemory:
    """The allocations that a kernel may touch, each a view of a real buffer at its real address."""

    __slots__ = ("_allocations", "_bases")

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._allocations: list[ByteMemory] = []

    def register(self, buffer: Array, *, name: str, written: bool = True) -> ByteMemory:
        """Make the bytes of a contiguous array addressable; ``written=False`` tracks which are written.

        Raises ValueError where they overlap what is registered, or the array is not contiguous.
        """
        if not buffer.flags.c_contiguous:
            raise ValueError(f"{name}: the buffer of an allocation must be contiguous; register its storage")
        data = buffer.reshape(-1).view(np.uint8)
        allocation = ByteMemory(name, data, int(data.ctypes.data), tracked=not written)
        position = bisect_right(self._bases, allocation.base)
        for other in self._allocations[max(position - 1, 0) : position + 1]:
            if allocation.base < other.end and other.base < allocation.end:
                raise ValueError(f"{name} at {allocation.base:#x} overlaps {other.name} at {other.base:#x}")
        self._bases.insert(position, allocation.base)
        self._allocations.insert(position, allocation)
        return allocation

    def register_spans(self, spans: Iterable[tuple[str, Bytes]], *, written: bool = True) -> list[ByteMemory]:
        """Register byte arrays that may overlap, such as Q, K and V of one packed tensor.

        What overlaps becomes one allocation with the joined names. The caller keeps the arrays alive.
        """
        groups: list[tuple[list[str], int, int, Bytes]] = []
        for name, data in sorted(spans, key=lambda span: int(span[1].ctypes.data)):
            start = int(data.ctypes.data)
            if groups and start < groups[-1][2]:
                names, first, end, _ = groups.pop()
                end = max(end, start + data.size)
                whole = np.ctypeslib.as_array((ctypes.c_uint8 * (end - first)).from_address(first))
                groups.append(([*names, name], first, end, whole))
            else:
                groups.append(([name], start, start + data.size, data))
        return [self.register(data, name=" + ".join(names), written=written) for names, _, _, data in groups]

    def tracked(self) -> list[ByteMemory]:
        """The allocations of which it is known what was written."""
        return [allocation for allocation in self._allocations if allocation.written is not None]

    def release(self, allocation: ByteMemory) -> None:
        """Take an allocation out: later accesses to it are faults. Raises ValueError if it is not here."""
        position = self._allocations.index(allocation)
        del self._bases[position], self._allocations[position]

    def __iter__(self) -> Iterator[ByteMemory]:
        return iter(tuple(self._allocations))

    def holds(self, address: int) -> bool:
        """Whether an allocation holds the byte at ``address``."""
        position = bisect_right(self._bases, address) - 1
        return position >= 0 and address < self._allocations[position].end

    def find(self, address: int, nbytes: int = 1, lane: int | None = None) -> ByteMemory:
        """The allocation that holds the span. Raises MemoryFault, naming the nearest below, if none does."""
        position = bisect_right(self._bases, address) - 1
        if position >= 0 and address + nbytes <= self._allocations[position].end:
            return self._allocations[position]
        near = "no allocation lies below it"
        if position >= 0:
            below = self._allocations[position]
            near = f"the nearest below, {below.name}, is {below.base:#x}..{below.end:#x}"
        who = "a copy" if lane is None else f"lane {lane}"
        what = f"{nbytes} bytes at {address:#x}, which belong to no allocation"
        message = f"global memory: {who} accesses {what}; {near}"
        raise MemoryFault("out of bounds", message, address=address, nbytes=nbytes, lane=lane)

    def load_words(self, addresses: Array, nbytes: int, mask: Mask | None = None) -> Array:
        """As ``ByteMemory.load_words``; lanes may read from several allocations."""
        first = 0 if mask is None else int(mask.argmax())
        try:
            return self.find(int(addresses[first]), nbytes, first).load_words(addresses, nbytes, mask)
        except MemoryFault as fault:
            if fault.kind == "misaligned":
                raise
        words = np.zeros((addresses.size, max(nbytes // 8, 1)), f"u{min(nbytes, 8)}")
        for owner, lanes in self._owners(addresses, nbytes, mask):
            part = owner.load_words(addresses, nbytes, lanes)
            words[lanes] = part.reshape(words.shape)[lanes]
        return words if nbytes > 8 else words[:, 0]

    def load(self, addresses: Array, nbytes: int, mask: Mask | None = None) -> Bytes:
        """Bytes of the lanes, uint8 (lanes, nbytes)."""
        return self.load_words(addresses, nbytes, mask).view(np.uint8).reshape(-1, nbytes)

    def store(self, addresses: Array, values: Array, nbytes: int, mask: Mask | None = None) -> None:
        """As ``ByteMemory.store``; nothing is written unless every lane's access is right."""
        first = 0 if mask is None else int(mask.argmax())
        try:
            return self.find(int(addresses[first]), nbytes, first).store(addresses, values, nbytes, mask)
        except MemoryFault as fault:
            if fault.kind == "misaligned":
                raise
        for owner, lanes in self._owners(addresses, nbytes, mask):
            owner.store(addresses, values, nbytes, lanes)
        return None

    def read(self, address: int, nbytes: int) -> Bytes:
        """A view of a span of one allocation."""
        return self.find(address, nbytes).read(address, nbytes)

    def write(self, address: int, data: Array) -> None:
        """Write the bytes of a contiguous array into one allocation."""
        self.find(address, data.nbytes).write(address, data)

    def _owners(self, addresses: Array, nbytes: int, mask: Mask | None) -> list[tuple[ByteMemory, Mask]]:
        """Each allocation touched, with the lanes that touch it. Raises MemoryFault before any is touched."""
        owners: dict[int, tuple[ByteMemory, Mask]] = {}
        lanes = np.arange(addresses.size) if mask is None else np.flatnonzero(mask)
        for lane in lanes.tolist():
            address = int(addresses[lane])
            found = self.find(address, nbytes, lane)
            if address % nbytes:
                raise _misaligned(found.name, address, nbytes, lane)
            owners.setdefault(found.base, (found, np.zeros(addresses.size, np.bool_)))[1][lane] = True
        return list(owners.values())


def _misaligned(name: str, address: int, nbytes: int, lane: int) -> MemoryFault:
    message = f"{name}: lane {lane} accesses {nbytes} bytes at {address:#x}, not a multiple of {nbytes}"
    return MemoryFault("misaligned", message, address=address, nbytes=nbytes, lane=lane)


def _words(data: Bytes, nbytes: int) -> Array:
    """View bytes as words of ``nbytes``, wider than 8 as rows of uint64; a rest that fills no word is cut."""
    whole = data[: data.size // nbytes * nbytes]
    if nbytes <= 8:
        return whole.view(f"u{nbytes}")
    return whole.view(np.uint64).reshape(-1, nbytes // 8)
