"""Attributes of other packages, replaced while a device block is open anywhere and put back afterwards.

A replacement is made from the original and decides for itself, by the context it is called in, which of the
two answers: code outside of every block, in another thread for instance, finds what it always found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """``owner.name`` becomes ``make(original)``; ``original`` is what stands in ``owner`` itself, else what
    it inherits.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]


class Patches:
    """Patches that are in place as long as anyone holds them.

    ``sources`` give the patches when the first holder comes, and again at each ``refresh``: a package that
    is imported late is patched late.
    """

    def __init__(self, *sources: Callable[[], Iterable[Patch]]) -> None:
        self._sources = sources
        self._lock = threading.RLock()
        self._holders = 0
        self._undo: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep them in place in this block."""
        with self._lock:
            self._holders += 1
            try:
                self._apply()
            except BaseException:
                self._let_go()
                raise
        try:
            yield
        finally:
            with self._lock:
                self._let_go()

    def refresh(self) -> None:
        """Patch what has become available since; nothing if no one holds them."""
        with self._lock:
            if self._holders:
                self._apply()

    def _apply(self) -> None:
        for source in self._sources:
            for patch in source():
                key = (id(patch.owner), patch.name)
                if key in self._undo:
                    continue
                own = vars(patch.owner).get(patch.name, _ABSENT)
                original = getattr(patch.owner, patch.name) if own is _ABSENT else own
                replacement = patch.make(original)
                setattr(patch.owner, patch.name, replacement)
                self._undo[key] = (patch.owner, own, replacement)

    def _let_go(self) -> None:
        self._holders -= 1
        if self._holders:
            return
        for (_, name), (owner, own, replacement) in reversed(self._undo.items()):
            if vars(owner).get(name) is not replacement:
                continue  # Someone has set it to something else since: theirs stays.
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._undo.clear()
