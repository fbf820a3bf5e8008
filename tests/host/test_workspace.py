"""The tile counter: one for each stream, and one of its own for each capture."""

import pytest
import torch

from attn4.ops import workspace


class Gpu:
    stream = 0
    capturing = False


@pytest.fixture
def device(monkeypatch):
    state = Gpu()
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state.capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: state.stream, raising=False)
    monkeypatch.setattr(workspace, "_zeros", lambda device: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(workspace, "_counters", {})
    return state


def test_a_stream_keeps_its_counter(device):
    assert workspace.counter(0) is workspace.counter(0)


def test_streams_and_devices_have_counters_of_their_own(device):
    first = workspace.counter(0)
    assert workspace.counter(1) is not first
    device.stream = 7
    assert workspace.counter(0) is not first
    device.stream = 0
    assert workspace.counter(0) is first


def test_a_capture_gets_a_fresh_counter_and_leaves_none_behind(device):
    device.stream = 7
    kept = workspace.counter(0)
    device.capturing = True
    first, second = workspace.counter(0), workspace.counter(0)
    assert len({id(x) for x in (kept, first, second)}) == 3
    device.capturing = False
    assert workspace.counter(0) is kept
