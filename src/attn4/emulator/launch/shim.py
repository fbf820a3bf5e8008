"""The small shared object that stands in for the CUDA runtime: built once with a C compiler, kept, loaded."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from attn4.emulator.launch.errors import ShimError
from attn4.emulator.launch.relink import private_name

SOURCE = Path(__file__).with_name("shim.c")
SYMBOLS = frozenset(
    {
        "CuteDSLRT_TVMFFISetRaisedCudaError",
        "CuteDSLRT_TVMFFISetRaisedCudaLaunchError",
        "_cuKernelGetAttribute",
        "_cudaDeviceGetAttribute",
        "_cudaDeviceSynchronize",
        "_cudaEventCreate",
        "_cudaEventDestroy",
        "_cudaEventRecord",
        "_cudaFree",
        "_cudaFreeAsync",
        "_cudaFreeHost",
        "_cudaFuncSetAttribute",
        "_cudaGetDevice",
        "_cudaGetDeviceCount",
        "_cudaKernelSetAttributeForDevice",
        "_cudaLaunchKernel",
        "_cudaLaunchKernelEx",
        "_cudaLibraryGetKernel",
        "_cudaLibraryLoadData",
        "_cudaLibraryUnload",
        "_cudaMalloc",
        "_cudaMallocAsync",
        "_cudaMallocHost",
        "_cudaMallocManaged",
        "_cudaMemcpy",
        "_cudaMemcpyAsync",
        "_cudaMemset",
        "_cudaMemsetAsync",
        "_cudaOccupancyMaxActiveBlocksPerMultiprocessor",
        "_cudaProfilerStart",
        "_cudaProfilerStop",
        "_cudaSetDevice",
        "_cudaStreamCreate",
        "_cudaStreamDestroy",
        "_cudaStreamSynchronize",
        "_cudaStreamWaitEvent",
        "cuda_dialect_assert_success",
        "cuda_dialect_get_error_name",
        "cuda_dialect_init_library_once",
        "cuda_dialect_print_on_error",
        "cuda_dialect_unload_library_once",
    }
)
"""What of the CUDA runtime and of CuTe-DSL's the shim defines."""

_COMPILERS = ("gcc", "cc", "clang")
_FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-s", "-Wl,-Bsymbolic")
_BUILD_SECONDS = 60.0


class Shim:
    """A loaded shim. ``install`` takes a ctypes structure that must live as long as the process."""

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.path = path
        self._install = library.attn4_shim_install
        self._install.argtypes = (ctypes.c_void_p,)
        self._install.restype = None
        self._explain = library.attn4_shim_explain
        self._explain.argtypes = (ctypes.c_char_p,)
        self._explain.restype = None

    def install(self, table: ctypes.Structure) -> None:
        """Answer every call with the functions in ``table`` from now on."""
        self._install(ctypes.addressof(table))

    def explain(self, reason: str) -> None:
        """What host code on this thread is told about the error that it is about to be given."""
        self._explain(reason.encode(errors="replace"))


@functools.cache
def private_shim() -> Shim:
    """The shim, under names that the whole process sees and that only host code of the emulator asks for.

    Raises ShimError.
    """
    path = build()
    try:
        return Shim(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL), path)
    except (OSError, AttributeError) as error:
        raise ShimError(f"{path} does not load: {error}. Remove it, so that it is built again.") from error


def build(folder: Path | None = None) -> Path:
    """The shared object, compiled into ``folder`` (the user's cache) unless it is there. Raises ShimError."""
    arguments = (*_FLAGS, *(f"-D{name}={private_name(name)}" for name in sorted(SYMBOLS)))
    content = "\0".join((SOURCE.read_text(encoding="utf-8"), *arguments)).encode()
    target = (folder or _cache_folder()) / f"shim-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not target.is_file():
        _compile(arguments, target)
    return target


def _compile(arguments: tuple[str, ...], target: Path) -> None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise ShimError(
            f"The emulator needs a C compiler once, to build what stands in for the CUDA runtime "
            f"({', '.join(_COMPILERS)} were looked for). Install gcc."
        )
    with tempfile.TemporaryDirectory(prefix=".shim-", dir=target.parent) as staging:
        made = Path(staging) / target.name
        command = [compiler, *arguments, "-o", str(made), str(SOURCE)]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ShimError(f"{compiler} does not compile the emulator's shim: {error}.") from error
        if result.returncode != 0:
            raise ShimError(f"{' '.join(command)} failed ({result.returncode}): {result.stderr.strip()}")
        made.replace(target)


@functools.cache
def _cache_folder() -> Path:
    """A folder of the user's that no one else writes to; a temporary one where there is none."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    root = given if given.is_absolute() else Path.home() / ".cache"
    folder = root / "attn4" / "emulator"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o022
        if private and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends; a library that is loaded from it stays loaded."""
    return tempfile.TemporaryDirectory(prefix="attn4-emulator-")
