"""Bundles: folders of artefacts built ahead of time, for machines that have no CuTe DSL."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from attn4.artifact.artifact import Artifact
from attn4.artifact.build import KERNELS
from attn4.artifact.cache import ArtifactFolder
from attn4.artifact.errors import NO_COMPILER, CompileError, warn_once
from attn4.artifact.key import FORMAT, artifact_key, toolchain
from attn4.artifact.worker import CompilerProcess
from attn4.plan.plan import Plan

ENTRY_POINTS = "attn4.bundles"
"""Group of entry points, each the name of a package whose folder is a bundle."""

INDEX = "index.json"

_registered: list[Bundle] = []


class Bundle(ArtifactFolder):
    """A bundle in use by this process, until ``remove`` or the end of a ``with`` block."""

    def remove(self) -> None:
        """Look into this bundle no more. Kernels already loaded from it stay."""
        if self in _registered:
            _registered.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


@dataclass(frozen=True, slots=True)
class BundleReport:
    """What ``build_bundle`` did. ``failed`` pairs a plan with the reason."""

    folder: Path
    built: tuple[Artifact, ...]
    skipped: tuple[Artifact, ...]
    failed: tuple[tuple[Plan, str], ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """One plan of ``total`` is done: ``built`` or found there, or failed with ``error``."""

    done: int
    total: int
    plan: Plan
    artifact: Artifact | None
    built: bool
    error: str | None


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """The bundle in the folder ``path``. Raises ValueError if there is no such folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder, so it cannot be a bundle; `attn4 compile --out` makes one."
        )
    return Bundle(folder.resolve())


def use_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Let this process look for kernels in the bundle ``path``, before those registered earlier.

    Returns a handle: ``remove()`` it, or use it in a ``with`` statement. Raises ValueError if there is
    no such folder.
    """
    bundle = open_bundle(path)
    _registered.insert(0, bundle)
    return bundle


def bundles_in_use() -> Iterator[ArtifactFolder]:
    """Where kernels are looked for: bundles registered, latest first, then installed ones."""
    yield from list(_registered)
    yield from installed_bundles()


@cache
def installed_bundles() -> tuple[ArtifactFolder, ...]:
    """Bundles that are installed: ``attn4/bundles``, and those that other distributions announce."""
    folders = [Path(__file__).resolve().parent.parent / "bundles"]
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            spec = importlib.util.find_spec(entry.value)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            warn_once(f"The bundle {entry.name} names the package {entry.value}, which is not installed.")
            continue
        folders += map(Path, spec.submodule_search_locations)
    return tuple(ArtifactFolder(folder) for folder in folders if folder.is_dir())


def build_bundle(
    plans: Iterable[Plan],
    out: str | os.PathLike[str],
    jobs: int | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
    compiler: str = KERNELS,
) -> BundleReport:
    """Compile ``plans`` into the folder ``out``, ``jobs`` at a time, each in a process of its own.

    What is there and whole is skipped; equal plans are compiled once. ``progress`` is called in this
    thread after each plan. A plan that does not compile is reported and does not stop the others. Raises
    CompileError if there is no CuTe DSL, ValueError if ``jobs`` is not positive.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs}; it must be at least 1.")
    tools = toolchain()
    if tools is None:
        raise CompileError(NO_COMPILER)
    folder = ArtifactFolder(Path(out).resolve())
    folder.root.mkdir(parents=True, exist_ok=True)
    wanted = list({artifact_key(plan, tools): plan for plan in plans}.items())
    workers = max(1, min(jobs or len(os.sched_getaffinity(0)), len(wanted)))
    events = []
    with ExitStack() as stack:
        idle: queue.SimpleQueue[CompilerProcess] = queue.SimpleQueue()
        for _ in range(workers):
            idle.put(stack.enter_context(CompilerProcess(compiler)))
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        tasks = {pool.submit(_build_one, folder, key, plan, idle): plan for key, plan in wanted}
        stack.callback(pool.shutdown, cancel_futures=True)
        for done, task in enumerate(as_completed(tasks), 1):
            artifact, built, error = task.result()
            events.append(Progress(done, len(wanted), tasks[task], artifact, built, error))
            if progress is not None:
                progress(events[-1])
    write_index(folder)
    return BundleReport(
        folder=folder.root,
        built=tuple(event.artifact for event in events if event.artifact and event.built),
        skipped=tuple(event.artifact for event in events if event.artifact and not event.built),
        failed=tuple((event.plan, event.error) for event in events if event.error is not None),
    )


def write_index(folder: ArtifactFolder) -> None:
    """List what a bundle holds in ``index.json``, for people; kernels are found without it."""
    entries = {}
    for path in sorted(folder.root.glob("[0-9a-f]*-*")):
        artifact = folder.get(path.name)
        if artifact is not None:
            entries[artifact.key] = {
                "arch": artifact.description.arch,
                "host": artifact.description.host,
                "plan": artifact.description.plan,
                "attn4_version": artifact.description.attn4_version,
                "dsl_version": artifact.description.dsl_version,
                "bytes": artifact.library.stat().st_size,
            }
    staging = folder.root / f".{INDEX}.{os.getpid()}.{threading.get_ident()}"
    text = json.dumps({"format": FORMAT, "artifacts": entries}, indent=1) + "\n"
    staging.write_text(text, encoding="utf-8")
    staging.replace(folder.root / INDEX)


def _build_one(
    folder: ArtifactFolder, key: str, plan: Plan, idle: queue.SimpleQueue[CompilerProcess]
) -> tuple[Artifact | None, bool, str | None]:
    """Artefact, whether it was built now, and the error if there is no artefact."""
    worker = idle.get()
    try:
        artifact, built = folder.get_or_build(key, lambda staging: worker.build(plan, staging))
    except (CompileError, OSError, ValueError) as error:
        return None, False, str(error)
    finally:
        idle.put(worker)
    return artifact, built, None
