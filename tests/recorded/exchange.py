"""Recorded programs: exchange between the lanes of a warp, and matrices between lanes and shared memory."""

from __future__ import annotations

from itertools import product

import numpy as np

from recorded.arithmetic import halves, pairs32
from recorded.program import HEADER, Program, elementwise, hashed

_OTHER = "mov.b32 %x, 0xCBCBCBCB;"
_MASKS = (0xFFFFFFFF, 0x0000FFFF, 0xAAAAAAAA, 0x80000001, 0x00F0F0F0)


def _for_lanes(mask: int) -> str:
    """Sets %p in the lanes of a mask."""
    return f"shl.b32 %s, 1, %lane; and.b32 %s, %s, {mask:#x}; setp.ne.b32 %p, %s, 0; {_OTHER} @%p "


def shuffles() -> list[Program]:
    controls = (0x1F, 0x0F, 0x00, 0x181F, 0x1C1F, 0x1003, 0x0703, 0x1E1F, 0x081F, 0x1800, 0x0C10)
    full = "0xffffffff"
    lines = [f"shfl.sync.{m}.b32 %x, %a, {b}, {c}, {full};" for m, b, c in product(
        ("up", "down", "bfly", "idx"), (1, 3, 17, 33), controls)]  # fmt: skip
    inside = [f"shfl.sync.{m}.b32 %s|%p, %a, {b}, {c}, {full}; selp.b32 %x, 1, 0, %p;" for m, b, c in product(
        ("up", "down", "bfly", "idx"), (1, 17), controls)]  # fmt: skip
    varied = [f"shfl.sync.{m}.b32 %x|%p, %a, %b, %c, {full};" for m in ("up", "down", "bfly", "idx")]
    inside += [
        f"shfl.sync.{m}.b32 %s|%p, %a, %b, %c, {full}; selp.b32 %x, 1, 0, %p;"
        for m in ("up", "down", "bfly", "idx")
    ]
    partial = [f"{_for_lanes(mask)}shfl.sync.idx.b32 %x, %a, {b}, 0x1f, {mask:#x};" for mask, b in (
        (0xFFFF, 7), (0xAAAAAAAA, 3), (0x80000001, 31))]  # fmt: skip
    lanes = np.arange(32, dtype=np.uint32) * 3 + 100
    offset, control = (
        hashed(32, 1).astype(np.uint32) % 40,
        hashed(32, 2).astype(np.uint32) & np.uint32(0x1F1F),
    )
    return [
        elementwise("shuffles", "b32 b32 b32", "b32", [*lines, *varied, *partial], [lanes, offset, control]),
        elementwise("shuffles in range", "b32 b32 b32", "b32", inside, [lanes, offset, control]),
    ]


def votes() -> list[Program]:
    """vote, match, redux, elect, activemask, by all lanes and by some."""
    full = 0xFFFFFFFF
    lines = []
    for mask in _MASKS:
        some = _for_lanes(mask) if mask != full else _OTHER
        # `taken` is set by the lanes that execute; the others keep the marker.
        guard = some.removesuffix("@%p ")
        at = "" if mask == full else "@%p "
        lines += [f"{guard} setp.gt.u32 %q, %b, 1; {at}vote.sync.ballot.b32 %x, %q, {mask:#x};"]
        lines += [
            f"{guard} setp.{c}.u32 %q, %b, {n}; {at}vote.sync.{m}.pred %q, %q, {mask:#x}; "
            f"{at}selp.b32 %x, 1, 0, %q;"
            for m, (c, n) in product(("all", "any", "uni"), (("gt", 1), ("le", 3), ("gt", 9)))
        ]
        lines += [
            f"{guard} {at}match.any.sync.b32 %x, %b, {mask:#x};",
            f"{guard} {at}match.all.sync.b32 %x, %d, {mask:#x};",
        ]
        lines += [
            f"{guard} {at}match.all.sync.b32 %x|%q, %b, {mask:#x};",
            f"{guard} mov.b64 %w, {{%b, %d}}; {at}match.any.sync.b64 %x, %w, {mask:#x};",
        ]
        lines += [f"{guard} {at}redux.sync.{op}.{k} %x, %a, {mask:#x};" for op, k in (
            *product(("add", "min", "max"), ("u32", "s32")),
            *product(("and", "or", "xor"), ("b32",)))]  # fmt: skip
        lines += [
            f"{guard} {at}elect.sync %x|%q, {mask:#x};",
            f"{guard} {at}elect.sync _|%q, {mask:#x}; {at}selp.b32 %x, 1, 0, %q;",
        ]
    # No lane of the membermask may be elsewhere: lanes that are not named take another way.
    lines += [f"{_for_lanes(mask)}activemask.b32 %x;" for mask in _MASKS]
    few = hashed(32, 4).astype(np.uint32) % 5
    return [
        elementwise("votes", "b32 b32 b32 b32", "b32", lines,
                    [hashed(32, 3).astype(np.uint32), few, few, np.full(32, 77, np.uint32)])
    ]  # fmt: skip


