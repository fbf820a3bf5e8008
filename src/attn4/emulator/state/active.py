"""What a mask of active lanes says, found once for each mask: masks are few, and looked at all the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WARP = 32
_KEPT = 8192

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Active:
    """The lanes of a mask: the first, how many, and the hardware warps (their places) that have any.

    ``span`` is the slice that holds them all where they are next to each other, None where they are not.
    ``touched`` is the mask of all lanes of those warps.
    """

    first: int
    count: int
    warps: tuple[int, ...]
    span: slice | None
    touched: Mask
    everyone: bool

    @classmethod
    def of(cls, mask: Mask) -> Active:
        """Look at a mask."""
        lanes = np.flatnonzero(mask)
        rows = mask.reshape(-1, WARP).any(axis=1)
        first = int(lanes[0]) if lanes.size else 0
        end = int(lanes[-1]) + 1 if lanes.size else 0
        touched = np.repeat(rows, WARP)
        touched.flags.writeable = False
        return cls(
            first,
            int(lanes.size),
            tuple(np.flatnonzero(rows).tolist()),
            slice(first, end) if lanes.size and end - first == lanes.size else None,
            touched,
            bool(lanes.size == mask.size),
        )


_known: dict[bytes, Active] = {}


def active(mask: Mask) -> Active:
    """What a mask says."""
    return active_bytes(mask.tobytes())


def active_bytes(bits: bytes) -> Active:
    """What a mask says that is given as bytes."""
    found = _known.get(bits)
    if found is None:
        if len(_known) >= _KEPT:
            _known.clear()
        found = _known[bits] = Active.of(np.frombuffer(bits, np.bool_))
    return found


def shared_value(values: NDArray[Any], mask: Mask) -> int | None:
    """The value, as an unsigned number, that all active lanes hold; None if they differ."""
    lanes = active(mask)
    if lanes.span is None:
        first = values[lanes.first]
        return int.from_bytes(first.tobytes(), "little") if (values[mask] == first).all() else None
    raw = values[lanes.span].tobytes()
    one = raw[: values.itemsize]
    return int.from_bytes(one, "little") if one * lanes.count == raw else None


def put(values: NDArray[Any], mask: Mask, value: int) -> None:
    """Write one value to the active lanes."""
    span = active(mask).span
    values[mask if span is None else span] = value
