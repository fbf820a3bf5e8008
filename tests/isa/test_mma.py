"""mma.sync against numpy, with fragments laid out element by element as PTX's figures say."""

import numpy as np
import pytest

from attn4.emulator.isa.registry import UnsupportedInstruction
from isa_lines import bound
from matrix_operands import bits_of, values_for

WARPS = 2


def a_place(i, lane, size, groups):
    """Row and column of element i of A's fragment; `size` elements a register."""
    group, quarter = lane // 4, lane % 4
    register, element = divmod(i, size)
    row = group + 8 * (register % 2) if groups else group
    return row, quarter * size + element + register // 2 * 4 * size


def b_place(i, lane, size):
    """Row (along K) and column of element i of B's fragment."""
    register, element = divmod(i, size)
    return lane % 4 * size + element + register * 4 * size, lane // 4


def c_place(i, lane):
    return lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2


def pack(elements, size, word):
    """(elements, lanes) of raw words to registers."""
    if size == 1:
        return [row.astype(word) for row in elements]
    parts = np.stack([elements[n : n + size] for n in range(0, len(elements), size)])
    return [np.ascontiguousarray(part.T).view(word).reshape(-1) for part in parts]


FORMS = [
    ("m16n8k8", "f32", "f16", "f16", "f32"),
    ("m16n8k16", "f32", "f16", "f16", "f32"),
    ("m16n8k16", "f16", "f16", "f16", "f16"),
    ("m16n8k16", "f32", "bf16", "bf16", "f32"),
    ("m16n8k8", "f32", "bf16", "bf16", "f32"),
    ("m16n8k4", "f32", "tf32", "tf32", "f32"),
    ("m16n8k8", "f32", "tf32", "tf32", "f32"),
    ("m16n8k16", "f32", "e4m3", "e5m2", "f32"),
    ("m16n8k32", "f16", "e5m2", "e4m3", "f16"),
    ("m16n8k32", "s32", "s8", "u8", "s32"),
    ("m16n8k16", "s32", "u8", "s8", "s32"),
    ("m8n8k4", "f64", "f64", "f64", "f64"),
    ("m16n8k4", "f64", "f64", "f64", "f64"),
    ("m16n8k16", "f64", "f64", "f64", "f64"),
]


def raw(values, kind):
    return values.astype(np.float64).view(np.uint64) if kind == "f64" else bits_of(values, kind)


def line(form, counts, extra=""):
    shape, d, a, b, c = form
    register = "%d" if d == "f64" else "%r"
    vectors = []
    for count in counts:
        names = ", ".join([f"{register}{n % 8}" for n in range(count)])
        vectors.append(f"{{{names}}}")
    return f"mma.sync.aligned.{shape}.row.col{extra}.{d}.{a}.{b}.{c} " + ", ".join(vectors)


@pytest.mark.parametrize("form", FORMS, ids=".".join)
def test_the_product_of_a_warp_is_that_of_its_matrices(form):
    shape, d, a, b, c = form
    m, k = int(shape[1 : shape.index("n")]), int(shape.rpartition("k")[2])
    size = {"f64": 1, "tf32": 1, "f16": 2, "bf16": 2}.get(a, 4)
    word = np.uint64 if d == "f64" else np.uint32
    left, right = values_for(a, (WARPS, m, k), 1), values_for(b, (WARPS, 8, k), 2)
    addend = values_for("f16", (WARPS, m, 8), 3)
    lanes = range(32 * WARPS)

    def fragment(matrices, kind, elements, place):
        bits = raw(matrices, kind)
        return np.array([[bits[lane // 32][place(i, lane % 32)] for lane in lanes] for i in range(elements)])

    a_elements, b_elements, c_elements = m * k // 32, 8 * k // 32, m * 8 // 32
    registers = pack(fragment(left, a, a_elements, lambda i, x: a_place(i, x, size, m == 16)), size, word)
    registers += pack(fragment(right, b, b_elements, lambda i, x: b_place(i, x, size)[::-1]), size, word)
    kind = {"s32": "s32"}.get(c, c)
    encode = {"f32": "tf32", "f16": "f16", "f64": "f64"}
    if kind == "s32":
        whole = addend.astype(np.int32).view(np.uint32)
        c_words = np.array([[whole[x // 32][c_place(i, x % 32)] for x in lanes] for i in range(c_elements)])
    else:
        c_words = fragment(addend, encode[c], c_elements, c_place)
    third = pack(c_words, 2 if c == "f16" else 1, word)
    counts = [c_elements // (2 if d == "f16" else 1), a_elements // size, b_elements // size, len(third)]
    operation = bound(line(form, counts))

    class Warp:
        def aligned(self, mask):
            return True

    result = operation.function(Warp(), np.ones(len(lanes), bool), *registers, *third)
    result = [result] if counts[0] == 1 else result
    expected = left @ right.swapaxes(1, 2) + addend
    view = {"f32": np.float32, "f64": np.float64, "s32": np.int32, "f16": np.float16}[d]
    for i in range(c_elements):
        for x in lanes:
            row = (
                result[i // 2][x : x + 1].view(view)[i % 2]
                if d == "f16"
                else result[i][x : x + 1].view(view)[0]
            )
            assert row == expected[x // 32][c_place(i, x % 32)]


@pytest.mark.parametrize(
    "text",
    [
        line(("m16n8k16", "f32", "tf32", "tf32", "f32"), (4, 4, 2, 4)),
        line(("m16n8k16", "f32", "f16", "bf16", "f32"), (4, 4, 2, 4)),
        line(("m16n8k16", "f16", "bf16", "bf16", "f16"), (2, 4, 2, 2)),
        line(("m16n8k16", "f32", "f16", "f16", "f32"), (4, 2, 2, 4)),
        line(("m16n8k16", "f32", "f16", "f16", "f32"), (4, 4, 2, 4), ".satfinite"),
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%r0,%r1,%r2,%r3}, {%r0,%r1,%r2,%r3}, "
        "{%r0,%r1,%r2,%r3}, {%r0,%r1,%r2,%r3}, %r4, 0",
    ],
)
def test_products_that_do_not_exist_are_refused(text):
    with pytest.raises(UnsupportedInstruction, match=r"line \d+: mma\."):
        bound(text)


def test_integer_products_saturate_only_with_satfinite():
    form = ("m16n8k16", "s32", "u8", "u8", "s32")

    class Warp:
        def aligned(self, mask):
            return True

    ones = [np.full(32, 0xFFFFFFFF, np.uint32)] * 3
    addend = [np.full(32, 2**31 - 5, np.uint32)] * 4
    for extra, expected in (("", (255 * 255 * 16 + 2**31 - 5) & 2**32 - 1), (".satfinite", 2**31 - 1)):
        operation = bound(line(form, (4, 2, 1, 4), extra))
        result = operation.function(Warp(), np.ones(32, bool), *ones, *addend)
        assert result[0].tolist() == [expected] * 32


def test_movmatrix_transposes():
    class Warp:
        def aligned(self, mask):
            return True

    matrix = np.arange(128, dtype=np.uint16)
    operation = bound("movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1")
    result = operation.function(Warp(), np.ones(64, bool), matrix.view(np.uint32))
    expected = matrix.reshape(2, 8, 8).swapaxes(1, 2)
    np.testing.assert_array_equal(result.view(np.uint16).reshape(2, 8, 8), expected)