def matrices() -> list[Program]:
    """ldmatrix and stmatrix: what each lane gets of, and puts into, 1024 bytes."""
    out = []
    for number, transposed in product((1, 2, 4), ("", ".trans")):
        names = ", ".join(f"%m{n}" for n in range(number))
        out.append(
            f"ldmatrix.sync.aligned.m8n8.x{number}{transposed}.shared.b16 {{{names}}}, [%row];\n"
            + "\n".join(f"st.global.b32 [%o+{128 * n}], %m{n};" for n in range(number))
            + "\nadd.u64 %o, %o, 512;"
        )
        out.append(
            "st.shared.v4.b32 [%whole], {%z, %z, %z, %z};\n"
            "st.shared.v4.b32 [%whole+512], {%z, %z, %z, %z};\nbar.warp.sync -1;\n"
            f"stmatrix.sync.aligned.m8n8.x{number}{transposed}.shared.b16 [%row], "
            f"{{{', '.join(f'%i{n}' for n in range(number))}}};\n"
            "bar.warp.sync -1;\n"
            "ld.shared.v4.b32 {%m0, %m1, %m2, %m3}, [%whole];\n"
            "st.global.v4.b32 [%o4], {%m0, %m1, %m2, %m3};\nadd.u64 %o4, %o4, 512;\nbar.warp.sync -1;\n"
            "st.shared.v4.b32 [%whole], {%i0, %i1, %i2, %i3};\nbar.warp.sync -1;"
        )
    text = f"""{HEADER}.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{
.shared .align 128 .b8 memory[1024];
.reg .b32 %m<4>, %i<4>, %row, %whole, %lane, %base, %z;  .reg .b64 %v, %o, %o4;
mov.u32 %lane, %tid.x;  mov.u32 %base, memory;  mov.b32 %z, 0;
ld.param.u64 %v, [p0];  mad.wide.u32 %v, %lane, 16, %v;
ld.global.v4.b32 {{%i0, %i1, %i2, %i3}}, [%v];
mad.lo.u32 %whole, %lane, 16, %base;
st.shared.v4.b32 [%whole], {{%i0, %i1, %i2, %i3}};
ld.param.u64 %v, [p1];  mad.wide.u32 %v, %lane, 4, %v;
ld.global.b32 %row, [%v];  add.u32 %row, %row, %base;
ld.param.u64 %o, [p2];  mad.wide.u32 %o4, %lane, 16, %o;  mad.wide.u32 %o, %lane, 4, %o;
add.u64 %o4, %o4, 3072;
bar.warp.sync -1;
{chr(10).join(out)}
ret;
}}
"""
    # The rows of the four matrices, in an order of their own.
    rows = (np.arange(32, dtype=np.uint32) * 5 + 3) % 32 * 16
    values = hashed(64, 5).view(np.uint32)
    return [Program("ldmatrix and stmatrix", text, (values, rows), "u4", (12, 128), (1, 32))]


