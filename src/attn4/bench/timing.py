"""How time is taken: backends in turns, a few calls each, on a device that never waits for the host.

A turn is one sample: the mean of some consecutive calls of one backend. Turns of all backends follow each
other, in each round in another order, so that a clock that falls under the power limit falls for all.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, Protocol

import torch

from attn4.bench.rows import Timing, percentile

_cuda: Any = torch.cuda

FEWEST_ROUNDS, MOST_ROUNDS = 5, 1_000
MOST_LAUNCHES = 64
"""Calls of a turn: far fewer than the 1024 launches that a stream holds before the host has to wait."""

HOST_REPEATS, HOST_CALLS = 30, 200
"""Repetitions of the host's cost, and calls in one: some backends launch several kernels a call."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A backend in a cell: ``call(i)`` runs it on input set ``i`` and ``scope()`` is entered around calls."""

    name: str
    call: Callable[[int], object]
    scope: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds of device time for all backends of a cell together, and microseconds of one turn."""

    seconds: float = 1.5
    turn_us: float = 500.0
    warmup_share: float = 0.2


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one call on the device, and of the host to issue it."""

    device: float
    host: float


@dataclass(frozen=True, slots=True)
class Turn:
    """``launches`` consecutive calls of one backend."""

    entrant: Entrant
    launches: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one call, the mean of a turn. ``exposed``: the device may have waited for the host in it."""

    name: str
    seconds: float
    exposed: bool = False


class Stopwatch(Protocol):
    """Takes time on one kind of device. ``asynchronous``: a call returns before the device has done it."""

    @property
    def asynchronous(self) -> bool:
        """Does the host go on while the device works?"""

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked."""

    def cost(self, entrant: Entrant, sets: Iterator[int]) -> Cost:
        """What a call costs, roughly."""

    def run(self, rounds: Sequence[Sequence[Turn]], sets: Iterator[int], ahead: float) -> list[Sample]:
        """All turns in order; the host needs about ``ahead`` seconds to issue a round."""


class HostStopwatch:
    """For a CPU, where a call is over when it returns."""

    asynchronous = False

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""

    def cost(self, entrant: Entrant, sets: Iterator[int]) -> Cost:
        """One call, timed."""
        with entrant.scope():
            start = time.perf_counter()
            entrant.call(next(sets))
            elapsed = time.perf_counter() - start
        return Cost(device=elapsed, host=elapsed)

    def run(self, rounds: Sequence[Sequence[Turn]], sets: Iterator[int], ahead: float) -> list[Sample]:
        """Wall time of each turn."""
        del ahead
        samples = []
        for turn in (turn for turns in rounds for turn in turns):
            with turn.entrant.scope():
                start = time.perf_counter()
                for _ in range(turn.launches):
                    turn.entrant.call(next(sets))
                elapsed = time.perf_counter() - start
            samples.append(Sample(turn.entrant.name, elapsed / turn.launches))
        return samples


class CudaStopwatch:
    """CUDA events around each turn, with enough work queued that the host's cost stays out of the figure.

    The device spins (``torch.cuda._sleep``) while the host gets ahead. When the host is done with a turn
    whose first event has already passed, the device had caught up and may have waited: that sample is
    exposed, and the next rounds begin with a longer spin.
    """

    SPIN_CLOCK_HZ = 2.0e9
    """Not under the clock of any device, so that a spin lasts at least as long as asked."""

    FIRST_LEAD, LONGEST_SPIN = 2e-3, 0.1

    asynchronous = True

    def synchronize(self) -> None:
        """Wait for the current device."""
        torch.cuda.synchronize()

    def cost(self, entrant: Entrant, sets: Iterator[int]) -> Cost:
        """Three calls behind a spin of 2 ms."""
        calls = 3
        start, end = _event(), _event()
        torch.cuda.synchronize()
        self._spin(self.FIRST_LEAD)
        with entrant.scope():
            start.record()
            issued = time.perf_counter()
            for _ in range(calls):
                entrant.call(next(sets))
            host = time.perf_counter() - issued
            end.record()
        end.synchronize()
        return Cost(device=start.elapsed_time(end) / 1e3 / calls, host=host / calls)

    def run(self, rounds: Sequence[Sequence[Turn]], sets: Iterator[int], ahead: float) -> list[Sample]:
        """Queue every turn, then read all events."""
        taken = self._queue(rounds, sets, ahead)
        torch.cuda.synchronize()
        return [
            Sample(turn.entrant.name, start.elapsed_time(end) / 1e3 / turn.launches, exposed)
            for turn, start, end, exposed in taken
        ]

    def _queue(
        self, rounds: Sequence[Sequence[Turn]], sets: Iterator[int], ahead: float
    ) -> list[tuple[Turn, Any, Any, bool]]:
        taken = []
        spin = 0.0
        self._spin(max(self.FIRST_LEAD, 2 * ahead))
        for turns in rounds:
            self._spin(spin)
            caught_up = False
            for turn in turns:
                start, end = _event(), _event()
                with turn.entrant.scope():
                    start.record()
                    for _ in range(turn.launches):
                        turn.entrant.call(next(sets))
                    end.record()
                exposed = bool(start.query())
                caught_up |= exposed
                taken.append((turn, start, end, exposed))
            if caught_up:
                spin = min(self.LONGEST_SPIN, max(1.25 * ahead, 2 * spin))
        return taken

    def _spin(self, seconds: float) -> None:
        if seconds > 0:
            _cuda._sleep(int(seconds * self.SPIN_CLOCK_HZ))


