"""Loads and stores of shared memory and of kernel parameters as LLVM functions.

A function first looks at all active lanes; if one is out of bounds, misaligned or reads what no one wrote, it
does nothing and returns 1, and the definition in ``isa.memory`` is called, which knows what to say. Lanes go
in order: of two that store to one address the highest wins, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from attn4.emulator.isa.registry import WIDTHS, Operation
from attn4.emulator.ptx.module import Address, Guard, Immediate, Operand, Register, Sink, Symbol, Vector

_SHARED: Final = frozenset({"shared", "shared::cta"})
_PARAMETERS: Final = frozenset({"param", "param::entry"})
_PLAIN: Final = frozenset(
    {"weak", "volatile", "relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys"}
)

WINDOWS: Final = {"shared": 2, "param": 6}
"""Place in a context of a window's memory, its flags (0: none are kept), its first address and its size."""


@dataclass(frozen=True, slots=True)
class Access:
    """A load or store of ``count`` words of ``bits``; its registers, None for a sink, and where it is."""

    window: str
    load: bool
    bits: int
    signed: bool
    base: Register | Symbol
    offset: int
    words: tuple[Operand, ...]
    guard: Guard | None

    @property
    def nbytes(self) -> int:
        """Bytes a lane."""
        return self.bits // 8 * len(self.words)


def access_of(operation: Operation) -> Access | None:
    """What a load or store does; None where it is of another kind than these functions do."""
    i = operation.instruction
    if i.opcode not in ("ld", "st"):
        return None
    load = i.opcode == "ld"
    memory, values = (i.operands[1], i.operands[0]) if load else i.operands[:2]
    kind = i.modifiers[-1]
    vector = next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)
    spaces = [m for m in i.modifiers if m in _SHARED | _PARAMETERS]
    known = _SHARED | _PARAMETERS | _PLAIN | {kind, f"v{vector}"}
    words = values.items if isinstance(values, Vector) else (values,)
    bits = WIDTHS.get(kind, 0)
    if (
        len(spaces) != 1
        or not known.issuperset(i.modifiers)
        or bits not in (8, 16, 32, 64)
        or len(words) != vector
        or not isinstance(memory, Address)
        or not isinstance(memory.base, Register | Symbol)
        or memory.coordinates
        or not all(_fits(word, bits, load) for word in words)
        or bits * vector > 256
    ):
        return None
    window = "shared" if spaces[0] in _SHARED else "param"
    if window == "param" and not load:
        return None
    return Access(window, load, bits, kind[0] == "s", memory.base, memory.offset, tuple(words), i.guard)


def _fits(word: Operand, bits: int, load: bool) -> bool:
    if isinstance(word, Register):
        return bits <= WIDTHS[word.type] <= 64
    return isinstance(word, Sink) if load else isinstance(word, Immediate) and word.type in ("s64", "u64")


def text(name: str, access: Access, places: dict[Register, int], base: int, lanes: int) -> str:
    """The LLVM text of one access. ``places`` and ``base`` are byte offsets for each lane of one."""
    wide = 32 if isinstance(access.base, Register) and access.base.type == "b32" else 64
    nbytes = access.nbytes
    kind = f"[{len(access.words)} x i{access.bits}]"
    active = _guarded(access.guard, places, lanes)
    lines = [
        f"define i32 @{name}(ptr %context) {{",
        "entry:",
        "  %registers = load ptr, ptr %context",
        *_field("active", 1, "ptr"),
        *_field("memory", WINDOWS[access.window], "ptr"),
        *_field("flags", WINDOWS[access.window] + 1, "ptr"),
        *_field("window", WINDOWS[access.window] + 2, "i64"),
        *_field("size", WINDOWS[access.window] + 3, "i64"),
        "  %flagged = ptrtoint ptr %flags to i64",
        "  %tracked = icmp ne i64 %flagged, 0",
        "  br label %check",
        *_lane("check", "entry", "examine", "more", active),
        *_located("check", access, base, lanes, wide),
        f"  %low = and i64 %place.check, {nbytes - 1}",
        "  %aligned = icmp eq i64 %low, 0",
        "  %begins = icmp ult i64 %place.check, %size",
        f"  %end = add i64 %place.check, {nbytes}",
        "  %ends = icmp ule i64 %end, %size",
        "  %inside = and i1 %begins, %ends",
        "  %fits = and i1 %aligned, %inside",
        f"  br i1 %fits, label %{'seen' if access.load else 'more'}, label %fail",
    ]
    if access.load:
        ones = int.from_bytes(b"\1" * nbytes, "little")
        lines += [
            "seen:",
            "  br i1 %tracked, label %flag, label %more",
            "flag:",
            "  %f = getelementptr i8, ptr %flags, i64 %place.check",
            f"  %written = load i{8 * nbytes}, ptr %f, align 1",
            f"  %all = icmp eq i{8 * nbytes} %written, {ones}",
            "  br i1 %all, label %more, label %fail",
        ]
    lines += [
        *_next("check", "more", lanes, "work"),
        *_lane("work", "more", "act", "done", active),
        *_located("work", access, base, lanes, wide),
        "  %at = getelementptr i8, ptr %memory, i64 %place.work",
    ]
    for n, word in enumerate(access.words):
        lines += _word(n, word, access, places, lanes, kind)
    if not access.load:
        ones = int.from_bytes(b"\1" * nbytes, "little")
        lines += [
            "  br i1 %tracked, label %mark, label %done",
            "mark:",
            "  %g = getelementptr i8, ptr %flags, i64 %place.work",
            f"  store i{8 * nbytes} {ones}, ptr %g, align 1",
        ]
    lines += ["  br label %done", *_next("work", "done", lanes, "exit")]
    return "\n".join([*lines, "exit:", "  ret i32 0", "fail:", "  ret i32 1", "}"])


