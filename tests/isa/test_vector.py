"""Vector definitions give the bits of the definitions in ``isa``, which are the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from attn4.emulator.codegen import machine_code
from attn4.emulator.codegen.layout import Storage
from attn4.emulator.codegen.segments import Segment
from attn4.emulator.codegen.vectors import Vectors
from attn4.emulator.ptx.module import Immediate, Negated, Register
from attn4.emulator.vector import registry
from isa_lines import STORAGE, bound

pytestmark = pytest.mark.skipif(not machine_code.available(), reason="llvmlite is not installed")

LANES = 256
SIGNED = [f"s{n}" for n in (16, 32, 64)]
INTEGERS = [f"{sign}{n}" for sign in "su" for n in (16, 32, 64)]
LETTER = {"16": "h", "32": "r", "64": "d"}


def _of(kind: str, line: str) -> str:
    """%x, %y, %z become registers 1, 2, 3 of a type's width, %w register 0 of it."""
    letter = LETTER[kind[-2:]]
    for n, name in enumerate("wxyz"):
        line = line.replace(f"%{name}", f"%{letter}{n}")
    return line.replace("T", kind)


INTEGER_LINES = [
    _of(kind, line)
    for kind in INTEGERS
    for line in (
        *("add.T %w, %x, %y", "sub.T %w, %x, 77", "mul.lo.T %w, %x, %y", "mad.lo.T %w, %x, %y, %z"),
        *("min.T %w, %x, %y", "max.T %w, %x, %y", "shr.T %w, %x, %r8", "shr.T %w, %x, 5", "shr.T %w, %x, 70"),
        *("setp.lt.T %p1, %x, %y", "setp.ge.T %p1, %x, 12", "setp.eq.T %p1|%p2, %x, %y"),
        *("setp.gt.and.T %p1|%p2, %x, %y, !%p3", "setp.ne.xor.T %p1, %x, %y, %p3", "selp.T %w, %x, %y, %p1"),
    )
]
INTEGER_LINES += [_of(kind, line) for kind in SIGNED for line in ("neg.T %w, %x", "abs.T %w, %x")]
INTEGER_LINES += [
    _of(kind, line)
    for kind in ("b16", "b32", "b64")
    for line in (
        *("and.T %w, %x, %y", "or.T %w, %x, 21", "xor.T %w, %x, %y", "not.T %w, %x"),
        *("shl.T %w, %x, %r8", "shl.T %w, %x, 7", "shl.T %w, %x, 200", "mov.T %w, %x"),
    )
]
INTEGER_LINES += [
    *("and.pred %p0, %p1, %p2", "or.pred %p0, %p1, !%p2", "xor.pred %p0, %p1, %p2", "not.pred %p0, %p1"),
    *("mul.hi.s32 %r0, %r1, %r2", "mul.hi.u32 %r0, %r1, %r2", "mul.hi.s16 %h0, %h1, %h2"),
    *("mul.wide.s32 %d0, %r1, %r2", "mul.wide.u32 %d0, %r1, 24", "mul.wide.u16 %r0, %h1, %h2"),
    *("mad.wide.s32 %d0, %r1, %r2, %d3", "mad.hi.u32 %r0, %r1, %r2, %r3", "bfe.u32 %r0, %r1, 3, 7"),
    *("bfe.s32 %r0, %r1, 9, 11", "bfe.u64 %d0, %d1, 40, 24", "bfe.s64 %d0, %d1, 56, 8"),
    *(f"lop3.b32 %r0, %r1, %r2, %r3, {table}" for table in (0, 1, 0x1B, 0x80, 0x96, 0xCA, 0xE8, 0xFE, 0xFF)),
    *(f"prmt.b32 %r0, %r1, %r2, {code}" for code in (0x5410, 0x7632, 0x7610, 0x3210, 0x0246)),
]
MOVE_LINES = [
    *(
        "mov.b64 %d0, {%r1, %r2}",
        "mov.b64 {%r0, %r4}, %d1",
        "mov.b32 %r0, {%h1, %h2}",
        "mov.b64 {_, %r4}, %d1",
    ),
    *("mov.b32 {%h0, %h4}, %r1", "mov.b64 %d0, {%r1, 5}", "mov.u32 %r0, 4294967295", "mov.pred %p0, %p1"),
    *("cvta.to.global.u64 %d0, %d1", "mov.b64 {%r0, %r4}, 81985529216486895"),
    *("cvt.u64.u32 %d0, %r1", "cvt.s64.s32 %d0, %r1", "cvt.u32.u64 %r0, %d1", "cvt.u32.u16 %r0, %h1"),
    *("cvt.s32.s16 %r0, %h1", "cvt.u16.u32 %h0, %r1", "cvt.s16.s8 %h0, %h1", "cvt.u16.u8 %h0, %h1"),
    *("cvt.s32.s8 %r0, %r1", "cvt.u8.u32 %h0, %r1", "cvt.s8.s32 %h0, %r1", "cvt.u64.u16 %d0, %h1"),
    *("cvt.u32.s16 %r0, %h1", "cvt.s64.u32 %d0, %r1", "cvt.rn.f32.s32 %f0, %r1", "cvt.rn.f32.u32 %f0, %r1"),
]
FLOAT_LINES = [
    *(f"{name}.f32 %f0, %f1, %f2" for name in ("add", "sub", "mul", "add.rn", "add.ftz", "mul.ftz")),
    *(f"{name}.f32 %f0, %f1, %f2" for name in ("add.rm", "add.rp", "add.rz", "sub.rm", "sub.rp", "sub.rz")),
    *(f"{name}.f32x2 %d0, %d1, %d2" for name in ("add.rn", "sub.rn", "mul.rn", "add.rm", "add.rz")),
    *(f"{name}.f32 %f0, %f1, %f2, %f3" for name in ("fma.rn", "fma.rn.ftz", "max", "min", "max.NaN")),
    *("fma.rn.f32x2 %d0, %d1, %d2, %d3", "fma.rn.f32.bf16 %f0, %h1, %h2, %f3", "add.f32.bf16 %f0, %h1, %f3"),
    *(f"{name}.f32 %f0, %f1, %f2" for name in ("max", "min", "max.NaN", "min.NaN", "max.ftz", "min.ftz")),
    *("neg.f32 %f0, %f1", "abs.f32 %f0, %f1", "selp.f32 %f0, %f1, %f2, %p1", "mov.f32 %f0, %f1"),
    *(f"{name}.approx.ftz.f32 %f0, %f1" for name in ("ex2", "lg2", "rcp", "rsqrt", "sqrt")),
    *(f"{name}.approx.f32 %f0, %f1" for name in ("ex2", "lg2", "rcp", "rsqrt", "sqrt")),
    *("cvt.rn.bf16x2.f32 %r0, %f1, %f2", "cvt.rn.bf16.f32 %h0, %f1", "max.f32 %f0, %f1, 0fFF800000"),
    *(f"setp.{op}.f32 %p0, %f1, %f2" for op in ("eq", "ne", "lt", "le", "gt", "ge", "num", "nan")),
    *(f"setp.{op}.f32 %p0|%p4, %f1, %f2" for op in ("equ", "neu", "ltu", "leu", "gtu", "geu")),
    "setp.neu.and.f32 %p0, %f1, 0f00000000, %p3",
]
SPECIAL = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1.0,
    -1.0,
    2.0**-126,
    -(2.0**-127),
    2.0**-149,
    3.4028235e38,
    0.5,
]