def _event() -> Any:
    return _cuda.Event(enable_timing=True)


def interleave(
    entrants: Sequence[Entrant], stopwatch: Stopwatch, budget: Budget, sets: int
) -> dict[str, Timing]:
    """Time the backends in turns; each call uses the next of ``sets`` inputs. Backend -> its percentiles."""
    order = (number % sets for number in count())
    for entrant in entrants:
        stopwatch.cost(entrant, order)
    costs = {entrant.name: stopwatch.cost(entrant, order) for entrant in entrants}
    turns = [Turn(entrant, launches(costs[entrant.name], budget)) for entrant in entrants]
    device = sum(turn.launches * costs[turn.entrant.name].device for turn in turns)
    host = sum(turn.launches * costs[turn.entrant.name].host for turn in turns)
    # Where the host needs longer than the device, each round is preceded by a spin about as long.
    round_seconds = max(device, 2 * host) if stopwatch.asynchronous else device
    stopwatch.run(rounds(turns, budget.seconds * budget.warmup_share / round_seconds, fewest=1), order, host)
    samples = stopwatch.run(rounds(turns, budget.seconds / round_seconds, FEWEST_ROUNDS), order, host)
    return {turn.entrant.name: summary(turn, samples) for turn in turns}


def host_cost(
    entrants: Sequence[Entrant], stopwatch: Stopwatch, budget: Budget, sets: int
) -> dict[str, Timing]:
    """What a call costs the host: many calls that nobody waits for, repeated, the backends in turns.

    The calls of one repetition stay under the launches that a stream holds, so that none waits for the
    device.
    """
    order = (number % sets for number in count())
    costs = {}
    for entrant in entrants:
        stopwatch.cost(entrant, order)
        costs[entrant.name] = stopwatch.cost(entrant, order)
    each = budget.seconds / len(entrants) / HOST_REPEATS
    times: dict[str, list[float]] = {entrant.name: [] for entrant in entrants}
    calls = {name: max(1, min(HOST_CALLS, int(each / cost.host))) for name, cost in costs.items()}
    for _ in range(HOST_REPEATS):
        for entrant in entrants:
            times[entrant.name].append(_issue(entrant, stopwatch, order, calls[entrant.name]))
    return {name: _timing(taken, calls[name]) for name, taken in times.items()}


def _issue(entrant: Entrant, stopwatch: Stopwatch, sets: Iterator[int], calls: int) -> float:
    """Microseconds of the host for one of ``calls`` calls."""
    stopwatch.synchronize()
    collecting = gc.isenabled()
    gc.disable()
    with entrant.scope():
        start = time.perf_counter()
        for _ in range(calls):
            entrant.call(next(sets))
        elapsed = time.perf_counter() - start
    if collecting:
        gc.enable()
    stopwatch.synchronize()
    return elapsed / calls * 1e6


def launches(cost: Cost, budget: Budget) -> int:
    """Calls in one turn: as many as fill ``turn_us``, at least one."""
    wanted = math.ceil(budget.turn_us / 1e6 / max(cost.device, 1e-9))
    return max(1, min(MOST_LAUNCHES, wanted))


def rounds(turns: Sequence[Turn], wanted: float, fewest: int) -> list[list[Turn]]:
    """About ``wanted`` rounds over all turns, each in an order drawn at random, the same in every run.

    A rotation would keep who follows whom, and at the power limit a kernel that follows a slow one finds
    the higher clock.
    """
    number = max(fewest, min(MOST_ROUNDS, int(wanted)))
    draw = Random(0)
    return [draw.sample(turns, len(turns)) for _ in range(number)]


def summary(turn: Turn, samples: Sequence[Sample]) -> Timing:
    """Percentiles of one backend's samples, the exposed ones left out unless that leaves too few."""
    own = [sample for sample in samples if sample.name == turn.entrant.name]
    clean = [sample for sample in own if not sample.exposed]
    host_bound = len(clean) < min(FEWEST_ROUNDS, len(own))
    times = [sample.seconds * 1e6 for sample in (own if host_bound else clean)]
    return _timing(times, turn.launches, host_bound)


def _timing(times_us: Sequence[float], calls: int, host_bound: bool = False) -> Timing:
    p20, p50, p80 = (percentile(times_us, percent) for percent in (20, 50, 80))
    return Timing(p20, p50, p80, samples=len(times_us), launches=calls, host_bound=host_bound)
