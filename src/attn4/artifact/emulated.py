"""Run an artefact on the emulator: its host code as it is, over CPU tensors, without a GPU or CuTe DSL."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from attn4.artifact.artifact import Artifact, read_artifact
from attn4.artifact.errors import KernelUnavailableError

if TYPE_CHECKING:
    from attn4.emulator.launch import Emulation, HostCode, Run


def emulated(run: Run) -> AbstractContextManager[Emulation]:
    """A block in which kernels loaded by ``load_emulated`` hand each launch to ``run``, one after the other.

    Concerns the kernels loaded in it by this thread (or task), and nothing else: kernels for a GPU are loaded
    and launched beside it as before. A kernel that outlives its block raises LaunchError when it is called.
    """
    _require()
    from attn4.emulator.launch import emulation

    return emulation(run)


def load_emulated(artifact: Artifact | Path) -> HostCode:
    """The kernel of ``artifact`` (or of a folder of one), called like that of ``gpu.load`` on CPU tensors.

    Raises KernelUnavailableError that says what to install, LaunchError outside of a block of ``emulated``
    and for a kernel that the emulator cannot launch, FileNotFoundError and DamagedArtifactError for a folder
    that holds none.
    """
    _require()
    from attn4.emulator.launch import ShimError, device_attributes, emulated_device, load_host_code

    if isinstance(artifact, Path):
        artifact = read_artifact(artifact)
    description = artifact.description
    device = emulated_device()
    attributes = device_attributes(description.arch) if device is None else device.attributes
    try:
        return load_host_code(artifact.library, description.function, artifact.ptx(), attributes)
    except ShimError as error:
        raise KernelUnavailableError(str(error)) from error


def _require() -> None:
    for module, package in (("numpy", "numpy"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            raise KernelUnavailableError(
                f"The emulator needs {module}, which is not installed. Install {package}."
            )
