"""Taking time: turns, percentiles, and a device that must never wait for the host."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from itertools import count, pairwise
from statistics import quantiles
from typing import Any

import pytest

from attn4.bench import timing
from attn4.bench.cases import cases, tensor_bytes
from attn4.bench.inputs import input_sets
from attn4.bench.rows import percentile
from attn4.bench.timing import (
    Budget,
    Cost,
    CudaStopwatch,
    Entrant,
    HostStopwatch,
    Sample,
    Turn,
    host_cost,
    interleave,
    launches,
    rounds,
    summary,
)


class SimulatedDevice:
    """A host and a device with a queue between them, in virtual seconds; stands in for ``torch.cuda``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free_at = 0.0
        self.order: list[str] = []

    def launch(self, name: str, host: float, device: float) -> None:
        self.order.append(name)
        self.now += host
        self.free_at = max(self.free_at, self.now) + device

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)

    def _sleep(self, cycles: int) -> None:
        self.free_at = max(self.free_at, self.now) + cycles / CudaStopwatch.SPIN_CLOCK_HZ

    def Event(self, enable_timing: bool) -> SimulatedEvent:
        assert enable_timing
        return SimulatedEvent(self)


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.at = float("nan")

    def record(self) -> None:
        self.at = max(self.device.free_at, self.device.now)

    def query(self) -> bool:
        return self.at <= self.device.now

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    simulated = SimulatedDevice()
    monkeypatch.setattr(timing, "_cuda", simulated)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", simulated.synchronize)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: simulated.now)
    return simulated


def entrant(device: SimulatedDevice, name: str, host: float, seconds: float) -> Entrant:
    return Entrant(name, lambda _: device.launch(name, host, seconds), nullcontext)


def test_kernels_shorter_than_their_launch_are_timed_without_the_host(device: SimulatedDevice) -> None:
    entrants = [entrant(device, "a", 40e-6, 10e-6), entrant(device, "b", 60e-6, 5e-6)]
    result = interleave(entrants, CudaStopwatch(), Budget(seconds=0.2), sets=4)
    assert result["a"].p50_us == pytest.approx(10)
    assert result["b"].p80_us == pytest.approx(5)
    assert not result["a"].host_bound
    assert result["a"].samples >= timing.FEWEST_ROUNDS


def test_without_a_spin_the_host_shows_and_is_reported(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaStopwatch, "_spin", lambda *_: None)
    result = interleave([entrant(device, "a", 40e-6, 10e-6)], CudaStopwatch(), Budget(seconds=0.2), sets=4)
    assert result["a"].p50_us == pytest.approx(40, rel=0.1)
    assert result["a"].host_bound


def test_long_kernels_need_no_spin_between_rounds(device: SimulatedDevice) -> None:
    entrants = [entrant(device, "a", 10e-6, 400e-6), entrant(device, "b", 10e-6, 300e-6)]
    spins: list[int] = []
    sleep = device._sleep
    device._sleep = lambda cycles: (spins.append(cycles), sleep(cycles))[1]  # type: ignore[method-assign]
    result = interleave(entrants, CudaStopwatch(), Budget(seconds=0.5), sets=2)
    assert result["a"].p50_us == pytest.approx(400)
    # Two calls of cost() for each backend, the warm-up and the measurement.
    assert len(spins) == 6


def test_each_round_has_every_backend_once_and_each_follows_each_other_as_often() -> None:
    turns = [Turn(Entrant(name, lambda _: None, nullcontext), 1) for name in "abc"]
    names = ["".join(turn.entrant.name for turn in row) for row in rounds(turns, 900.7, fewest=2)]
    assert all(sorted(row) == ["a", "b", "c"] for row in names)
    following = Counter(pair for row in names for pair in pairwise(row))
    assert len(following) == 6
    assert all(240 < count < 360 for count in following.values())
    assert names == ["".join(turn.entrant.name for turn in row) for row in rounds(turns, 900.7, fewest=2)]
    assert len(rounds(turns, 0.0, fewest=5)) == 5
    assert len(rounds(turns, 1e9, fewest=5)) == timing.MOST_ROUNDS


def test_backends_alternate_at_the_granularity_of_a_turn(device: SimulatedDevice) -> None:
    entrants = [entrant(device, "a", 1e-6, 1e-3), entrant(device, "b", 1e-6, 1e-3)]
    interleave(entrants, CudaStopwatch(), Budget(seconds=0.05, turn_us=2000), sets=2)
    tail = "".join(device.order[-16:])
    # Turns of two, in rounds of four.
    assert {tail[at : at + 4] for at in range(0, 16, 4)} <= {"aabb", "bbaa"}


def test_consecutive_calls_take_different_input_sets() -> None:
    taken: list[int] = []
    entrants = [Entrant(name, taken.append, nullcontext) for name in "ab"]
    interleave(entrants, HostStopwatch(), Budget(seconds=1e-4, turn_us=1e-3), sets=3)
    assert all((one + 1) % 3 == two for one, two in pairwise(taken))


def test_a_turn_is_as_many_calls_as_fill_it() -> None:
    assert launches(Cost(device=170e-6, host=0), Budget(turn_us=500)) == 3
    assert launches(Cost(device=4e-3, host=0), Budget(turn_us=500)) == 1
    assert launches(Cost(device=1e-7, host=0), Budget(turn_us=500)) == timing.MOST_LAUNCHES


def test_exposed_samples_are_left_out() -> None:
    turn = Turn(Entrant("a", lambda _: None, nullcontext), 2)
    clean = [Sample("a", 1e-5) for _ in range(6)]
    other = [Sample("b", 1e-3) for _ in range(6)]
    result = summary(turn, [*clean, *other, Sample("a", 1e-4, exposed=True)])
    assert (result.p80_us, result.samples, result.host_bound) == (pytest.approx(10), 6, False)


def test_scopes_are_entered_once_a_turn() -> None:
    entered = count()

    def scope() -> Any:
        next(entered)
        return nullcontext()

    turn = Turn(Entrant("a", lambda _: None, scope), 7)
    HostStopwatch().run([[turn], [turn]], count(), 0.0)
    assert next(entered) == 2


def test_host_cost_is_that_of_issuing_alone(device: SimulatedDevice) -> None:
    entrants = [entrant(device, "a", 4e-6, 30e-6), entrant(device, "b", 9e-6, 1e-6)]
    result = host_cost(entrants, CudaStopwatch(), Budget(seconds=1.0), sets=2)
    assert result["a"].p50_us == pytest.approx(4)
    assert result["b"].p50_us == pytest.approx(9)
    assert result["a"].launches == timing.HOST_CALLS


@pytest.mark.parametrize("percent", [20, 50, 80])
def test_percentiles_interpolate_like_those_of_the_standard_library(percent: int) -> None:
    values = [5.0, 1.0, 4.0, 2.0, 8.0, 9.0, 3.5]
    expected = quantiles(values, n=100, method="inclusive")[percent - 1]
    assert percentile(values, percent) == pytest.approx(expected)


def test_percentiles_of_one_value_and_of_none() -> None:
    assert percentile([3.0], 20) == 3.0
    assert percentile([], 50) != percentile([], 50)


def test_input_sets_exceed_the_cache() -> None:
    large, small = cases("forward")[0], cases("host")[0]
    assert input_sets(large, l2_bytes=50 * 2**20) == 2
    assert input_sets(small, l2_bytes=2**20) * tensor_bytes(small) > 2 * 2**20
