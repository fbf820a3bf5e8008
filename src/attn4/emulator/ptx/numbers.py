"""Constants of PTX, section 4.5, as raw bits."""

from __future__ import annotations

import re
import struct

from attn4.emulator.ptx.errors import PtxError
from attn4.emulator.ptx.module import Immediate

_NUMBER = re.compile(
    r"""(?P<sign>[+-]?)\s*(?:
      0[fF](?P<single>[0-9a-fA-F]{8})
    | 0[dD](?P<double>[0-9a-fA-F]{16})
    | (?P<decimal>(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
    | 0[xX](?P<hexadecimal>[0-9a-fA-F]+)(?P<u16>U?)
    | 0[bB](?P<binary>[01]+)(?P<u2>U?)
    | 0(?P<octal>[0-7]+)(?P<u8>U?)
    | (?P<integer>0|[1-9]\d*)(?P<u10>U?)
    )""",
    re.VERBOSE | re.ASCII,
)
_BASES = {"hexadecimal": 16, "binary": 2, "octal": 8, "integer": 10}
_LONGEST = 64  # digits of the largest integer, in base 2


def immediate(text: str, line: int) -> Immediate:
    """The constant ``text``; ``PtxError`` if it is none, or needs more than 64 bits."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise PtxError(f"{text[:80]} is no number", line)
    negative = match["sign"] == "-"
    if match["single"]:
        return Immediate(int(match["single"], 16) ^ (negative << 31), "f32")
    if match["double"]:
        return Immediate(int(match["double"], 16) ^ (negative << 63), "f64")
    if match["decimal"]:
        (bits,) = struct.unpack("<Q", struct.pack("<d", float(match["decimal"])))
        return Immediate(bits ^ (negative << 63), "f64")
    return _integer(match, negative, line)


def _integer(match: re.Match[str], negative: bool, line: int) -> Immediate:
    kind = next(kind for kind in _BASES if match[kind])
    digits = match[kind].lstrip("0") or "0"
    magnitude = int(digits, _BASES[kind]) if len(digits) <= _LONGEST else 2**64
    if magnitude >= 2**64:
        raise PtxError(f"{match.group()[:80]} needs more than 64 bits", line)
    signed = magnitude < 2**63 or (negative and magnitude == 2**63)
    unsigned = match.group().endswith("U") or not signed
    return Immediate(-magnitude % 2**64 if negative else magnitude, "u64" if unsigned else "s64")


def signed(constant: Immediate) -> int:
    """The value of an integer constant, negative if its top bit is set and it was written as signed."""
    return constant.value - 2**64 if constant.type == "s64" and constant.value >> 63 else constant.value
