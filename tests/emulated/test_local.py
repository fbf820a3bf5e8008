"""Local memory: each thread's own, at one address for all."""

import numpy as np
import pytest

from attn4.emulator.state.memory import MemoryFault
from emulated.tiny import THREAD, kernel_text, run, words

DEPOT = ".local .align 16 .b8 depot[40];\nmov.u64 %d5, depot;\n"


def test_every_thread_has_its_own(schedule):
    """Words go in by their number in the grid, and come out through a generic address, in a loop."""
    body = (
        THREAD
        + DEPOT
        + """
        cvta.local.u64 %d6, %d5;
        st.local.v2.b32 [%d5+8], {%r3, %r0};
        add.u64 %d7, %d6, 8;
        isspacep.local %p1, %d7;
        isspacep.global %p2, %d7;
        selp.b32 %r8, 100, 7, %p1;
        @%p2 add.u32 %r8, %r8, 1;
        ld.v2.b32 {%r4, %r5}, [%d7];
        add.u32 %r6, %r4, %r5;
        add.u32 %r6, %r6, %r8;
        st.global.b32 [%d2], %r6;
        ret;
        """
    )
    out = words(96 * 3)
    run(kernel_text(body), [out], grid=3, block=96, schedule=schedule)
    number = np.arange(96 * 3)
    np.testing.assert_array_equal(out, number + number % 96 + 100)


def test_threads_may_index_it_each_in_its_own_way():
    body = (
        THREAD
        + DEPOT
        + """
        and.b32 %r4, %r0, 7;
        mul.wide.u32 %d6, %r4, 4;
        add.u64 %d6, %d5, %d6;
        setp.lt.u32 %p0, %r0, 20;
        @%p0 st.local.u32 [%d6], %r0;
        @!%p0 st.u32 [%d6], 1000;
        ld.u32 %r5, [%d6];
        st.global.b32 [%d2], %r5;
        ret;
        """
    )
    out = words(64)
    run(kernel_text(body), [out], block=64)
    assert out.tolist() == [n if n < 20 else 1000 for n in range(64)]


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("ld.local.b32 %r4, [%d5+40]", "out of bounds"),
        ("st.local.b32 [%d5+-4], %r0", "out of bounds"),
        ("ld.local.b32 %r4, [%d5+2]", "misaligned"),
        ("ld.local.b32 %r4, [%d5+4]", "no one wrote"),
        ("atom.add.u32 %r4, [%d5], 1", "outside"),
    ],
)
def test_a_wrong_access_is_a_fault(access, message):
    with pytest.raises(MemoryFault, match=message):
        run(kernel_text(THREAD + DEPOT + access + ";\nret;"), [words(32)], block=32)
