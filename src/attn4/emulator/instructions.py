"""The table of instructions that the emulator has, from their definitions, and of those that it refuses.

``python -m attn4.emulator.instructions > docs/instructions.md`` renews the page.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Final

from attn4.emulator.isa.registry import DEFINITIONS, Definition, load

INTRODUCTION: Final = """\
# Instructions of the emulator

Made by `python -m attn4.emulator.instructions > docs/instructions.md` from the definitions in
`attn4/emulator/isa`; a test fails when this page is stale. Branches (`bra`, `brx.idx`), `ret`, `exit` and
calls of functions in the module belong to the engine and the parser.

A modifier, type or operand that a definition does not know is an error that names the instruction, its PTX
line and its source line, when the kernel is bound, before anything runs. So is every opcode that is not here.
"""

REFUSED: Final = {
    "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d1, %d2, %r3, %p1": "weight-stationary products",
    "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %d1, %d2, [%r2], %r3, %p1": "sparse products",
    "tcgen05.shift.cta_group::1.down [%r1]": "rows shifted in tensor memory",
    "tcgen05.ld.red.sync.aligned.32x32b.x1.f32.max %r0, %r8, [%r1]": "loads that reduce",
    "tcgen05.cp.cta_group::1.4x256b [%r1], %d1": "copies of 4 rows, and those that unpack 4 or 6 bits",
    "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%r0,%r1,%r2,%r3}, {%r0,%r1,%r2,%r3}, "
    "{%r0,%r1,%r2,%r3}, {%r0,%r1,%r2,%r3}, %r4, 0": "sparse products of a warp",
    "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%r0,%r1,%r2,%r3}, {%r0,%r1,%r2,%r3}, {%r0,%r1}, "
    "{%r0,%r1,%r2,%r3}": "products of 4-bit and 1-bit integers, and block-scaled ones of sm_120",
    "wmma.load.a.sync.aligned.m16n16k16.row.f16 {%r0,%r1,%r2,%r3,%r4,%r5,%r6,%r7}, [%d1]": "the older wmma",
    "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 %r1, [%r3]": "matrices unpacked from 4 or 6 bits",
    "cvt.rs.f16x2.f32 %r1, %f1, %f2, %r3": "stochastic rounding",
    "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], "
    "[%d1, {%r1,%r2,%r3}], [%r3], {%h1}": "im2col",
    "multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%d1]": "memory of several devices",
    "st.async.mmio.release.sys.global.u32 [%d1], %r1": "st.async to global memory",
    "discard.global.L2 [%d1], 128": "discard, which leaves memory undefined",
    "mbarrier.pending_count.b64 %r1, %d1": "the count within a state of an mbarrier",
    "vadd2.s32.s32.s32 %r1, %r2, %r3, %r4": "video instructions",
    "tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%d1, {%f1,%f2}]": "textures and surfaces",
    "brkpt": "breakpoints and events",
}
"""An example of each instruction that PTX has and the emulator refuses, and what it is; each has a test."""


def page() -> str:
    """The text of docs/instructions.md."""
    load()
    lines = [INTRODUCTION]
    for chapter, rows in sorted(_chapters().items()):
        lines += [f"## {chapter}", "", "| instruction | what it does |", "|---|---|"]
        lines += [f"| {', '.join(f'`{name}`' for name in names)} | {text} |" for names, text in rows]
        lines.append("")
    lines += ["## Refused", "", "| example | what it is |", "|---|---|"]
    lines += [f"| `{example.split(' ')[0]}` | {what} |" for example, what in REFUSED.items()]
    return "\n".join([*lines, ""])


def _chapters() -> dict[str, list[tuple[list[str], str]]]:
    """Rows of each chapter: the opcodes that share a definition, and the first sentence of its docstring."""
    found: dict[str, dict[str, tuple[list[str], str]]] = {}
    for definition in _all():
        module = inspect.getmodule(definition.build)
        title = _title(module.__name__ if module else "")
        text = _summary(definition.build.__doc__ or "")
        names, _ = found.setdefault(title, {}).setdefault(definition.build.__qualname__, ([], text))
        names.append(f"{definition.opcode}.{definition.form}" if definition.form else definition.opcode)
    return {
        title: [
            (sorted(names), text) for names, text in sorted(rows.values(), key=lambda row: sorted(row[0]))
        ]
        for title, rows in found.items()
    }


def _all() -> Iterator[Definition]:
    for definitions in DEFINITIONS.values():
        yield from definitions


def _title(module: str) -> str:
    """The first sentence of a chapter's docstring, without the section of the manual."""
    text = _summary(importlib.import_module(module).__doc__ or module)
    return text.partition(" (PTX")[0].rstrip(".").partition(":")[0]


def _summary(docstring: str) -> str:
    """The first paragraph of a docstring on one line, fit for a cell of a table."""
    paragraph = inspect.cleandoc(docstring).partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
