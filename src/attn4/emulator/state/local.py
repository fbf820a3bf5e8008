"""Local memory: each thread's own, at the same addresses for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from attn4.emulator.state.memory import POISON, ByteMemory, MemoryFault, Unwritten, refuse_unwritten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attn4.emulator.ptx.module import Variable

LOCAL_BASE: Final = 0x4000_0000
"""Where local memory starts, as a generic address; it ends below 2**31."""
LOCAL_LIMIT: Final = 512 * 1024
"""Bytes that a thread may have (CUDA C programming guide, table of technical specifications)."""
_ALIGNMENT: Final = 32

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


def local_layout(variables: Iterable[Variable]) -> tuple[dict[str, int], int]:
    """Address of each local variable, and the bytes that a thread needs."""
    addresses: dict[str, int] = {}
    end = 0
    for variable in variables:
        start = -(-end // variable.align) * variable.align
        addresses[variable.name] = LOCAL_BASE + start
        end = start + variable.size
    return addresses, end


class LocalMemory:
    """The local memory of the threads of a CTA, ``size`` poisoned bytes each."""

    __slots__ = ("_memory", "_stride", "size")

    def __init__(self, threads: int, size: int) -> None:
        self.size = size
        self._stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        data = np.full(threads * self._stride, POISON, np.uint8)
        self._memory = ByteMemory("local memory", data, LOCAL_BASE, tracked=True)
        self._memory.on_unwritten = self._refuse

    def of(self, threads: npt.NDArray[np.uint32]) -> LocalView:
        """The same as the lanes of a warp see it."""
        return LocalView(self, threads)

    def _refuse(self, read: Unwritten) -> None:
        """The address that the thread used, in place of that in the storage of all threads."""
        inside = (read.addresses - LOCAL_BASE) % max(self._stride, 1) + LOCAL_BASE
        refuse_unwritten(Unwritten(read.memory, inside, read.lanes))

    def locate(
        self, addresses: Array, nbytes: int, threads: npt.NDArray[np.uint32], mask: Mask | None
    ) -> Array:
        """Where the accesses lie in the storage of all threads. Raises MemoryFault."""
        offset = addresses.astype(np.int64) - LOCAL_BASE
        outside = (offset < 0) | (offset + nbytes > self.size)
        misaligned = offset % nbytes != 0
        wrong = outside | misaligned if mask is None else (outside | misaligned) & mask
        if wrong.any():
            lane = int(wrong.argmax())
            kind = "out of bounds" if outside[lane] else "misaligned"
            address = int(addresses[lane])
            message = (
                f"local memory: lane {lane} accesses {nbytes} bytes at {address:#x}, {kind} "
                f"of {LOCAL_BASE:#x}..{LOCAL_BASE + self.size:#x}"
            )
            raise MemoryFault(kind, message, address=address, nbytes=nbytes, lane=lane)
        if mask is not None:
            offset = np.where(mask, offset, 0)
        return offset + threads.astype(np.int64) * self._stride + LOCAL_BASE

    @property
    def storage(self) -> ByteMemory:
        """That of all threads, one after another."""
        return self._memory


class LocalView:
    """The local memory of some lanes, with the interface of `ByteMemory` that loads and stores use."""

    __slots__ = ("_memory", "_threads")

    def __init__(self, memory: LocalMemory, threads: npt.NDArray[np.uint32]) -> None:
        self._memory = memory
        self._threads = threads

    def load_words(self, addresses: Array, nbytes: int, mask: Mask | None = None) -> Array:
        """As `ByteMemory.load_words`; one address a lane."""
        where = self._memory.locate(addresses, nbytes, self._threads, mask)
        return self._memory.storage.load_words(where, nbytes, mask)

    def store(self, addresses: Array, values: Array, nbytes: int, mask: Mask | None = None) -> None:
        """As `ByteMemory.store`; one address a lane."""
        where = self._memory.locate(addresses, nbytes, self._threads, mask)
        self._memory.storage.store(where, values, nbytes, mask)
