"""cuda.bindings, through which Python programs call the CUDA driver and runtime, where a device is emulated.

Calls end before they return, so that streams and events are handles with nothing behind them. Whatever is
not here raises LaunchError with its name instead of looking for a driver.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

from attn4.emulator.launch.driver import emulated_chip, emulated_device
from attn4.emulator.launch.errors import LaunchError
from attn4.emulator.launch.patches import Patch

_DRIVER, _RUNTIME = "cuda.bindings.driver", "cuda.bindings.runtime"
_DRIVER_VERSION = 13000
_INVALID_VALUE, _INVALID_DEVICE = 1, 101
_LOCAL = ("cuGetErrorName", "cuGetErrorString", "cudaGetErrorName", "cudaGetErrorString")
"""Functions that ask no device; the runtime's answer without a driver."""

_handles = itertools.count(1)


class _Refused(Exception):  # noqa: N818 - an outcome, caught here
    """A call answered by an error code."""


def _device(index: int) -> int:
    if int(index) != 0:
        raise _Refused(_INVALID_DEVICE)
    return 0


def _attribute(attribute: Any, device: Any) -> int:
    _device(device)
    known = emulated_chip().attributes()
    if int(attribute) not in known:
        raise LaunchError(f"Device attribute {attribute!s} was asked for: the emulated device has none.")
    return known[int(attribute)]


def _allocate(nbytes: int, *_: Any) -> int:
    device = emulated_device()
    assert device is not None
    return device.allocate(int(nbytes))


def _release(memory: Any, *_: Any) -> None:
    device = emulated_device()
    assert device is not None
    if int(memory) and not device.release(int(memory)):
        raise _Refused(_INVALID_VALUE)


def _require(memory: Any, nbytes: int) -> int:
    """The address of device memory. Raises LaunchError if the device does not know it."""
    device = emulated_device()
    assert device is not None
    device.require(int(memory), int(nbytes))
    return int(memory)


def _copy_in(to: Any, source: Any, nbytes: int, *_: Any) -> None:
    ctypes.memmove(_require(to, nbytes), _address(source), int(nbytes))


def _copy_out(to: Any, source: Any, nbytes: int, *_: Any) -> None:
    ctypes.memmove(_address(to), _require(source, nbytes), int(nbytes))


def _copy(to: Any, source: Any, nbytes: int, *_: Any) -> None:
    ctypes.memmove(_require(to, nbytes), _require(source, nbytes), int(nbytes))


def _copy_kind(to: Any, source: Any, nbytes: int, kind: Any, *_: Any) -> None:
    """cudaMemcpy: ``kind`` 1 and 3 write the device, 2 and 3 read it."""
    target = _require(to, nbytes) if int(kind) in (1, 3) else _address(to)
    origin = _require(source, nbytes) if int(kind) in (2, 3) else _address(source)
    ctypes.memmove(target, origin, int(nbytes))


def _address(memory: Any) -> int:
    """The address of host memory: given as such, or as an object that holds a buffer."""
    if hasattr(memory, "__int__"):
        return int(memory)
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _fill(width: int) -> Callable[..., None]:
    def fill(memory: Any, value: int, count: int, *_: Any) -> None:
        whole = (int(value) & (1 << 8 * width) - 1).to_bytes(width, "little") * int(count)
        ctypes.memmove(_require(memory, len(whole)), whole, len(whole))

    return fill


def _nothing(*_: Any) -> None:
    return None


def _zero(*_: Any) -> int:
    return 0


def _no_time(*_: Any) -> float:
    return math.nan


