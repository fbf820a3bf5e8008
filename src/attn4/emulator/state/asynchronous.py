"""Work that completes later: copies and products, and the order in which the rules let them complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Step = Callable[[], None]


@dataclass(slots=True, eq=False)
class Copy:
    """An asynchronous copy in two steps: its source is read, then its destination written and completion
    signalled.

    A copy whose ``read`` is None reads and writes in one step. ``label`` tells a report what it is.
    """

    label: str
    write: Step
    read: Step | None = None
    done: bool = False

    def finish_reading(self) -> None:
        """Do the first step, if it is still to be done."""
        if self.read is not None:
            read, self.read = self.read, None
            self._noted(read)

    def complete(self) -> None:
        """Do what is left."""
        if not self.done:
            self.done = True
            self.finish_reading()
            self._noted(self.write)

    def _noted(self, step: Step) -> None:
        try:
            step()
        except Exception as error:
            error.add_note(self.label)
            raise


@dataclass(slots=True)
class BulkGroups:
    """The bulk async-groups of one thread (PTX ``cp.async.bulk.commit_group``): the open one, and those
    committed.
    """

    open: list[Copy] = field(default_factory=list)
    committed: list[list[Copy]] = field(default_factory=list)

    def commit(self) -> None:
        """Close the open group, empty or not."""
        self.committed.append(self.open)
        self.open = []

    def wait(self, pending: int, *, read: bool) -> None:
        """Complete (or only read the sources of) all groups but the latest ``pending``."""
        if not self.committed:
            return
        finished = self.committed[: len(self.committed) - pending] if pending else list(self.committed)
        for group in finished:
            for copy in group:
                if read:
                    copy.finish_reading()
                else:
                    copy.complete()
        if not read:
            del self.committed[: len(finished)]


@dataclass(slots=True)
class Products:
    """The wgmma products of one warp, in order: the open group and those committed."""

    open: list[Step] = field(default_factory=list)
    committed: list[list[Step]] = field(default_factory=list)

    @property
    def pending(self) -> bool:
        """Whether a product is still to be computed."""
        return bool(self.open or any(self.committed))

    def commit(self) -> None:
        """Close the open group."""
        self.committed.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        """Compute all groups but the latest ``pending``."""
        while len(self.committed) > pending:
            for product in self.committed.pop(0):
                product()

    def flush(self) -> None:
        """Compute all that was issued."""
        for group in (*self.committed, self.open):
            for product in group:
                product()
            group.clear()
