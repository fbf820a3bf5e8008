"""What torch.cuda says where a device is emulated, and CPU tensors that count as tensors of the device."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from attn4.emulator.launch.device import Chip
from attn4.emulator.launch.driver import Emulation, emulated_chip, emulated_device
from attn4.emulator.launch.errors import LaunchError
from attn4.emulator.launch.patches import Patch
from attn4.emulator.launch.record import Allocation
from attn4.emulator.launch.torch_device import names_cuda
from attn4.emulator.launch.torch_graph import Capture, Graph


class Stream:
    """The only stream, or one that cannot be told from it: whatever is launched has ended already."""

    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0
        self.stream_id = 0

    @property
    def device(self) -> torch.device:
        """Device 0."""
        return torch.device("cuda", 0)

    def query(self) -> bool:
        """Everything is done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event if event is not None else Event()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """An event that has happened."""

    cuda_event = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing to note: launches end before they return."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, _end: Any) -> float:
        """NaN: an emulated launch has no duration."""
        return math.nan


class _Selected:
    """torch.cuda.device and torch.cuda.stream: blocks that select what is selected already."""

    def __init__(self, selected: Any = None) -> None:
        self.selected = selected

    def __enter__(self) -> Any:
        return self.selected

    def __exit__(self, *_: object) -> None:
        pass


def _properties(chip: Chip) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=chip.name,
        major=chip.capability[0],
        minor=chip.capability[1],
        multi_processor_count=chip.sms,
        shared_memory_per_block_optin=chip.shared_memory,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_multiprocessor=chip.shared_memory + 1024,
        L2_cache_size=chip.l2_bytes,
        total_memory=chip.memory_bytes,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )


def _only_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if index > 0:
        raise LaunchError(f"Device {index} was selected: one device is emulated, number 0.")


_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _only_device,
    "get_device_capability": lambda *_, **__: emulated_chip().capability,
    "get_device_name": lambda *_, **__: emulated_chip().name,
    "get_device_properties": lambda *_, **__: _properties(emulated_chip()),
    "get_arch_list": lambda: [emulated_chip().arch.rstrip("a")],
    "current_stream": lambda *_, **__: Stream(),
    "default_stream": lambda *_, **__: Stream(),
    "stream": _Selected,
    "synchronize": lambda *_, **__: None,
    "empty_cache": lambda: None,
    "mem_get_info": lambda *_, **__: (emulated_chip().memory_bytes,) * 2,
    "reset_peak_memory_stats": lambda *_, **__: None,
    "is_current_stream_capturing": lambda: False,
    "manual_seed": torch.default_generator.manual_seed,
    "manual_seed_all": lambda *_, **__: None,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
}

_CLASSES: dict[str, type] = {
    "Stream": Stream,
    "Event": Event,
    "device": _Selected,
    "CUDAGraph": Graph,
    "graph": Capture,
}


def patches() -> Iterable[Patch]:
    """torch.cuda, and of tensors ``is_cuda``, ``data_ptr`` and ``record_stream``."""
    for name, answer in _ANSWERS.items():
        yield Patch(torch.cuda, name, partial(_either, answer))
    for name in ("range_push", "range_pop", "mark"):
        yield Patch(torch.cuda.nvtx, name, partial(_either, lambda *_, **__: None))
    yield Patch(torch, "set_default_device", _default_device)
    for name, ours in _CLASSES.items():
        yield Patch(torch.cuda, name, partial(_either_class, ours))
    yield Patch(torch.Tensor, "is_cuda", _is_cuda)
    yield Patch(torch.Tensor, "data_ptr", _data_ptr)
    yield Patch(torch.Tensor, "record_stream", lambda original: _either(original, lambda *_, **__: None))


def _either(answer: Callable[..., Any], original: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if emulated_device() is None:
            return original(*arguments, **options)
        return answer(*arguments, **options)

    return call


def _either_class(ours: type, original: Any) -> type:
    """A class that makes instances of one of the two, and takes both for its own."""

    class Either(type(original)):  # type: ignore[misc]
        def __call__(cls, *arguments: Any, **options: Any) -> Any:
            return (original if emulated_device() is None else ours)(*arguments, **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, ours))

    made: type = Either(original.__name__, (original,), {"__doc__": original.__doc__})
    return made


def _default_device(original: Any) -> Callable[[Any], None]:
    def choose(device: Any) -> None:
        original("cpu" if emulated_device() is not None and names_cuda(device) else device)

    return choose


def _is_cuda(original: Any) -> property:
    """True of plain CPU tensors too; others, such as fake ones, know better."""

    def read(tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        return (plain and emulated_device() is not None) or bool(original.__get__(tensor, type(tensor)))

    return property(read)


def _data_ptr(original: Any) -> Callable[[torch.Tensor], int]:
    """An address that is given away may come back as a pointer: its memory is the device's from then on."""

    def read(tensor: torch.Tensor) -> int:
        address = int(original(tensor))
        device = emulated_device()
        if device is not None and address and tensor.device.type == "cpu":
            _lend(device, tensor)
        return address

    return read


def _lend(device: Emulation, tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    device.lend(Allocation(storage.data_ptr(), storage.nbytes()), lambda: not reference.expired())
