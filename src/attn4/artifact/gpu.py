"""Load an artefact for the GPU, with or without CuTe DSL on the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn4.artifact.artifact import Artifact
from attn4.artifact.errors import KernelUnavailableError
from attn4.artifact.runtime import load_runtime

_modules: list[Any] = []
"""Loaded modules, never unloaded: a kernel may still run when its last reference goes."""


def load(artifact: Artifact) -> Callable[..., None]:
    """The kernel of ``artifact``, to be called with tensors of any package that speaks DLPack.

    It launches on the current stream of the tensors' device. Needs no GPU until it is called. Raises
    KernelUnavailableError that says what to install.
    """
    try:
        import tvm_ffi
    except ImportError as error:
        raise KernelUnavailableError(
            "Kernels are called through tvm-ffi, which is not installed. Install apache-tvm-ffi."
        ) from error
    load_runtime()
    try:
        module = tvm_ffi.load_module(str(artifact.library))
        kernel: Callable[..., None] = getattr(module, artifact.description.function)
    except (RuntimeError, AttributeError) as error:
        made_with = artifact.description
        raise KernelUnavailableError(
            f"The kernel in {artifact.folder} does not load: {error}. It was compiled with CuTe DSL "
            f"{made_with.dsl_version}: install that version of "
            f"nvidia-cutlass-dsl-libs-cu{made_with.toolkit}, or build the kernel again."
        ) from error
    _modules.append(module)
    return kernel
