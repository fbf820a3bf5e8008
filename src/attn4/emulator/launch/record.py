"""What one launch is: everything that a machine needs to run it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Dim3: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Global memory that a kernel may touch: ``nbytes`` from ``base``, the first byte's address.

    ``argument`` is the position of the tensor in the call that gave it, -1 if host code allocated it. A
    tensor with gaps between its rows counts them in; two tensors may overlap. ``owner`` keeps the memory
    alive.
    """

    base: int
    nbytes: int
    argument: int = -1
    owner: Any = field(default=None, repr=False, compare=False)

    def bytes(self) -> NDArray[np.uint8]:
        """The memory itself, not a copy: uint8 (nbytes,)."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.base))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch, as host code asked for it.

    ``kernel`` is the entry's name in ``ptx``, ``image`` the sha256 of the cubin that the PTX was assembled
    to: names are not unique, digests are. ``grid`` counts blocks, ``block`` threads, ``cluster`` blocks, as
    (x, y, z). ``shared_bytes`` is dynamic shared memory of one block, ``stream`` a handle (0: the default
    stream). ``parameters`` holds the bytes of each parameter, in the order of the PTX. ``programmatic``: the
    kernel may start before its predecessor has ended (griddepcontrol); ``cooperative``: all its blocks must
    be resident together.
    """

    kernel: str
    image: str
    ptx: str = field(repr=False)
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    stream: int
    parameters: tuple[bytes, ...] = field(repr=False)
    allocations: tuple[Allocation, ...]
    programmatic: bool = False
    cooperative: bool = False


Run: TypeAlias = Callable[[Launch], None]
"""Runs a launch to its end; what it raises reaches the caller of the kernel."""
