"""What was recorded on a chip, and the same programs on the emulator."""

from __future__ import annotations

import io
import json
import lzma
import struct
from functools import cache
from pathlib import Path

import numpy as np

from attn4.emulator.grid import Shape
from attn4.emulator.machine import Machine
from attn4.emulator.ptx.parser import parse
from attn4.emulator.units.fused import as_on_chip
from recorded.copies import Copy
from recorded.program import Program

DATA = Path(__file__).parent / "data"


@cache
def recording(name: str) -> dict[str, np.ndarray]:
    """All arrays of a recording, of a file ``data/<name>.npz.xz``. Raises FileNotFoundError."""
    with np.load(io.BytesIO(lzma.decompress((DATA / f"{name}.npz.xz").read_bytes()))) as arrays:
        return dict(arrays)


@cache
def about(name: str) -> dict:
    """Where a recording comes from: ``data/<name>.json``."""
    return json.loads((DATA / f"{name}.json").read_text())


def emulate(program: Program, tensor_map: np.ndarray | None = None) -> np.ndarray:
    """The output of a program on the emulator, the part of it that is recorded.

    ``tensor_map``: the 128 bytes as the driver made them, of which the address is replaced.
    """
    inputs = [array.copy() for array in program.inputs]
    in_place = isinstance(program, Copy) and program.in_place
    if tensor_map is not None:
        inputs[1] = aligned(np.zeros(32, np.uint32), 128)
        inputs[0] = aligned(inputs[0], 128)
        inputs[1].view(np.uint8)[:] = tensor_map
        inputs[1].view(np.uint64)[0] = inputs[0].ctypes.data
    output = np.zeros(program.shape, program.dtype)
    arrays = [*inputs, output]
    module = parse(program.text)
    machine = Machine()
    for n, array in enumerate(arrays):
        machine.memory.register(array.reshape(-1), name=f"p{n}")
    parameters = struct.pack(f"<{len(arrays)}Q", *(array.ctypes.data for array in arrays))
    grid, block = program.threads
    with as_on_chip():
        machine.launch(module.kernels[0], Shape((grid, 1, 1), (block, 1, 1)), parameters, module.globals)
    return program.recorded(inputs[0].reshape(program.shape) if in_place else output)


def aligned(array: np.ndarray, alignment: int) -> np.ndarray:
    """A copy whose address is a multiple of ``alignment``."""
    room = np.empty(array.nbytes + alignment, np.uint8)
    start = -room.ctypes.data % alignment
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy
