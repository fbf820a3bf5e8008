"""Compiled code kept on disk, in files that only their owner's processes load."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Where compiled code is kept: ``attn4/emulator`` under the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "attn4" / "emulator"


def kept(name: str) -> bytes | None:
    """What was kept under a name; None if there is nothing, or another user wrote it."""
    path = cache_folder() / name
    with contextlib.suppress(OSError):
        if path.stat().st_uid == os.getuid():
            return path.read_bytes()
    return None


def keep(name: str, data: bytes) -> None:
    """Keep data under a name, whole or not at all; a folder that cannot be written keeps nothing."""
    path = cache_folder() / name
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(written).replace(path)
