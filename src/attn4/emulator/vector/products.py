"""The dot products of one step of the tensor core on 16-bit floats, as an LLVM function.

    dot_bf16(a, rows, b, columns, out)      a: 16-bit words (rows, 16); b: (columns, 16); out: float32

Each element is a sum of 16 exact products in float64, rounded once, as in ``units.dot``; ``columns`` is a
multiple of 8 of at most 256.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

DEPTH: Final = 16
COLUMNS: Final = 256
_STEPS: Final = (32, 8)


@cache
def functions() -> dict[str, Any]:
    """The compiled function of each format, called with addresses and counts; empty where there are none."""
    from attn4.emulator.codegen import machine_code

    if not machine_code.available():
        return {}
    names = {f"dot_{kind}": (None, 5) for kind in ("bf16", "f16")}
    found = machine_code.compiled("\n".join(_text(kind) for kind in ("bf16", "f16")), names, effort=2)
    return {name.removeprefix("dot_"): function for name, function in found.items()}


def _decoded(kind: str, name: str) -> list[str]:
    """16 words to float64, into %{name}d."""
    if kind == "f16":
        return [
            f"  %{name}h = bitcast <16 x i16> %{name} to <16 x half>",
            f"  %{name}d = fpext <16 x half> %{name}h to <16 x double>",
        ]
    return [
        f"  %{name}w = zext <16 x i16> %{name} to <16 x i32>",
        f"  %{name}s = shl <16 x i32> %{name}w, splat (i32 16)",
        f"  %{name}f = bitcast <16 x i32> %{name}s to <16 x float>",
        f"  %{name}d = fpext <16 x float> %{name}f to <16 x double>",
    ]


def _text(kind: str) -> str:
    lines = [
        f"define void @dot_{kind}(ptr %a, i64 %rows, ptr %b, i64 %columns, ptr %out) {{",
        "entry:",
        f"  %turned = alloca [{DEPTH * COLUMNS} x double], align 64",
        "  %wide = and i64 %columns, -32",
        "  br label %turn",
        "turn:",
        "  %c = phi i64 [ 0, %entry ], [ %c1, %turn ]",
        "  %bp = getelementptr [16 x i16], ptr %b, i64 %c",
        "  %x = load <16 x i16>, ptr %bp, align 2",
        *_decoded(kind, "x"),
        "  %tp = getelementptr double, ptr %turned, i64 %c",
    ]
    for k in range(DEPTH):
        lines += [
            f"  %x{k} = extractelement <16 x double> %xd, i32 {k}",
            f"  %tp{k} = getelementptr double, ptr %tp, i64 {k * COLUMNS}",
            f"  store double %x{k}, ptr %tp{k}, align 8",
        ]
    lines += [
        "  %c1 = add i64 %c, 1",
        "  %cmore = icmp ult i64 %c1, %columns",
        "  br i1 %cmore, label %turn, label %row",
        "row:",
        "  %r = phi i64 [ 0, %turn ], [ %r1, %rnext ]",
        "  %ap = getelementptr [16 x i16], ptr %a, i64 %r",
        "  %y = load <16 x i16>, ptr %ap, align 2",
        *_decoded(kind, "y"),
        "  %rbase = mul i64 %r, %columns",
        "  %op = getelementptr float, ptr %out, i64 %rbase",
    ]
    for k in range(DEPTH):
        lines.append(
            f"  %y{k} = shufflevector <16 x double> %yd, <16 x double> poison, <8 x i32> splat (i32 {k})"
        )
    lines += ["  %some = icmp ne i64 %wide, 0", "  br i1 %some, label %step32, label %rest"]
    lines += _columns(32, "row", "%wide", "rest")
    lines += [
        "rest:",
        "  %left = icmp ult i64 %wide, %columns",
        "  br i1 %left, label %step8, label %rnext",
    ]
    lines += _columns(8, "rest", "%columns", "rnext")
    lines += [
        "rnext:",
        "  %r1 = add i64 %r, 1",
        "  %rmore = icmp ult i64 %r1, %rows",
        "  br i1 %rmore, label %row, label %exit",
        "exit:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def _columns(step: int, before: str, end: str, after: str) -> list[str]:
    """A loop over columns in steps of 32 or 8, eight to a vector."""
    name = f"step{step}"
    start = "0" if before == "row" else "%wide"
    lines = [
        f"{name}:",
        f"  %j{step} = phi i64 [ {start}, %{before} ], [ %n{step}, %{name} ]",
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
        lines += [
            f"  %f{step}_{v} = fptrunc <8 x double> {total} to <8 x float>",
            f"  %q{step}_{v} = add i64 %j{step}, {v}",
            f"  %w{step}_{v} = getelementptr float, ptr %op, i64 %q{step}_{v}",
            f"  store <8 x float> %f{step}_{v}, ptr %w{step}_{v}, align 4",
        ]
    lines += [
        f"  %n{step} = add i64 %j{step}, {step}",
        f"  %m{step} = icmp ult i64 %n{step}, {end}",
        f"  br i1 %m{step}, label %{name}, label %{after}",
    ]
    return lines
