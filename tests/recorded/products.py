"""Recorded programs: products of a warpgroup (wgmma), their layouts and their arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from recorded.program import HEADER, Program, hashed

IMAGE_BYTES = 40960
_B_START = 8192
_SPANS = {0: 16, 1: 128, 2: 64, 3: 32}
"""Span in bytes of each swizzle code of a wgmma descriptor."""


@dataclass(frozen=True)
class Kind:
    """Formats of a product, and its depth."""

    d: str
    a: str
    b: str
    depth: int

    @property
    def bytes(self) -> int:
        return 32 // self.depth


KINDS = {
    "f16": Kind("f32", "f16", "f16", 16),
    "f16 into f16": Kind("f16", "f16", "f16", 16),
    "bf16": Kind("f32", "bf16", "bf16", 16),
    "tf32": Kind("f32", "tf32", "tf32", 8),
    "e4m3": Kind("f32", "e4m3", "e4m3", 32),
    "e5m2": Kind("f32", "e5m2", "e5m2", 32),
    "e4m3 by e5m2": Kind("f32", "e4m3", "e5m2", 32),
    "e4m3 into f16": Kind("f16", "e4m3", "e4m3", 32),
    "s8 by u8": Kind("s32", "s8", "u8", 32),
}


@dataclass(frozen=True)
class Form:
    """One wgmma: kind, N, swizzle code, and flags."""

    kind: Kind
    n: int = 8
    swizzle: int = 0
    in_registers: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    negate_a: bool = False
    negate_b: bool = False
    scale_d: bool = True
    satfinite: bool = False
    steps: int = 1

    @property
    def registers(self) -> int:
        """32-bit registers of the accumulator, a thread."""
        return self.n // (4 if self.kind.d == "f16" else 2)


def _offsets(form: Form, rows: int, transposed: bool) -> tuple[int, int]:
    """Leading and stride offsets in bytes."""
    span = _SPANS[form.swizzle]
    if form.swizzle == 0:
        # K-major: 128 bytes between the halves of K; MN-major: 8 rows each, K at `leading`.
        return (128, 256) if not transposed else (rows * 16, 128)
    if transposed:
        return 8 * span * 2, 8 * span
    return 16, 8 * span


def text(form: Form) -> str:
    """The kernel: an image for shared memory, A's registers, accumulators; the accumulators afterwards."""
    kind = form.kind
    d = [f"%d{n}" for n in range(form.registers)]
    loads = "\n".join(f"ld.global.b32 %d{n}, [%vc+{512 * n}];" for n in range(form.registers))
    stores = "\n".join(f"st.global.b32 [%vo+{512 * n}], %d{n};" for n in range(form.registers))
    shape = f"m64n{form.n}k{kind.depth}"
    sat = ".satfinite" if form.satfinite else ""
    leading_a, stride_a = _offsets(form, 64, form.transpose_a)
    leading_b, stride_b = _offsets(form, form.n, form.transpose_b)
    constants = [
        (leading >> 4) << 16 | (stride >> 4) << 32 | form.swizzle << 62
        for leading, stride in ((leading_a, stride_a), (leading_b, stride_b))
    ]
    flags = ["%ps"]
    if kind.d != "s32":
        flags += ["-1" if negate else "1" for negate in (form.negate_a, form.negate_b)]
    if kind.bytes == 2:
        flags += [str(int(form.transpose_a))] if not form.in_registers else []
        flags += [str(int(form.transpose_b))]
    left = "{%a0, %a1, %a2, %a3}" if form.in_registers else "%da"
    step = (
        f"wgmma.mma_async.sync.aligned.{shape}.{kind.d}.{kind.a}.{kind.b}{sat} "
        f"{{{', '.join(d)}}}, {left}, %db, {', '.join(flags)};\n"
        "add.u64 %da, %da, 2; add.u64 %db, %db, 2; setp.eq.u32 %ps, 1, 1;"
    )
    body = "\n".join([step] * form.steps)
    return f"""{HEADER}.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3)
{{
.shared .align 1024 .b8 memory[{IMAGE_BYTES}];
.reg .b32 %d<{form.registers}>, %a<4>, %t, %s, %m, %n;
.reg .b64 %v, %w, %vc, %vo, %da, %db;  .reg .pred %p, %ps;
mov.u32 %t, %tid.x;  mov.u32 %m, memory;
ld.param.u64 %v, [p0];  mad.wide.u32 %v, %t, 4, %v;  mad.lo.u32 %s, %t, 4, %m;  mov.u32 %n, 0;
copy:
ld.global.b32 %a0, [%v];  st.shared.b32 [%s], %a0;
add.u64 %v, %v, 512;  add.u32 %s, %s, 512;  add.u32 %n, %n, 512;
setp.lt.u32 %p, %n, {IMAGE_BYTES};
@%p bra copy;
ld.param.u64 %v, [p1];  mad.wide.u32 %v, %t, 16, %v;
ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%v];
ld.param.u64 %vc, [p2];  mad.wide.u32 %vc, %t, 4, %vc;
ld.param.u64 %vo, [p3];  mad.wide.u32 %vo, %t, 4, %vo;
{loads}
shr.u32 %s, %m, 4;  cvt.u64.u32 %w, %s;
or.b64 %da, %w, {constants[0]:#x};
add.u64 %w, %w, {_B_START >> 4};
or.b64 %db, %w, {constants[1]:#x};
setp.eq.u32 %ps, {int(form.scale_d)}, 1;
fence.proxy.async;
bar.sync 0;
wgmma.fence.sync.aligned;
{body}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
{stores}
ret;
}}
"""


