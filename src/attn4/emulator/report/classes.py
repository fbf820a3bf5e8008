"""Which class an instruction counts in, and how much: the one table that reports are made from.

Instructions count once a warp. Bytes and operations count for all 32 lanes, whether they were active or not;
what only the running program knows (the box of a tensor copy, the shape of a tcgen05 product) is not here but
in `Tally`. A guarded instruction counts wherever it is reached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from attn4.emulator.isa.registry import FLOATING, WIDTHS
from attn4.emulator.ptx.module import Instruction, Vector

Amounts = Mapping[str, float]

WARP: Final = 32
_HALVES: Final = frozenset({"f16", "bf16", "f16x2", "bf16x2"})
_GROUP_ROWS: Final = 16  # rows of a 64-row product that one warp of its warpgroup holds

CLASSES: Final[dict[str, str]] = {
    "instructions": "instructions of warps",
    "mufu.ex2": "2^x on the multi-function unit",
    "mufu.lg2": "log2",
    "mufu.rcp": "reciprocals, of divisions too",
    "mufu.rsqrt": "reciprocal square roots",
    "mufu.sqrt": "square roots",
    "mufu.sin": "sines and cosines",
    "mufu.tanh": "hyperbolic tangents",
    "fma": "float32 multiply-adds",
    "fma.x2": "packed pairs of them",
    "fadd": "float32 additions",
    "fadd.x2": "packed pairs of them",
    "fmul": "float32 multiplications",
    "fmul.x2": "packed pairs of them",
    "half": "arithmetic on 16-bit floating point",
    "double": "arithmetic on float64",
    "minmax": "floating-point minima and maxima",
    "conversions": "cvt from or to floating point",
    "integer": "integer arithmetic and logic",
    "selects": "comparisons and selections",
    "moves": "mov, cvta, integer cvt",
    "shuffles": "shfl, prmt between lanes not among them",
    "votes": "vote, match, redux, elect",
    "shared load bytes": "ld, ldmatrix",
    "shared store bytes": "st, stmatrix",
    "global load bytes": "ld",
    "global store bytes": "st",
    "local bytes": "spills and arrays",
    "generic bytes": "accesses whose space the instruction does not say",
    "tensor load bytes": "tcgen05.ld",
    "tensor store bytes": "tcgen05.st",
    "tensor copy bytes": "tcgen05.cp",
    "async copy bytes": "cp.async",
    "bulk load bytes": "bulk copies into shared memory",
    "bulk store bytes": "bulk copies out of it",
    "bulk reduce bytes": "bulk reductions",
    "products": "matrix instructions",
    "flop": "their operations, a multiply-add being two",
    "operand bytes": "what those of tcgen05 read in shared memory",
    "barrier waits": "mbarrier waits that ended",
    "barrier arrivals": "mbarrier arrivals",
    "named barriers": "bar, barrier",
    "group waits": "waits for copies or products by their order: wait_group, tcgen05.wait",
    "commits": "what closes a group, or lets a barrier follow one",
    "fences": "fence, membar, those of wgmma and tcgen05",
    "atomics": "atom, red",
    "branches": "bra, exit and the like",
    "other": "the rest",
}
"""Every class, in the order of reports, and what it counts."""


def amounts(i: Instruction) -> Amounts:
    """What one execution by a warp adds to which class."""
    rule = _RULES.get(i.opcode)
    return {"instructions": 1, **(rule(i) if rule else {"other": 1})}


def _kind(i: Instruction) -> str:
    return next((m for m in reversed(i.modifiers) if m in WIDTHS), "")


def _floating(name: str) -> Callable[[Instruction], Amounts]:
    """``name`` for float32, and the classes of other types."""

    def rule(i: Instruction) -> Amounts:
        kind = _kind(i)
        if kind == "f32x2" or "f32x2" in i.modifiers:
            return {f"{name}.x2": 1}
        if kind in _HALVES:
            return {"half": 1}
        if kind == "f64":
            return {"double": 1}
        return {name: 1} if kind == "f32" else {"integer": 1}

    return rule


def _special(name: str) -> Callable[[Instruction], Amounts]:
    return lambda i: {"double": 1} if _kind(i) == "f64" else {name: 1}


def _division(i: Instruction) -> Amounts:
    kind = _kind(i)
    if kind == "f64":
        return {"double": 1}
    return {"mufu.rcp": 1, "fmul": 1} if kind == "f32" else {"integer": 1}


def _extreme(i: Instruction) -> Amounts:
    return {"minmax": 1} if _kind(i) in FLOATING else {"integer": 1}


def _sign(i: Instruction) -> Amounts:
    return {"fadd": 1} if _kind(i) == "f32" else {"half": 1} if _kind(i) in _HALVES else {"integer": 1}


def _conversion(i: Instruction) -> Amounts:
    real = any(re.match(r"(b?f|tf|e\dm|ue)\d", m) for m in i.modifiers)
    return {"conversions": 1} if real else {"moves": 1}


def _one(name: str) -> Callable[[Instruction], Amounts]:
    return lambda _: {name: 1}


def _space(i: Instruction) -> str:
    for modifier in i.modifiers:
        name = modifier.partition("::")[0]
        if name in ("shared", "global", "local", "param", "const"):
            return name
    return ""


def _access(direction: str) -> Callable[[Instruction], Amounts]:
    def rule(i: Instruction) -> Amounts:
        count = next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)
        nbytes = WIDTHS.get(_kind(i), 32) // 8 * count * WARP
        space = _space(i)
        if space in ("param", "const"):
            return {"moves": 1}
        if space == "local":
            return {"local bytes": nbytes}
        return {f"{space} {direction} bytes" if space else "generic bytes": nbytes}

    return rule


def _matrix_access(direction: str) -> Callable[[Instruction], Amounts]:
    """PTX ldmatrix, stmatrix: matrices of 8 rows of 16 bytes."""

    def rule(i: Instruction) -> Amounts:
        count = next((int(m[1:]) for m in i.modifiers if m in ("x1", "x2", "x4")), 1)
        return {f"shared {direction} bytes": 128 * count}

    return rule


def _mbarrier(i: Instruction) -> Amounts:
    kind = i.modifiers[0]
    if kind in ("try_wait", "test_wait"):
        return {"barrier waits": 1}
    return {"barrier arrivals": 1} if kind.startswith("arrive") else {"other": 1}


def _grouping(i: Instruction) -> Amounts:
    """What orders asynchronous work: PTX's .commit_group, .wait_group, .fence and their like."""
    for modifier in i.modifiers:
        if modifier.startswith("wait"):
            return {"group waits": 1}
        if modifier.startswith("commit"):
            return {"commits": 1}
        if modifier.startswith("fence"):
            return {"fences": 1}
    return {"other": 1}