def _values(random: np.random.Generator, kind: str) -> np.ndarray:
    """Bits of which many are equal, near a border, or special as floats."""
    if kind == "pred":
        return random.integers(0, 2, LANES).astype(bool)
    dtype = np.dtype(STORAGE[kind])
    raw = random.integers(0, 1 << 63, LANES, dtype=np.uint64).astype(dtype)
    small = random.integers(-70, 70, LANES).astype(np.int64).astype(dtype)
    values = np.where(random.random(LANES) < 0.4, small, raw)
    if kind in ("b32", "b64"):
        floats = (random.standard_normal(LANES * dtype.itemsize // 4) * 30).astype(np.float32)
        chosen = random.random(floats.size) < 0.4
        floats[chosen] = random.choice(np.array(SPECIAL, np.float32), int(chosen.sum()))
        values = np.where(random.random(LANES) < 0.7, floats.view(dtype), values)
    return values


def _both(line: str, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Destinations after one line, by its vector function and by its definition, under one mask."""
    operation = bound(line)
    vectors = Vectors.of((Segment(0, ((0, operation),), None, -1, -1, -1),))
    # One instruction's own registers would never be stored: let them all outlive the run.
    registers = [
        o.register if isinstance(o, Negated) else o for o in (*operation.sources, *operation.destinations)
    ]
    registers = list(dict.fromkeys(o for o in registers if isinstance(o, Register)))
    vectors.layout = type(vectors.layout).of(registers, {})
    storage = Storage(vectors.layout, LANES)
    random = np.random.default_rng(seed)
    for register in registers:
        storage.register(register)[:] = _values(random, register.type)
    before = {register: storage.register(register).copy() for register in registers}
    storage.active[:] = random.random(LANES) < 0.8
    storage.active[32:48] = False
    sources = []
    for operand, constant in zip(operation.sources, operation.constants, strict=True):
        if isinstance(operand, Immediate):
            sources.append(np.repeat(constant, LANES))
        elif isinstance(operand, Negated):
            sources.append(~before[operand.register])
        else:
            sources.append(before[operand])
    (run,) = vectors.runs
    machine_code.compiled(vectors.llvm(LANES), vectors.names)[run.name](storage.context)
    with np.errstate(all="ignore"):
        results = operation.function(*sources)
    results = results if isinstance(results, tuple) else (results,)
    pairs = [(o, r) for o, r in zip(operation.destinations, results, strict=True) if isinstance(o, Register)]
    expected = [np.where(storage.active, result, before[register]) for register, result in pairs]
    return [storage.register(register).copy() for register, _ in pairs], expected


@pytest.mark.parametrize("line", [*INTEGER_LINES, *MOVE_LINES, *FLOAT_LINES])
def test_a_vector_function_gives_the_bits_of_the_definition(line):
    operation = bound(line)
    if not registry.known(operation):
        pytest.fail(f"{line}: no vector definition")
    for seed in range(4):
        found, expected = _both(line, seed)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "line",
    [
        *("bfe.u32 %r0, %r1, 1, 0", "bfe.u32 %r0, %r1, %r2, %r3", "prmt.b32 %r0, %r1, %r2, %r3"),
        *("prmt.b32 %r0, %r1, %r2, 0x8123", "shf.l.wrap.b32 %r0, %r1, %r2, %r3", "add.cc.u32 %r0, %r1, %r2"),
        *("fma.rm.f32 %f0, %f1, %f2, %f3", "div.u32 %r0, %r1, %r2", "cvt.rn.f16x2.f32 %r0, %f1, %f2"),
        *("cvt.rzi.s32.f32 %r0, %f1", "add.rn.f64 %d0, %d1, %d2"),
        *("max.xorsign.abs.f32 %f0, %f1, %f2", "add.sat.f32 %f0, %f1, %f2", "mul.hi.u64 %d0, %d1, %d2"),
        *("mov.b64 %d0, {%h0, %h1, %h2, %h3}", "setp.lt.ftz.f32 %p0, %f1, %f2", "add.s16x2 %r0, %r1, %r2"),
        *("mov.u32 %r0, %clock", "add.sat.s32 %r0, %r1, %r2"),
    ],
)
def test_a_form_without_a_vector_definition_is_left_to_the_definition(line):
    assert not registry.known(bound(line))


def test_another_process_generates_the_same_code():
    """Kept code is found by its text, which must not follow the order of a set."""
    program = (
        "from attn4.emulator.codegen.program import Program\n"
        "from attn4.emulator.ptx.parser import parse\n"
        "from emulated.tiny import THREAD, kernel_text\n"
        "lines = [f'add.u32 %r{10 + n}, %r{n + 9}, %r{n + 8};' for n in range(20)]\n"
        "text = kernel_text(THREAD + '\\n'.join(lines) + 'st.global.u32 [%d2], %r29;\\nret;')\n"
        "made = Program(parse(text).kernels[0], vectors=True)\n"
        "print(made.vectors.llvm(32), made.vectors.layout)\n"
    )
    texts = set()
    for seed in ("0", "1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        texts.add(done.stdout)
    assert len(texts) == 1
