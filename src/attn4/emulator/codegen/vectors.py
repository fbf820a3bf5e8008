"""A kernel's segments where runs of computing instructions are vector functions: their LLVM text, and Python
for the rest.

The Python functions are called as those of ``emit``; registers are views of a `Storage` and are written in
place, under the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int32
from dataclasses import dataclass, field
from typing import Any

from attn4.emulator.codegen.emit import Source, argument, is_narrow, jump
from attn4.emulator.codegen.layout import Fixed, Layout, Rows
from attn4.emulator.codegen.runs import Item, Run, divide, stored
from attn4.emulator.codegen.segments import Segment, may_wait
from attn4.emulator.isa.registry import WIDTHS, Operation, UnsupportedInstruction
from attn4.emulator.ptx.module import (
    Negated,
    Operand,
    Register,
    SpecialRegister,
    Symbol,
    Vector,
)
from attn4.emulator.vector.body import LANES, Body, Value, constant
from attn4.emulator.vector.memory import Access, access_of, text
from attn4.emulator.vector.registry import emit

PARAMETERS = "w, R, m, b"


@dataclass(slots=True)
class Vectors:
    """How a kernel is divided, and where its registers lie. ``python`` lists those that Python touches."""

    segments: tuple[Segment, ...]
    items: tuple[tuple[Item, ...], ...]
    layout: Layout
    accesses: dict[int, Access] = field(default_factory=dict)
    python: dict[Register, None] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: tuple[Segment, ...], *, watched: bool = False) -> Vectors:
        """Divide the segments of a kernel. ``watched``: a Watch is to be told of all accesses to memory."""
        items = tuple(divide(segment) for segment in segments)
        outlive = stored(segments, items)
        fixed: dict[Fixed, str] = {}
        accesses = {} if watched else dict(_accesses(items))
        for access in accesses.values():
            if isinstance(access.base, Symbol):
                fixed["b64", access.base.name] = "b64"
        for run in _runs(items):
            for _, operation in run.operations:
                for operand in operation.sources:
                    name = fixed_name(operation, operand)
                    if name is not None:
                        fixed[name] = operand.type if isinstance(operand, SpecialRegister) else name[0]
        wide = [rows for rows in map(rows_of, _others(items)) if rows]
        return cls(segments, items, Layout.of(outlive, fixed, wide), accesses)

    @property
    def runs(self) -> list[Run]:
        """All runs."""
        return list(_runs(self.items))

    @property
    def names(self) -> dict[str, tuple[Any, int]]:
        """The functions of the module with their results and numbers of arguments."""
        runs: dict[str, tuple[Any, int]] = {run.name: (None, 1) for run in self.runs}
        return runs | {f"memory{number}": (c_int32, 1) for number in self.accesses}

    def llvm(self, lanes: int) -> str:
        """The text of a module with a function for each run."""
        parts = [_HEADER, *(_function(run, self.layout, lanes) for run in self.runs)]
        places = self.layout.registers
        for number, access in self.accesses.items():
            base = access.base
            at = self.layout.fixed["b64", base.name] if isinstance(base, Symbol) else places[base]
            parts.append(text(f"memory{number}", access, places, at, lanes))
        return "\n".join(parts)


def _accesses(items: tuple[tuple[Item, ...], ...]) -> Iterator[tuple[int, Access]]:
    for parts in items:
        for item in parts:
            access = None if isinstance(item, Run) else access_of(item[1])
            if access is not None and not isinstance(item, Run):
                yield item[0], access


def _others(items: tuple[tuple[Item, ...], ...]) -> list[Operation]:
    return [item[1] for parts in items for item in parts if not isinstance(item, Run)]


def rows_of(operation: Operation) -> Rows:
    """The vector of registers that an effect with a form for rows reads or writes; else empty."""
    if not hasattr(operation.function, "rows"):
        return ()
    operands = operation.destinations or operation.sources
    registers = tuple(operand for operand in operands if isinstance(operand, Register))
    if operation.destinations:
        return registers if len(registers) == len(operands) > 1 else ()
    vector = operation.instruction.operands[-1]
    items = vector.items if isinstance(vector, Vector) else ()
    registers = tuple(operand for operand in items if isinstance(operand, Register))
    return registers if len(registers) == len(items) > 1 else ()


def _runs(items: tuple[tuple[Item, ...], ...]) -> list[Run]:
    return [item for parts in items for item in parts if isinstance(item, Run)]


def fixed_name(operation: Operation, operand: Operand) -> Fixed | None:
    """The name of an operand that never changes in a warp; None for all others."""
    if isinstance(operand, Symbol):
        return ("b32" if is_narrow(operation) else "b64"), operand.name
    if isinstance(operand, SpecialRegister):
        return "special", operand.name
    return None


_HEADER = f"""\
@functions = global [16 x ptr] zeroinitializer
declare <{LANES} x float> @llvm.fma.v{LANES}f32(<{LANES} x float>, <{LANES} x float>, <{LANES} x float>)
declare <{LANES} x float> @llvm.fabs.v{LANES}f32(<{LANES} x float>)
declare <{LANES} x float> @llvm.copysign.v{LANES}f32(<{LANES} x float>, <{LANES} x float>)
declare <{LANES} x double> @llvm.sqrt.v{LANES}f64(<{LANES} x double>)
"""

_ENTRY = """\
define void @{name}(ptr %context) {{
entry:
  %registers = load ptr, ptr %context
  %second = getelementptr i8, ptr %context, i64 8
  %active = load ptr, ptr %second
{locals}  br label %head
head:
  %lane = phi i64 [ 0, %entry ], [ %following, %next ]
  %here = getelementptr i8, ptr %active, i64 %lane
  %bytes = load <16 x i8>, ptr %here, align 16
  %mask = icmp ne <16 x i8> %bytes, zeroinitializer
  %bits = bitcast <16 x i1> %mask to i16
  %none = icmp eq i16 %bits, 0
  br i1 %none, label %next, label %body
body:
  %at1 = getelementptr i8, ptr %registers, i64 %lane
  %lane2 = shl i64 %lane, 1
  %at2 = getelementptr i8, ptr %registers, i64 %lane2
  %lane4 = shl i64 %lane, 2
  %at4 = getelementptr i8, ptr %registers, i64 %lane4
  %lane8 = shl i64 %lane, 3
  %at8 = getelementptr i8, ptr %registers, i64 %lane8
{body}
  br label %next
next:
  %following = add i64 %lane, 16
  %more = icmp ult i64 %following, {lanes}
  br i1 %more, label %head, label %exit
exit:
  ret void
}}
"""

_CALLS = """\
  %from = alloca <16 x double>, align 128
  %to = alloca <16 x double>, align 128
  %arguments = alloca [2 x ptr]
  %count = alloca i64
  %steps = alloca [2 x i64]
  store ptr %from, ptr %arguments
  %argument = getelementptr [2 x ptr], ptr %arguments, i64 0, i64 1
  store ptr %to, ptr %argument
  store i64 16, ptr %count
  store i64 8, ptr %steps
  %step = getelementptr [2 x i64], ptr %steps, i64 0, i64 1
  store i64 8, ptr %step
