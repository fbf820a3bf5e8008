"""Matrices of bytes between shared memory and fragments, element by element."""

import numpy as np
import pytest

from emulated.tiny import THREAD, kernel_text, run, words

ROUND_TRIP = """
ld.param.u64 %d5, [p1];
mov.u32 %r10, memory;
mad.lo.u32 %r11, %r0, 16, %r10;
mul.wide.u32 %d6, %r0, 16;
add.u64 %d7, %d5, %d6;
ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d7];
st.shared.v4.b32 [%r11], {{%r20, %r21, %r22, %r23}};
bar.warp.sync -1;
{instruction}
ret;
"""


def loaded(count):
    """The registers (2 count, 32) of a load of 32 rows of 16 bytes, and the rows."""
    names = ", ".join(f"%r{30 + n}" for n in range(2 * count))
    store = "".join(f"st.global.b32 [%d2+{128 * n}], %r{30 + n};\n" for n in range(2 * count))
    load = f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {{{names}}}, [%r11];\n{store}"
    source = np.arange(512, dtype=np.uint16).astype(np.uint8) ^ np.repeat(np.arange(2), 256).astype(np.uint8)
    out = words(64 * count)
    text = kernel_text(THREAD + ROUND_TRIP.format(instruction=load), parameters=2, shared=512)
    run(text, [out, source.view(np.uint32).copy()], block=32)
    return out.reshape(2 * count, 32), source.reshape(32, 16)


@pytest.mark.parametrize("count", [1, 2])
def test_a_transposed_matrix_of_bytes_is_spread_over_the_lanes(count):
    registers, rows = loaded(count)
    for matrix in range(count):
        for lane in range(32):
            group, quarter = lane // 4, lane % 4
            for part in range(2):
                row = 16 * matrix + 4 * quarter + 2 * part
                octets = [rows[row + n % 2, group + 8 * (n // 2)] for n in range(4)]
                assert registers[2 * matrix + part, lane] == int.from_bytes(bytes(octets), "little")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_transposed_store_of_bytes_puts_them_back_in_rows(count):
    names = ", ".join(f"%r{20 + n}" for n in range(count))
    store = (
        "st.shared.v4.b32 [%r11], {%r24, %r24, %r24, %r24};\nbar.warp.sync -1;\n"
        f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r11], {{{names}}};\n"
        "bar.warp.sync -1;\nld.shared.v4.b32 {%r40, %r41, %r42, %r43}, [%r11];\n"
        "mul.wide.u32 %d8, %r0, 16; add.u64 %d9, %d0, %d8;\n"
        "st.global.v4.b32 [%d9], {%r40, %r41, %r42, %r43};"
    )
    body = THREAD + "mov.u32 %r24, 0;\n" + ROUND_TRIP.format(instruction=store)
    source = np.random.default_rng(3).integers(0, 256, (32, 4, 4)).astype(np.uint8)  # lane, register, byte
    out = np.zeros(128, np.uint32)
    room = np.zeros(out.nbytes + 16, np.uint8)
    target = room[-room.ctypes.data % 16 :][: out.nbytes].view(np.uint32)
    run(
        kernel_text(body, parameters=2, shared=512),
        [target, source.reshape(-1).view(np.uint32).copy()],
        block=32,
    )
    rows = target.view(np.uint8).reshape(32, 16)
    for lane in range(32):
        group, quarter = lane // 4, lane % 4
        for register in range(4):
            for n in range(4):
                found = rows[8 * register + 2 * quarter + n % 2, group + 8 * (n // 2)]
                assert found == (source[lane, register, n] if register < count else 0)
