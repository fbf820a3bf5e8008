"""Objects whose fields change inside loops and branches that run on the device."""

from __future__ import annotations

import copy

import cutlass


class Carried:
    """Base of mutable state that a device loop carries from one trip to the next.

    Subclasses name the fields that hold device values in ``carried``; the rest is fixed while tracing. A loop
    or branch that assigns such an object, or calls a method of it, gets a rebuilt object: a function that
    changes one must return it.
    """

    carried: tuple[str, ...] = ()

    def __extract_mlir_values__(self):
        return [value for name in self.carried for value in cutlass.extract_mlir_values(getattr(self, name))]

    def __new_from_mlir_values__(self, values):
        rebuilt = copy.copy(self)
        for name in self.carried:
            field = getattr(self, name)
            count = len(cutlass.extract_mlir_values(field))
            setattr(rebuilt, name, cutlass.new_from_mlir_values(field, values[:count]))
            values = values[count:]
        return rebuilt


class Bundle(Carried):
    """Named ends of channels that a role passes on together; ``name0``, ``name1`` are of numbered tiles."""

    def __init__(self, **ends):
        self.carried = tuple(ends)
        for name, end in ends.items():
            setattr(self, name, end)

    def of(self, name: str, tile: int):
        """The end called ``name`` of a query tile."""
        return getattr(self, f"{name}{tile}")

    def ring(self, name: str):
        """The end of the ring of ``name``, "key" or "value", which may share one."""
        return getattr(self, name if hasattr(self, name) else "key_value")


class Fixed:
    """Base of objects that device loops and branches use but never change."""

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self
