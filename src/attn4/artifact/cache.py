"""Folders of artefacts: written whole or not at all, each built once, damaged ones built again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from attn4.artifact.artifact import DESCRIPTION, Artifact, DamagedArtifactError, read_artifact
from attn4.artifact.errors import warn_once
from attn4.artifact.key import FORMAT, Toolchain

_LOCKS = ".locks"


class ArtifactFolder:
    """A folder that holds one folder an artefact, named after its key. A cache and a bundle are both one."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str) -> Artifact | None:
        """The artefact of that key; None if there is none, or (with a warning) a damaged one."""
        try:
            return read_artifact(self.root / key)
        except OSError:
            return None
        except DamagedArtifactError as error:
            warn_once(f"A damaged kernel is passed over. {error}")
            return None

    def find(self, plan_key: str, tools: Toolchain | None) -> Artifact | None:
        """An artefact of that plan, whatever compiled it: the one of ``tools`` if there, else the newest."""
        exact = self.get(f"{plan_key}-{tools.digest}") if tools else None
        if exact is not None:
            return exact
        found = (self.get(folder.name) for folder in self.root.glob(f"{plan_key}-*"))
        return max((artifact for artifact in found if artifact), key=_age, default=None)

    def get_or_build(self, key: str, build: Callable[[Path], None]) -> tuple[Artifact, bool]:
        """The artefact of that key, and whether ``build`` made it now by writing into an empty folder.

        Of several threads and processes that ask for one key at once, one builds and the others wait.
        Raises OSError if the folder cannot be written, and whatever ``build`` raises.
        """
        found = self.get(key)
        if found is not None:
            return found, False
        with self._lock(key) as locked:
            found = self.get(key)
            if found is not None:
                return found, False
            if locked:
                self._remove_leftovers(key)
            return self._build(key, build), True

    def _build(self, key: str, build: Callable[[Path], None]) -> Artifact:
        staging = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=self.root))
        try:
            build(staging)
            read_artifact(staging, key)
            staging.chmod(0o755)
            target = self.root / key
            with contextlib.suppress(FileNotFoundError):  # a damaged entry moves out of the way
                target.rename(staging.with_name(f"{staging.name}.old"))
            with contextlib.suppress(OSError):  # without locks another process may have been first
                staging.rename(target)
            return read_artifact(target)
        finally:
            for remains in (staging, staging.with_name(f"{staging.name}.old")):
                shutil.rmtree(remains, ignore_errors=True)

    def _remove_leftovers(self, key: str) -> None:
        """Remove what a process that was killed left behind. Only for the holder of the key's lock."""
        for folder in self.root.glob(f".{key}.*"):
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[bool]:
        """Hold the lock of ``key``; yields False where the file system has no locks."""
        locks = self.root / _LOCKS
        locks.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(locks / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                locked = True
            except OSError:
                locked = False
            yield locked
        finally:
            os.close(descriptor)


def usage(root: Path) -> tuple[int, int]:
    """How many artefacts there are below ``root``, and their bytes, while others build and remove some."""
    count = size = 0
    for folder, names, files in os.walk(root):  # which passes over folders that are gone
        names[:] = [name for name in names if not name.startswith(".")]
        count += DESCRIPTION in files
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                size += (Path(folder) / name).stat().st_size
    return count, size


def user_cache_root() -> Path:
    """The user's cache folder of attn4, existing or not. Where results are kept changes none of them."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "attn4"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "attn4"
    return Path.home() / ".cache" / "attn4"


def user_cache() -> ArtifactFolder | None:
    """The user's cache, private to the user; None with a warning if it cannot be used."""
    try:
        root = user_cache_root()
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.stat()
        if status.st_uid != os.getuid():
            warn_once(
                f"The cache folder {root} belongs to another user (uid {status.st_uid}), so it is not used: "
                "kernels are compiled anew in each process. Let XDG_CACHE_HOME name a folder of yours."
            )
            return None
        if stat.S_IMODE(status.st_mode) & 0o077:
            root.chmod(0o700)
        folder = root / str(FORMAT)
        folder.mkdir(exist_ok=True)
    except (OSError, RuntimeError) as error:
        warn_unwritable(error)
        return None
    return ArtifactFolder(folder)


def warn_unwritable(error: Exception) -> None:
    """Tell, once, that nothing can be kept."""
    warn_once(
        f"attn4's cache folder cannot be written ({error}): kernels are compiled anew in each process. "
        "Let XDG_CACHE_HOME name a folder that can be."
    )


def _age(artifact: Artifact) -> tuple[tuple[int, ...], str]:
    """Order of preference among toolchains: the version of CuTe DSL, then the date."""
    version = tuple(int(part) for part in artifact.description.dsl_version.split(".") if part.isdigit())
    return version, artifact.description.created