def _copy(i: Instruction) -> Amounts:
    """cp: the bytes of bulk copies are counted as they are issued."""
    if i.modifiers[0] == "async" and any(m in ("ca", "cg") for m in i.modifiers):
        size = i.operands[2]
        return {"async copy bytes": getattr(size, "value", 16) * WARP}
    return _grouping(i)


def _warpgroup_product(i: Instruction) -> Amounts:
    """A quarter of a wgmma for each of the four warps that issue it together."""
    shape = next((m for m in i.modifiers if m.startswith("m64n")), "")
    match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    if match is None:
        return _grouping(i)
    return {"products": 0.25, "flop": 2 * _GROUP_ROWS * int(match[1]) * int(match[2])}


def _warp_product(i: Instruction) -> Amounts:
    shapes = (re.fullmatch(r"m(\d+)n(\d+)k(\d+)", m) for m in i.modifiers)
    shape = next(filter(None, shapes), None)
    if shape is None:
        return {"other": 1}
    return {"products": 1, "flop": 2 * int(shape[1]) * int(shape[2]) * int(shape[3])}


def _tensor(i: Instruction) -> Amounts:
    """tcgen05: what ld, st and cp move; products are counted as they are issued."""
    kind = i.modifiers[0]
    if kind in ("ld", "st"):
        fragment = next((o for o in i.operands if isinstance(o, Vector)), None)
        registers = len(fragment.items) if fragment is not None else 1
        return {f"tensor {'load' if kind == 'ld' else 'store'} bytes": 4 * WARP * registers}
    if kind == "cp":
        shape = next(filter(None, (re.fullmatch(r"(\d+)x(\d+)b", m) for m in i.modifiers)), None)
        return {"tensor copy bytes": int(shape[1]) * int(shape[2]) // 8} if shape else {"other": 1}
    return _grouping(i)


_INTEGER = (
    *(
        "addc",
        "subc",
        "madc",
        "mul24",
        "mad24",
        "sad",
        "rem",
        "and",
        "or",
        "xor",
        "not",
        "cnot",
        "shl",
        "shr",
    ),
    *("shf", "lop3", "prmt", "bfe", "bfi", "bmsk", "popc", "clz", "bfind", "brev", "fns", "dp4a", "dp2a"),
)
_RULES: Final[dict[str, Callable[[Instruction], Amounts]]] = {
    "add": _floating("fadd"),
    "sub": _floating("fadd"),
    "mul": _floating("fmul"),
    "fma": _floating("fma"),
    "mad": _floating("fma"),
    "div": _division,
    "ex2": _special("mufu.ex2"),
    "lg2": _special("mufu.lg2"),
    "rcp": _special("mufu.rcp"),
    "rsqrt": _special("mufu.rsqrt"),
    "sqrt": _special("mufu.sqrt"),
    "sin": _special("mufu.sin"),
    "cos": _special("mufu.sin"),
    "tanh": _special("mufu.tanh"),
    "min": _extreme,
    "max": _extreme,
    "abs": _sign,
    "neg": _sign,
    "copysign": _sign,
    "cvt": _conversion,
    **dict.fromkeys(_INTEGER, _one("integer")),
    **dict.fromkeys(("setp", "set", "selp", "slct", "testp"), _one("selects")),
    **dict.fromkeys(("mov", "cvta", "mapa", "getctarank", "isspacep"), _one("moves")),
    "shfl": _one("shuffles"),
    **dict.fromkeys(("vote", "match", "redux", "elect", "activemask"), _one("votes")),
    "ld": _access("load"),
    "ldu": _access("load"),
    "st": _access("store"),
    "ldmatrix": _matrix_access("load"),
    "stmatrix": _matrix_access("store"),
    "mbarrier": _mbarrier,
    "cp": _copy,
    "wgmma": _warpgroup_product,
    "mma": _warp_product,
    "tcgen05": _tensor,
    **dict.fromkeys(("bar", "barrier"), _one("named barriers")),
    **dict.fromkeys(("fence", "membar"), _one("fences")),
    **dict.fromkeys(("atom", "red"), _one("atomics")),
    **dict.fromkeys(("bra", "brx", "ret", "exit", "call", "trap"), _one("branches")),
}
