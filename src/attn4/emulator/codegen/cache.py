"""Compiled code kept on disk, in files that only their owner's processes load.

Each begins with the digest of the rest: damaged code is not executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

_DIGEST = 32


def cache_folder() -> Path:
    """Where compiled code is kept: ``attn4/emulator`` under the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "attn4" / "emulator"


def kept(name: str) -> bytes | None:
    """What was kept under a name; None if there is nothing, it is damaged, or another user wrote it."""
    path = cache_folder() / name
    with contextlib.suppress(OSError):
        if path.stat().st_uid == os.getuid():
            data = path.read_bytes()
            if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]:
                return data[_DIGEST:]
    return None


def keep(name: str, data: bytes) -> None:
    """Keep data under a name, whole or not at all; a folder that cannot be written keeps nothing."""
    path = cache_folder() / name
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        Path(written).replace(path)
