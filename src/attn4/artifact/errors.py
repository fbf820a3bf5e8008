"""What can go wrong with artefacts, and the one warning."""

from __future__ import annotations

import warnings


class KernelUnavailableError(RuntimeError):
    """No artefact of a plan can be found, compiled or loaded here; the text says what is missing."""


class CompileError(RuntimeError):
    """A kernel did not compile, export or link."""


class ArtifactWarning(UserWarning):
    """Something about caches or bundles needs attention, but results are not affected."""


NO_COMPILER = (
    "CuTe DSL is not installed, so no kernel can be compiled here. Install nvidia-cutlass-dsl[cu13]."
)

_given: set[str] = set()


def warn_once(message: str) -> None:
    """Issue ``message`` as an ``ArtifactWarning``, the first time only in this process."""
    if message not in _given:
        _given.add(message)
        warnings.warn(message, ArtifactWarning, stacklevel=3)
