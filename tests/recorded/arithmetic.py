"""Recorded programs: arithmetic of one thread on floats, integers and bits, and conversions."""

from __future__ import annotations

from itertools import product

import numpy as np

from recorded.program import Program, elementwise, hashed, uniform

_SPECIAL32 = [
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000),
    *(0x3F800000, 0xBF800000, 0x3F000000, 0x40000000, 0x3F7FFFFF, 0x3F800001, 0x7F7FFFFF, 0xFF7FFFFF),
    *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FA00001),
    *(0x4B800000, 0x4B7FFFFF, 0x4F000000, 0xCF000000, 0x4F800000, 0x5F000000, 0x5F800000, 0x3FC00000),
    *(0x40200000, 0xBF000000, 0xBFC00000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x38800000, 0x387FC000),
    *(0x33000000, 0x33000001, 0x33800000, 0x43E00000, 0x43E80000, 0x43F00000, 0x47600000, 0x47700000),
    *(0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F801000, 0x3F803000, 0x7F7F8000, 0x7F7F7FFF, 0x7F7FF000),
    *(0x00400000, 0x00008000, 0xC2FC0000, 0xC3150000, 0x43000000, 0x42FFFFFF, 0x7E800000, 0x7E800001),
]
_SPECIAL16 = [
    *(0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00),
    *(0x7E00, 0xFE00, 0x7C01, 0x7FFF, 0x3BFF, 0x3C01, 0x0080, 0x007F, 0x3F80, 0xBF80, 0x7F80, 0xFF80),
    *(0x7FC0, 0xFFC0, 0x7F7F, 0xFF7F, 0x4000, 0xC000, 0x5F00, 0x7B00),
]
MODES = ("rn", "rz", "rm", "rp")


def singles(count: int, seed: int):
    """float32 bits: special values, any bits, and values near one, in equal parts."""
    bits = hashed(count, seed)
    any_bits = (bits >> np.uint64(32)).astype(np.uint32)
    near = (any_bits & np.uint32(0x807FFFFF)) | (
        (bits & np.uint64(15)).astype(np.uint32) + np.uint32(119)
    ) << 23
    out = np.where(bits >> np.uint64(8) & np.uint64(1) == 0, any_bits, near).astype(np.uint32)
    few = bits >> np.uint64(9) & np.uint64(7) == 0
    out[few] &= np.uint32(0xFFFF8000)
    return out


def with_specials(values, special):
    """The first values replaced by special ones."""
    values = values.copy()
    values[: min(len(special), len(values))] = special[: len(values)]
    return values


def unary32(count: int, seed: int):
    return with_specials(singles(count, seed), np.array(_SPECIAL32, np.uint32))


def pairs32(count: int, seed: int, operands: int = 2):
    """Operands of which many are special, equal, opposite or of like magnitude."""
    special = np.array(_SPECIAL32, np.uint32)
    columns = []
    first = None
    for n in range(operands):
        column = singles(count, seed * 10 + n)
        pick = hashed(count, seed * 10 + n + 500)
        chosen = special[(pick >> np.uint64(20)).astype(np.int64) % len(special)]
        column = np.where(pick % np.uint64(3) == 0, chosen, column)
        if first is not None:
            near = first ^ ((pick >> np.uint64(30)).astype(np.uint32) & np.uint32(0x8000000F))
            column = np.where(pick % np.uint64(5) == 1, near, column)
        first = column if first is None else first
        columns.append(column.astype(np.uint32))
    return columns


def halves(count: int, seed: int):
    """Two 16-bit values a word, half of them special."""
    special = np.array(_SPECIAL16, np.uint16)
    pick = hashed(2 * count, seed)
    values = (pick >> np.uint64(40)).astype(np.uint16)
    near = (values & np.uint16(0x83FF)) | np.uint16(0x3800)
    values = np.where(pick & np.uint64(3) == 1, near, values)
    values = np.where(pick & np.uint64(3) == 0, special[(pick >> np.uint64(8)).astype(np.int64) % 32], values)
    return values.astype(np.uint16).view(np.uint32)


