"""Tensors of a Python that is not position independent lie below 4 GiB, where other windows are here."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from attn4.emulator.isa.memory import PARAMETER_BASE
from emulated.tiny import THREAD, kernel_text, run

MAP_32BIT = 0x40
MAP_FIXED_NOREPLACE = 0x100000
MOST = 1 << 32


def words_at(wanted: int | None, flag: int) -> Iterator[np.ndarray]:
    """128 words of zeros below 4 GiB, at the address ``wanted`` if it is not None."""
    size = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flag
    address = libc.mmap(wanted, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    if address is None or address >= MOST or wanted not in (None, address):
        pytest.skip("no memory is given there")
    yield np.ctypeslib.as_array((ctypes.c_uint32 * 128).from_address(address))
    libc.munmap(ctypes.c_void_p(address), size)


@pytest.fixture
def low_words() -> Iterator[np.ndarray]:
    yield from words_at(None, MAP_32BIT)


@pytest.fixture
def words_at_parameters() -> Iterator[np.ndarray]:
    yield from words_at(PARAMETER_BASE, MAP_FIXED_NOREPLACE)


ACCESSES = {
    "store": "st.u32 [%d2], %r3;",
    "load": "ld.u32 %r4, [%d2];\nadd.u32 %r4, %r4, %r3;\nst.global.u32 [%d2], %r4;",
    "atomic": "red.add.u32 [%d2], %r3;",
    "exchange": "atom.global.exch.b32 %r5, [%d2], %r3;",
    "isspacep": "isspacep.global %p0, %d2;\n@%p0 st.u32 [%d2], %r3;",
}


@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("hazards", [False, True])
def test_a_generic_address_below_4_gib_that_a_tensor_holds_is_global(low_words, access, hazards):
    grid = run(kernel_text(THREAD + ACCESSES[access] + "\nret;"), [low_words], hazards=hazards)
    np.testing.assert_array_equal(low_words, np.arange(128))
    assert list(grid.findings) == []


def test_a_parameter_is_read_by_its_generic_address_where_a_tensor_lies_too(words_at_parameters):
    body = "mov.u64 %d0, p0;\nld.u64 %d1, [%d0];\nst.global.u32 [%d1], 7;\nret;"
    run(kernel_text(body), [words_at_parameters])
    assert words_at_parameters[0] == 7


def test_a_bulk_copy_reads_a_tensor_below_4_gib(low_words):
    low_words[:] = np.arange(128)
    out = np.zeros(128, np.uint32)
    body = """
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
    mov.u32 %r0, memory; add.u32 %r1, %r0, 512;
    mov.u32 %r2, %tid.x;
    setp.ne.u32 %p0, %r2, 0;
    @%p0 bra WAIT;
    mbarrier.init.shared.b64 [%r1], 1;
    fence.proxy.async;
    mbarrier.arrive.expect_tx.shared.b64 %d2, [%r1], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%d0], 512, [%r1];
    WAIT:
    bar.sync 0;
    AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @!%p1 bra AGAIN;
    shl.b32 %r3, %r2, 2; add.u32 %r4, %r0, %r3;
    ld.shared.u32 %r5, [%r4];
    cvt.u64.u32 %d3, %r3; add.u64 %d4, %d1, %d3;
    st.global.u32 [%d4], %r5;
    ret;
    """
    run(kernel_text(body, parameters=2, shared=1024), [low_words, out])
    np.testing.assert_array_equal(out, np.arange(128))
