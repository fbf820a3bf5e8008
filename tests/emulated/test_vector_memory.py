"""Loads and stores by vector functions do what the definitions do, and leave all that is wrong to them."""

import numpy as np
import pytest

from attn4.emulator.codegen import machine_code
from attn4.emulator.state.memory import MemoryFault
from emulated.tiny import THREAD, kernel_text, run, words

pytestmark = pytest.mark.skipif(not machine_code.available(), reason="llvmlite is not installed")

SETUP = (
    THREAD
    + """
    mov.u32 %r10, memory;
    shl.b32 %r11, %r0, 4;
    add.u32 %r12, %r10, %r11;
    and.b32 %r13, %r0, 3;
    setp.ne.u32 %p1, %r13, 2;
    mad.lo.u32 %r20, %r0, 2654435761, 12345;
    xor.b32 %r21, %r20, 0x5bd1e995;
    add.u32 %r22, %r20, %r21;
    not.b32 %r23, %r20;
    mov.b64 %d20, {%r20, %r21};
    mov.b64 %d21, {%r22, %r23};
    cvt.u16.u32 %h1, %r20;
    cvt.u16.u32 %h2, %r21;
    st.shared.v4.b32 [%r12], {%r21, %r22, %r23, %r20};
    mov.u32 %r30, 7; mov.u32 %r31, 8; mov.u32 %r32, 9; mov.u32 %r33, 10;
    mov.u16 %h10, 0; mov.u16 %h11, 0;
    mov.u64 %d30, 0; mov.u64 %d31, 0;
"""
)
REST = """
    cvt.u32.u16 %r40, %h10; cvt.u32.u16 %r41, %h11; shl.b32 %r41, %r41, 16; or.b32 %r40, %r40, %r41;
    mov.b64 {%r42, %r43}, %d30; mov.b64 {%r44, %r45}, %d31;
    xor.b32 %r50, %r42, %r43; xor.b32 %r51, %r44, %r45; xor.b32 %r50, %r50, %r51;
    xor.b32 %r50, %r50, %r30; shf.l.wrap.b32 %r50, %r50, %r50, 5; add.u32 %r50, %r50, %r31;
    shf.l.wrap.b32 %r50, %r50, %r50, 5; add.u32 %r50, %r50, %r32; shf.l.wrap.b32 %r50, %r50, %r50, 5;
    add.u32 %r50, %r50, %r33; xor.b32 %r50, %r50, %r40;
    bar.sync 0;
    ld.shared.v4.b32 {%r30, %r31, %r32, %r33}, [%r12];
    xor.b32 %r30, %r30, %r31; xor.b32 %r32, %r32, %r33; xor.b32 %r30, %r30, %r32; xor.b32 %r50, %r50, %r30;
    st.global.b32 [%d2], %r50;
    ret;
"""
LINES = [
    "st.shared.b32 [%r12+4], %r20;",
    "@%p1 st.shared.b32 [%r12+8], %r20;",
    "@!%p1 st.shared.v2.b32 [%r12+8], {%r20, %r21};",
    "st.shared.b8 [%r12+3], %h1;",
    "st.shared.b16 [%r12+6], %h2;",
    "st.shared.v2.b16 [%r12+4], {%h1, %h2};",
    "st.shared.b64 [%r12+8], %d20;",
    "st.shared.v2.b64 [%r12], {%d20, %d21};",
    "st.shared.v2.b32 [%r12], {%r20, 77};",
    "and.b32 %r14, %r12, 0xffffff8f; st.shared.b32 [%r14], %r20;",
    "ld.shared.b32 %r30, [%r12+4];",
    "@%p1 ld.shared.b32 %r30, [%r12+4];",
    "@!%p1 ld.shared.v4.b32 {%r30, %r31, %r32, %r33}, [%r12];",
    "ld.shared.v2.b32 {%r30, _}, [%r12+8];",
    "ld.shared.u8 %h10, [%r12+5];",
    "ld.shared.s8 %r30, [%r12+5];",
    "ld.shared.s8 %h10, [%r12+5];",
    "ld.shared.u16 %r31, [%r12+6];",
    "ld.shared.s16 %r31, [%r12+6];",
    "ld.shared.v2.b16 {%h10, %h11}, [%r12+12];",
    "ld.shared.s32 %d30, [%r12];",
    "ld.shared.v2.b64 {%d30, %d31}, [%r12];",
    "mov.b32 %r30, %r12; ld.shared.v2.b32 {%r30, %r31}, [%r30];",
    "ld.param.b32 %r30, [p0+4];",
    "ld.param.v2.b32 {%r30, %r31}, [p0];",
    "ld.param.u8 %h10, [p0+1];",
]


def outputs(body, **options):
    """What a kernel writes, with vector functions for memory; how often they left it to the definition."""
    out = words(128)
    grid = run(kernel_text(body, shared=4096), [out], block=128, **options)
    return out, grid


@pytest.mark.parametrize("line", LINES)
def test_memory_functions_do_what_the_definitions_do(line, monkeypatch):
    found, grid = outputs(SETUP + line + REST)
    assert grid.program.vectors.accesses, "no vector function"
    monkeypatch.setattr(machine_code, "available", lambda: False)
    expected, grid = outputs(SETUP + line + REST)
    assert grid.program.vectors is None
    if "param" in line:
        # Addresses differ from run to run.
        return
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("ld.shared.b32 %r30, [%r12+2];", "misaligned"),
        ("st.shared.b64 [%r12+4], %d20;", "misaligned"),
        ("ld.shared.b32 %r30, [%r12+4096];", "out of bounds"),
        ("st.shared.v4.b32 [%r12+2096], {%r20, %r21, %r22, %r23};", "out of bounds"),
        ("ld.shared.b32 %r30, [%r12-4096];", "out of bounds"),
        ("ld.shared.b32 %r30, [%r12+2048];", "unwritten"),
        ("@!%p1 ld.shared.b32 %r30, [%r12+2048];", "unwritten"),
        ("ld.param.b64 %d30, [p0+16];", "out of bounds"),
    ],
)
def test_what_is_wrong_is_told_as_by_the_definitions(line, kind, monkeypatch):
    told = []
    for vectors in (True, False):
        if not vectors:
            monkeypatch.setattr(machine_code, "available", lambda: False)
        out = words(128)
        text = kernel_text(SETUP + line + REST, shared=4112)
        with pytest.raises(MemoryFault) as caught:
            run(text, [out], block=128)
        told.append((str(caught.value), caught.value.kind, caught.value.lane, caught.value.__notes__))
    assert told[0] == told[1]
    assert told[0][1] == kind


def test_an_inactive_lane_may_hold_any_address():
    body = (
        SETUP
        + "selp.b32 %r14, %r12, 3, %p1; @%p1 ld.shared.b32 %r30, [%r14]; st.global.b32 [%d2], %r30; ret;"
    )
    out, _ = outputs(body)
    thread = np.arange(128, dtype=np.uint64)
    hashed = (thread * 2654435761 + 12345).astype(np.uint32) ^ np.uint32(0x5BD1E995)
    assert (out == np.where(thread % 4 != 2, hashed, 7)).all()
