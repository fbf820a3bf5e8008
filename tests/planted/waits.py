"""The mbarrier waits of a kernel: which are executed, by whom and on what, and the kernel without one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import attn4.emulator.isa.mbarrier as definitions
from attn4.emulator.isa.registry import BLOCKED
from attn4.emulator.schedule import RoundRobin
from planted.replay import Recording

_WAIT = re.compile(r"mbarrier\.(?:try|test)_wait[\w.:]*\s+([%\w$]+)(?:\|[%\w$]+)?\s*,[^;]*;")


@dataclass(slots=True)
class Wait:
    """One try_wait or test_wait of the text: its PTX line, and how it was executed.

    ``passes`` counts successes by a warp, ``vacuous`` those of a barrier none of whose phases had completed:
    nobody had arrived, and nothing could be waited for. ``offsets`` are those of the barriers in shared
    memory, ``warps`` the numbers of the warps of a CTA.
    """

    line: int
    source: str | None = None
    passes: int = 0
    vacuous: int = 0
    offsets: set[int] = field(default_factory=set)
    warps: set[int] = field(default_factory=set)

    @property
    def is_vacuous(self) -> bool:
        """Whether it never waited for anything."""
        return self.vacuous == self.passes


def executed(recording: Recording, sms: int = 2) -> list[Wait]:
    """The waits that a launch gets past at least once, in the order of the text."""
    found: dict[int, Wait] = {}
    text = recording.launch.ptx + "\n// so that code is generated anew\n"
    with _counted(found):
        done = recording.replay(RoundRobin(), ptx=text, sms=sms, hazards=False)
    if done.fault is not None:
        raise done.fault
    return [found[line] for line in sorted(found)]


def without(ptx: str, line: int) -> str:
    """The text with the wait at ``line`` succeeding at once, whatever the barrier says.

    Raises ValueError if there is no wait at that line.
    """
    lines = ptx.split("\n")
    changed, count = _WAIT.subn(r"setp.eq.u32 \1, 0, 0;", lines[line - 1])
    if count != 1:
        raise ValueError(f"line {line} is no mbarrier wait: {lines[line - 1].strip()}")
    lines[line - 1] = changed
    return "\n".join(lines)


@contextmanager
def _counted(found: dict[int, Wait]) -> Iterator[None]:
    """Kernels whose code is generated in this block note in ``found`` which waits they get past."""
    original = definitions._wait

    def wait(locate: Any, **kind: Any) -> Any:
        run = original(locate, **kind)

        def noted(warp: Any, mask: Any, base: Any, *phase: Any) -> Any:
            result = run(warp, mask, base, *phase)
            if result is not BLOCKED and result.any():
                _note(found, warp, result & mask, locate(base))
            return result

        return noted

    with patch.object(definitions, "_wait", wait):
        yield


def _note(found: dict[int, Wait], warp: Any, passed: Any, addresses: Any) -> None:
    instruction = warp.program.segments[warp.current.segment].operations[0][1].instruction
    entry = found.setdefault(instruction.line, Wait(instruction.line, instruction.source))
    for place, number in enumerate(warp.numbers):
        lanes = passed[32 * place : 32 * (place + 1)]
        if not lanes.any():
            continue
        address = int(addresses[32 * place + lanes.argmax()])
        entry.passes += 1
        entry.vacuous += warp.block.mbarrier(address).phase == 0
        entry.offsets.add(address & definitions.OFFSET_MASK)
        entry.warps.add(number)
