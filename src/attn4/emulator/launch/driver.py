"""The CUDA runtime as host code sees it, with Python behind it: libraries, kernels, attributes, launches.

Host code runs on the thread that calls a kernel, and returns when all its launches are done. A Python error
inside a callback cannot cross the C frames: it is kept in the ``Call``, host code is told that the call
failed, and whoever called the kernel gets the error itself.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attn4.emulator.launch.device import SHARED_BYTES_A_MULTIPROCESSOR, Chip
from attn4.emulator.launch.errors import LaunchError
from attn4.emulator.launch.image import Image, cubin_at, digest, image
from attn4.emulator.launch.record import Allocation, Dim3, Launch, Run
from attn4.emulator.launch.shim import Shim

_FAILED = 719  # cudaErrorLaunchFailure; a nonzero code is all that host code looks at
_DEFAULT_SHARED_BYTES = 48 * 1024
_MALLOC_ALIGNMENT = 256
_PORTABLE_CLUSTER = 8
_MAX_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)
_MAX_THREADS = 1024
_MAX_RESIDENT_THREADS, _MAX_RESIDENT_BLOCKS = 2048, 32
_SYSTEM_SHARED_BYTES = 1024

# Numbers of enum cudaFuncAttribute (the first is CUfunction_attribute's) and enum cudaLaunchAttributeID.
_SHARED_SIZE, _MAX_DYNAMIC_SHARED, _CARVEOUT, _NON_PORTABLE_CLUSTER = 1, 8, 9, 14
_IGNORE, _COOPERATIVE, _CLUSTER, _PROGRAMMATIC, _PRIORITY, _PREFERRED_CLUSTER = 0, 2, 4, 6, 8, 11
_LAUNCH_ATTRIBUTES = (_IGNORE, _COOPERATIVE, _CLUSTER, _PROGRAMMATIC, _PRIORITY, _PREFERRED_CLUSTER)


class _Attribute(ctypes.Structure):
    """cudaLaunchAttribute: 72 bytes."""

    _fields_ = (("id", ctypes.c_int32), ("pad", ctypes.c_int32), ("value", ctypes.c_uint32 * 16))


class _Configuration(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    )


@dataclass(slots=True)
class _Kernel:
    """A kernel that host code has a handle of, and what it has set for it."""

    name: str
    image: Image
    max_dynamic_shared: int = _DEFAULT_SHARED_BYTES
    non_portable_cluster: bool = False


@dataclass(slots=True)
class Modules:
    """What host code may load, by digest of the cubin, and what it has loaded, by handle."""

    images: dict[str, Image] = field(default_factory=dict)
    libraries: dict[int, Image] = field(default_factory=dict)
    kernels: dict[int, _Kernel] = field(default_factory=dict)

    def add(self, cubin: bytes, ptx: str) -> None:
        """Let ``cubin`` be loaded, which ``ptx`` was assembled to. Raises LaunchError if it was not."""
        known = image(cubin, ptx)
        self.images[known.digest] = known


@dataclass(slots=True)
class Emulation:
    """Where launches go.

    ``attributes`` answers cudaDeviceGetAttribute for host code that is called directly, by the number of enum
    cudaDeviceAttr. ``chip`` is there if Python code, too, is to find a device (`attn4.emulator.device`).
    ``recording`` takes launches that are to run later. ``memory`` holds what host code has allocated, by
    address; ``lent`` what the program has, by address,
    size and owner, each with a question whether it is still there. ``roles`` names warps for reports: by
    kernel, the warps of each role.
    """

    run: Run
    attributes: Mapping[int, int] = field(default_factory=dict)
    chip: Chip | None = None
    recording: list[Launch] | None = None
    memory: dict[int, Allocation] = field(default_factory=dict)
    lent: dict[tuple[int, int, int], tuple[Allocation, Callable[[], bool]]] = field(default_factory=dict)
    roles: dict[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    is_open: bool = True

    def submit(self, launch: Launch) -> None:
        """Run a launch, or record it. Raises what ``run`` raises."""
        if self.recording is None:
            self.run(launch)
        else:
            self.recording.append(launch)

    def allocate(self, nbytes: int) -> int:
        """The address of new memory, aligned as cudaMalloc does."""
        owner = np.empty(max(nbytes, 1) + _MALLOC_ALIGNMENT - 1, np.uint8)
        base = -(-owner.ctypes.data // _MALLOC_ALIGNMENT) * _MALLOC_ALIGNMENT
        self.memory[base] = Allocation(base, nbytes, owner=owner)
        return base

    def release(self, address: int) -> bool:
        """Free what ``allocate`` gave; false if it gave no such address."""
        return self.memory.pop(address, None) is not None

    def require(self, address: int, nbytes: int, spans: Iterable[Allocation] = ()) -> None:
        """Raise LaunchError unless a span is allocated, lent, or in one of ``spans``."""
        known = itertools.chain(spans, self.memory.values(), self.allocations())
        if nbytes and not any(a.base <= address and address + nbytes <= a.base + a.nbytes for a in known):
            raise LaunchError(
                f"{nbytes} bytes at {address:#x} belong to no tensor that the device knows, and to no memory "
                "that was allocated on it."
            )

    def lend(self, allocation: Allocation, alive: Callable[[], bool], owner: int = 0) -> None:
        """Let host code that is called directly touch memory of the program's as long as ``alive``.

        ``owner`` tells apart those who lend the same memory.
        """
        if allocation.nbytes:
            self.lent[allocation.base, allocation.nbytes, owner] = (allocation, alive)

    def allocations(self) -> tuple[Allocation, ...]:
        """All that host code called directly may touch."""
        gone = [key for key, (_, alive) in self.lent.items() if not alive()]
        for key in gone:
            del self.lent[key]
        return tuple(allocation for allocation, _ in self.lent.values())


@dataclass(slots=True)
class Call:
    """One call of host code: whose it is, what it may touch, and what went wrong in it."""

    emulation: Emulation
    modules: Modules
    attributes: Mapping[int, int]
    allocations: tuple[Allocation, ...]
    error: BaseException | None = None


IN_PROCESS = Modules()
"""Modules of host code that is compiled in this process, and that outlives any block."""

_emulation: ContextVar[Emulation | None] = ContextVar("attn4_emulation", default=None)
_call: ContextVar[Call | None] = ContextVar("attn4_emulated_call", default=None)


@contextmanager
def emulation(
    run: Run, attributes: Mapping[int, int] | None = None, chip: Chip | None = None
) -> Iterator[Emulation]:
    """Open an ``Emulation`` for this context (thread or task); blocks may nest, the innermost counts."""
    opened = Emulation(run, attributes or (chip.attributes() if chip else {}), chip)
    token = _emulation.set(opened)
    try:
        yield opened
    finally:
        _emulation.reset(token)
        opened.is_open = False


def current_emulation() -> Emulation:
    """The innermost open one. Raises LaunchError outside of every block."""
    found = _emulation.get()
    if found is None:
        raise LaunchError("No emulation is open here: load and call kernels in a `with emulated(run)` block.")
    return found


def emulated_device() -> Emulation | None:
    """The innermost open emulation if it stands for a whole device, else None."""
    found = _emulation.get()
    return found if found is not None and found.chip is not None else None


def emulated_chip() -> Chip:
    """The chip of `emulated_device`. Raises LaunchError where there is none."""
    found = emulated_device()
    if found is None or found.chip is None:
        raise LaunchError(
            "No device is emulated here: call this in a `with attn4.emulator.device(...)` block."
        )
    return found.chip


@contextmanager
def calling(call: Call) -> Iterator[None]:
    """Launches of host code in this block belong to ``call``; its error, if any, is raised when it ends."""
    if not call.emulation.is_open:
        raise LaunchError(
            "The block in which this kernel was loaded has been left: load it again in a new one."
        )
    token = _call.set(call)
    try:
        yield
    except Exception:
        if call.error is None:
            raise
    finally:
        _call.reset(token)
    if call.error is not None:
        raise call.error


class Driver:
    """Answers a shim's calls. One a shim, for as long as the process lives."""

    def __init__(self, shim: Shim) -> None:
        self._shim = shim
        self._handles = itertools.count(1)
        self._table = self._callbacks()
        shim.install(self._table)

    def _load_library(self, call: Call, library: Any, code: int) -> None:
        found = digest(cubin_at(code))
        module = call.modules.images.get(found)
        if module is None:
            raise LaunchError(
                f"A module was loaded whose cubin (sha256 {found}) no known PTX was assembled to."
            )
        library[0] = self._new(call.modules.libraries, module)

    def _get_kernel(self, call: Call, kernel: Any, library: int, name: bytes) -> None:
        module = _known(call.modules.libraries, library, "module")
        text = name.decode()
        if text not in module.kernels:
            raise LaunchError(f"The module with the cubin {module.digest[:16]} has no kernel {text}.")
        kernel[0] = self._new(call.modules.kernels, _Kernel(text, module))

    def _set_attribute(self, call: Call, handle: int, attribute: int, value: int) -> None:
        kernel = _known(call.modules.kernels, handle, "kernel")
        if attribute == _MAX_DYNAMIC_SHARED:
            kernel.max_dynamic_shared = value
        elif attribute == _NON_PORTABLE_CLUSTER:
            kernel.non_portable_cluster = bool(value)
        elif attribute != _CARVEOUT:
            raise LaunchError(
                f"Attribute {attribute} of kernel {kernel.name} was set, which is not emulated."
            )

    def _get_attribute(self, call: Call, value: Any, attribute: int, handle: int) -> None:
        kernel = _known(call.modules.kernels, handle, "kernel")
        if attribute == _SHARED_SIZE:
            value[0] = kernel.image.kernels[kernel.name].shared_bytes
        elif attribute == _MAX_DYNAMIC_SHARED:
            value[0] = kernel.max_dynamic_shared
        else:
            raise LaunchError(f"Attribute {attribute} of kernel {kernel.name} was asked for: not emulated.")

    def _device_attribute(self, call: Call, value: Any, attribute: int) -> None:
        if attribute not in call.attributes:
            raise LaunchError(
                f"Device attribute {attribute} was asked for, which the emulated device has no value of."
            )
        value[0] = call.attributes[attribute]

    def _launch(self, call: Call, configuration: Any, handle: int, arguments: Any) -> None:
        kernel = _known(call.modules.kernels, handle, "kernel")
        config = configuration[0]
        attributes = _launch_attributes(kernel, config)
        launch = Launch(
            kernel=kernel.name,
            image=kernel.image.digest,
            ptx=kernel.image.ptx,
            grid=_dim3(config.grid),
            block=_dim3(config.block),
            cluster=_cluster(_dim3(config.grid), attributes),
            shared_bytes=config.shared_bytes,
            stream=config.stream or 0,
            parameters=_parameters(kernel, arguments),
            allocations=call.allocations + tuple(call.emulation.memory.values()),
            programmatic=bool(attributes.get(_PROGRAMMATIC, (0,))[0]),
            cooperative=bool(attributes.get(_COOPERATIVE, (0,))[0]),
        )
        _check(launch, kernel)
        call.emulation.submit(launch)

    def _allocate(self, call: Call, memory: Any, nbytes: int) -> None:
        memory[0] = call.emulation.allocate(nbytes)

    def _release(self, call: Call, memory: int | None) -> None:
        if memory is not None and not call.emulation.release(memory):
            raise LaunchError(f"Memory at {memory:#x} was freed, which was not allocated in this block.")

    def _touch(self, call: Call, memory: int | None, nbytes: int) -> None:
        if call.emulation.recording is not None:
            raise LaunchError("A memset or a copy was called while a graph is captured: not emulated.")
        call.emulation.require(memory or 0, nbytes, call.allocations)

    def _occupancy(self, call: Call, blocks: Any, handle: int, threads: int, nbytes: int) -> None:
        """cudaOccupancyMaxActiveBlocksPerMultiprocessor, of what is limited here: not by registers."""
        kernel = _known(call.modules.kernels, handle, "kernel")
        shared = nbytes + kernel.image.kernels[kernel.name].shared_bytes + _SYSTEM_SHARED_BYTES
        available = call.attributes[SHARED_BYTES_A_MULTIPROCESSOR]
        blocks[0] = min(_MAX_RESIDENT_THREADS // max(threads, 1), _MAX_RESIDENT_BLOCKS, available // shared)

    def _new(self, table: dict[int, Any], value: Any) -> int:
        handle = next(self._handles)
        table[handle] = value
        return handle

    def _callbacks(self) -> ctypes.Structure:
        """The ``struct callbacks`` of shim.c, each entry guarded."""
        number, pointer = ctypes.c_int, ctypes.c_void_p
        out, out_number = ctypes.POINTER(pointer), ctypes.POINTER(number)
        entries: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
            "load_library": (self._load_library, (out, pointer)),
            "get_kernel": (self._get_kernel, (out, pointer, ctypes.c_char_p)),
            "set_attribute": (self._set_attribute, (pointer, number, number)),
            "get_attribute": (self._get_attribute, (out_number, number, pointer)),
            "device_attribute": (self._device_attribute, (out_number, number)),
            "launch": (self._launch, (ctypes.POINTER(_Configuration), pointer, out)),
            "allocate": (self._allocate, (out, ctypes.c_size_t)),
            "release": (self._release, (pointer,)),
            "touch": (self._touch, (pointer, ctypes.c_size_t)),
            "occupancy": (self._occupancy, (out_number, pointer, number, ctypes.c_size_t)),
        }
        types = {name: ctypes.CFUNCTYPE(number, *arguments) for name, (_, arguments) in entries.items()}
        table = type("Callbacks", (ctypes.Structure,), {"_fields_": tuple(types.items())})
        made: ctypes.Structure = table(
            *(types[name](self._guarded(answer)) for name, (answer, _) in entries.items())
        )
        return made

    def _guarded(self, answer: Callable[..., None]) -> Callable[..., int]:
        """``answer`` for the call that this thread is in; its errors kept, and told as an error code."""

        def callback(*arguments: Any) -> int:
            call = _call.get()
            try:
                if call is None:
                    opened = current_emulation()
                    call = Call(opened, IN_PROCESS, opened.attributes, opened.allocations())
                answer(call, *arguments)
            except BaseException as error:  # noqa: BLE001  raised again in ``calling``
                if call is not None and call.error is None:
                    call.error = error
                self._shim.explain(f"{type(error).__name__}: {error}")
                return _FAILED
            return 0

        return callback


