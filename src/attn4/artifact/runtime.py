"""CuTe DSL's launch runtime, found and loaded without importing CuTe DSL.

Compiled kernels call a small library that ships in the packages ``nvidia-cutlass-dsl-libs-cu12`` and
``-cu13``. It is needed wherever a kernel is launched; the compiler next to it is not.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path

from attn4.artifact.errors import KernelUnavailableError

LIBRARY = "libcute_dsl_runtime.so"


def runtime_libraries() -> dict[int, Path]:
    """The runtime of each CUDA major version that is installed."""
    try:
        spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    except (ImportError, ValueError):
        return {}
    found: dict[int, Path] = {}
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for library in Path(folder).glob(f"cu*/lib/{LIBRARY}"):
            major = re.fullmatch(r"cu(\d+)", library.parent.parent.name)
            if major:
                found.setdefault(int(major[1]), library)
    return found


@cache
def driver_major() -> int | None:
    """Newest CUDA major version that the installed driver supports; None without a driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


@cache
def toolkit_major() -> int | None:
    """The CUDA major version that CuTe DSL uses here: the newest installed that the driver supports.

    CuTe DSL chooses by the same rule, so that compiler and runtime agree.
    """
    installed = runtime_libraries()
    driver = driver_major()
    usable = [major for major in installed if driver is None or major <= driver]
    return max(usable, default=None)


@cache
def load_runtime() -> ctypes.CDLL:
    """Load the launch runtime, its symbols visible to the kernels loaded later."""
    major = toolkit_major()
    if major is None:
        raise KernelUnavailableError(_missing())
    library = runtime_libraries()[major]
    try:
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise KernelUnavailableError(
            f"CuTe DSL's launch runtime {library} does not load: {error}. "
            f"Install nvidia-cutlass-dsl-libs-cu{major} again."
        ) from error


def _missing() -> str:
    installed = runtime_libraries()
    if installed:
        return (
            f"The CUDA driver supports CUDA {driver_major()} at most, and CuTe DSL's launch runtime is "
            f"installed for CUDA {min(installed)} and newer. Update the driver, or install "
            f"nvidia-cutlass-dsl-libs-cu{driver_major()}."
        )
    return (
        f"CuTe DSL's launch runtime ({LIBRARY}) is not installed, and compiled kernels need it. "
        "Install nvidia-cutlass-dsl[cu13], or only nvidia-cutlass-dsl-libs-cu13 on a machine that "
        "loads its kernels from a bundle."
    )
