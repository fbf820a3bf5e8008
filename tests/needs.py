"""Marks of tests that need what not every machine has."""

from __future__ import annotations

import shutil

import pytest

from attn4.artifact.key import toolchain

COMPILES = [
    pytest.mark.skipif(toolchain() is None, reason="CuTe DSL is not installed"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]
"""Of kernels that are compiled here."""