_drivers: dict[str, Driver] = {}
_starting = threading.Lock()


def driver_of(shim: Shim) -> Driver:
    """The driver behind ``shim``, started if it is not yet."""
    with _starting:
        name = str(shim.path)
        if name not in _drivers:
            _drivers[name] = Driver(shim)
        return _drivers[name]


def _known(table: Mapping[int, Any], handle: int | None, what: str) -> Any:
    found = table.get(handle or 0)
    if found is None:
        raise LaunchError(
            f"Host code used an unknown {what} (handle {handle or 0:#x}): it was not loaded here."
        )
    return found


def _launch_attributes(kernel: _Kernel, config: Any) -> dict[int, tuple[int, ...]]:
    found = {}
    for attribute in config.attributes[: config.attribute_count]:
        if attribute.id not in _LAUNCH_ATTRIBUTES:
            raise LaunchError(
                f"Kernel {kernel.name} was launched with attribute {attribute.id}: not emulated."
            )
        found[attribute.id] = tuple(attribute.value)
    return found


def _cluster(grid: Dim3, attributes: Mapping[int, tuple[int, ...]]) -> Dim3:
    """The preferred size of clusters where the grid is made of such, else the other; a device may choose
    either for any part of the grid.
    """
    preferred = _dim3(attributes.get(_PREFERRED_CLUSTER, (0, 0, 0)))
    if 0 not in preferred and not any(n % c for n, c in zip(grid, preferred, strict=True)):
        return preferred
    return _dim3(attributes.get(_CLUSTER, (1, 1, 1)))


