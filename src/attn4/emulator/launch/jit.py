"""Host code that CuTe-DSL compiles in this process, made to call the emulator.

The DSL resolves what its host code calls in the libraries that ``CUTE_DSL_LIBS`` names when it compiles, and
makes host code at all only for the architecture that it takes the machine for (``CUTE_DSL_ARCH``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from attn4.emulator.launch.driver import driver_of
from attn4.emulator.launch.errors import ShimError
from attn4.emulator.launch.shim import public_shim

_LIBRARIES, _ARCH = "CUTE_DSL_LIBS", "CUTE_DSL_ARCH"


@contextmanager
def jit_runtime(arch: str) -> Iterator[None]:
    """What CuTe-DSL compiles for ``arch`` in this block calls the emulator, now and later.

    Compile with ``--keep-ptx`` and ``--keep-cubin``, and make both known: ``IN_PROCESS.add(cubin, ptx)``.
    Both environment variables are as before when the block ends. CuTe-DSL remembers the architecture from
    the first time it needs one, so that the block must come before, or the DSL be told of another. Raises
    ShimError.
    """
    shim = public_shim()
    driver_of(shim)
    kept = {name: os.environ.get(name) for name in (_LIBRARIES, _ARCH)}
    _keep_first(kept[_LIBRARIES])
    os.environ.update({_LIBRARIES: str(shim.path), _ARCH: arch})
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _keep_first(libraries: str | None) -> None:
    """Load the runtime that is in use, before the DSL loads the shim.

    Kernels for a GPU find their symbols in whichever library was made visible to the process first.
    """
    for path in (libraries or "").split(os.pathsep):
        if path:
            try:
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise ShimError(f"{path}, which {_LIBRARIES} names, does not load: {error}.") from error
