"""One step of the tensor core on 16-bit floats as an LLVM function: D = A B^T, or that added to D.

An operand is named by the places of its 16-byte chunks, numbered from an address: K-major (rows, 2), or B
also MN-major (16, columns / 8). Each element is a sum of 16 exact products in float64, rounded once, as in
``units.dot``; a sum with D is rounded once more. ``columns`` is a multiple of 8 of at most 256.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from attn4.emulator.codegen import machine_code

DEPTH: Final = 16
COLUMNS: Final = 256
KINDS: Final = ("bf16", "f16")


@cache
def functions() -> dict[tuple[str, bool], Any]:
    """The functions by format and whether B is MN-major; empty where nothing can be compiled.

    Their arguments: address, places and rows of A; address, places and columns of B; address of the float32
    D, the distance of its rows in elements, and 1 to add or 0 to replace.
    """
    if not machine_code.available():
        return {}
    forms = [(kind, mn_major) for kind in KINDS for mn_major in (False, True)]
    names = {_name(*form): (None, 9) for form in forms}
    found = machine_code.compiled("\n".join(_text(*form) for form in forms), names, effort=2)
    return {form: found[_name(*form)] for form in forms}


def _name(kind: str, mn_major: bool) -> str:
    return f"step_{kind}_{'mn' if mn_major else 'k'}"


def _decoded(kind: str, name: str, count: int) -> list[str]:
    """16-bit words %{name} to float64, into %{name}d."""
    if kind == "f16":
        return [
            f"  %{name}h = bitcast <{count} x i16> %{name} to <{count} x half>",
            f"  %{name}d = fpext <{count} x half> %{name}h to <{count} x double>",
        ]
    return [
        f"  %{name}w = zext <{count} x i16> %{name} to <{count} x i32>",
        f"  %{name}s = shl <{count} x i32> %{name}w, splat (i32 16)",
        f"  %{name}f = bitcast <{count} x i32> %{name}s to <{count} x float>",
        f"  %{name}d = fpext <{count} x float> %{name}f to <{count} x double>",
    ]


def _chunk(name: str, memory: str, places: str, number: str) -> list[str]:
    """The chunk at place ``number`` of a list of places, 8 words, into %{name}."""
    return [
        f"  %{name}.i = getelementptr i64, ptr {places}, i64 {number}",
        f"  %{name}.p = load i64, ptr %{name}.i",
        f"  %{name}.a = getelementptr [16 x i8], ptr {memory}, i64 %{name}.p",
        f"  %{name} = load <8 x i16>, ptr %{name}.a, align 16",
    ]


def _row(name: str, memory: str, places: str, number: str) -> list[str]:
    """The two chunks of a row, 16 words, into %{name}."""
    both = ", ".join(f"i32 {n}" for n in range(DEPTH))
    return [
        f"  %{name}.n0 = shl i64 {number}, 1",
        f"  %{name}.n1 = or i64 %{name}.n0, 1",
        *_chunk(f"{name}.c0", memory, places, f"%{name}.n0"),
        *_chunk(f"{name}.c1", memory, places, f"%{name}.n1"),
        f"  %{name} = shufflevector <8 x i16> %{name}.c0, <8 x i16> %{name}.c1, <16 x i32> <{both}>",
    ]


def _text(kind: str, mn_major: bool) -> str:
    lines = [
        f"define void @{_name(kind, mn_major)}(ptr %a, ptr %ai, i64 %rows, ptr %b, ptr %bi, i64 %columns,"
        " ptr %d, i64 %stride, i64 %adds) {",
        "entry:",
        f"  %turned = alloca [{DEPTH * COLUMNS} x double], align 64",
        "  %wide = and i64 %columns, -32",
        "  %eighth = lshr i64 %columns, 3",
        "  %add = icmp ne i64 %adds, 0",
        "  br label %turn",
        *(_turned_rows(kind) if mn_major else _turned_columns(kind)),
        "row:",
        "  %r = phi i64 [ 0, %turn ], [ %r1, %rnext ]",
        *_row("y", "%a", "%ai", "%r"),
        *_decoded(kind, "y", DEPTH),
        "  %rbase = mul i64 %r, %stride",
        "  %op = getelementptr float, ptr %d, i64 %rbase",
    ]
    pair = "<16 x double> %yd, <16 x double> poison"
    lines += [f"  %y{k} = shufflevector {pair}, <8 x i32> splat (i32 {k})" for k in range(DEPTH)]
    lines += [
        "  %some = icmp ne i64 %wide, 0",
        "  br i1 %some, label %step32, label %rest",
        *_columns(32, "row", "%wide", "rest"),
        "rest:",
        "  %left = icmp ult i64 %wide, %columns",
        "  br i1 %left, label %step8, label %rnext",
        *_columns(8, "rest", "%columns", "rnext"),
        "rnext:",
        "  %r1 = add i64 %r, 1",
        "  %rmore = icmp ult i64 %r1, %rows",
        "  br i1 %rmore, label %row, label %exit",
        "exit:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def _turned_columns(kind: str) -> list[str]:
    """B, K-major, to float64 with its columns next to each other, one column of D at a time."""
    lines = [
        "turn:",
        "  %c = phi i64 [ 0, %entry ], [ %c1, %turn ]",
        *_row("x", "%b", "%bi", "%c"),
        *_decoded(kind, "x", DEPTH),
        "  %tp = getelementptr double, ptr %turned, i64 %c",
    ]
    for k in range(DEPTH):
        lines += [
            f"  %x{k} = extractelement <16 x double> %xd, i32 {k}",
            f"  %tp{k} = getelementptr double, ptr %tp, i64 {k * COLUMNS}",
            f"  store double %x{k}, ptr %tp{k}, align 8",
        ]
    return [
        *lines,
        "  %c1 = add i64 %c, 1",
        "  %cmore = icmp ult i64 %c1, %columns",
        "  br i1 %cmore, label %turn, label %row",
    ]


def _turned_rows(kind: str) -> list[str]:
    """B, MN-major, to float64, eight columns of D at a time."""
    lines = ["turn:", "  %c = phi i64 [ 0, %entry ], [ %c1, %turn ]", "  %c8 = shl i64 %c, 3"]
    for k in range(DEPTH):
        lines += [
            f"  %e{k} = mul i64 %eighth, {k}",
            f"  %z{k} = add i64 %e{k}, %c",
            *_chunk(f"x{k}", "%b", "%bi", f"%z{k}"),
            *_decoded(kind, f"x{k}", 8),
            f"  %o{k} = add i64 %c8, {k * COLUMNS}",
            f"  %tp{k} = getelementptr double, ptr %turned, i64 %o{k}",
            f"  store <8 x double> %x{k}d, ptr %tp{k}, align 64",
        ]
    return [
        *lines,
        "  %c1 = add i64 %c, 1",
        "  %cmore = icmp ult i64 %c1, %eighth",
        "  br i1 %cmore, label %turn, label %row",
    ]


def _columns(step: int, before: str, end: str, after: str) -> list[str]:
    """A loop over columns in steps of 32 or 8, eight to a vector."""
    name = f"step{step}"
    lines = [
        f"{name}:",
        f"  %j{step} = phi i64 [ {'0' if before == 'row' else '%wide'}, %{before} ], [ %n{step}, %{name} ]",
        f"  %t{step} = getelementptr double, ptr %turned, i64 %j{step}",
    ]
    for v in range(0, step, 8):
        total = "zeroinitializer"
        for k in range(DEPTH):
            at = f"%s{step}_{v}_{k}"
            factors = f"<8 x double> %y{k}, <8 x double> {at}b, <8 x double> {total}"
            lines += [
                f"  {at}p = getelementptr double, ptr %t{step}, i64 {k * COLUMNS + v}",
                f"  {at}b = load <8 x double>, ptr {at}p, align 64",
                f"  {at} = call <8 x double> @llvm.fma.v8f64({factors})",
            ]
            total = at
        at = f"{step}_{v}"
        lines += [
            f"  %f{at} = fptrunc <8 x double> {total} to <8 x float>",
            f"  %q{at} = add i64 %j{step}, {v}",
            f"  %w{at} = getelementptr float, ptr %op, i64 %q{at}",
            f"  %old{at} = load <8 x float>, ptr %w{at}, align 4",
            f"  %sum{at} = fadd <8 x float> %old{at}, %f{at}",
            f"  %new{at} = select i1 %add, <8 x float> %sum{at}, <8 x float> %f{at}",
            f"  store <8 x float> %new{at}, ptr %w{at}, align 4",
        ]
    return [
        *lines,
        f"  %n{step} = add i64 %j{step}, {step}",
        f"  %m{step} = icmp ult i64 %n{step}, {end}",
        f"  br i1 %m{step}, label %{name}, label %{after}",
    ]
