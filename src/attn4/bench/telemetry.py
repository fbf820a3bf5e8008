"""What the device did meanwhile (clock, power) and what everything ran on (versions)."""

from __future__ import annotations

import importlib
import platform
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import torch

from attn4 import __version__
from attn4.bench.rows import Condition, Setting, percentile

PERIOD = 0.02
"""Seconds between two readings of the clock."""


def setting(device: torch.device, command: str) -> Setting:
    """The place, the time and the versions of a run."""
    on_gpu = device.type == "cuda"
    nvml = _Nvml()
    driver = nvml.read("nvmlSystemGetDriverVersion") if on_gpu and nvml.present else None
    return Setting(
        device=torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        origin="measured",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        attn4=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if on_gpu else None,
        driver=None if driver is None else str(driver),
    )


class _Nvml:
    """NVIDIA's management library, of which every part may be missing: what cannot be read is None."""

    def __init__(self) -> None:
        self._library: Any = None
        self.present = False
        with suppress(ImportError, OSError):
            self._library = importlib.import_module("pynvml")
        if self._library is not None:
            with suppress(self._library.NVMLError):
                self._library.nvmlInit()
                self.present = True

    def read(self, function: str, *arguments: object) -> Any:
        """What the function returns, or None where it fails or is not there."""
        try:
            return getattr(self._library, function)(*arguments)
        except (AttributeError, self._library.NVMLError):
            return None

    def constant(self, name: str) -> Any:
        """A constant of the library."""
        return getattr(self._library, name)

    def handle(self, device: torch.device) -> Any:
        """The handle of a torch device: by UUID, for CUDA_VISIBLE_DEVICES renumbers torch's devices alone."""
        uuid = torch.cuda.get_device_properties(device).uuid
        found = self.read("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
        if found is None and self.read("nvmlDeviceGetCount") == 1:
            return self.read("nvmlDeviceGetHandleByIndex", 0)
        return found


class Recorder:
    """Reads the clock and the energy counter of a device for as long as it is entered.

    ``condition`` is complete after leaving. What NVML does not tell, and everything on a CPU, is unknown.
    """

    def __init__(self, device: torch.device) -> None:
        self.condition = Condition()
        self._nvml = _Nvml()
        watched = device.type == "cuda" and self._nvml.present
        self._handle = self._nvml.handle(device) if watched else None
        self._clocks: list[int] = []
        self._limited: bool | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._start: tuple[float, int | None] = (0.0, None)

    def __enter__(self) -> Self:
        if self._handle is not None:
            self._start = (time.perf_counter(), self._energy())
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is None:
            return
        self._stop.set()
        self._thread.join()
        (began, before), after = self._start, self._energy()
        seconds = time.perf_counter() - began
        power = None if before is None or after is None else (after - before) / 1e3 / seconds
        self.condition = Condition(
            clock_mhz=percentile(self._clocks, 50) if self._clocks else None,
            power_w=power,
            power_limited=self._limited,
        )

    def _energy(self) -> int | None:
        """Millijoules since the driver was loaded."""
        energy: int | None = self._nvml.read("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        return energy

    def _watch(self) -> None:
        domain = self._nvml.constant("NVML_CLOCK_SM")
        cap = self._nvml.constant("nvmlClocksThrottleReasonSwPowerCap")
        while not self._stop.wait(PERIOD):
            clock = self._nvml.read("nvmlDeviceGetClockInfo", self._handle, domain)
            if clock is not None:
                self._clocks.append(clock)
            reasons = self._nvml.read("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle)
            if reasons is not None:
                self._limited = bool(self._limited) or bool(reasons & cap)