"""


def _function(run: Run, layout: Layout, lanes: int) -> str:
    writer = _Writer(layout, lanes)
    for _, operation in run.operations:
        writer.operation(operation)
    for register in run.written:
        if register in layout.registers:
            writer.store(register)
    body = writer.body
    return _ENTRY.format(
        name=run.name, locals=_CALLS if body.calls else "", body="\n".join(body.lines), lanes=lanes
    )


class _Writer:
    def __init__(self, layout: Layout, lanes: int) -> None:
        self.body = Body()
        self._layout = layout
        self._lanes = lanes
        self._values: dict[Register | Fixed, Value] = {}

    def operation(self, operation: Operation) -> None:
        guard = operation.instruction.guard
        # The guard may be among the destinations.
        condition = self._read(guard.register) if guard else None
        sources = [self._source(operation, n, operand) for n, operand in enumerate(operation.sources)]
        results = emit(self.body, operation, sources)
        if results is None:
            raise UnsupportedInstruction(operation.instruction, "its vector definition has changed")
        for operand, result in zip(operation.destinations, results, strict=True):
            if not isinstance(operand, Register):
                continue
            if condition is not None and guard is not None:
                chosen = self.body.integer(condition)
                old = self._read(operand)
                first, second = (old, result) if guard.negated else (result, old)
                result = self.body.choose(chosen, first, second)
            self._values[operand] = result

    def store(self, register: Register) -> None:
        body = self.body
        value = self._values[register]
        bits, name = value.bits, body.integer(value)
        where = self._address(self._layout.registers[register], register.type)
        if bits == 1:
            name = body.line(f"zext <{LANES} x i1> {name} to <{LANES} x i8>")
            bits = 8
        kind = f"<{LANES} x i{bits}>"
        align = bits * LANES // 8
        old = body.line(f"load {kind}, ptr {where}, align {min(align, 64)}")
        merged = body.line(f"select <{LANES} x i1> %mask, {kind} {name}, {kind} {old}")
        body.act(f"store {kind} {merged}, ptr {where}, align {min(align, 64)}")

    def _source(self, operation: Operation, n: int, operand: Operand) -> Value:
        given = operation.constants[n]
        if given is not None:
            bits = 1 if given.dtype == bool else given.itemsize * 8
            return constant(int(given[0]), bits)
        if isinstance(operand, Register):
            return self._read(operand)
        if isinstance(operand, Negated):
            return self.body.inverted(self._read(operand.register))
        name = fixed_name(operation, operand)
        if name is None:
            raise UnsupportedInstruction(operation.instruction, f"operand {operand.text}")
        if name not in self._values:
            self._values[name] = self._load(self._layout.fixed[name], self._layout.types[name])
        return self._values[name]

    def _read(self, register: Register) -> Value:
        if register not in self._values:
            self._values[register] = self._load(self._layout.registers[register], register.type)
        return self._values[register]

    def _load(self, offset: int, kind: str) -> Value:
        bits = max(WIDTHS[kind], 8)
        where = self._address(offset, kind)
        align = min(bits * LANES // 8, 64)
        name = self.body.line(f"load <{LANES} x i{bits}>, ptr {where}, align {align}")
        if kind == "pred":
            return Value(1, integer=self.body.line(f"icmp ne <{LANES} x i8> {name}, zeroinitializer"))
        return Value(bits, integer=name)

    def _address(self, offset: int, kind: str) -> str:
        size = max(WIDTHS[kind] // 8, 1)
        return self.body.line(f"getelementptr i8, ptr %at{size}, i64 {offset * self._lanes}")


def emit_python(vectors: Vectors, places: dict[Register, int]) -> Source:
    """Two functions a segment, in two lists called ``full`` and ``some``, as `codegen.emit.emit`."""
    source = Source([], [])
    for segment, items in zip(vectors.segments, vectors.items, strict=True):
        for masked in (False, True):
            _Python(source, places, vectors, masked=masked).segment(segment, items)
    for name in ("full", "some"):
        source.add(f"{name} = [{', '.join(f'{name}{segment.index}' for segment in vectors.segments)}]")
    return source


class _Python:
    def __init__(
        self, source: Source, places: dict[Register, int], vectors: Vectors, *, masked: bool
    ) -> None:
        self._source = source
        self._places = places
        self._touched = vectors.python
        self._accesses = vectors.accesses
        self._rows = {rows: len(places) + n for n, rows in enumerate(vectors.layout.rows)}
        self._masked = masked

    def segment(self, segment: Segment, items: tuple[Item, ...]) -> None:
        name = "some" if self._masked else "full"
        self._source.add(f"def {name}{segment.index}({PARAMETERS}):")
        for item in items:
            if isinstance(item, Run):
                self._source.add(f" {item.name}(w.context)", item.operations[0][0])
            else:
                self._other(*item)
        self._jump(segment)

    def _name(self, register: Register) -> str:
        self._touched[register] = None
        return f"R[{self._places[register]}]"

    def _other(self, number: int, operation: Operation) -> None:
        if number not in self._accesses:
            self._operation(number, operation, " ")
            return
        self._source.add(f" if memory{number}(w.context):", number)
        self._operation(number, operation, "  ")
        if not self._accesses[number].load:
            self._source.add(" else: w.block.grid.changes += 1", number)

    def _operation(self, number: int, operation: Operation, indent: str) -> None:
        i = operation.instruction
        add = self._source.add
        mask = "m"
        if i.guard is not None:
            guard = self._name(i.guard.register)
            add(f"{indent}g = {'~' if i.guard.negated else ''}{guard} & m", number)
            add(f"{indent}if ONE in g.tobytes():", number)
            indent, mask = indent + " ", "g"
            if may_wait(i):
                add(f"{indent}if w.split(m, g): return BLOCKED", number)
            if operation.effect and may_wait(i):
                add(f"{indent}if w.split(m, g): return BLOCKED", number)
        rows = rows_of(operation)
        if rows in self._rows:
            sources = operation.sources
            # wgmma reads its destinations; a store has its vector last.
            first = len(rows) if sources[: len(rows)] == rows and operation.destinations else 0
            last = len(sources) if operation.destinations else len(sources) - len(rows)
            others = [self._argument(number, n, operation, sources[n]) for n in range(first, last)]
            add(
                f"{indent}f{number}.rows({', '.join(['w', mask, f'R[{self._rows[rows]}]', *others])})", number
            )
            return
        arguments = [
            self._argument(number, n, operation, operand) for n, operand in enumerate(operation.sources)
        ]
        if operation.effect:
            arguments = ["w", mask, *arguments]
        registers = [r if isinstance(r, Register) else None for r in operation.destinations]
        add(f"{indent}{'t = ' if registers or may_wait(i) else ''}f{number}({', '.join(arguments)})", number)
        if operation.effect and may_wait(i):
            add(f"{indent}if t is BLOCKED: return t", number)
        for n, register in enumerate(registers):
            if register is not None:
                value = f"t[{n}]" if len(registers) > 1 else "t"
                if mask == "m" and not self._masked:
                    add(f"{indent}{self._name(register)}[:] = {value}", number)
                else:
                    add(f"{indent}copyto({self._name(register)}, {value}, where={mask})", number)

    def _argument(self, number: int, n: int, operation: Operation, operand: Operand) -> str:
        return argument(number, n, operation, operand, self._name)

    def _jump(self, segment: Segment) -> None:
        jump(self._source, segment, self._name, " & m")
