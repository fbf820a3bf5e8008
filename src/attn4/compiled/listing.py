"""Machine code as text and as records: what nvdisasm prints of a cubin, an instruction a line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SECTION = re.compile(r"^\.text\.(\S+):\s*$")
_LABEL = re.compile(r"^([.$][\w$.]+):")
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
_TARGET = re.compile(r"`\(([.$][\w$.]+)\)|(?:BRANCH_TARGETS |,)(\.[\w$.]+)")
_REGISTER = re.compile(r"(?<![\w.])R(\d+)\b")


class DisassemblerMissingError(RuntimeError):
    """There is no disassembler on this machine; the text says what to install."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """``guard`` is the predicate that it runs under, "" if it always does."""

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def targets(self) -> tuple[str, ...]:
        """The labels it may jump to: several of one that goes by a table."""
        return tuple(one or other for one, other in _TARGET.findall(self.operands))

    @property
    def registers(self) -> tuple[int, ...]:
        """The numbers of the vector registers that it names."""
        return tuple(map(int, _REGISTER.findall(self.operands)))


@dataclass(frozen=True, slots=True)
class Listing:
    """One kernel. ``labels`` maps a label to the number of the instruction it stands before."""

    kernel: str
    code: tuple[Instruction, ...]
    labels: Mapping[str, int]


def parse(text: str) -> tuple[Listing, ...]:
    """The kernels in what ``nvdisasm -c`` prints. Raises ValueError if there is none."""
    found: list[tuple[str, list[Instruction], dict[str, int]]] = []
    for line in text.splitlines():
        section = _SECTION.match(line)
        if section:
            found.append((section[1], [], {}))
            continue
        if not found:
            continue
        _, code, labels = found[-1]
        label, instruction = _LABEL.match(line), _LINE.match(line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            address, guard, opcode, operands = instruction.groups()
            code.append(Instruction(int(address, 16), guard or "", opcode, operands))
    listings = tuple(Listing(name, tuple(code), labels) for name, code, labels in found if code)
    if not listings:
        raise ValueError("The disassembly holds no kernel: it was not printed by `nvdisasm -c`.")
    return listings


def disassemble(cubin: bytes) -> str:
    """The machine code of ``cubin`` as text. Raises DisassemblerMissingError, RuntimeError if it fails."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(disassembler()), "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def disassembler() -> Path:
    """nvdisasm: of the Python packages, else the one that PATH leads to. Raises DisassemblerMissingError."""
    packaged = sorted(Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/bin/nvdisasm"))
    if packaged:
        return packaged[-1]
    found = shutil.which("nvdisasm")
    if found is None:
        raise DisassemblerMissingError(
            "Reading machine code needs nvdisasm, which is neither among the Python packages nor on PATH. "
            "Install nvidia-cuda-nvdisasm (pip) or the CUDA toolkit, 13 or newer."
        )
    return Path(found)
