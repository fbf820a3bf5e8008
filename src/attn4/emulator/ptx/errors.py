"""What can be wrong with PTX text."""

from __future__ import annotations


class PtxError(ValueError):
    """PTX that breaks the grammar or names what it never declared; ``line`` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"line {line}: {message}")
        self.message = message
        self.line = line


class UnsupportedError(PtxError):
    """PTX that may well be right, but uses what the emulator does not have."""
