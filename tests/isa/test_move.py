"""Copies, packing and unpacking."""

import numpy as np
import pytest

from attn4.emulator.isa.registry import UnsupportedInstruction
from isa_lines import bound, execute, u32


def test_mov_copies_registers_and_constants():
    a = u32(1, 2, 3)
    assert execute("mov.b32 %r0, %r1", a).tolist() == [1, 2, 3]
    assert execute("mov.f32 %f0, 0fFF800000").tolist() == [0xFF800000] * 32
    assert execute("mov.f32 %f0, 1.5").tolist() == [0x3FC00000] * 32
    assert execute("mov.b64 %d0, -1").tolist() == [2**64 - 1] * 32
    assert execute("mov.pred %p0, 1").tolist() == [True] * 32
    assert execute("mov.u16 %h0, 65535").tolist() == [65535] * 32


def test_the_first_element_of_a_vector_is_the_least_significant():
    low, high = u32(0x11111111, 1), u32(0x22222222, 2)
    packed = execute("mov.b64 %d0, {%r1, %r2}", low, high)
    assert packed.tolist() == [0x2222222211111111, 0x200000001]
    first, second = execute("mov.b64 {%r0, %r1}, %d1", packed)
    np.testing.assert_array_equal(first, low)
    np.testing.assert_array_equal(second, high)
    assert execute("mov.b64 {_, %r1}, %d1", packed)[1].tolist() == high.tolist()
    halves = [np.array([n, n + 10], np.uint16) for n in (1, 2, 3, 4)]
    packed = execute("mov.b64 %d0, {%h1, %h2, %h3, %h4}", *halves)
    assert packed.tolist() == [0x0004000300020001, 0x000E000D000C000B]
    for part, half in zip(execute("mov.b64 {%h1, %h2, %h3, %h4}, %d1", packed), halves, strict=True):
        np.testing.assert_array_equal(part, half)
    assert execute("mov.b32 %r0, {%h1, %h2}", *halves[:2]).tolist() == [0x00020001, 0x000C000B]
    assert execute("mov.b64 %d0, {%r1, 5}", low).tolist() == [0x511111111, 0x500000001]


def test_128_bits_are_two_columns():
    low, high = np.array([1, 2], np.uint64), np.array([3, 4], np.uint64)
    packed = execute("mov.b128 %q0, {%d1, %d2}", low, high)
    assert packed.tolist() == [[1, 3], [2, 4]]
    first, second = execute("mov.b128 {%d0, %d1}, %q1", packed)
    assert first.tolist() == [1, 2]
    assert second.tolist() == [3, 4]


def test_cvta_changes_nothing():
    a = np.array([0x400, 2**40], np.uint64)
    assert execute("cvta.to.global.u64 %d0, %d1", a).tolist() == a.tolist()
    assert execute("cvta.shared.u64 %d0, %d1", a).tolist() == a.tolist()


@pytest.mark.parametrize("line", ["mov.b32 {%r0, %r1}, %d1", "mov.s64 {%r0, %r1}, %d1", "mov.b63 %d0, %d1"])
def test_forms_that_do_not_exist_are_errors(line):
    with pytest.raises(UnsupportedInstruction):
        bound(line)
