"""Who touched each word of a CTA's shared memory last: a shadow of it, and the checks on it.

Writers are kept by the word of 4 bytes: the column and a *stamp*, which is the epoch and the number of the
instruction. Readers of the generic proxy are kept for each warp by the word, with the lanes that read;
readers of the async proxy for each engine by the 16-byte chunk. Of writes of less than a word the bytes are
kept, so that neighbours in a word do not conflict.

A check first compares whole pages: most accesses are in order, and of those no more is asked. What it
returns are conflicts, one for each other actor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.hazards.clocks import FENCED, ORDERED, WARP, Clocks, Row, Who

Index = NDArray[Any]
Words = NDArray[np.int64]

STAMP: Final = 24
"""Bits of a stamp below the epoch: the number of the instruction."""
NUMBER: Final = (1 << STAMP) - 1
WORD: Final = 4
CHUNK_WORDS: Final = 4
PAGE_WORDS: Final = 256
PAGE_CHUNKS: Final = PAGE_WORDS // CHUNK_WORDS


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two accesses that nothing orders.

    ``lane`` (of the array of warps; None: an engine) accesses byte ``offset`` of the memory; the other access
    is of ``column`` and was made by instruction ``number``.
    ``wrote`` tells what the other did; ``ordered`` that only a proxy fence is missing. A read of what no one
    wrote has column -1.
    """

    lane: int | None
    offset: int
    column: int
    number: int
    wrote: bool
    ordered: bool


@dataclass(frozen=True, slots=True)
class Threads:
    """Generic accesses: the active ``lanes`` of ``who``, each with ``words`` (lanes, n), made by ``number``.

    ``parts`` are the bytes of the word that each lane touches, as 4 bits, or None for whole words.
    ``collective``: the warp reads as one (ldmatrix), so that what any of its lanes passes on covers it.
    """

    who: Who
    lanes: NDArray[np.int64]
    words: Words
    number: int
    parts: NDArray[np.uint8] | None = None
    collective: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """Accesses of the async proxy to ``chunks``: stamped with ``column`` and ``epoch``, issued by ``thread``.

    ``known`` is what the issuer knows; ``proxy`` the plane that accesses before it must be known in.
    """

    column: int
    epoch: int
    thread: int
    known: Row
    chunks: slice | Index
    number: int
    proxy: int = FENCED