def doubles(count: int, seed: int):
    special = np.array(
        [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 5e-324, 2.0**-1022, 1.7e308,
         2.0**31, 2.0**32, 2.0**63, -(2.0**63), 2.0**64, 1 + 2.0**-24, 1 + 2.0**-52, 2.0**-150,
         3.4028235677973366e38]
    ).view(np.uint64)  # fmt: skip
    bits = hashed(count, seed)
    near = uniform(count, seed + 7, -70, 70)
    near = np.ldexp(near, near.astype(np.int64)).view(np.uint64)
    return with_specials(np.where(bits & np.uint64(1) == 0, bits, near), special)


def integers(count: int, seed: int, bits: int = 32):
    """Integers of every magnitude, and the extreme ones."""
    raw = hashed(count, seed)
    values = raw >> (raw & np.uint64(63))
    edge = np.array(
        [0, 1, 2, 31, 32, 33, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 2**63 - 1], np.uint64
    )
    edge = np.concatenate([edge, ~edge, np.array([7, 0xFFFF, 0x8000, 0x80, 0x7F, 0x100], np.uint64)])
    pick = hashed(count, seed + 1)
    values = np.where(
        pick & np.uint64(3) == 0, edge[(pick >> np.uint64(5)).astype(np.int64) % len(edge)], values
    )
    values = np.where(pick & np.uint64(3) == 1, raw, values)
    return values.astype(f"u{bits // 8}")


def special_functions() -> list[Program]:
    """ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh."""
    count = 1024
    wide = unary32(count, 1)
    exponents = uniform(count, 2, -130, 130).astype(np.float32).view(np.uint32)
    exponents = with_specials(exponents, np.array(_SPECIAL32, np.uint32))
    exponents[512:] = uniform(512, 3, -1, 1).astype(np.float32).view(np.uint32)
    positive = wide & np.uint32(0x7FFFFFFF)
    positive[: len(_SPECIAL32)] = _SPECIAL32
    positive[700:] = uniform(count - 700, 4, 0.5, 2).astype(np.float32).view(np.uint32)
    angles = uniform(count, 5, -8, 8).astype(np.float32).view(np.uint32)
    angles[600:] = uniform(count - 600, 6, -400, 400).astype(np.float32).view(np.uint32)
    angles = with_specials(angles, np.array(_SPECIAL32, np.uint32))
    both = ("", ".ftz")
    return [
        elementwise("ex2", "b32", "b32", [f"ex2.approx{f}.f32 %x, %a;" for f in both], [exponents]),
        elementwise("lg2", "b32", "b32", [f"lg2.approx{f}.f32 %x, %a;" for f in both], [positive]),
        elementwise(
            "reciprocals", "b32", "b32",
            [f"{op}.approx{f}.f32 %x, %a;" for op in ("rcp", "rsqrt", "sqrt") for f in both], [positive],
        ),
        elementwise(
            "angles", "b32", "b32",
            [f"{op}.approx{f}.f32 %x, %a;" for op in ("sin", "cos") for f in both], [angles],
        ),
        elementwise("tanh", "b32", "b32", ["tanh.approx.f32 %x, %a;"], [angles]),
        elementwise(
            "special pairs", "b32", "b32",
            ["ex2.approx.f16x2 %x, %a;", "ex2.approx.ftz.bf16x2 %x, %a;", "tanh.approx.f16x2 %x, %a;",
             "tanh.approx.bf16x2 %x, %a;"], [halves(512, 11)],
        ),
        elementwise(
            "special doubles", "b64", "b64",
            ["rcp.approx.ftz.f64 %x, %a;", "rsqrt.approx.ftz.f64 %x, %a;", "rsqrt.approx.f64 %x, %a;"],
            [doubles(256, 12)],
        ),
    ]  # fmt: skip


