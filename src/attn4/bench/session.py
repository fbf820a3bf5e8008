"""One run: every case through every backend, checked, timed and written down, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from attn4.bench.attainable import attainable_tflops
from attn4.bench.cases import Case, flops
from attn4.bench.check import Oracle
from attn4.bench.gradients import GradientOracle, both_passes, kept_graphs
from attn4.bench.inputs import Inputs, input_sets, make_inputs
from attn4.bench.peers import Call, Peer
from attn4.bench.planned import device_machine, plan_summary
from attn4.bench.rows import Accuracy, Row, Setting, Status, Timing
from attn4.bench.table import OWN
from attn4.bench.telemetry import Recorder
from attn4.bench.timing import (
    Budget,
    CudaStopwatch,
    Entrant,
    HostStopwatch,
    Stopwatch,
    host_cost,
    interleave,
)

CPU_CACHE_BYTES = 0
"""On a CPU two input sets are enough: its figures are not compared with anything."""

CPU_FLOPS = 1e9
"""The largest case that a CPU is asked to do."""


class Judge(Protocol):
    """Says how far a result is from what it should be."""

    def check(self, result: Any, /) -> Accuracy:
        """The worst part of a result."""


@dataclass(frozen=True, slots=True)
class Session:
    """What stays the same in a run: the backends that are present with their versions, and the device."""

    device: torch.device
    setting: Setting
    budget: Budget
    present: tuple[tuple[Peer, str], ...]
    missing: tuple[tuple[Peer, str], ...] = ()

    @classmethod
    def open(cls, peers: Sequence[Peer], setting: Setting, device: torch.device, budget: Budget) -> Session:
        """Try to import every backend. Those that cannot be used are kept with the reason."""
        present, missing = [], []
        for peer in peers:
            if device.type not in peer.devices:
                missing.append((peer, f"needs a device of type {' or '.join(peer.devices)}"))
                continue
            try:
                present.append((peer, peer.version()))
            except Exception as error:  # noqa: BLE001 - a foreign package may fail to load in any way
                missing.append((peer, f"cannot be imported: {reason(error)}"))
        return cls(device, setting, budget, tuple(present), tuple(missing))

    def run(self, cases: Sequence[Case]) -> Iterator[list[Row]]:
        """The rows of each case in turn. ``ValueError`` for a case that is too large, before any runs."""
        for case in cases:
            _check_case(case, self.device)
        for case in cases:
            yield self.cell(case)

    def cell(self, case: Case) -> list[Row]:
        """One row for each backend on one case, those that are missing too."""
        with torch.no_grad():
            cell = _Cell(self, case)
            for peer, version in self.present:
                cell.enter(peer, version)
            return [*cell.time(), *self._missing_rows(case)]

    def _missing_rows(self, case: Case) -> list[Row]:
        return [
            Row(
                case=case,
                backend=peer.name,
                backend_version="",
                status="missing",
                setting=self.setting,
                detail=why,
            )
            for peer, why in self.missing
        ]


def _check_case(case: Case, device: torch.device) -> None:
    if device.type == "cpu" and flops(case) > CPU_FLOPS:
        raise ValueError(
            f"{case.name} is {flops(case):.1e} operations, and a CPU is asked for at most {CPU_FLOPS:.0e}: "
            "time it on a GPU, or choose the case set quick"
        )


def reason(error: BaseException) -> str:
    """An error in one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


@dataclass
class _Cell:
    """A case while it is run: its inputs, its oracle, the backends that are in, and the rows of all.

    ``calls`` holds for each backend what is timed, by the number of the input set.
    """

    session: Session
    case: Case
    inputs: list[Inputs] = field(init=False)
    oracle: Judge = field(init=False)
    rows: dict[str, Row] = field(default_factory=dict)
    calls: dict[str, tuple[Peer, Callable[[int], Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.session.device
        on_gpu = device.type == "cuda"
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else CPU_CACHE_BYTES
        number = input_sets(self.case, l2_bytes)
        self.inputs = [make_inputs(self.case, device, seed) for seed in range(number)]
        oracle = Oracle if self.case.direction == "forward" else GradientOracle
        self.oracle = oracle(self.case, self.inputs[0])

    def enter(self, peer: Peer, version: str) -> None:
        """Run a backend once and compare: what fails, is refused or is wrong gets a row without a time."""
        row = Row(
            case=self.case,
            backend=peer.name,
            backend_version=version,
            status="timed",
            setting=self.session.setting,
        )
        refusal = peer.refuses(self.case)
        if refusal is not None:
            self.rows[peer.name] = replace(row, status="unsupported", detail=refusal)
            return
        try:
            call = self._timed(peer, peer.prepare(self.case, self.inputs[0]))
            accuracy = self._check(peer, call)
            plan = plan_summary(self.case, self.session.device) if peer.name == OWN else None
        except Exception as error:  # noqa: BLE001 - one backend's failure must not end the others' run
            status: Status = "unsupported" if isinstance(error, NotImplementedError) else "failed"
            self.rows[peer.name] = replace(row, status=status, detail=reason(error))
            return
        if accuracy.passed:
            self.rows[peer.name] = replace(row, accuracy=accuracy, plan=plan)
            self.calls[peer.name] = (peer, call)
            return
        detail = f"error {accuracy.error:.3g} where {accuracy.allowed:.3g} is allowed"
        self.rows[peer.name] = replace(row, status="wrong", accuracy=accuracy, detail=detail, plan=plan)

    def _timed(self, peer: Peer, call: Call) -> Callable[[int], Any]:
        inputs = self.inputs
        if self.case.direction == "forward":
            return lambda index: call(inputs[index])
        if self.case.direction == "both":
            return both_passes(call, inputs)
        with peer.scope():
            return kept_graphs(call, inputs)

    def _check(self, peer: Peer, call: Callable[[int], Any]) -> Accuracy:
        with peer.scope():
            return self.oracle.check(call(0))

    def time(self) -> list[Row]:
        """The rows of the cell, those of the backends that are in with their times."""
        if self.calls:
            # A thread that reads the clock would take the interpreter from a host whose cost is measured.
            recorder = Recorder(self.session.device)
            with nullcontext() if self.case.host else recorder:
                timings = self._timings()
            bound = self._bound(recorder.condition.clock_mhz)
            for name, timing in timings.items():
                self.rows[name] = replace(
                    self.rows[name], timing=timing, condition=recorder.condition, attainable_tflops=bound
                )
        return list(self.rows.values())

    def _bound(self, clock_mhz: float | None) -> float | None:
        device = self.session.device
        model = device_machine(device)
        if model is None or self.case.host:
            return None
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        return attainable_tflops(self.case, model, sms, clock_mhz)

    def _timings(self) -> dict[str, Timing]:
        stopwatch: Stopwatch = CudaStopwatch() if self.session.device.type == "cuda" else HostStopwatch()
        entrants = [Entrant(peer.name, call, peer.scope) for peer, call in self.calls.values()]
        take = host_cost if self.case.host else interleave
        return take(entrants, stopwatch, self.session.budget, len(self.inputs))