def image(kind: str, spread: int, seed: int, special: bool = False):
    """32-bit words full of numbers of a format whose exponents lie within `spread` of that of 1."""
    count = IMAGE_BYTES // 4
    raw = hashed(count, seed)
    words = (raw >> np.uint64(32)).astype(np.uint32)
    if kind in ("s8", "u8"):
        return words
    fraction, bias, width = {"f16": (10, 15, 16), "bf16": (7, 127, 16), "tf32": (23, 127, 32),
                             "e4m3": (3, 7, 8), "e5m2": (2, 15, 8)}[kind]  # fmt: skip
    elements = words.view(f"u{width // 8}").astype(np.uint64)
    pick = hashed(len(elements), seed + 100)
    low, high = max(bias - spread, 0), min(bias + spread, (1 << width - 1 - fraction) - 2)
    exponent = np.uint64(low) + (pick >> np.uint64(20)) % np.uint64(high - low + 1)
    sign = (pick & np.uint64(1)) << np.uint64(width - 1)
    out = sign | exponent << np.uint64(fraction) | elements & np.uint64((1 << fraction) - 1)
    if special:
        # One element in 64 is any pattern, infinities and NaN among them; one in 16 is subnormal.
        out = np.where(pick >> np.uint64(8) & np.uint64(63) == 0, elements, out)
        out = np.where(
            pick >> np.uint64(8) & np.uint64(15) == 1, sign | elements & np.uint64((1 << fraction) - 1), out
        )
    return out.astype(f"u{width // 8}").view(np.uint32)


