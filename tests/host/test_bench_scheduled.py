"""attn4 under other schedules, with kernels that only record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn4.bench import scheduled
from attn4.bench.cases import CAUSAL, Case
from attn4.bench.inputs import make_inputs
from attn4.bench.peers import PEERS, select
from attn4.machine import machine
from attn4.ops import check, gpu, sort_batches, workspace

PACKED = Case(case_set="test", head_dim=64, heads=2, kv_heads=2, seqlens=(3, 40), mask=CAUSAL, packed=True)
DENSE = Case(case_set="test", head_dim=64, heads=2, kv_heads=2, seqlens=(40, 40), mask=CAUSAL)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple[Any, ...]]]:
    """(plan, arguments) of each launch on an H200 that lives in host memory."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def kernel_for(plan: Any) -> Any:
        return lambda *arguments: calls.append((plan, arguments))

    for module in (gpu, scheduled, sort_batches):
        monkeypatch.setattr(module, "kernel_for", kernel_for)
    for module in (gpu, sort_batches):
        monkeypatch.setattr(module, "machine_of", lambda device: machine("sm_90a"))
    for module in (check, sort_batches):
        monkeypatch.setattr(module, "backend_of", lambda name, device: "gpu")
    monkeypatch.setattr(gpu, "sm_count", lambda device: 132)
    monkeypatch.setattr(workspace, "counter", lambda device: torch.zeros(2, dtype=torch.int32))
    return calls


def run(name: str, case: Case) -> None:
    (peer,) = select((name,))
    inputs = make_inputs(case, torch.device("cpu"), 0)
    call = peer.prepare(case, inputs)
    call(inputs)
    call(inputs)


@pytest.mark.parametrize(
    ("name", "order", "dynamic"), [("attn4-dealt", "linear", False), ("attn4-linear", "linear", True)]
)
@pytest.mark.parametrize("case", [PACKED, DENSE], ids=["packed", "dense"])
def test_other_schedules_are_other_plans(launched, name, order, dynamic, case):
    run(name, case)
    assert len(launched) == 2
    for plan, arguments in launched:
        assert (plan.schedule.order, plan.schedule.dynamic) == (order, dynamic)
        assert (arguments[-2] is not None) == dynamic


@pytest.mark.parametrize(("name", "passes"), [("attn4-sorted", 1), ("attn4-sorting", 3)])
def test_metadata_is_made_once_or_for_each_call(launched, name, passes):
    run(name, PACKED)
    sorting = [arguments for plan, arguments in launched if plan.kernel == "sort_batches"]
    attending = [(plan, arguments) for plan, arguments in launched if plan.kernel == "attention"]
    assert (len(sorting), len(attending)) == (passes, 2)
    for plan, arguments in attending:
        assert plan.schedule.sorted_batches
        assert arguments[12] is sorting[0][0]


def test_launch_control_is_for_blackwell(launched, monkeypatch):
    with pytest.raises(ValueError, match="no forward pass on Blackwell"):
        run("attn4-takeover", DENSE)
    monkeypatch.setattr(gpu, "machine_of", lambda device: machine("sm_100a"))
    run("attn4-takeover", DENSE)
    for plan, arguments in launched:
        assert plan.schedule.launch_control
        assert arguments[-2] is None


def test_they_take_part_only_when_they_are_named():
    assert not {peer.name for peer in select(None)} & {peer.name for peer in PEERS if not peer.usual}
    (peer,) = select(("attn4-sorted",))
    assert peer.refuses(DENSE)
    assert peer.refuses(PACKED) is None
