"""Programs of a few PTX instructions whose results were recorded on a chip.

A `Program` holds its PTX, its inputs and the shape of its output. Inputs come from a hash, not from a random
number generator of a library, so that the chip and the test see the same bits whatever their versions.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

HEADER = ".version 8.4\n.target sm_90a\n.address_size 64\n"


@dataclass(frozen=True)
class Program:
    """One kernel ``k`` and one launch of it.

    Attributes
    ----------
    name
        Key of the recorded output.
    text
        The PTX module. Parameters: the address of each input, then that of the output.
    inputs
        Contiguous arrays.
    dtype, shape
        Of the output, which is zero before the launch; its first dimension is that of `labels` where lines
        are compared one by one.
    threads
        CTAs and threads a CTA.
    labels
        What each row of the output is the result of.
    keep
        How many columns of the output are recorded; 0 for all.
    """

    name: str
    text: str
    inputs: tuple[npt.NDArray[np.generic], ...]
    dtype: str
    shape: tuple[int, ...]
    threads: tuple[int, int]
    labels: tuple[str, ...] = ()
    keep: int = 0

    @property
    def digest(self) -> int:
        """Of everything that decides the result."""
        crc = zlib.crc32(self.text.encode())
        for array in self.inputs:
            crc = zlib.crc32(array.tobytes(), crc)
        return crc

    def recorded(self, output: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """The part of an output that is recorded."""
        return output[..., : self.keep] if self.keep else output


def hashed(count: int, seed: int) -> Words:
    """64-bit words that look random: splitmix64 of a counter."""
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(seed * 0x51_7CC1_B727_220A_95 & (1 << 64) - 1)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(count: int, seed: int, low: float, high: float) -> npt.NDArray[np.float64]:
    """Numbers spread evenly over [low, high)."""
    return low + (hashed(count, seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53 * (high - low)


_LOADS = {"b16": 2, "b32": 4, "b64": 8}


def elementwise(
    name: str,
    sources: str,
    result: str,
    lines: Iterable[str],
    inputs: Sequence[npt.NDArray[np.generic]],
    **more: int,
) -> Program:
    """Lines, each run by every thread on its own elements of the inputs.

    Registers: %a, %b, %c, %d hold the sources, of the types listed in `sources`; %x is the result, stored for
    each line; %p, %q are predicates, %s, %u 32-bit, %h, %g 16-bit, %w 64-bit scratch, %lane the lane.
    """
    lines = tuple(lines)
    types = sources.split()
    count = len(inputs[0])
    registers = "abcd"[: len(types)]
    parameters = ", ".join(f".param .u64 p{n}" for n in range(len(types) + 1))
    body = [
        ".reg .pred %p, %q;  .reg .b32 %s, %u, %lane, %t, %n;  .reg .b16 %h, %g;  .reg .b64 %w, %v, %o;",
        f".reg .{result} %x;",
        *(f".reg .{kind} %{register};" for kind, register in zip(types, registers, strict=True)),
        "mov.u32 %lane, %laneid;  mov.u32 %t, %ctaid.x;  mov.u32 %n, %ntid.x;  mad.lo.u32 %t, %t, %n, 0;",
        "mov.u32 %n, %tid.x;  add.u32 %t, %t, %n;",
    ]
    for n, (kind, register) in enumerate(zip(types, registers, strict=True)):
        body.append(f"ld.param.u64 %v, [p{n}];  mad.wide.u32 %v, %t, {_LOADS[kind]}, %v;")
        body.append(f"ld.global.{kind} %{register}, [%v];")
    body.append(f"ld.param.u64 %o, [p{len(types)}];  mad.wide.u32 %o, %t, {_LOADS[result]}, %o;")
    for n, line in enumerate(lines):
        body.append(f"{{ {line} }}\nst.global.{result} [%o+{n * count * _LOADS[result]}], %x;")
    text = f"{HEADER}.visible .entry k({parameters})\n{{\n" + "\n".join(body) + "\nret;\n}\n"
    arrays = tuple(
        np.ascontiguousarray(array).view(f"u{_LOADS[kind]}")
        for array, kind in zip(inputs, types, strict=True)
    )
    assert all(array.shape == (count,) for array in arrays), name
    block = min(count, 128)
    assert count % block == 0, name
    return Program(
        name, text, arrays, f"u{_LOADS[result]}", (len(lines), count), (count // block, block), lines, **more
    )
