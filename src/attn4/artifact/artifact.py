"""One artefact: a folder with the kernel's shared object, its PTX and a description of both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn4.artifact.codec import decode, encode
from attn4.artifact.elf import KernelResources
from attn4.artifact.key import FORMAT

LIBRARY = "kernel.so"
PTX = "kernel.ptx"
DESCRIPTION = "artifact.json"


class DamagedArtifactError(ValueError):
    """A folder does not hold a whole artefact; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What ``artifact.json`` says.

    ``function`` names the kernel in the shared object. ``toolkit`` is the CUDA major version that CuTe DSL
    used. ``created`` is UTC, ISO 8601. ``sha256`` has the digests of the shared object and the PTX,
    ``seconds`` the time that each step of the build took.
    """

    format: int
    key: str
    plan: dict[str, Any]
    arch: str
    host: str
    function: str
    attn4_version: str
    source_digest: str
    dsl_version: str
    toolkit: int | None
    created: str
    sha256: dict[str, str]
    kernels: tuple[KernelResources, ...]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled kernel on disk."""

    folder: Path
    description: Description

    @property
    def key(self) -> str:
        """The name of the folder: ``<plan key>-<toolchain>``."""
        return self.description.key

    @property
    def library(self) -> Path:
        """The shared object."""
        return self.folder / LIBRARY

    def ptx(self) -> str:
        """The PTX that the kernel was assembled from."""
        return (self.folder / PTX).read_text(encoding="utf-8")


def write_description(folder: Path, description: Description) -> None:
    """Write ``artifact.json`` into ``folder``, beside the files it describes."""
    text = json.dumps(encode(Description, description), indent=1) + "\n"
    (folder / DESCRIPTION).write_text(text, encoding="utf-8")


def read_artifact(folder: Path, key: str | None = None) -> Artifact:
    """Read and check the artefact in ``folder``, which is named after its key unless ``key`` says other.

    Raises FileNotFoundError if there is none, DamagedArtifactError if it is not whole.
    """
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    description = _read_description(folder / DESCRIPTION)
    expected = key or folder.name
    if description.key != expected:
        raise DamagedArtifactError(f"{folder} describes the artefact {description.key}, not {expected}.")
    for name in (LIBRARY, PTX):
        try:
            digest = file_sha256(folder / name)
        except OSError as error:
            raise DamagedArtifactError(f"{folder / name} cannot be read: {error}.") from error
        if digest != description.sha256.get(name):
            raise DamagedArtifactError(f"{folder / name} does not have the sha256 that {DESCRIPTION} gives.")
    return Artifact(folder, description)


def file_sha256(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_description(path: Path) -> Description:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
            raise DamagedArtifactError(f"{path} has format {content['format']}; this attn4 reads {FORMAT}.")
        return decode(Description, content, DESCRIPTION)
    except DamagedArtifactError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedArtifactError(f"{path} cannot be read: {error}") from error
