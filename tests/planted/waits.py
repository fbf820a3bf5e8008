"""Operations on mbarriers, and what else orders accesses, in the text of a kernel: which are executed, by
whom and on what, and the kernel without one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from unittest.mock import patch

from attn4.emulator.isa import registry
from attn4.emulator.isa.memory import address_operand, displaced
from attn4.emulator.isa.registry import BLOCKED, Builder, Definition, Function
from attn4.emulator.ptx.module import Address, Instruction
from attn4.emulator.schedule import RoundRobin
from attn4.emulator.state.block import OFFSET_MASK
from planted.replay import Recording

KINDS = {"try_wait": "wait", "test_wait": "wait", "arrive": "arrive", "init": "init"}
"""Modifiers of mbarrier, and what the operation is called here."""

ORDERS = (
    "wait::ld",
    "wait::st",
    "fence::before_thread_sync",
    "fence::after_thread_sync",
    "proxy",
    "wait_group",
)
"""Modifiers of what orders accesses without a barrier, and their kinds here."""

_WAIT = re.compile(r"mbarrier\.(?:try|test)_wait[\w.:]*\s+([%\w$]+)(?:\|[%\w$]+)?\s*,[^;]*;")


@dataclass(slots=True)
class Site:
    """One wait, arrive, commit, init or order of the text, and how it was executed.

    ``passes`` counts warps that executed it (for a wait: that got past it), ``vacuous`` those of them that
    met a barrier none of whose phases had completed. ``offsets`` are those of the barriers in shared memory,
    ``warps`` the numbers of the warps of a CTA.
    """

    kind: str
    line: int
    passes: int = 0
    vacuous: int = 0
    offsets: set[int] = field(default_factory=set)
    warps: set[int] = field(default_factory=set)

    @property
    def is_vacuous(self) -> bool:
        """Whether it never met a barrier that had completed a phase."""
        return self.vacuous == self.passes


_CALLS = count()


def executed(recording: Recording, sms: int = 2) -> list[Site]:
    """What a launch executes of ``KINDS`` and ``ORDERS``, and tcgen05's commits, in the order of the text."""
    found: dict[int, Site] = {}
    text = f"{recording.launch.ptx}\n// so that code is generated anew, call {next(_CALLS)}\n"
    with _noted(found):
        done = recording.replay(RoundRobin(), ptx=text, sms=sms, hazards=False)
    if done.fault is not None:
        raise done.fault
    return [found[line] for line in sorted(found)]


def without(ptx: str, line: int) -> str:
    """The text with the wait at ``line`` succeeding at once, whatever the barrier says.

    Raises ValueError if there is no wait at that line.
    """
    lines = ptx.split("\n")
    changed, number = _WAIT.subn(r"setp.eq.u32 \1, 0, 0;", lines[line - 1])
    if number != 1:
        raise ValueError(f"line {line} is no mbarrier wait: {lines[line - 1].strip()}")
    lines[line - 1] = changed
    return "\n".join(lines)


@contextmanager
def _noted(found: dict[int, Site]) -> Iterator[None]:
    """Kernels that are bound in this block note in ``found`` what they do to mbarriers."""
    look_up = registry.find

    def find(instruction: Instruction) -> Definition:
        definition = look_up(instruction)
        modifiers = instruction.modifiers
        if instruction.opcode == "mbarrier":
            kind = next((KINDS[kind] for kind in KINDS if kind in modifiers), None)
        elif instruction.opcode == "tcgen05" and modifiers[0] == "commit":
            kind = "commit"
        else:
            order = next((order for order in ORDERS if order in modifiers), None)
            return (
                definition
                if order is None
                else replace(definition, build=_passing(found, order, definition.build))
            )
        return (
            definition if kind is None else replace(definition, build=_noting(found, kind, definition.build))
        )

    with patch.object(registry, "find", find):
        yield


def _noting(found: dict[int, Site], kind: str, build: Builder) -> Builder:
    def built(instruction: Instruction) -> Function:
        run = build(instruction)
        position = next(n for n, operand in enumerate(instruction.operands) if isinstance(operand, Address))
        locate = displaced(address_operand(instruction, position))
        site = Site(kind, instruction.line)

        def noting(warp: Any, mask: Any, base: Any, *rest: Any) -> Any:
            result = run(warp, mask, base, *rest)
            if kind == "wait":
                if result is BLOCKED or not result.any():
                    return result
                mask = result & mask
            found[site.line] = site
            _note(site, warp, mask, locate(base))
            return result

        return noting

    return built


def _passing(found: dict[int, Site], kind: str, build: Builder) -> Builder:
    """Note who executes what has no barrier."""

    def built(instruction: Instruction) -> Function:
        run = build(instruction)
        site = Site(kind, instruction.line)

        def noting(warp: Any, mask: Any, *rest: Any) -> Any:
            found[site.line] = site
            for place, number in enumerate(warp.numbers):
                if mask[32 * place : 32 * (place + 1)].any():
                    site.passes += 1
                    site.warps.add(number)
            return run(warp, mask, *rest)

        return noting

    return built


def _note(site: Site, warp: Any, passed: Any, addresses: Any) -> None:
    for place, number in enumerate(warp.numbers):
        lanes = passed[32 * place : 32 * (place + 1)]
        if not lanes.any():
            continue
        address = int(addresses[32 * place + lanes.argmax()])
        site.passes += 1
        site.vacuous += warp.block.mbarrier(address).phase == 0
        site.offsets.add(address & OFFSET_MASK)
        site.warps.add(number)