def _parameters(kernel: _Kernel, arguments: Any) -> tuple[bytes, ...]:
    sizes = kernel.image.kernels[kernel.name].parameter_bytes
    if sizes and not arguments:
        raise LaunchError(f"Kernel {kernel.name} takes {len(sizes)} parameters and was launched with none.")
    values = []
    for index, size in enumerate(sizes):
        if not arguments[index]:
            raise LaunchError(f"Parameter {index} of kernel {kernel.name} ({size} bytes) has no value.")
        values.append(ctypes.string_at(arguments[index], size))
    return tuple(values)


def _check(launch: Launch, kernel: _Kernel) -> None:
    """Refuse what a device refuses."""
    problem = None
    blocks = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if 0 in (*launch.grid, *launch.block, *launch.cluster):
        problem = "every extent must be at least 1"
    elif any(count > most for count, most in zip(launch.grid, _MAX_GRID, strict=True)):
        problem = f"a grid has at most {_MAX_GRID} blocks"
    elif threads > _MAX_THREADS:
        problem = f"a block has at most {_MAX_THREADS} threads"
    elif any(count % size for count, size in zip(launch.grid, launch.cluster, strict=True)):
        problem = "the grid must be a multiple of the cluster"
    elif blocks > (2 * _PORTABLE_CLUSTER if kernel.non_portable_cluster else _PORTABLE_CLUSTER):
        problem = f"the cluster has {blocks} blocks, more than the kernel allows"
    elif launch.shared_bytes > kernel.max_dynamic_shared:
        problem = f"{kernel.max_dynamic_shared} bytes of dynamic shared memory are allowed for it"
    if problem:
        raise LaunchError(
            f"Kernel {launch.kernel} was launched with grid {launch.grid}, block {launch.block}, cluster "
            f"{launch.cluster} and {launch.shared_bytes} bytes of dynamic shared memory: {problem}."
        )


def _dim3(values: Any) -> Dim3:
    return int(values[0]), int(values[1]), int(values[2])
