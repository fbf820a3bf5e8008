"""CPU tensors that say they are on device 0, over the same memory.

Host code checks the device in each tensor's DLPack record. Each export of a tensor writes a new record, and
its device field is all that is changed here: the tensor itself stays a CPU tensor.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.launch.record import Allocation

_CPU, _CUDA = 1, 2
_CAPSULE = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLTensor(ctypes.Structure):
    """DLTensor of DLPack 0.x and 1.x, which DLManagedTensor starts with."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer.restype = ctypes.c_void_p


class _Relabelled:
    """Offers a capsule once, for device 0 of CUDA."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor of a package that speaks DLPack."""
    return hasattr(value, "__dlpack__")


def on_device(tensor: Any, argument: int) -> tuple[Any, Allocation | None]:
    """``tensor`` as tvm-ffi's, labelled as on device 0, and the memory it spans (None if it is empty).

    ``argument`` is its position in the call. No byte is copied. Raises ValueError if it is not on the CPU.
    """
    import tvm_ffi

    kind, _ = tensor.__dlpack_device__()
    if kind != _CPU:
        where = getattr(tensor, "device", f"a device of DLPack's kind {int(kind)}")
        raise ValueError(
            f"Argument {argument} is a tensor on {where}, and the emulator runs over CPU tensors: "
            "pass tensor.cpu()."
        )
    offer, allocation = relabelled(tensor, argument)
    return tvm_ffi.from_dlpack(offer), allocation


def relabelled(tensor: Any, argument: int = -1) -> tuple[Any, Allocation | None]:
    """What offers a CPU ``tensor`` once, through DLPack, as of device 0, and the memory that it spans."""
    if getattr(tensor, "requires_grad", False):
        tensor = tensor.detach()
    capsule = tensor.__dlpack__()
    record = _DLTensor.from_address(_capsule_pointer(capsule, _CAPSULE))
    allocation = _span(record, argument, tensor)
    record.device.kind, record.device.index = _CUDA, 0
    return _Relabelled(capsule), allocation


def _span(record: _DLTensor, argument: int, owner: Any) -> Allocation | None:
    shape = record.shape[: record.ndim]
    if 0 in shape:
        return None
    if record.strides:
        strides = record.strides[: record.ndim]
    else:
        strides = [math.prod(shape[i + 1 :]) for i in range(record.ndim)]
    steps = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    item = record.bits * record.lanes // 8
    base = (record.data or 0) + record.byte_offset + item * sum(step for step in steps if step < 0)
    return Allocation(base, item * (sum(map(abs, steps)) + 1), argument, owner)


def bytes_of(tensor: Any) -> NDArray[np.uint8]:
    """The memory of a contiguous CPU tensor of torch, shared with it. Raises ValueError for another."""
    import torch

    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a tensor of strides {tensor.stride()} on {tensor.device}: a contiguous one on the CPU is wanted"
        )
    found: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found
