"""The chip that an emulated device is, and what host code is told about it."""

from __future__ import annotations

from dataclasses import dataclass

from attn4.machine import machine

_CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
_FAMILIES = {(9, 0): {(9, 0)}, (10, 0): {(10, 0), (10, 3)}, (10, 3): {(10, 0), (10, 3)}}

# Numbers of enum cudaDeviceAttr, which are those of CUdevice_attribute.
_MAX_THREADS_A_BLOCK, _SHARED_BYTES, _WARP_SIZE, _MULTIPROCESSORS, _L2_BYTES = 1, 8, 10, 16, 38
_THREADS_A_MULTIPROCESSOR, _MAJOR, _MINOR = 39, 75, 76
SHARED_BYTES_A_MULTIPROCESSOR, _SHARED_BYTES_A_BLOCK, _BLOCKS_A_MULTIPROCESSOR = 81, 97, 106

_SYSTEM_SHARED_BYTES = 1024
_MEMORY_BYTES = 2**36


@dataclass(frozen=True, slots=True)
class Chip:
    """An emulated GPU. ``sms`` are those that host code is told of."""

    arch: str
    name: str
    capability: tuple[int, int]
    sms: int
    shared_memory: int
    l2_bytes: int
    memory_bytes: int = _MEMORY_BYTES

    @classmethod
    def of(cls, arch: str, sms: int | None = None) -> Chip:
        """The chip of an architecture. Raises ValueError for one that is not emulated."""
        found = _CAPABILITY.get(arch)
        if found is None:
            raise ValueError(
                f"arch {arch!r} is not emulated; {', '.join(_CAPABILITY)} are. Compile for one of those."
            )
        chip = machine(arch)
        if sms is not None and sms < 1:
            raise ValueError(f"sms={sms}: a device has at least one multiprocessor")
        name = f"emulated {chip.chip}"
        return cls(arch, name, found, sms or chip.sms, chip.shared_memory, chip.l2_bytes)

    def runs(self, target: str) -> bool:
        """Whether code for ``target`` runs here: sm_90a only on that, sm_100f in its family, sm_90 on all
        later ones too.
        """
        digits = "".join(c for c in target if c.isdigit())
        if not digits:
            return False
        capability = divmod(int(digits), 10)
        if target.endswith("a"):
            return capability == self.capability
        if target.endswith("f"):
            return capability <= self.capability and capability in _FAMILIES[self.capability]
        return capability <= self.capability

    def attributes(self) -> dict[int, int]:
        """Answers to cudaDeviceGetAttribute, by the number of enum cudaDeviceAttr."""
        major, minor = self.capability
        return {
            _MAX_THREADS_A_BLOCK: 1024,
            _SHARED_BYTES: 48 * 1024,
            _WARP_SIZE: 32,
            _MULTIPROCESSORS: self.sms,
            _L2_BYTES: self.l2_bytes,
            _THREADS_A_MULTIPROCESSOR: 2048,
            _MAJOR: major,
            _MINOR: minor,
            SHARED_BYTES_A_MULTIPROCESSOR: self.shared_memory + _SYSTEM_SHARED_BYTES,
            _SHARED_BYTES_A_BLOCK: self.shared_memory,
            _BLOCKS_A_MULTIPROCESSOR: 32,
        }


def device_attributes(arch: str) -> dict[int, int]:
    """Answers to cudaDeviceGetAttribute of a whole chip. Raises ValueError for one that is not emulated."""
    return Chip.of(arch).attributes()
