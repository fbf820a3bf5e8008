"""Segments as Python source.

A segment becomes two functions of (w, R, m, b): the warp, its registers, the active lanes as a bool array
and as bytes. ``full``, with all lanes active, writes registers as they are computed; ``some`` computes all
lanes and merges what outlives the segment under the mask. Both return the next segment, BLOCKED, or what
the warp's methods say of a branch that parts its lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn4.emulator.codegen.chains import chains
from attn4.emulator.codegen.segments import Segment, may_wait, read, written
from attn4.emulator.isa.registry import Operation, UnsupportedInstruction
from attn4.emulator.ptx.module import (
    Immediate,
    Negated,
    Operand,
    Register,
    SpecialRegister,
    Symbol,
)


@dataclass(slots=True)
class Source:
    """Generated text, and for each of its lines the number of the instruction that it executes (-1: none)."""

    lines: list[str]
    instructions: list[int]

    def add(self, text: str, instruction: int = -1) -> None:
        """Append one line."""
        self.lines.append(text)
        self.instructions.append(instruction)

    @property
    def text(self) -> str:
        """The whole."""
        return "\n".join(self.lines) + "\n"


def emit(segments: tuple[Segment, ...], places: dict[Register, int], local: frozenset[Register]) -> Source:
    """Two functions a segment, in two lists called ``full`` and ``some``."""
    source = Source([], [])
    for segment in segments:
        _Writer(source, places, local, masked=False).segment(segment)
        _Writer(source, places, local, masked=True).segment(segment)
    for name in ("full", "some"):
        source.add(f"{name} = [{', '.join(f'{name}{segment.index}' for segment in segments)}]")
    return source


class _Writer:
    def __init__(
        self, source: Source, places: dict[Register, int], local: frozenset[Register], *, masked: bool
    ) -> None:
        self._source = source
        self._places = places
        self._local = local
        self._masked = masked
        self._chains: dict[int, tuple[int, ...]] = {}
        self._captured: frozenset[int] = frozenset()

    def segment(self, segment: Segment) -> None:
        name = "some" if self._masked else "full"
        self._source.add(f"def {name}{segment.index}(w, R, m, b):")
        self._loads(segment)
        self._chains = chains(segment)
        self._captured = frozenset(n for members in self._chains.values() for n in members)
        stored: dict[Register, None] = {}
        for number, operation in segment.operations:
            self._operation(number, operation)
            for register in written(operation):
                if register not in self._local:
                    stored[register] = None
        for register in stored:
            place = self._places[register]
            if self._masked:
                self._source.add(f" R[{place}] = {_where(register)}(m, r{place}, R[{place}])")
            else:
                self._source.add(f" R[{place}] = r{place}")
        self._jump(segment)

    def _loads(self, segment: Segment) -> None:
        known: set[Register] = set()
        for _, operation in segment.operations:
            needed = list(read(operation))
            if operation.instruction.guard:
                needed.extend(written(operation))
            for register in needed:
                self._load(register, known)
            known.update(written(operation))
        if segment.jump is not None and segment.jump.guard:
            self._load(segment.jump.guard.register, known)

    def _load(self, register: Register, known: set[Register]) -> None:
        if register not in known:
            known.add(register)
            place = self._places[register]
            self._source.add(f" r{place} = R[{place}]")

    def _operation(self, number: int, operation: Operation) -> None:
        i = operation.instruction
        results = ", ".join(
            f"r{self._places[operand]}" if isinstance(operand, Register) else "_"
            for operand in operation.destinations
        )
        value = self._call(number, operation)
        if number in self._captured:
            self._product(number, operation, results)
        elif operation.effect:
            self._effect(number, operation, results)
        elif i.guard is None:
            self._source.add(f" {results} = {value}", number)
        else:
            # A copy of the name: the guard may be among the destinations.
            self._source.add(f" g = r{self._places[i.guard.register]}", number)
            self._source.add(f" t = {value}", number)
            several = len(operation.destinations) > 1
            for n, register in enumerate(operation.destinations):
                if isinstance(register, Register):
                    place = self._places[register]
                    new = f"t[{n}]" if several else "t"
                    first, second = (f"r{place}", new) if i.guard.negated else (new, f"r{place}")
                    self._source.add(f" r{place} = {_where(register)}(g, {first}, {second})", number)

    def _call(self, number: int, operation: Operation) -> str:
        i = operation.instruction
        arguments = [
            self._argument(number, n, operation, operand) for n, operand in enumerate(operation.sources)
        ]
        if i.opcode == "mov" and len(operation.destinations) == 1 and len(arguments) == 1:
            return arguments[0]
        return f"f{number}({', '.join(arguments)})"

    def _argument(self, number: int, n: int, operation: Operation, operand: Operand) -> str:
        return argument(number, n, operation, operand, self._name)

    def _product(self, number: int, operation: Operation, results: str) -> None:
        """A product of a chain: its own operands are kept until the last one issues them all."""
        count = len(operation.destinations)
        arguments = [
            self._argument(number, n, operation, operand) for n, operand in enumerate(operation.sources)
        ]
        self._source.add(f" c{number} = ({', '.join(arguments[count:])})", number)
        members = self._chains.get(number)
        if members is not None:
            steps = ", ".join(f"c{member}" for member in members)
            old = ", ".join(arguments[:count])
            self._source.add(f" {results} = f{number}.chain(w, m, ({steps}), {old})", number)

    def _effect(self, number: int, operation: Operation, results: str) -> None:
        i = operation.instruction
        mask = "m"
        indent = " "
        if i.guard is not None:
            guard = f"r{self._places[i.guard.register]}"
            chosen = f"~{guard}" if i.guard.negated else guard
            self._source.add(f" g = {chosen}{' & m' if self._masked else ''}", number)
            self._source.add(" if ONE in g.tobytes():", number)
            mask = "g"
            indent = "  "
        arguments = [
            self._argument(number, n, operation, operand) for n, operand in enumerate(operation.sources)
        ]
        call = f"f{number}({', '.join(['w', mask, *arguments])})"
        waits = may_wait(i)
        if waits and mask == "g":
            self._source.add("  if w.split(m, g): return BLOCKED", number)
        if not results and not waits:
            self._source.add(f"{indent}{call}", number)
            return
        if not waits and mask == "m":
            self._source.add(f"{indent}{results} = {call}", number)
            return
        self._source.add(f"{indent}t = {call}", number)
        if waits:
            self._source.add(f"{indent}if t is BLOCKED: return t", number)
        if not results:
            return
        if mask == "m":
            self._source.add(f"{indent}{results} = t", number)
            return
        several = len(operation.destinations) > 1
        for n, register in enumerate(operation.destinations):
            if isinstance(register, Register):
                place = self._places[register]
                self._source.add(
                    f"{indent}r{place} = {_where(register)}(g, t{f'[{n}]' if several else ''}, r{place})",
                    number,
                )

    def _jump(self, segment: Segment) -> None:
        jump(self._source, segment, self._name, " & m" if self._masked else "")

    def _name(self, register: Register) -> str:
        return f"r{self._places[register]}"


def jump(source: Source, segment: Segment, name: Callable[[Register], str], mask: str) -> None:
    """The end of a segment: where the warp goes on. ``name`` spells a register, ``mask`` narrows a guard."""
    last = segment.jump
    add = source.add
    if last is None:
        add(f" return {segment.following}" if segment.following >= 0 else " return w.leave(m, m, -1)")
        return
    if last.guard is None:
        add(f" return {segment.target}" if last.opcode == "bra" else " return w.leave(m, m, -1)")
        return
    add(f" g = {'~' if last.guard.negated else ''}{name(last.guard.register)}{mask}")
    add(" t = g.tobytes()")
    if last.opcode != "bra":
        add(f" if ONE not in t: return {segment.following}")
        add(f" return w.leave(m, g, {segment.following})")
        return
    add(f" if t == b: return {segment.target}")
    add(f" if ONE not in t: return {segment.following}")
    add(f" return w.diverge(m, g, {segment.target}, {segment.following}, {segment.join})")


def argument(
    number: int, n: int, operation: Operation, operand: Operand, name: Callable[[Register], str]
) -> str:
    """The text of operand ``n`` of instruction ``number``. Raises UnsupportedInstruction."""
    match operand:
        case Register():
            return name(operand)
        case Negated():
            return f"~{name(operand.register)}"
        case Immediate():
            return f"k{number}_{n}"
        case SpecialRegister():
            return f"w.special[{operand.name!r}](w)"
        case Symbol():
            return f"w.symbol_{'b32' if is_narrow(operation) else 'b64'}[{operand.name!r}]"
    raise UnsupportedInstruction(operation.instruction, f"operand {operand.text}")


def is_narrow(operation: Operation) -> bool:
    """Whether a symbol stands as a 32-bit value: in mov, cvta and arithmetic on 32 bits."""
    i = operation.instruction
    return not operation.effect and bool(i.modifiers) and i.modifiers[-1] in ("b32", "u32", "s32")


def _where(register: Register) -> str:
    """The function that merges a register; one of 128 bits has two words a lane."""
    return "wide" if register.type == "b128" else "where"
