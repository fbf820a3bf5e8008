"""Functions of the driver that kernels call (CUDA C programming guide, "Formatted Output", "Assertion")."""

from __future__ import annotations

import re
import struct
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.faults import Trap
from attn4.emulator.isa.memory import generic, is_global, local
from attn4.emulator.isa.registry import Function, Modifiers, UnsupportedInstruction, effect
from attn4.emulator.ptx.module import Instruction
from attn4.emulator.state.local import LOCAL_BASE

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]

_LONGEST: Final = 1 << 16
_CONVERSION: Final = re.compile(
    r"%(?P<flags>[-+ #0]*(?:\d+)?(?:\.\d+)?)(?P<length>hh|h|ll|l|j|z|t|L)?(?P<kind>[diouxXcsaAeEfFgGp%])"
)
_INTEGERS: Final = "diouxXc"


@effect("call", destinations=0, types=("u64",))
def call(i: Instruction) -> Function:
    """A call of a function that is not in the module; its parameters are local variables of the caller."""
    modifiers = Modifiers(i)
    name = modifiers.one_of("vprintf", "__assertfail")
    modifiers.done()
    count = 3 if name == "vprintf" else 5
    if len(i.operands) not in (count, count - (name == "vprintf")):
        raise UnsupportedInstruction(i, f"{len(i.operands)} results and arguments")
    return _vprintf if name == "vprintf" else _assertfail


def _vprintf(warp: Warp, mask: Mask, *where: Lanes) -> None:
    """vprintf(const char* format, void* arguments) gives the number of arguments."""
    formats, buffers = (_loaded(warp, mask, addresses, 8) for addresses in where[-2:])
    counts = np.zeros(warp.lanes, np.uint32)
    for lane in np.flatnonzero(mask).tolist():
        text, counts[lane] = _formatted(warp, lane, _string(warp, int(formats[lane])), int(buffers[lane]))
        sys.stdout.write(text)
    if len(where) == 3:
        local(warp, 0).store(where[0], counts, 4, mask)


def _assertfail(warp: Warp, mask: Mask, *where: Lanes) -> None:
    """__assertfail(message, file, line, function, size of a character) ends the launch."""
    sizes = (8, 8, 4, 8)
    lane = int(mask.argmax())
    message, file, line, function = (
        int(_loaded(warp, mask, addresses, size)[lane])
        for addresses, size in zip(where[:4], sizes, strict=True)
    )
    texts = [_string(warp, address) for address in (file, function, message)]
    raise Trap(f"{texts[0]}:{line}: {texts[1]}: assertion `{texts[2]}` failed")


def _loaded(warp: Warp, mask: Mask, addresses: Lanes, nbytes: int) -> Lanes:
    return local(warp, 0).load_words(addresses, nbytes, mask)


def _string(warp: Warp, address: int) -> str:
    """The characters from a generic address up to a zero."""
    memory = generic(warp, address)
    data = bytearray()
    while len(data) < _LONGEST:
        byte = int(memory.read(address + len(data), 1)[0])
        if not byte:
            break
        data.append(byte)
    return data.decode(errors="replace")


def _formatted(warp: Warp, lane: int, text: str, buffer: int) -> tuple[str, int]:
    """The text with its arguments, which stand in ``buffer`` one after another, each at its alignment."""
    at, count = buffer, 0

    def convert(match: re.Match[str]) -> str:
        nonlocal at, count
        kind, length = match["kind"], match["length"] or ""
        if kind == "%":
            return "%"
        size = 4 if kind in _INTEGERS and length in ("", "h", "hh") else 8
        at = -(-at // size) * size
        raw = _argument(warp, lane, at, size)
        at, count = at + size, count + 1
        if kind == "s":
            return f"%{match['flags']}s" % _string(warp, int.from_bytes(raw, "little"))
        if kind == "p":
            return f"{int.from_bytes(raw, 'little'):#x}"
        if kind in _INTEGERS:
            value = int.from_bytes(raw, "little", signed=kind in "di")
            return f"%{match['flags']}{kind.replace('u', 'd')}" % (value & 0xFF if kind == "c" else value)
        return f"%{match['flags']}{kind}" % struct.unpack("<d", raw)

    return _CONVERSION.sub(convert, text), count


def _argument(warp: Warp, lane: int, address: int, size: int) -> bytes:
    if address < LOCAL_BASE or is_global(warp, address):
        return generic(warp, address).read(address, size).tobytes()
    chosen = np.zeros(warp.lanes, np.bool_)
    chosen[lane] = True
    words = local(warp, 0).load_words(np.full(warp.lanes, address, np.uint64), size, chosen)
    return words[lane : lane + 1].tobytes()