# Name -> (the type that wraps the answer, "" for none, and what answers).
_DRIVER_ANSWERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "cuInit": ("", _nothing),
    "cuDriverGetVersion": ("", lambda: _DRIVER_VERSION),
    "cuDeviceGetCount": ("", lambda: 1),
    "cuDeviceGet": ("CUdevice", _device),
    "cuDeviceGetName": ("", lambda length, *_: emulated_chip().name.encode()[: int(length)]),
    "cuDeviceTotalMem": ("", lambda *_: emulated_chip().memory_bytes),
    "cuDeviceGetAttribute": ("", _attribute),
    "cuDevicePrimaryCtxRetain": ("CUcontext", lambda *_: 1),
    "cuDevicePrimaryCtxRelease": ("", _nothing),
    "cuCtxCreate": ("CUcontext", lambda *_: 1),
    "cuCtxDestroy": ("", _nothing),
    "cuCtxGetCurrent": ("CUcontext", lambda: 1),
    "cuCtxSetCurrent": ("", _nothing),
    "cuCtxGetDevice": ("CUdevice", _zero),
    "cuCtxSynchronize": ("", _nothing),
    "cuStreamCreate": ("CUstream", lambda *_: next(_handles)),
    "cuStreamDestroy": ("", _nothing),
    "cuStreamSynchronize": ("", _nothing),
    "cuStreamQuery": ("", _nothing),
    "cuStreamWaitEvent": ("", _nothing),
    "cuEventCreate": ("CUevent", lambda *_: next(_handles)),
    "cuEventDestroy": ("", _nothing),
    "cuEventRecord": ("", _nothing),
    "cuEventQuery": ("", _nothing),
    "cuEventSynchronize": ("", _nothing),
    "cuEventElapsedTime": ("", _no_time),
    "cuMemAlloc": ("CUdeviceptr", _allocate),
    "cuMemAllocAsync": ("CUdeviceptr", _allocate),
    "cuMemFree": ("", _release),
    "cuMemFreeAsync": ("", _release),
    "cuMemcpyHtoD": ("", _copy_in),
    "cuMemcpyHtoDAsync": ("", _copy_in),
    "cuMemcpyDtoH": ("", _copy_out),
    "cuMemcpyDtoHAsync": ("", _copy_out),
    "cuMemcpyDtoD": ("", _copy),
    "cuMemcpyDtoDAsync": ("", _copy),
    "cuMemcpy": ("", _copy),
    "cuMemcpyAsync": ("", _copy),
    "cuMemsetD8": ("", _fill(1)),
    "cuMemsetD8Async": ("", _fill(1)),
    "cuMemsetD16": ("", _fill(2)),
    "cuMemsetD16Async": ("", _fill(2)),
    "cuMemsetD32": ("", _fill(4)),
    "cuMemsetD32Async": ("", _fill(4)),
    "cuLibraryUnload": ("", _nothing),
}
_RUNTIME_ANSWERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "cudaGetDeviceCount": ("", lambda: 1),
    "cudaGetDevice": ("", _zero),
    "cudaSetDevice": ("", lambda device: _device(device) or None),
    "cudaInitDevice": ("", _nothing),
    "cudaFree": ("", _release),
    "cudaFreeAsync": ("", _release),
    "cudaMalloc": ("", _allocate),
    "cudaMallocAsync": ("", _allocate),
    "cudaMemcpy": ("", _copy_kind),
    "cudaMemcpyAsync": ("", _copy_kind),
    "cudaMemset": ("", _fill(1)),
    "cudaMemsetAsync": ("", _fill(1)),
    "cudaRuntimeGetVersion": ("", lambda: _DRIVER_VERSION),
    "cudaDriverGetVersion": ("", lambda: _DRIVER_VERSION),
    "cudaDeviceGetAttribute": ("", _attribute),
    "cudaDeviceSynchronize": ("", _nothing),
    "cudaGetLastError": ("", _nothing),
    "cudaPeekAtLastError": ("", _nothing),
    "cudaStreamCreate": ("cudaStream_t", lambda: next(_handles)),
    "cudaStreamCreateWithFlags": ("cudaStream_t", lambda *_: next(_handles)),
    "cudaStreamDestroy": ("", _nothing),
    "cudaStreamSynchronize": ("", _nothing),
    "cudaStreamQuery": ("", _nothing),
    "cudaStreamWaitEvent": ("", _nothing),
    "cudaEventCreate": ("cudaEvent_t", lambda: next(_handles)),
    "cudaEventCreateWithFlags": ("cudaEvent_t", lambda *_: next(_handles)),
    "cudaEventDestroy": ("", _nothing),
    "cudaEventRecord": ("", _nothing),
    "cudaEventQuery": ("", _nothing),
    "cudaEventSynchronize": ("", _nothing),
    "cudaEventElapsedTime": ("", _no_time),
    "cudaLibraryUnload": ("", _nothing),
}


def patches() -> Iterable[Patch]:
    """Every function of the two modules, if they are loaded."""
    for module, answers, status, prefix in (
        (_DRIVER, _DRIVER_ANSWERS, "CUresult", "cu"),
        (_RUNTIME, _RUNTIME_ANSWERS, "cudaError_t", "cuda"),
    ):
        bindings = sys.modules.get(module)
        if bindings is None:
            continue
        for name, value in tuple(vars(bindings).items()):
            follows = name.removeprefix(prefix)
            is_function = follows != name and follows[:1].isupper() and not isinstance(value, type)
            if not (is_function and callable(value)) or name in _LOCAL:
                continue
            wraps, answer = answers.get(name, ("", _missing(name)))
            yield Patch(bindings, name, _emulated(bindings, status, wraps, answer))


def _missing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise LaunchError(f"The program called {name}, which is not emulated.")

    return refuse


def _emulated(
    bindings: Any, status: str, wraps: str, answer: Callable[..., Any]
) -> Callable[[Any], Callable[..., Any]]:
    codes = getattr(bindings, status)

    def make(original: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if emulated_device() is None:
                return original(*arguments, **options)
            try:
                result = answer(*arguments, **options)
            except _Refused as refused:
                return (codes(refused.args[0]), None)
            if result is None:
                return (codes(0),)
            return (codes(0), getattr(bindings, wraps)(result) if wraps else result)

        return call

    return make
