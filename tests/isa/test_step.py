"""A step of the tensor core in one call gives the bits of its parts: products, one rounding, one sum."""

import numpy as np
import pytest

from attn4.emulator.codegen import machine_code
from attn4.emulator.units.dot import dot
from attn4.emulator.units.step import Operand, add_step, in_words

pytestmark = pytest.mark.skipif(not machine_code.available(), reason="llvmlite is not installed")

SPECIAL = np.array([np.inf, -0.0, 0.0, 2.0**-130, 6e4], np.float32)
SHAPES = [(128, 128), (64, 256), (64, 8), (128, 40), (64, 96), (128, 24)]


def words(generator, kind, rows, special):
    values = (generator.standard_normal((rows, 16)) * 2.0 ** generator.integers(-12, 12, (rows, 16))).astype(
        np.float32
    )
    if special:
        chosen = generator.random(values.shape) < 0.05
        values[chosen] = generator.choice(SPECIAL, chosen.sum())
    if kind == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def mn_major(matrix):
    """The operand of a matrix (columns, 16) whose columns lie next to each other for each k."""
    turned = np.ascontiguousarray(matrix.T)
    places = np.arange(turned.size // 8, dtype=np.int64)
    return Operand(turned.ctypes.data, places.ctypes.data, len(matrix), True, (turned, places))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("special", [False, True], ids=["numbers", "infinities"])
@pytest.mark.parametrize("place", [in_words, mn_major], ids=["K-major", "MN-major"])
def test_a_step_has_the_bits_of_its_parts(kind, rows, columns, special, place):
    generator = np.random.default_rng(rows + columns)
    a, b = (words(generator, kind, count, special) for count in (rows, columns))
    with np.errstate(all="ignore"):
        product = dot(a, kind, b, kind)
        before = generator.standard_normal((rows, columns + 3)).astype(np.float32)
        after = before.copy()
        add_step(kind, in_words(a), place(b), after.ctypes.data, columns + 3, accumulate=True)
        expected = before[:, :columns] + product
    same = (after[:, :columns] == expected) | (np.isnan(after[:, :columns]) & np.isnan(expected))
    assert same.all()
    assert (after[:, columns:] == before[:, columns:]).all()
    add_step(kind, in_words(a), place(b), after.ctypes.data, columns + 3, accumulate=False)
    np.testing.assert_array_equal(after[:, :columns], product)