def float_arithmetic() -> list[Program]:
    ftz, sat = ("", ".ftz"), ("", ".sat")
    two = [
        f"{op}.{m}{f}{s}.f32 %x, %a, %b;" for op, m, f, s in product(("add", "sub", "mul"), MODES, ftz, sat)
    ]
    three = [f"fma.{m}{f}{s}.f32 %x, %a, %b, %c;" for m, f, s in product(MODES, ftz, sat)]
    extremes = [
        f"{op}{f}{n}{x}.f32 %x, %a, %b;"
        for op, f, n, x in product(("min", "max"), ftz, ("", ".NaN"), ("", ".xorsign.abs"))
    ]
    others = [f"div.{m}{f}.f32 %x, %a, %b;" for m, f in product((*MODES, "approx", "full"), ftz)]
    compare = [
        f"set.{c}.u32.f32 %x, %a, %b;"
        for c in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
    ]
    others += ["copysign.f32 %x, %a, %b;", "set.lt.ftz.u32.f32 %x, %a, %b;", "set.eq.ftz.f32.f32 %x, %a, %b;"]
    one = [f"{op}.{m}{f}.f32 %x, %a;" for op, m, f in product(("sqrt", "rcp"), MODES, ftz)]
    one += [f"{op}{f}.f32 %x, %a;" for op, f in product(("abs", "neg"), ftz)]
    one += [
        f"testp.{c}.f32 %p, %a; selp.b32 %x, 1, 0, %p;"
        for c in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    ]
    double2 = [f"{op}.{m}.f64 %x, %a, %b;" for op, m in product(("add", "sub", "mul", "div"), MODES)]
    double2 += [f"{op}.f64 %x, %a, %b;" for op in ("min", "max", "copysign")]
    double2 += [f"{op}.{m}.f64 %x, %a;" for op, m in product(("sqrt", "rcp"), MODES)]
    double2 += [f"fma.{m}.f64 %x, %a, %b, %a;" for m in MODES]
    return [
        elementwise(
            "float32 of two", "b32 b32", "b32", [*two, *extremes, *others, *compare], pairs32(256, 21)
        ),
        elementwise("float32 of three", "b32 b32 b32", "b32", three, pairs32(384, 22, 3)),
        elementwise("float32 of one", "b32", "b32", one, [unary32(256, 23)]),
        elementwise("float64", "b64 b64", "b64", double2, [doubles(128, 24), doubles(128, 25)[::-1]]),
    ]


def half_arithmetic() -> list[Program]:
    ftz, sat = ("", ".ftz"), ("", ".sat")
    lines = [
        f"{op}{m}{f}{s}.f16x2 %x, %a, %b;"
        for op, m, f, s in product(("add", "sub", "mul"), (".rn",), ftz, sat)
    ]
    lines += [f"{op}.rn.bf16x2 %x, %a, %b;" for op in ("add", "sub", "mul")]
    lines += [f"fma.rn{f}{s}.f16x2 %x, %a, %b, %c;" for f, s in product(ftz, ("", ".sat", ".relu"))]
    lines += [f"fma.rn{r}.bf16x2 %x, %a, %b, %c;" for r in ("", ".relu")]
    lines += [f"fma.rn.oob{r}.{k} %x, %a, %b, %c;" for r, k in product(("", ".relu"), ("f16x2", "bf16x2"))]
    for op, n, x in product(("min", "max"), ("", ".NaN"), ("", ".xorsign.abs")):
        lines += [f"{op}{f}{n}{x}.f16x2 %x, %a, %b;" for f in ftz]
        lines.append(f"{op}{n}{x}.bf16x2 %x, %a, %b;")
    lines += [f"{op}.{k} %x, %a;" for op, k in product(("abs", "neg"), ("f16x2", "bf16x2"))]
    lines += [f"set.{c}.{k}.{k} %x, %a, %b;" for c, k in product(("lt", "geu", "nan"), ("f16x2", "bf16x2"))]
    outside = [f"fma.rn.oob{r}.{k} %x, %a, %b, %c;" for r, k in product(("", ".relu"), ("f16x2", "bf16x2"))]
    # Which of the many NaN stands for "out of bounds".
    marks = np.concatenate([np.arange(0x7FE0, 0x8000), np.arange(0xFFE0, 0x10000)]).astype(np.uint32)
    marks = marks | np.uint32(0x3F80 << 16)
    return [
        elementwise("halves", "b32 b32 b32", "b32", lines, [halves(256, n) for n in (31, 32, 33)]),
        elementwise(
            "outside", "b32 b32 b32", "b32", outside, [marks, np.full(64, 0x3F803F80, np.uint32), marks[::-1]]
        ),
    ]


