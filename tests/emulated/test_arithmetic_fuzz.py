"""Random straight-line arithmetic gives on the machine what the same operations give in numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest

from emulated.tiny import THREAD, kernel_text, run

INTEGERS = 8
FLOATS = 8
STEPS = 60
LANES = 128


def u32(x):
    return np.asarray(x).astype(np.uint32)


INTEGER_OPERATIONS = {
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32),
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "min.u32": np.minimum,
    "max.u32": np.maximum,
    "min.s32": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
    "max.s32": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
}
FLOAT_OPERATIONS = {
    "add.rn.f32": np.add,
    "sub.rn.f32": np.subtract,
    "mul.rn.f32": np.multiply,
    "div.rn.f32": np.divide,
}


class Program:
    """Lines of PTX and, step by step, what they make of numpy arrays."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        draw = np.random.default_rng(seed)
        self.integers = list(draw.integers(0, 1 << 32, (INTEGERS, LANES), dtype=np.uint64).astype(np.uint32))
        self.floats = list(draw.standard_normal((FLOATS, LANES)).astype(np.float32))
        self.inputs = np.stack([*self.integers, *(x.view(np.uint32) for x in self.floats)])
        self.lines: list[str] = []
        with np.errstate(all="ignore"):
            for _ in range(STEPS):
                self.choose.choice([self.integer, self.shift, self.floating, self.convert, self.guarded])()

    def places(self, count: int, limit: int) -> list[int]:
        return [self.choose.randrange(limit) for _ in range(count)]

    def integer(self) -> None:
        name, function = self.choose.choice(list(INTEGER_OPERATIONS.items()))
        d, a, b = self.places(3, INTEGERS)
        self.lines.append(f"{name} %r{10 + d}, %r{10 + a}, %r{10 + b};")
        self.integers[d] = u32(function(self.integers[a], self.integers[b]))

    def shift(self) -> None:
        (d, a), amount = self.places(2, INTEGERS), self.choose.randrange(32)
        if self.choose.random() < 0.5:
            self.lines.append(f"shl.b32 %r{10 + d}, %r{10 + a}, {amount};")
            self.integers[d] = self.integers[a] << np.uint32(amount)
        else:
            self.lines.append(f"shr.s32 %r{10 + d}, %r{10 + a}, {amount};")
            self.integers[d] = (self.integers[a].view(np.int32) >> np.int32(amount)).view(np.uint32)

    def floating(self) -> None:
        name, function = self.choose.choice(list(FLOAT_OPERATIONS.items()))
        d, a, b = self.places(3, FLOATS)
        self.lines.append(f"{name} %f{d}, %f{a}, %f{b};")
        self.floats[d] = function(self.floats[a], self.floats[b])

    def convert(self) -> None:
        (d,), (a,) = self.places(1, FLOATS), self.places(1, INTEGERS)
        self.lines.append(f"cvt.rn.f32.s32 %f{d}, %r{10 + a};")
        self.floats[d] = self.integers[a].view(np.int32).astype(np.float32)

    def guarded(self) -> None:
        d, a, b, c = self.places(4, INTEGERS)
        self.lines.append(
            f"setp.lt.s32 %p1, %r{10 + a}, %r{10 + b};\n@%p1 add.u32 %r{10 + d}, %r{10 + c}, 1;"
        )
        chosen = self.integers[a].view(np.int32) < self.integers[b].view(np.int32)
        self.integers[d] = np.where(chosen, self.integers[c] + np.uint32(1), self.integers[d])

    @property
    def text(self) -> str:
        names = [f"%r{10 + n}" for n in range(INTEGERS)] + [f"%f{n}" for n in range(FLOATS)]
        at = [f"[%d2+{4 * LANES * n}]" for n in range(len(names))]
        loads = [f"ld.global.b32 {name}, {place};" for name, place in zip(names, at, strict=True)]
        stores = [f"st.global.b32 {place}, {name};" for name, place in zip(names, at, strict=True)]
        return kernel_text(THREAD + "\n".join([*loads, *self.lines, *stores, "ret;"]))


@pytest.mark.parametrize("seed", range(20))
def test_a_random_program_gives_what_numpy_gives(seed):
    program = Program(seed)
    memory = program.inputs.copy()
    run(program.text, [memory], block=LANES)
    np.testing.assert_array_equal(memory[:INTEGERS], np.stack(program.integers))
    got, expected = memory[INTEGERS:].view(np.float32), np.stack(program.floats)
    # NaN has one form in PTX and many in numpy; all else is compared bit for bit.
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    same = ~np.isnan(expected)
    np.testing.assert_array_equal(got.view(np.uint32)[same], expected.view(np.uint32)[same])
