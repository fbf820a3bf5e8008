"""torch.cuda.CUDAGraph where a device is emulated: recorded launches run when the graph is replayed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode

from attn4.emulator.launch.driver import Emulation, emulated_device
from attn4.emulator.launch.errors import LaunchError
from attn4.emulator.launch.record import Launch

_ALLOCATIONS = ("aten::empty", "aten::new_empty")


class Graph:
    """Launches in their order. Arguments after the first are torch's, without a meaning here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.launches: list[Launch] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Record instead of running."""
        device = _device()
        if device.recording is not None:
            raise LaunchError("A graph is captured already.")
        self.launches = device.recording = []

    def capture_end(self) -> None:
        """Run again what is launched."""
        _device().recording = None

    def replay(self) -> None:
        """Run what was recorded, on the device of the block that this is called in."""
        device = _device()
        for launch in self.launches:
            device.submit(launch)

    def reset(self) -> None:
        """Forget what was recorded."""
        self.launches = []


class Capture:
    """torch.cuda.graph: a block whose launches go into a graph."""

    def __init__(self, graph: Graph, *_: Any, **__: Any) -> None:
        self._graph = graph
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._graph.capture_begin()
        self._stack.callback(self._graph.capture_end)
        self._stack.enter_context(_OnlyLaunches())  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _OnlyLaunches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what torch would compute while a graph is captured, which would not be there in a replay."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Run what computes no tensor: views, questions, and memory without contents."""
        schema = function._schema
        made = any("Tensor" in str(found.type) and found.alias_info is None for found in schema.returns)
        if (schema.is_mutable or made) and not schema.name.startswith(_ALLOCATIONS):
            raise LaunchError(
                f"torch's {schema.name} was called while a graph is captured: only launches are recorded."
            )
        return function(*arguments, **(options or {}))


def _device() -> Emulation:
    found = emulated_device()
    if found is None:
        raise LaunchError("A graph of an emulated device was used outside of every device block.")
    return found