def conversions() -> list[Program]:
    relu, sat, ftz = ("", ".relu"), ("", ".satfinite"), ("", ".ftz")
    to16 = [f"cvt.{m}{f}{s}.f16.f32 %x, %a;" for m, f, s in product(MODES, ftz, ("", ".sat"))]
    to16 += [
        f"cvt.{m}{r}{s}.{k}.f32 %x, %a;"
        for m, r, s, k in product(MODES[:2], relu, sat, ("f16", "bf16"))
        if r or s
    ]
    to16 += [f"cvt.{m}.bf16.f32 %x, %a;" for m in MODES]
    to16 += [f"cvt.{m}i.{k}16.f32 %x, %a;" for m, k in product(MODES, "su")]
    pair = [
        f"cvt.{m}{r}{s}.{k}.f32 %x, %a, %b;"
        for m, r, s, k in product(MODES[:2], relu, sat, ("f16x2", "bf16x2"))
    ]
    eight = [f"cvt.rn.satfinite{r}.{k}.f32 %x, %a, %b;" for r, k in product(relu, ("e4m3x2", "e5m2x2"))]
    eight16 = [f"cvt.rn.satfinite{r}.{k}.f16x2 %x, %a;" for r, k in product(relu, ("e4m3x2", "e5m2x2"))]
    from8 = [f"cvt.rn{r}.f16x2.{k} %x, %a;" for r, k in product(relu, ("e4m3x2", "e5m2x2"))]
    tf32 = [f"cvt.{m}{r}.tf32.f32 %x, %a;" for m, r in product(MODES[:2], relu)]
    tf32 += [f"cvt.rna{s}.tf32.f32 %x, %a;" for s in sat]
    whole = [f"cvt.{m}i{f}{s}.f32.f32 %x, %a;" for m, f, s in product(MODES, ftz, ("", ".sat"))]
    whole += [f"cvt.{m}i{f}.{k}32.f32 %x, %a;" for m, k, f in product(MODES, "su", ftz)]
    whole += [f"cvt.{m}i.{k}8.f32 %x, %a;" for m, k in product(MODES[:2], "su")]
    wide = [f"cvt.{m}i.{k}64.f32 %x, %a;" for m, k in product(MODES, "su")] + ["cvt.f64.f32 %x, %a;"]
    from64 = [f"cvt.{m}.f32.f64 %x, %a;" for m in MODES] + [
        "cvt.rn.ftz.f32.f64 %x, %a;",
        "cvt.rn.sat.f32.f64 %x, %a;",
    ]
    from64 += [f"cvt.{m}i.{k}32.f64 %x, %a;" for m, k in product(MODES, "su")]
    long64 = [f"cvt.{m}i.{k}64.f64 %x, %a;" for m, k in product(MODES, "su")] + [
        f"cvt.{m}i.f64.f64 %x, %a;" for m in MODES
    ]
    from_half = [
        "cvt.f32.f16 %x, %a;",
        "cvt.ftz.f32.f16 %x, %a;",
        "cvt.sat.f32.f16 %x, %a;",
        "cvt.f32.bf16 %x, %a;",
    ]
    from_half += [f"cvt.{m}i.{k}32.{h} %x, %a;" for m, k, h in product(MODES, "su", ("f16", "bf16"))]
    half_whole = [f"cvt.{m}i.{h}.{h} %x, %a;" for m, h in product(MODES, ("f16",))] + [
        f"cvt.{m}.{a}.{b} %x, %a;"
        for m, a, b in (("rn", "bf16", "f16"), ("rn", "f16", "bf16"), ("rz", "bf16", "f16"))
    ]
    ints = [f"cvt.{m}.f32.{k}32 %x, %a;" for m, k in product(MODES, "su")]
    ints += [
        f"cvt.sat.{a}.{b} %x, %a;"
        for a, b in (("s8", "s32"), ("u8", "s32"), ("s16", "u32"), ("u32", "s32"), ("s32", "u32"))
    ]
    ints16 = [f"cvt.{m}.{h}.{k}32 %x, %a;" for m, k, h in product(MODES, "su", ("f16", "bf16"))]
    ints64 = [f"cvt.{m}.f32.{k}64 %x, %a;" for m, k in product(MODES, "su")] + [
        "cvt.sat.s32.s64 %x, %a;",
        "cvt.sat.u32.s64 %x, %a;",
    ]
    ints64x = [f"cvt.{m}.f64.{k}64 %x, %a;" for m, k in product(MODES, "su")]
    f32 = unary32(256, 41)
    f32[160:] = uniform(96, 42, -70000, 70000).astype(np.float32).view(np.uint32)
    ordered = with_specials(halves(128, 44).view(np.uint16), np.array(_SPECIAL16, np.uint16))
    small = np.arange(256, dtype=np.uint16) << 8 | np.arange(255, -1, -1, dtype=np.uint16)
    return [
        elementwise("to 16 bits", "b32", "b16", to16, [f32]),
        elementwise("to pairs", "b32 b32", "b32", pair, [f32, f32[::-1]]),
        elementwise("to 8 bits", "b32 b32", "b16", eight, [f32, f32[::-1]]),
        elementwise("16 to 8 bits", "b32", "b16", eight16, [halves(256, 43)]),
        elementwise("from 8 bits", "b16", "b32", from8, [small]),
        elementwise("to tf32", "b32", "b32", tf32, [f32]),
        elementwise("to integers", "b32", "b32", whole, [f32]),
        elementwise("to wide", "b32", "b64", wide, [f32]),
        elementwise("from float64", "b64", "b32", from64, [doubles(256, 45)]),
        elementwise("float64 to wide", "b64", "b64", long64, [doubles(128, 46)]),
        elementwise("from 16 bits", "b16", "b32", from_half, [ordered]),
        elementwise("16 to 16 bits", "b16", "b16", half_whole, [ordered]),
        elementwise("from integers", "b32", "b32", ints, [integers(256, 47)]),
        elementwise("integers to 16 bits", "b32", "b16", ints16, [integers(128, 48)]),
        elementwise("from wide integers", "b64", "b32", ints64, [integers(128, 49, 64)]),
        elementwise("wide integers to float64", "b64", "b64", ints64x, [integers(128, 50, 64)]),
    ]


