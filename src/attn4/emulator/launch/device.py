"""What host code is told about the device that it runs on."""

from __future__ import annotations

from attn4.machine import machine

_CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}

# Numbers of enum cudaDeviceAttr.
_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_BYTES_A_BLOCK = 16, 75, 76, 97


def device_attributes(arch: str) -> dict[int, int]:
    """Answers to cudaDeviceGetAttribute, by the number of enum cudaDeviceAttr.

    Raises ValueError for an architecture that is not emulated.
    """
    chip = machine(arch)
    major, minor = _CAPABILITY[chip.name]
    return {
        _MULTIPROCESSORS: chip.sms,
        _MAJOR: major,
        _MINOR: minor,
        _SHARED_BYTES_A_BLOCK: chip.shared_memory,
    }
