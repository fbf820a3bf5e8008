"""PTX text to typed, frozen records."""

from __future__ import annotations

from attn4.emulator.ptx.errors import PtxError, UnsupportedError
from attn4.emulator.ptx.module import Module
from attn4.emulator.ptx.parser import parse

__all__ = ["Module", "PtxError", "UnsupportedError", "parse"]