def integer_arithmetic() -> list[Program]:
    two = [f"prmt.b32 %x, %a, %b, {s};" for s in (0x3210, 0x7654, 0x5140, 0x8F3C, 0xFEDC, 0x0123)]
    two += [
        f"{op}.{k}32 %x, %a, %b;"
        for op, k in product(("div", "rem", "mul.hi", "mul24.lo", "mul24.hi", "min", "max"), "su")
    ]
    two += ["mul.lo.u32 %x, %a, %b;", "add.sat.s32 %x, %a, %b;", "sub.sat.s32 %x, %a, %b;"]
    two += [f"{op}.{k}32 %x, %a, %b;" for op, k in (("shl", "b"), ("shr", "u"), ("shr", "s"))]
    two += [f"szext.{m}.{k}32 %x, %a, %b;" for m, k in product(("clamp", "wrap"), "su")]
    two += [f"bmsk.{m}.b32 %x, %a, %b;" for m in ("clamp", "wrap")]
    two += [
        f"{op}{r}.{k}16x2 %x, %a, %b;"
        for op, k, r in product(("min", "max"), "su", ("", ".relu"))
        if not (k == "u" and r)
    ]
    two += [
        "add.u16x2 %x, %a, %b;",
        "add.cc.u32 %s, %a, %b; addc.u32 %x, %a, %a;",
        "sub.cc.u32 %s, %a, %b; subc.u32 %x, %a, %a;",
    ]
    three = [f"prmt.b32{m} %x, %a, %b, %c;" for m in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")]
    three += [f"shf.{d}.{m}.b32 %x, %a, %b, %c;" for d, m in product("lr", ("clamp", "wrap"))]
    three += [f"bfe.{k}32 %x, %a, %b, %c;" for k in "su"] + [
        "bfi.b32 %x, %a, %a, %b, %c;",
        "bfi.b32 %x, %a, %c, 5, 9;",
    ]
    three += [f"dp4a.{a}32.{b}32 %x, %a, %b, %c;" for a, b in product("su", "su")]
    three += [f"dp2a.{h}.{a}32.{b}32 %x, %a, %b, %c;" for h, a, b in product(("lo", "hi"), "su", "su")]
    three += [
        f"{op}.{k}32 %x, %a, %b, %c;" for op, k in product(("mad.hi", "mad24.lo", "mad24.hi", "sad"), "su")
    ]
    three += [
        "mad.hi.sat.s32 %x, %a, %b, %c;",
        "mad24.hi.sat.s32 %x, %a, %b, %c;",
        "mad.lo.cc.u32 %s, %a, %b, %c; addc.u32 %x, 0, 0;",
    ]
    three += [
        "fns.b32 %x, %a, 0, 1;",
        "fns.b32 %x, %a, %s, %c;".replace("%s", "31"),
        "fns.b32 %x, %a, 5, -2;",
        "fns.b32 %x, %a, 7, 0;",
    ]
    one = [f"{op}.b32 %x, %a;" for op in ("popc", "clz", "brev", "not", "cnot")]
    one += [f"bfind{s}.{k}32 %x, %a;" for s, k in product(("", ".shiftamt"), "su")] + [
        "abs.s32 %x, %a;",
        "neg.s32 %x, %a;",
    ]
    long = [f"{op}.{k}64 %x, %a, %b;" for op, k in product(("div", "rem", "mul.hi", "min"), "su")]
    long += [
        "mul.lo.u64 %x, %a, %b;",
        "shl.b64 %x, %a, 63;",
        "cvt.u32.u64 %s, %b; shr.s64 %x, %a, %s;",
        "brev.b64 %x, %a;",
    ]
    long += [
        "popc.b64 %s, %a; cvt.u64.u32 %x, %s;",
        "clz.b64 %s, %a; cvt.u64.u32 %x, %s;",
        "bfind.s64 %s, %a; cvt.u64.u32 %x, %s;",
    ]
    long += ["cvt.u32.u64 %s, %b; bfe.s64 %x, %a, %s, 23;", "cvt.u32.u64 %s, %b; bfe.u64 %x, %a, 11, %s;"]
    short = [f"{op}.{k}16 %x, %a, %b;" for op, k in product(("div", "rem", "mul.hi", "mul.lo"), "su")]
    short += ["cvt.u32.u16 %s, %b; shr.s16 %x, %a, %s;", "cvt.u32.u16 %s, %b; shl.b16 %x, %a, %s;"]
    shift = integers(128, 61) % np.uint32(70)
    shift[::3] = integers(128, 64)[::3]
    odd = np.arange(128) % 2 == 1
    second, third = (np.where(odd, shift, integers(128, seed)) for seed in (63, 66))
    return [
        elementwise("integers of two", "b32 b32", "b32", two, [integers(128, 62), second]),
        elementwise("integers of three", "b32 b32 b32", "b32", three,
                    [integers(128, 65), third, shift[::-1]]),
        elementwise("integers of one", "b32", "b32", one, [integers(128, 67)]),
        elementwise("64-bit integers", "b64 b64", "b64", long, [integers(128, n, 64) for n in (68, 69)]),
        elementwise("16-bit integers", "b16 b16", "b16", short, [integers(128, n, 16) for n in (70, 71)]),
        elementwise("lop3", "b32 b32 b32", "b32", [f"lop3.b32 %x, %a, %b, %c, {n};" for n in range(256)],
                    [hashed(32, n).astype(np.uint32) for n in (72, 73, 74)], keep=1),
    ]  # fmt: skip


def programs() -> list[Program]:
    """All programs of this file."""
    return [
        *special_functions(),
        *float_arithmetic(),
        *half_arithmetic(),
        *conversions(),
        *integer_arithmetic(),
    ]
