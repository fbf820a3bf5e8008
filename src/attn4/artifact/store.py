"""From a Plan to a kernel that can be called: loaded already, in a bundle, in the cache, or compiled."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

from attn4.artifact import gpu
from attn4.artifact.artifact import Artifact
from attn4.artifact.build import KERNELS, build_here, environment_is_clean
from attn4.artifact.bundle import bundles_in_use, open_bundle
from attn4.artifact.cache import ArtifactFolder, user_cache, user_cache_root, warn_unwritable
from attn4.artifact.errors import KernelUnavailableError
from attn4.artifact.key import Toolchain, artifact_key, plan_key, toolchain
from attn4.artifact.worker import CompilerProcess
from attn4.plan.plan import Plan

_loaded: dict[Plan, Callable[..., None]] = {}
_loading = threading.Lock()


def kernel_for(plan: Plan, *, bundle: str | os.PathLike[str] | None = None) -> Callable[..., None]:
    """The kernel of ``plan``, ready to be called; ``bundle`` is a folder to look into first.

    Taken from this process, else a bundle (the argument, ``use_bundle``, installed ones), else the user's
    cache, else compiled. Equal plans give the same object. Raises KernelUnavailableError if the kernel
    cannot be had here, CompileError if it does not compile, ValueError if ``bundle`` is no folder.
    """
    kernel = _loaded.get(plan)
    if kernel is None:
        with _loading:
            kernel = _loaded.get(plan)
            if kernel is None:
                kernel = _loaded[plan] = gpu.load(artifact_for(plan, bundle=bundle))
    return kernel


def artifact_for(
    plan: Plan, *, bundle: str | os.PathLike[str] | None = None, compiler: str = KERNELS
) -> Artifact:
    """The artefact of ``plan``, found or compiled as ``kernel_for`` says, but not loaded."""
    key, tools = plan_key(plan), toolchain()
    folders = ([open_bundle(bundle)] if bundle is not None else []) + list(bundles_in_use())
    for folder in folders:
        found = folder.find(key, tools)
        if found is not None:
            return found
    kept = user_cache()
    if tools is None:
        found = kept.find(key, None) if kept is not None else None
        if found is None:
            raise KernelUnavailableError(_unavailable(plan, folders))
        return found
    return _cached_or_built(plan, tools, kept, compiler)


def _cached_or_built(plan: Plan, tools: Toolchain, kept: ArtifactFolder | None, compiler: str) -> Artifact:
    def build(folder: Path) -> None:
        if environment_is_clean():
            build_here(plan, folder, compiler)
        else:
            with CompilerProcess(compiler) as process:
                process.build(plan, folder)

    key = artifact_key(plan, tools)
    if kept is not None:
        try:
            return kept.get_or_build(key, build)[0]
        except OSError as error:
            warn_unwritable(error)
    return _temporary_folder().get_or_build(key, build)[0]


@cache
def _temporary_folder() -> ArtifactFolder:
    """Where artefacts go when there is no cache; removed when the process ends."""
    root = Path(tempfile.mkdtemp(prefix="attn4-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return ArtifactFolder(root)


def _unavailable(plan: Plan, folders: list[ArtifactFolder]) -> str:
    looked = [str(folder.root) for folder in folders] + [str(user_cache_root())]
    return (
        f"There is no compiled kernel for this plan ({plan.arch}, {plan.direction}, {plan.dtype}, head_dim "
        f"{plan.head_dim}, head_dim_v {plan.head_dim_v}, {plan.mask}; key {plan_key(plan)}) in "
        f"{', '.join(looked)}, and CuTe DSL is not installed to compile it. Install "
        "nvidia-cutlass-dsl[cu13], or build a bundle where it is installed, with the same version of attn4 "
        "(`attn4 compile --out FOLDER`), and name it with attn4.artifact.use_bundle."
    )
