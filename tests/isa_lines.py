"""One line of PTX, bound and executed on arrays; and exact rounding of rational numbers, for oracles."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import numpy as np

from attn4.emulator.isa import registry
from attn4.emulator.ptx.module import Immediate
from attn4.emulator.ptx.parser import parse

DECLARATIONS = """
    .reg .pred %p<9>;  .reg .b16 %h<9>;  .reg .b32 %r<9>;  .reg .b64 %d<9>;  .reg .b128 %q<9>;
    .reg .f32 %f<9>;
"""
STORAGE = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}


def bound(line):
    """The Operation of one PTX instruction; %p are predicates, %h 16, %r and %f 32, %d 64, %q 128 bits."""
    text = (
        ".version 8.6\n.target sm_100a\n.address_size 64\n"
        f".visible .entry k() {{\n{DECLARATIONS}\n{line};\nret;\n}}\n"
    )
    instruction = next(iter(parse(text).kernels[0].instructions))
    return registry.bind(instruction)


def execute(line, *registers, mask=None, alive=None):
    """Results of one line for the values of its register sources, in order; each as an array of its type."""
    operation = bound(line)
    lanes = len(registers[0]) if registers else 32
    given = iter(registers)
    sources = []
    for operand, constant in zip(operation.sources, operation.constants, strict=True):
        if isinstance(operand, Immediate):
            sources.append(np.repeat(constant, lanes))
        else:
            value = np.ascontiguousarray(next(given))
            kind = STORAGE.get(getattr(operand, "type", None))
            if kind is not None and value.dtype != kind:
                assert value.dtype.itemsize == np.dtype(kind).itemsize, (operand, value.dtype)
                value = value.view(kind)
            sources.append(value)
    assert next(given, None) is None, "more values than register sources"
    before = [source.copy() for source in sources]
    with np.errstate(all="ignore"):
        if operation.effect:
            mask = np.ones(lanes, bool) if mask is None else mask
            warp = SimpleNamespace(alive=np.ones(lanes, bool) if alive is None else alive)
            result = operation.function(warp, mask, *sources)
        else:
            result = operation.function(*sources)
    for source, copy in zip(sources, before, strict=True):
        np.testing.assert_array_equal(source, copy, "a definition must not write its sources")
    results = result if isinstance(result, tuple) else (result,)
    assert len(results) == len(operation.destinations)
    for value, operand in zip(results, operation.destinations, strict=True):
        kind = STORAGE.get(getattr(operand, "type", None))
        if kind is not None:
            assert value.dtype == kind, (line, value.dtype)
            assert value.shape == (lanes,), (line, value.shape)
    return result


def u32(*values):
    return np.array(values, np.uint64).astype(np.uint32)


def bits(values):
    return np.asarray(values, np.float32).view(np.uint32)


FORMATS = {"f32": (23, -126, 127), "f64": (52, -1022, 1023), "f16": (10, -14, 15), "bf16": (7, -126, 127)}
"""Bits of the fraction, least and greatest exponent."""
CANONICAL = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}


def power(exponent):
    """2 ** exponent."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def rounded(value, kind, mode, zero_sign=0):
    """Bits of the Fraction `value` in `kind`, by integer arithmetic alone; `zero_sign` for an exact zero."""
    fraction_bits, least, greatest = FORMATS[kind]
    width = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16}[kind]
    sign = (1 << width - 1) if value < 0 or (value == 0 and zero_sign) else 0
    if value == 0:
        return sign
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < power(exponent):
        exponent -= 1
    exponent = max(exponent, least)
    quanta = magnitude * power(fraction_bits - exponent)
    whole, rest = divmod(quanta.numerator, quanta.denominator)
    if mode == "rn":
        up = 2 * rest > quanta.denominator or (2 * rest == quanta.denominator and whole % 2 == 1)
    elif mode == "rna":
        up = 2 * rest >= quanta.denominator
    else:
        up = rest > 0 and {"rz": False, "rm": sign != 0, "rp": sign == 0}[mode]
    whole += up
    encoded = (exponent - least << fraction_bits) + whole
    infinite = greatest - least + 2 << fraction_bits
    if encoded >= infinite:
        to_infinity = mode in ("rn", "rna") or (mode == "rm" and sign) or (mode == "rp" and not sign)
        encoded = infinite if to_infinity else infinite - 1
    return sign | encoded


def value_of(encoded, kind):
    """The Fraction that finite bits stand for, and whether the sign bit is set."""
    fraction_bits, least, _ = FORMATS[kind]
    width = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16}[kind]
    sign = encoded >> width - 1
    field = encoded >> fraction_bits & (1 << width - 1 - fraction_bits) - 1
    fraction = encoded & (1 << fraction_bits) - 1
    if field:
        fraction |= 1 << fraction_bits
    value = fraction * power(max(field, 1) - 1 + least - fraction_bits)
    return (-value if sign else value), bool(sign)


def is_special(encoded, kind):
    fraction_bits, least, greatest = FORMATS[kind]
    return encoded >> fraction_bits & (1 << (greatest - least + 2).bit_length()) - 1 >= greatest - least + 2


def exact(operation, mode, kind, *encoded):
    """Bits of a + b, a - b, a * b or a * b + c of finite bits, rounded once."""
    values, signs = zip(*(value_of(x, kind) for x in encoded), strict=True)
    if operation == "fma":
        first, second = values[0] * values[1], values[2]
        first_sign, second_sign = signs[0] ^ signs[1], signs[2]
    elif operation == "mul":
        return rounded(values[0] * values[1], kind, mode, signs[0] ^ signs[1])
    else:
        first, first_sign = values[0], signs[0]
        second = values[1] if operation == "add" else -values[1]
        second_sign = signs[1] ^ (operation == "sub")
    both_zero = first == 0 and second == 0 and first_sign == second_sign
    return rounded(first + second, kind, mode, first_sign if both_zero else mode == "rm")


def hard_singles(count, seed):
    """float32 bits: random, subnormal, powers of two and their neighbours, short and long fractions."""
    rng = np.random.default_rng(seed)
    any_bits = rng.integers(0, 2**32, count, dtype=np.uint32)
    exponent = rng.integers(0, 255, count, dtype=np.uint32) << 23
    near_one = rng.integers(120, 134, count, dtype=np.uint32) << 23
    fraction = rng.choice(
        [0, 1, 2, 3, 0x7FFFFF, 0x7FFFFE, 0x400000, 0x400001, 0x3FFFFF, 0xFFF, 0x1000], count
    )
    sign = rng.integers(0, 2, count, dtype=np.uint32) << 31
    kinds = [
        any_bits,
        exponent | fraction | sign,
        near_one | fraction | sign,
        near_one | (any_bits & 0x7FFFFF) | sign,
        (any_bits & 0x7FFFFF) | sign,
        (rng.integers(0, 30, count, dtype=np.uint32) << 23) | (any_bits & 0x7FFFFF) | sign,
    ]
    chosen = rng.integers(0, len(kinds), count)
    values = np.choose(chosen, kinds).astype(np.uint32)
    return np.where((values >> 23 & 0xFF) == 0xFF, values & 0x807FFFFF, values).astype(np.uint32)