class Shadow:
    """The shadow of ``nbytes`` of shared memory of one CTA."""

    def __init__(self, nbytes: int, clocks: Clocks) -> None:
        pages = -(-nbytes // (PAGE_WORDS * WORD))
        self._clocks = clocks
        self._words = pages * PAGE_WORDS
        self._warps = clocks.threads // WARP
        self._writers = np.zeros(self._words, np.int32)
        self._written = np.zeros(self._words, np.int64)
        # Zeros that nobody touches take no memory, so room for every warp costs nothing.
        self._reads = np.zeros(self._warps * self._words, np.int64)
        self._read_lanes = np.zeros(self._warps * self._words, np.uint32)
        self._pages = np.zeros((self._warps, pages), np.int64)
        self._slots: dict[int, int] = {}
        self._columns: list[int] = []
        self._chunks: list[NDArray[np.int64]] = []
        self._chunk_pages = np.zeros((4, pages), np.int64)
        self._parts: NDArray[np.uint8] | None = None
        self._small_reads: NDArray[np.bool_] | None = None
        self.remote: dict[int, int] = {}
        self.barriers = np.zeros(self._words, np.bool_)

    def read(self, access: Threads) -> list[Conflict]:
        """Record reads of threads; the conflicts with the last writers."""
        conflicts = self._against_writers(access, reads=True)
        self._record_reads(access)
        return conflicts

    def write(self, access: Threads) -> list[Conflict]:
        """Record writes of threads; the conflicts with the last writers and with readers since."""
        conflicts = self._against_writers(access, reads=False)
        conflicts += self._against_readers(access)
        who, words = access.who, access.words
        epochs = self._clocks.epochs[(who.first + access.lanes) // WARP].astype(np.int64)
        self._writers[words] = (who.first + access.lanes)[:, None]
        self._written[words] = (epochs << STAMP | access.number)[:, None]
        if access.parts is not None:
            if self._parts is None:
                self._parts = np.full(self._words, 15, np.uint8)
            self._parts[words] = access.parts[:, None]
        elif self._parts is not None:
            self._parts[words] = 15
        return conflicts

    def engine_read(self, access: Engine) -> list[Conflict]:
        """Record reads of the async proxy; the conflicts with the last writers."""
        conflicts = self._engine_against_writers(access, reads=True)
        self.record_engine_read(access)
        return conflicts

    def record_engine_read(self, access: Engine) -> None:
        """Record reads of the async proxy that need no check."""
        slot = self._slot(access.column)
        stamp = access.epoch << STAMP | access.number
        self._chunks[slot][access.chunks] = stamp
        self._chunk_pages[slot, _pages_of(access.chunks)] = stamp

    def engine_write(self, access: Engine) -> list[Conflict]:
        """Record writes of the async proxy; the conflicts with the last writers and with readers since."""
        conflicts = self._engine_against_writers(access, reads=False)
        conflicts += self._engine_against_readers(access)
        self._writers.reshape(-1, CHUNK_WORDS)[access.chunks] = access.column
        self._written.reshape(-1, CHUNK_WORDS)[access.chunks] = access.epoch << STAMP | access.number
        if self._parts is not None:
            self._parts.reshape(-1, CHUNK_WORDS)[access.chunks] = 15
        return conflicts

    def engine_write_words(self, access: Engine) -> list[Conflict]:
        """As ``engine_write``, where ``access.chunks`` is a slice of words that lie in one chunk."""
        words = access.chunks
        assert isinstance(words, slice)
        before = self._writers[words].copy(), self._written[words].copy()
        first = words.start // CHUNK_WORDS
        whole = replace(access, chunks=slice(first, first + 1))
        chunk = slice(first * CHUNK_WORDS, (first + 1) * CHUNK_WORDS)
        kept = self._writers[chunk].copy(), self._written[chunk].copy()
        # The neighbours in the chunk are left out of the check, and left as they are.
        self._writers[chunk], self._written[chunk] = 0, 0
        self._writers[words], self._written[words] = before
        conflicts = self._engine_against_writers(whole, reads=False) + self._engine_against_readers(whole)
        self._writers[chunk], self._written[chunk] = kept
        self._writers[words] = access.column
        self._written[words] = access.epoch << STAMP | access.number
        return conflicts

    def unknown_to(self, known: NDArray[np.int32]) -> list[tuple[int, int]]:
        """Column and instruction of accesses from other CTAs that ``known`` does not hold."""
        return [
            (column, stamp & NUMBER)
            for column, stamp in self.remote.items()
            if known[column] < stamp >> STAMP
        ]

    def freed(self, known: Row) -> list[Conflict]:
        """Conflicts of one who knows ``known`` and gives the whole memory up."""
        everything = Engine(-1, 0, -1, known, slice(0, self._words // CHUNK_WORDS), 0, ORDERED)
        conflicts = self._engine_against_writers(everything, reads=False)
        return conflicts + self._engine_against_readers(everything)

    @property
    def partial(self) -> bool:
        """Whether anybody has written less than a word."""
        return self._parts is not None

    def _against_writers(self, access: Threads, *, reads: bool) -> list[Conflict]:
        words, who = access.words, access.who
        columns = self._writers.take(words)
        stamps = self._written.take(words)
        found: dict[int, Conflict] = {}
        if reads and not stamps.all():
            row, item = np.argwhere(stamps == 0)[0].tolist()
            offset = int(words[row, item]) * WORD
            found[-1] = Conflict(int(access.lanes[row]), offset, -1, 0, wrote=False, ordered=False)
        epochs = stamps >> STAMP
        in_order = self._clocks.common(who, ORDERED).take(columns) >= epochs
        if in_order.all():
            return list(found.values())
        in_order |= columns == (who.first + access.lanes)[:, None]
        if self._parts is not None:
            mine = np.uint8(15) if access.parts is None else access.parts[:, None]
            in_order |= (self._parts.take(words) & mine) == 0
        for row, item in np.argwhere(~in_order).tolist():
            thread = who.first + int(access.lanes[row])
            column, stamp = int(columns[row, item]), int(stamps[row, item])
            if column in found or self._clocks.row(thread)[ORDERED, column] >= stamp >> STAMP:
                continue
            offset = int(words[row, item]) * WORD
            lane = int(access.lanes[row])
            found[column] = Conflict(lane, offset, column, stamp & NUMBER, wrote=True, ordered=False)
        return list(found.values())

    def _record_reads(self, access: Threads) -> None:
        who, words = access.who, access.words
        lanes = access.lanes
        warps = (who.first + lanes) // WARP
        epochs = self._clocks.epochs[warps].astype(np.int64)
        stamps = (epochs << STAMP | access.number)[:, None]
        index = warps[:, None] * self._words + words
        bits = np.uint32(1) << (lanes % WARP).astype(np.uint32)
        if len(lanes) > 1 and words[0, 0] == words[-1, 0] and (words[:, 0] == words[0, 0]).all():
            # One word for all: of what is assigned to one place only the last is kept.
            for warp in np.unique(warps).tolist():
                bits[warps == warp] = np.bitwise_or.reduce(bits[warps == warp])
        if access.collective:
            self._read_lanes[index] = 0
        else:
            before = self._reads.take(index) >> STAMP == epochs[:, None]
            self._read_lanes[index] = bits[:, None] | np.where(before, self._read_lanes.take(index), 0)
        self._reads[index] = stamps
        self._pages[warps[:, None], words // PAGE_WORDS] = stamps
        if access.parts is not None:
            if self._small_reads is None:
                self._small_reads = np.zeros(self._words, np.bool_)
            self._small_reads[words] = True

    def _against_readers(self, access: Threads) -> list[Conflict]:
        words, who = access.words, access.who
        known = self._clocks.common(who, ORDERED)
        first, last = int(words.min()) // PAGE_WORDS, int(words.max()) // PAGE_WORDS + 1
        conflicts: list[Conflict] = []
        late = self._late(self._pages, self._least(known), first, last)
        for slot in late:
            conflicts += self._against_warp(access, slot)
        late = self._late(self._chunk_pages[: len(self._columns)], known[self._columns], first, last)
        for slot in late:
            stamps = self._chunks[slot].take(words // CHUNK_WORDS)
            column = self._columns[slot]
            for row, item in np.argwhere(stamps >> STAMP > known[column]).tolist():
                thread, stamp = who.first + int(access.lanes[row]), int(stamps[row, item])
                if self._clocks.row(thread)[ORDERED, column] < stamp >> STAMP:
                    lane, offset = int(access.lanes[row]), int(words[row, item]) * WORD
                    found = Conflict(lane, offset, column, stamp & NUMBER, wrote=False, ordered=False)
                    conflicts.append(found)
                    break
        return conflicts

    def _against_warp(self, access: Threads, warp: int) -> list[Conflict]:
        """Conflicts of writes with what the lanes of one warp have read: at most one."""
        who, words = access.who, access.words
        index = warp * self._words + words
        stamps, readers = self._reads.take(index), self._read_lanes.take(index)
        least = self._clocks.common(who, ORDERED)[warp * WARP : (warp + 1) * WARP]
        for row, item in np.argwhere(_unknown(stamps, readers, least)).tolist():
            thread, stamp = who.first + int(access.lanes[row]), stamps[row, item]
            small = access.parts is not None and self._small_reads is not None
            if small and self._small_reads is not None and self._small_reads[words[row, item]]:
                continue
            lane = self._reader(warp, thread, stamp, readers[row, item], self._clocks.row(thread))
            if lane >= 0:
                offset, mine = int(words[row, item]) * WORD, int(access.lanes[row])
                column = warp * WARP + lane
                return [Conflict(mine, offset, column, int(stamp) & NUMBER, wrote=False, ordered=False)]
        return []

    def _reader(
        self, warp: int, thread: int, stamp: np.int64, readers: np.uint32, row: NDArray[np.int32]
    ) -> int:
        """The first lane of ``warp`` that read and of whose read ``thread`` does not know; -1: none."""
        known = row[ORDERED, warp * WARP : (warp + 1) * WARP]
        late = known < int(stamp) >> STAMP
        if readers == 0:
            return 0 if late.all() and thread // WARP != warp else -1
        for lane in np.flatnonzero(late).tolist():
            if int(readers) >> lane & 1 and thread != warp * WARP + lane:
                return int(lane)
        return -1

    def _engine_against_writers(self, access: Engine, *, reads: bool) -> list[Conflict]:
        columns = self._writers.reshape(-1, CHUNK_WORDS)[access.chunks]
        stamps = self._written.reshape(-1, CHUNK_WORDS)[access.chunks]
        found: dict[int, Conflict] = {}
        if reads and not stamps.all():
            row, item = np.argwhere(stamps == 0)[0].tolist()
            offset = (_chunk(access.chunks, row) * CHUNK_WORDS + item) * WORD
            found[-1] = Conflict(None, offset, -1, 0, wrote=False, ordered=False)
        in_order = access.known[access.proxy].take(columns) >= stamps >> STAMP
        if in_order.all():
            return list(found.values())
        own = self._clocks.own(access.thread, access.proxy) if access.thread >= 0 else 0
        in_order |= (columns == access.thread) & (stamps >> STAMP <= own)
        in_order |= columns == access.column
        for row, item in np.argwhere(~in_order).tolist():
            column, stamp = int(columns[row, item]), int(stamps[row, item])
            if column not in found:
                ordered = column == access.thread or access.known[ORDERED, column] >= stamp >> STAMP
                offset = (_chunk(access.chunks, row) * CHUNK_WORDS + item) * WORD
                found[column] = Conflict(
                    None, offset, column, stamp & NUMBER, wrote=True, ordered=bool(ordered)
                )
        return list(found.values())

    def _engine_against_readers(self, access: Engine) -> list[Conflict]:
        chunks, known = access.chunks, access.known[ORDERED]
        pages = _pages_of(chunks)
        first, last = int(np.min(pages)), int(np.max(pages)) + 1
        conflicts: list[Conflict] = []
        for warp in self._late(self._pages, self._least(known), first, last):
            conflicts += self._engine_against_warp(access, warp)
        late = self._late(self._chunk_pages[: len(self._columns)], known[self._columns], first, last)
        for slot in late:
            column = self._columns[slot]
            stamps = self._chunks[slot][chunks]
            bad = np.flatnonzero(stamps >> STAMP > known[column])
            if bad.size and column != access.column:
                offset = _chunk(chunks, int(bad[0])) * CHUNK_WORDS * WORD
                number = int(stamps[bad[0]]) & NUMBER
                conflicts.append(Conflict(None, offset, column, number, wrote=False, ordered=False))
        return conflicts

    def _engine_against_warp(self, access: Engine, warp: int) -> list[Conflict]:
        rows = slice(warp * self._words, (warp + 1) * self._words)
        stamps = self._reads[rows].reshape(-1, CHUNK_WORDS)[access.chunks]
        readers = self._read_lanes[rows].reshape(-1, CHUNK_WORDS)[access.chunks]
        known = access.known[ORDERED, warp * WARP : (warp + 1) * WARP]
        for row, item in np.argwhere(_unknown(stamps, readers, known)).tolist():
            lane = self._reader(warp, access.thread, stamps[row, item], readers[row, item], access.known)
            if lane >= 0:
                offset = (_chunk(access.chunks, row) * CHUNK_WORDS + item) * WORD
                number, column = int(stamps[row, item]) & NUMBER, warp * WARP + lane
                return [Conflict(None, offset, column, number, wrote=False, ordered=False)]
        return []

    def _least(self, known: NDArray[np.int32]) -> NDArray[np.int32]:
        """The epoch of each warp that is known of all its lanes."""
        least: NDArray[np.int32] = known[: self._clocks.threads].reshape(-1, WARP).min(axis=1)
        return least

    def _late(self, pages: NDArray[np.int64], known: NDArray[np.int32], first: int, last: int) -> list[int]:
        """Slots that have read in a range of pages what is not known to be over."""
        latest = pages[:, first:last].max(axis=1) >> STAMP
        late: list[int] = np.flatnonzero(latest > known).tolist()
        return late

    def _slot(self, column: int) -> int:
        slot = self._slots.get(column)
        if slot is None:
            slot = self._slots[column] = len(self._columns)
            self._columns.append(column)
            self._chunks.append(np.zeros(self._words // CHUNK_WORDS, np.int64))
            if slot >= len(self._chunk_pages):
                self._chunk_pages = np.concatenate((self._chunk_pages, np.zeros_like(self._chunk_pages)))
        return slot


def _unknown(
    stamps: NDArray[np.int64], readers: NDArray[np.uint32], known: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Reads of lanes of a warp that may not be known, ``known`` being the epochs of its lanes that are."""
    epochs = stamps >> STAMP
    unknown: NDArray[np.bool_] = epochs > known.min()
    if unknown.any():
        unknown &= (readers != 0) | (epochs > known.max())
        late = np.flatnonzero(known < known.max())
        if unknown.any() and late.size < WARP:
            bits = np.bitwise_or.reduce(np.uint32(1) << late.astype(np.uint32)) if late.size else np.uint32(0)
            unknown &= ((readers & bits) != 0) | (epochs > known.max())
    return unknown


def _pages_of(chunks: slice | Index) -> Any:
    """Pages of chunks: all from the first to the last."""
    if isinstance(chunks, slice):
        return np.arange(chunks.start // PAGE_CHUNKS, (chunks.stop - 1) // PAGE_CHUNKS + 1)
    low, high = int(chunks.min()), int(chunks.max())
    return np.arange(low // PAGE_CHUNKS, high // PAGE_CHUNKS + 1)


def _chunk(chunks: slice | Index, row: int) -> int:
    return chunks.start + row if isinstance(chunks, slice) else int(chunks.reshape(-1)[row])