_ATOMIC_TYPES = ("f32", "noftz.f16x2", "noftz.bf16x2")


def atomics() -> list[Program]:
    """Additions to memory: what becomes of subnormal numbers, NaN and ties, in global and shared memory."""
    lines = []
    for kind in _ATOMIC_TYPES:
        for space in ("global", "shared"):
            if space == "global":
                lines.append(
                    f"st.global.b32 [%v], %a; atom.global.add.{kind} %s, [%v], %b; ld.global.b32 %x, [%v];"
                )
                lines.append(
                    f"st.global.b32 [%v], %a; red.global.add.{kind} [%v], %b; "
                    "ld.volatile.global.b32 %x, [%v];"
                )
            else:
                lines.append(
                    f"st.shared.b32 [%u], %a; atom.shared.add.{kind} %s, [%u], %b; ld.shared.b32 %x, [%u];"
                )
    arrays = [*pairs32(128, 81), np.zeros(128, np.uint32)]
    arrays[0][64:], arrays[1][64:] = halves(64, 82), halves(64, 83)
    program = elementwise("atomic additions", "b32 b32 b32", "b32", lines, [*arrays[:2], arrays[2]])
    setup = (
        ".shared .align 16 .b8 room[512];\n"
        "mov.u32 %u, room;  mov.u32 %s, %tid.x;  mad.lo.u32 %u, %s, 4, %u;\n"
        "ld.param.u64 %v, [p2];  mad.wide.u32 %v, %t, 4, %v;\n"
    )
    text = program.text.replace("{ st.global.b32 [%v]", setup + "{ st.global.b32 [%v]", 1)
    return [Program(program.name, text, program.inputs, "u4", program.shape, program.threads, program.labels)]


def barriers() -> list[Program]:
    """A barrier of two arrivals: what test_wait says of both parities after each step."""
    steps = []

    def ask(what: str = "") -> None:
        both = "".join(
            f"mbarrier.test_wait.parity.shared.b64 %p, [%b], {parity};\n"
            "selp.b32 %r, 1, 0, %p; shl.b32 %s, %s, 1; or.b32 %s, %s, %r;\n"
            for parity in (0, 1)
        )
        steps.append(f"{what}\nmov.b32 %s, 0;\n{both}st.global.b32 [%o], %s; add.u64 %o, %o, 4;")

    arrive = "mbarrier.arrive.shared.b64 %t, [%b];"
    ask()
    for _ in range(5):
        ask(arrive)
    ask("mbarrier.arrive.expect_tx.shared.b64 %t, [%b], 32;")
    ask("mbarrier.complete_tx.relaxed.cta.shared::cluster.b64 [%b], 16;")
    ask("mbarrier.complete_tx.relaxed.cta.shared::cluster.b64 [%b], 16;")
    ask("mbarrier.complete_tx.relaxed.cta.shared::cluster.b64 [%b], 16;")
    ask("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%b], 16;")
    ask(arrive)
    ask("mbarrier.arrive_drop.shared.b64 %t, [%b];")
    ask(arrive)
    ask(arrive)
    ask(arrive)
    body = "\n".join(steps)
    text = f"""{HEADER}.visible .entry k(.param .u64 p0, .param .u64 p1)
{{
.shared .align 8 .b8 barrier[8];
.reg .b32 %b, %r, %s;  .reg .b64 %o, %t;  .reg .pred %p;
mov.u32 %b, barrier;  ld.param.u64 %o, [p1];
mbarrier.init.shared.b64 [%b], 2;
{body}
ret;
}}
"""
    return [Program("barrier parities", text, (np.zeros(32, np.uint32),), "u4", (1, len(steps)), (1, 1))]


def programs() -> list[Program]:
    """All programs of this file."""
    return [*shuffles(), *votes(), *matrices(), *atomics(), *barriers()]
