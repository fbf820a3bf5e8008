"""The machines that plans are made for, by architecture or by product name."""

from __future__ import annotations

from attn4.machine.machine import Machine
from attn4.machine.sm90 import H100, H200
from attn4.machine.sm100 import B200, B300

__all__ = ["MACHINES", "Machine", "machine"]

MACHINES = (H200, B200, B300)
"""One machine for each architecture: the one that its name alone stands for."""

_BY_NAME = {m.name: m for m in MACHINES} | {m.chip.lower(): m for m in (H100, H200, B200, B300)}


def machine(name: str) -> Machine:
    """The machine called ``name``: an architecture ("sm_90a") or a product ("H100"), in any case.

    Raises
    ------
    ValueError
        No machine has that name.
    """
    found = _BY_NAME.get(name.lower())
    if found is None:
        raise ValueError(f"no machine is called {name!r}; known are {', '.join(_BY_NAME)}")
    return found
