"""Keys: what must be equal for two artefacts to be the same.

A key has two parts, ``<plan key>-<toolchain>``. The plan key covers what is compiled: the format, the
plan, the kernel sources and the host architecture. The toolchain covers what compiles it. A machine
without CuTe DSL knows the first part only, and finds artefacts by it; a machine that has CuTe DSL asks its
cache for both.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attn4.artifact.codec import decode, encode
from attn4.artifact.runtime import toolkit_major
from attn4.plan.plan import Plan

FORMAT = 1
"""Version of the artefact folder. Raise it when a reader of the previous one could go wrong."""

PLAN_KEY_DIGITS = 32
TOOLCHAIN_DIGITS = 12

KERNEL_SOURCES = ("kernels", "plan/plan.py", "plan/workspace.py")
"""What turns a plan into a kernel. How a plan is chosen shows in its fields, and is no part of this."""

_DSL_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)


DSL_LINE = "4.8."
"""The versions of nvidia-cutlass-dsl that the kernels are written for."""

_BAD_DSL = {
    "4.6.0": "a backward pass compiled with it never returned on a B300",
    "4.6.1": "a backward pass compiled with it never returned on a B300",
}
"""What is known of versions outside of that line that a machine may have (flash-attention, issue 2797)."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What compiles kernels on this machine: CuTe DSL's packages and the CUDA toolkit it embeds."""

    packages: tuple[tuple[str, str], ...]
    toolkit: int | None

    @property
    def dsl_version(self) -> str:
        """Version of nvidia-cutlass-dsl."""
        return dict(self.packages)["nvidia-cutlass-dsl"]

    @property
    def unfit(self) -> str | None:
        """Why kernels must not be compiled with this version, and what to install; None if they may."""
        version = self.dsl_version
        if version.startswith(DSL_LINE):
            return None
        known = f": {_BAD_DSL[version]}" if version in _BAD_DSL else ""
        return (
            f"CuTe DSL {version} is installed{known}. The kernels are written for {DSL_LINE}x: install "
            f"'nvidia-cutlass-dsl[cu13]=={DSL_LINE}*', or use a bundle that was built with it."
        )

    @property
    def digest(self) -> str:
        """The second part of an artefact's key."""
        return _sha256(json.dumps([self.packages, self.toolkit]))[:TOOLCHAIN_DIGITS]


@cache
def toolchain() -> Toolchain | None:
    """The toolchain of this machine, found without importing it; None if there is no CuTe DSL."""
    try:
        if importlib.util.find_spec("cutlass") is None:
            return None
    except (ImportError, ValueError):
        return None
    packages = []
    for name in _DSL_PACKAGES:
        try:
            packages.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    if not packages or packages[0][0] != _DSL_PACKAGES[0]:
        return None
    return Toolchain(tuple(packages), toolkit_major())


def host() -> str:
    """Operating system and processor that an artefact's shared object is for, such as linux-x86_64."""
    return f"{platform.system().lower()}-{platform.machine().lower()}"


@cache
def source_digest() -> str:
    """sha256 of the sources that turn a plan into a kernel, as they were when first asked for."""
    return _source_digest()


def sources_changed() -> bool:
    """Whether the sources were edited since: what is compiled now would go by a key that is not its own."""
    return _source_digest() != source_digest()


def _source_digest() -> str:
    """Names and bytes of the sources, in order of name."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for entry in KERNEL_SOURCES:
        path = package / entry
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def plan_key(plan: Plan) -> str:
    """Digest of everything that fixes a kernel but its compiler; equal on every machine of one kind."""
    parts = {
        "format": FORMAT,
        "plan": plan_to_json(plan),
        "arch": plan.arch,
        "sources": source_digest(),
        "host": host(),
    }
    return _sha256(canonical_json(parts))[:PLAN_KEY_DIGITS]


def artifact_key(plan: Plan, tools: Toolchain) -> str:
    """The name of an artefact's folder: ``<plan key>-<toolchain>``."""
    return f"{plan_key(plan)}-{tools.digest}"


def canonical_json(value: Any) -> str:
    """The one spelling of ``value`` that is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Every field of ``plan`` as JSON values; equal plans give equal text (0 in a float field is 0.0)."""
    encoded: dict[str, Any] = encode(Plan, plan)
    return encoded


def plan_from_json(value: Any) -> Plan:
    """Inverse of ``plan_to_json``. Raises ValueError that names the field which does not fit."""
    return decode(Plan, value, "plan")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
