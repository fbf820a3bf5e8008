"""What can go wrong between host code and the emulator."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """Host code asked for what cannot be emulated, or what no device would do; the text says what."""


class ShimError(RuntimeError):
    """What stands in for the CUDA runtime cannot be built or loaded here; the text says what is missing."""
