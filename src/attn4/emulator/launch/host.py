"""Host code of an artefact, loaded so that it runs over CPU tensors."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attn4.emulator.launch.driver import Call, Modules, calling, current_emulation, driver_of
from attn4.emulator.launch.errors import LaunchError
from attn4.emulator.launch.image import cubins_in
from attn4.emulator.launch.record import Allocation
from attn4.emulator.launch.relink import relinked
from attn4.emulator.launch.shim import SYMBOLS, private_shim
from attn4.emulator.launch.tensors import is_tensor, on_device


class HostCode:
    """A tvm-ffi function, called as on a device but with CPU tensors; calls from several threads take turns.

    It belongs to the emulation that is open when it is made. ``modules`` are what it may load, ``attributes``
    those of the device, by the number of enum cudaDeviceAttr.
    """

    def __init__(self, function: Callable[..., Any], modules: Modules, attributes: Mapping[int, int]) -> None:
        self._emulation = current_emulation()
        self._function = function
        self._modules = modules
        self._attributes = dict(attributes)
        self._turn = threading.RLock()

    def __call__(self, *arguments: Any) -> None:
        """Run the host code; returns when all it launched has run.

        Raises what the emulation's ``run`` raises, ValueError for a tensor that is not on the CPU,
        LaunchError for what cannot be emulated, and what the host code itself raises for arguments that do
        not fit.
        """
        given: list[Any] = []
        allocations: list[Allocation] = []
        for position, argument in enumerate(arguments):
            if not is_tensor(argument):
                given.append(argument)
                continue
            tensor, allocation = on_device(argument, position)
            given.append(tensor)
            if allocation is not None:
                allocations.append(allocation)
        call = Call(self._emulation, self._modules, self._attributes, tuple(allocations))
        with self._turn, calling(call):
            self._function(*given)


def load_host_code(library: Path, function: str, ptx: str, attributes: Mapping[int, int]) -> HostCode:
    """Load ``function`` of the shared object ``library``, whose kernels ``ptx`` was assembled to.

    Each load is a copy with state of its own, bound to the emulation that is open. ``attributes`` are those
    of the device, by the number of enum cudaDeviceAttr. Raises LaunchError, ShimError, OSError.
    """
    import tvm_ffi

    current_emulation()
    content = library.read_bytes()
    cubins = cubins_in(content)
    if not cubins:
        raise LaunchError(f"{library} holds no cubin: it is no exported CuTe-DSL kernel.")
    modules = Modules()
    for cubin in cubins:
        modules.add(cubin, ptx)
    copy = relinked(content, SYMBOLS)
    driver_of(private_shim())
    with tempfile.TemporaryDirectory(prefix="attn4-emulator-") as folder:
        path = Path(folder) / library.name
        path.write_bytes(copy)
        try:
            # Stays mapped when the file is gone, for as long as the function is there.
            module = tvm_ffi.load_module(str(path), keep_module_alive=False)
            found = getattr(module, function)
        except (RuntimeError, AttributeError) as error:
            raise LaunchError(f"{library} does not load: {error}") from error
    return HostCode(found, modules, attributes)
