"""Instructions of sm_90 and sm_100 by what they are there for in attention.

Every instruction takes one issue slot of a warp, whatever it does; a packed one (FFMA2, FADD2, FMUL2) does
two columns of a row in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from attn4.compiled.listing import Instruction

CLASSES: tuple[tuple[str, str], ...] = (
    ("MUFU.EX2", r"MUFU\.EX2"),
    ("MUFU, other", r"MUFU"),
    ("FFMA2", r"FFMA2"),
    ("FADD2, FMUL2", r"FADD2|FMUL2"),
    ("FFMA, FADD, FMUL", r"FFMA|FADD|FMUL"),
    ("FMNMX3", r"FMNMX3"),
    ("FMNMX", r"FMNMX"),
    ("F2FP", r"F2FP|F2F"),
    ("LDTM", r"LDTM"),
    ("STTM", r"STTM"),
    ("tensor core", r"UTC\w*MMA|HGMMA|WARPGROUP|UTCBAR|UTCATOMSWS|UVIRTCOUNT|UTCCP"),
    ("bulk copies", r"UTMA\w+|UBLKCP|UBLKRED"),
    ("LEA", r"U?LEA"),
    (
        "integer",
        r"U?IADD3?|VIADD|VIADDMNMX|U?IMAD|U?SHF|U?LOP3|U?IABS|VIMNMX3?|U?IMNMX|U?PRMT|U?BREV|U?FLO|U?SGXT|U?BMSK",
    ),
    ("SEL, FSEL", r"F?SEL|USEL"),
    ("ISETP, FSETP", r"U?ISETP|FSETP|U?PLOP3|R2P|P2R"),
    ("moves", r"U?MOV|R2UR|S2U?R|CS2R|HFMA2|LDC|LDCU|UR2UP|R2B|B2R|ULDC|I2F|F2I|I2FP"),
    ("LDL, STL", r"LDL|STL"),
    ("LDS, STS", r"LDSM?|STSM?|ATOMS"),
    ("LDG, STG", r"LDG|STG|ATOMG?|REDG?|LD|ST"),
    ("SYNCS (mbarrier)", r"SYNCS"),
    ("warps", r"BAR|VOTEU?|ELECT|WARPSYNC|SHFL|REDUX|USETMAXREG|NANOSLEEP|DEPBAR|FENCE|MEMBAR|CCTL|ERRBAR"),
    ("branches", r"BRA|BRX|BSSY|BSYNC|EXIT|CALL|RET|BREAK|JMP|BPT|YIELD|WARPSYNC"),
    ("NOP", r"NOP"),
)
"""Class -> pattern of the opcodes in it; the first that matches counts, a pattern without a dot up to one."""

OTHER = "other"

_PATTERNS = tuple((name, re.compile(rf"(?:{pattern})(?:\.|$)")) for name, pattern in CLASSES)


def class_of(opcode: str) -> str:
    """The class of an opcode, its modifiers included; ``OTHER`` if the table does not name it."""
    return next((name for name, pattern in _PATTERNS if pattern.match(opcode)), OTHER)


def count(code: Iterable[Instruction]) -> dict[str, int]:
    """Instructions by class, in the table's order; classes without any are left out."""
    found = Counter(class_of(instruction.opcode) for instruction in code)
    return {name: found[name] for name in (*(name for name, _ in CLASSES), OTHER) if found[name]}