def whole_numbers(kind: str, seed: int):
    """Words full of small whole numbers, so that no sum is rounded."""
    values = (hashed(IMAGE_BYTES, seed) >> np.uint64(30)).astype(np.int64) % 7 - 3
    if kind == "bf16":
        return (
            (values[: IMAGE_BYTES // 2].astype(np.float32).view(np.uint32) >> 16)
            .astype(np.uint16)
            .view(np.uint32)
        )
    if kind == "f16":
        return values[: IMAGE_BYTES // 2].astype(np.float16).view(np.uint32)
    if kind == "tf32":
        return values[: IMAGE_BYTES // 4].astype(np.float32).view(np.uint32)
    if kind == "e4m3":
        codes = np.array([0xC4, 0xC0, 0xB8, 0x00, 0x38, 0x40, 0x44], np.uint8)
        return codes[values + 3].view(np.uint32)
    return values.astype(np.int8).view(np.uint32)


def _accumulators(form: Form, spread: int, seed: int):
    count = form.registers * 128
    raw = hashed(count, seed)
    if form.kind.d == "s32":
        return (raw >> np.uint64(32)).astype(np.uint32)
    words = (raw >> np.uint64(32)).astype(np.uint32)
    if form.kind.d == "f16":
        return (words & np.uint32(0x83FF83FF)) | np.uint32(0x40003C00)
    exponent = (127 - spread + (raw & np.uint64(0xFFFF)) % np.uint64(2 * spread + 1)).astype(np.uint32)
    return (words & np.uint32(0x807FFFFF)) | exponent << 23


def _program(name: str, form: Form, shared, accumulators, registers=None) -> Program:
    registers = shared[:512] if registers is None else registers
    return Program(
        "wgmma: " + name, text(form), (shared, np.ascontiguousarray(registers), accumulators), "u4",
        (form.registers, 128), (1, 128),
    )  # fmt: skip


def _layouts() -> list[Program]:
    bf16, out = KINDS["bf16"], []
    forms = {f"bf16 n64 swizzle {s}": Form(bf16, 64, s) for s in _SPANS}
    forms |= {
        f"bf16 n64 swizzle {s} transposed {a:d}{b:d}": Form(bf16, 64, s, transpose_a=a, transpose_b=b)
        for s, (a, b) in product(_SPANS, ((True, False), (False, True), (True, True)))
        if s != 1 or not b or not a
    }
    forms["bf16 n256"] = Form(bf16, 256, 1)
    forms["bf16 n64 four steps"] = Form(bf16, 64, 1, steps=4)
    forms["bf16 registers n64 transposed b"] = Form(bf16, 64, 1, in_registers=True, transpose_b=True)
    forms |= {
        f"{k} n16 swizzle {s}": Form(KINDS[k], 16, s)
        for k, s in product(("tf32", "e4m3", "s8 by u8"), _SPANS)
    }
    for k in KINDS:
        forms[f"{k} registers"] = Form(KINDS[k], 16, 1, in_registers=True)
    for name, form in forms.items():
        shared = whole_numbers(form.kind.a if form.kind.a != "e5m2" else "e4m3", len(out))
        zero = np.zeros(form.registers * 128, np.uint32)
        out.append(_program(name, replace(form, scale_d=False), shared, zero))
    return out


def _sums() -> list[Program]:
    """Products whose sums are rounded: three spreads of exponents, and special values."""
    out = []
    for k, kind in KINDS.items():
        if kind.d == "s32":
            continue
        for spread in (2, 6, 14) if kind.a != "bf16" else (2, 6, 14, 40):
            form = Form(kind, 8, 0)
            out.append(
                _program(
                    f"{k} spread {spread}",
                    form,
                    image(kind.a, spread, spread),
                    _accumulators(form, spread, 3),
                )
            )
        form = Form(kind, 8, 0, scale_d=False)
        out.append(_program(f"{k} from zero", form, image(kind.a, 4, 5), _accumulators(form, 4, 6)))
        form = Form(kind, 8, 0)
        out.append(
            _program(f"{k} special", form, image(kind.a, 3, 7, special=True), _accumulators(form, 4, 8))
        )
        form = Form(kind, 8, 1, steps=4)
        out.append(_program(f"{k} four steps", form, image(kind.a, 4, 9), _accumulators(form, 4, 10)))
    for a, b in ((True, False), (False, True), (True, True)):
        form = Form(KINDS["bf16"], 8, 0, negate_a=a, negate_b=b)
        out.append(
            _program(
                f"bf16 negated {a:d}{b:d}",
                form,
                image("bf16", 4, 11, special=True),
                _accumulators(form, 4, 12),
            )
        )
    for sat in (False, True):
        form = Form(KINDS["s8 by u8"], 8, 0, satfinite=sat)
        out.append(
            _program(f"s8 by u8{' saturated' * sat}", form, image("s8", 0, 13), _accumulators(form, 4, 14))
        )
    return out


_PROBES = (0.0, 1.0, -1.0, 2.0**-23, 1 + 2.0**-23, 2.0**12, 2.0**24 + 2, -(2.0**-12) * (1 + 2.0**-23))
"""Accumulators of a probe, one a column."""


def _probe(name: str, kind: Kind, encode, lowest: int) -> Program:
    """Row s: 1 + 2**-s; row 32 + s: 1 - 1 + 2**-s + 2**-s; B is all ones: which bits survive the sum?"""
    a = np.zeros((64, kind.depth))
    for s in range(32):
        power = 2.0 ** max(-s, lowest)
        a[s, :2] = 1, power
        a[32 + s, :4] = 1, -1, power, power
    top = 2.0 ** min(-lowest, 8) if lowest > -20 else 1.0
    a *= top
    # The registers of A: thread (w, g, q) holds in register i row 16w + 8(i % 2) + g, half i // 2 of K.
    each = 4 // kind.bytes
    packed = encode(a).reshape(4, 2, 8, 2, 4, each)  # w i%2 g i//2 q element
    registers = np.ascontiguousarray(packed.transpose(0, 2, 4, 3, 1, 5)).reshape(-1).view(np.uint32)
    shared = np.zeros(IMAGE_BYTES // 4, np.uint32)
    ones = encode(np.ones(8 * kind.depth)).view(np.uint32)
    shared[_B_START // 4 : _B_START // 4 + len(ones)] = ones
    form = Form(kind, 8, 0, in_registers=True)
    columns = np.array(_PROBES, np.float32) * np.float32(top)
    thread = np.arange(128) % 4
    accumulators = np.stack([columns[2 * thread + r % 2] for r in range(4)]).astype(np.float32)
    return _program(
        f"{name} probe",
        form,
        shared,
        np.ascontiguousarray(accumulators).reshape(-1).view(np.uint32),
        registers,
    )


def _probes() -> list[Program]:
    def bf16(x):
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    def e4m3(x):
        half = np.abs(x).astype(np.float32).view(np.uint32) >> 20
        code = np.where(x == 0, 0, half.astype(np.int64) - (120 << 3))
        sub = (np.abs(x) < 2.0**-6) & (x != 0)
        code = np.where(sub, np.abs(x) * 512, code)
        return (code.astype(np.int64) | (x < 0) * 128).astype(np.uint8)

    return [
        _probe("bf16", KINDS["bf16"], bf16, -31),
        _probe("tf32", KINDS["tf32"], lambda x: x.astype(np.float32).view(np.uint32), -31),
        _probe("f16", KINDS["f16"], lambda x: x.astype(np.float16).view(np.uint16), -24),
        _probe("e4m3", KINDS["e4m3"], e4m3, -17),
    ]


_WARP_SHAPES = {"f16": (16, 8), "bf16": (16, 8), "tf32": (8, 4), "e4m3": (32, 16), "e5m2": (32,), "s8": (32,)}
"""Depths of mma.sync."""


def _warp_text(shape: str, d: str, kind: str, counts: tuple[int, int, int]) -> str:
    """Every warp multiplies what it loads: registers of A, B and C, one array each; the result."""
    names = [
        "{" + ", ".join(f"%{x}{n}" for n in range(count)) + "}"
        for x, count in zip("abc", counts, strict=True)
    ]
    loads = "".join(
        f"ld.param.u64 %v, [p{p}];  mad.wide.u32 %v, %t, 4, %v;\n"
        + "".join(f"ld.global.b32 %{x}{n}, [%v+{512 * n}];\n" for n in range(count))
        for p, (x, count) in enumerate(zip("abc", counts, strict=True))
    )
    stores = "".join(f"st.global.b32 [%v+{512 * n}], %d{n};\n" for n in range(counts[2]))
    result = "{" + ", ".join(f"%d{n}" for n in range(counts[2])) + "}"
    return f"""{HEADER}.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3)
{{
.reg .b32 %a<4>, %b<2>, %c<4>, %d<4>, %t;  .reg .b64 %v;
mov.u32 %t, %tid.x;
{loads}
mma.sync.aligned.{shape}.row.col.{d}.{kind}.{kind}.{d} {result}, {", ".join(names)};
ld.param.u64 %v, [p3];  mad.wide.u32 %v, %t, 4, %v;
{stores}
ret;
}}
"""


def _warps() -> list[Program]:
    """mma.sync: the same questions to the product of a warp."""
    out = []
    for kind, depths in _WARP_SHAPES.items():
        for depth, d in product(depths, ("f32", "f16") if kind == "f16" else ("f32",)):
            d = "s32" if kind == "s8" else d
            if kind == "e4m3" and depth == 16:
                continue
            size = {"tf32": 4, "f16": 2, "bf16": 2}.get(kind, 1)
            groups = depth * size // 16
            counts = (2 * groups, groups, 2 if d == "f16" else 4)
            words = [
                image(kind, 6, seed)[: 128 * count] for seed, count in zip((61, 62), counts, strict=False)
            ]
            raw = hashed(128 * counts[2], 63)
            third = (raw >> np.uint64(32)).astype(np.uint32)
            if d == "f16":
                third = (third & np.uint32(0x83FF83FF)) | np.uint32(0x40003C00)
            elif d == "f32":
                exponent = (121 + (raw & np.uint64(0xFFFF)) % np.uint64(13)).astype(np.uint32)
                third = (third & np.uint32(0x807FFFFF)) | exponent << 23
            text_ = _warp_text(f"m16n8k{depth}", d, kind, counts)
            name = f"mma: {kind} k{depth} into {d}"
            out.append(Program(name, text_, (*words, third), "u4", (counts[2], 128), (1, 128)))
    return out


def programs() -> list[Program]:
    """All programs of this file."""
    return [*_probes(), *_layouts(), *_sums(), *_warps()]