def _field(name: str, place: int, kind: str) -> list[str]:
    return [
        f"  %{name}.at = getelementptr i8, ptr %context, i64 {8 * place}",
        f"  %{name} = load {kind}, ptr %{name}.at",
    ]


def _guarded(guard: Guard | None, places: dict[Register, int], lanes: int) -> tuple[str, str]:
    """Where the guard's lanes are, and how they compare with 0 where it passes."""
    if guard is None:
        return "", ""
    return f"{places[guard.register] * lanes}", "eq" if guard.negated else "ne"


def _lane(loop: str, before: str, inside: str, after: str, guard: tuple[str, str]) -> list[str]:
    """The head of a loop over lanes; inactive ones go on to ``after``."""
    lines = [
        f"{loop}:",
        f"  %l.{loop} = phi i64 [ 0, %{before} ], [ %n.{loop}, %{after} ]",
        f"  %m.{loop} = getelementptr i8, ptr %active, i64 %l.{loop}",
        f"  %b.{loop} = load i8, ptr %m.{loop}",
        f"  %on.{loop} = icmp ne i8 %b.{loop}, 0",
    ]
    chosen = f"%on.{loop}"
    place, relation = guard
    if relation:
        lines += [
            f"  %gr.{loop} = getelementptr i8, ptr %registers, i64 {place}",
            f"  %gl.{loop} = getelementptr i8, ptr %gr.{loop}, i64 %l.{loop}",
            f"  %gv.{loop} = load i8, ptr %gl.{loop}",
            f"  %gc.{loop} = icmp {relation} i8 %gv.{loop}, 0",
            f"  %both.{loop} = and i1 %on.{loop}, %gc.{loop}",
        ]
        chosen = f"%both.{loop}"
    return [*lines, f"  br i1 {chosen}, label %{inside}, label %{after}", f"{inside}:"]


def _next(loop: str, label: str, lanes: int, after: str) -> list[str]:
    return [
        f"{label}:",
        f"  %n.{loop} = add i64 %l.{loop}, 1",
        f"  %c.{loop} = icmp ult i64 %n.{loop}, {lanes}",
        f"  br i1 %c.{loop}, label %{loop}, label %{after}",
    ]


def _located(loop: str, access: Access, base: int, lanes: int, wide: int) -> list[str]:
    """The place in the window: address less the first one; what lies below becomes very large."""
    widened = f"zext i32 %o.{loop} to i64" if wide == 32 else f"add i64 %o.{loop}, 0"
    return [
        f"  %r.{loop} = getelementptr i8, ptr %registers, i64 {base * lanes}",
        f"  %p.{loop} = getelementptr i{wide}, ptr %r.{loop}, i64 %l.{loop}",
        f"  %v.{loop} = load i{wide}, ptr %p.{loop}",
        f"  %o.{loop} = add i{wide} %v.{loop}, {access.offset}",
        f"  %a.{loop} = {widened}",
        f"  %place.{loop} = sub i64 %a.{loop}, %window",
    ]


def _word(
    n: int, word: Operand, access: Access, places: dict[Register, int], lanes: int, kind: str
) -> list[str]:
    """One word between its register and memory, widened or cut."""
    if isinstance(word, Sink):
        return []
    bits = access.bits
    lines = [f"  %at{n} = getelementptr {kind}, ptr %at, i64 0, i64 {n}"]
    if isinstance(word, Immediate):
        return [*lines, f"  store i{bits} {word.bits(bits)}, ptr %at{n}, align 1"]
    assert isinstance(word, Register)
    width = WIDTHS[word.type]
    lines += [
        f"  %r{n} = getelementptr i8, ptr %registers, i64 {places[word] * lanes}",
        f"  %p{n} = getelementptr i{width}, ptr %r{n}, i64 %l.work",
    ]
    source, value = f"i{bits}", f"%x{n}"
    if access.load:
        lines.append(f"  %x{n} = load {source}, ptr %at{n}, align 1")
        if width != bits:
            lines.append(f"  %y{n} = {'sext' if access.signed else 'zext'} {source} %x{n} to i{width}")
            value = f"%y{n}"
        return [*lines, f"  store i{width} {value}, ptr %p{n}"]
    lines.append(f"  %x{n} = load i{width}, ptr %p{n}")
    if width != bits:
        lines.append(f"  %y{n} = trunc i{width} %x{n} to {source}")
        value = f"%y{n}"
    return [*lines, f"  store {source} {value}, ptr %at{n}, align 1"]
