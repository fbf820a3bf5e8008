"""Streams, CUDA graphs, devices, and what a GPU call refuses."""

import gc
import threading

import pytest
import torch

from attn4 import flash_attn_func, flash_attn_varlen_func
from attn4.ops import workspace
from cases import case
from judge import eager, judge, oracle
from poison import poisoned_memory

DYNAMIC = "packed self 128 causal"
"""A kernel that takes its tiles from a counter."""


def _delay():
    """Some milliseconds of work on the current stream."""
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(10):
        x = x @ x / 4096
    return x


@pytest.mark.fault("G6")
@pytest.mark.parametrize("name", ["dim 128 full", DYNAMIC])
def test_launch_waits_for_its_stream(name):
    named = case(name)
    inputs = named.inputs("cuda")
    expected, _ = named.run(inputs)
    late = torch.zeros_like(inputs.q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _delay()
        late.copy_(inputs.q)
        out, _ = named.run(inputs.with_tensors(late, inputs.k, inputs.v))
    stream.synchronize()
    assert torch.equal(out, expected)


def test_streams_side_by_side_keep_counters_of_their_own():
    named = case(DYNAMIC)
    inputs = named.inputs("cuda")
    expected, _ = named.run(inputs)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(25):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(named.run(inputs)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in results)
    assert all(counter.count_nonzero() == 0 for counter in workspace._counters.values())


def _key_gradients(named, inputs, dout):
    """dK and dV, which are the same bits in every run."""
    leaves = [x.detach().requires_grad_() for x in (inputs.k, inputs.v)]
    out, _ = named.run(inputs.with_tensors(inputs.q, *leaves))
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.fault("G6")
@pytest.mark.parametrize("name", ["dim 128 full", DYNAMIC])
def test_a_backward_pass_waits_for_its_stream(name):
    named = case(name)
    inputs = named.inputs("cuda")
    dout = torch.randn_like(inputs.q)
    expected = _key_gradients(named, inputs, dout)
    late = torch.zeros_like(dout)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _delay()
        late.copy_(dout)
        found = _key_gradients(named, inputs, late)
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_backward_passes_side_by_side_keep_memory_of_their_own():
    """Counters, statistics of rows and sums of dQ."""
    named = case(DYNAMIC)
    inputs = named.inputs("cuda")
    dout = torch.randn_like(inputs.q)
    expected = _key_gradients(named, inputs, dout)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(_key_gradients(named, inputs, dout))
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for found in results for x, y in zip(found, expected, strict=True))
    assert all(counter.count_nonzero() == 0 for counter in workspace._counters.values())


def test_threads_share_a_stream():
    named = case(DYNAMIC)
    inputs = named.inputs("cuda")
    expected, _ = named.run(inputs)
    results = []

    def work():
        results.extend(named.run(inputs)[0] for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 80
    assert all(torch.equal(out, expected) for out in results)


@pytest.mark.fault("C14")
def test_graph_replays_follow_the_lengths_on_the_device():
    """Captured with short sequences and a small hint, replayed with long ones."""
    named = case(DYNAMIC)
    inputs = named.inputs("cuda")
    total = inputs.q.shape[0]
    q, k, v = (x.nan_to_num(0.0) for x in (inputs.q, inputs.k, inputs.v))
    cu_seqlens = inputs.lengths["cu_seqlens_q"]
    short = torch.arange(cu_seqlens.numel(), dtype=torch.int32, device="cuda")
    static = short.clone()

    def attend(lengths):
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=1, max_seqlen_k=1,
            causal=True, return_lse=True,
        )  # fmt: skip

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        attend(static)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(static)
    gc.collect()
    skewed = torch.tensor([0, *range(10, 70, 10), total], dtype=torch.int32, device="cuda")
    for lengths in (cu_seqlens, short, skewed, cu_seqlens):
        static.copy_(lengths)
        out.fill_(torch.nan), lse.fill_(torch.nan)
        graph.replay()
        expected_out, expected_lse = attend(lengths.clone())
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)


def test_graph_replays_beside_ordinary_calls():
    """A graph's counter is its own: replays on one stream do not disturb calls on another."""
    named = case(DYNAMIC)
    inputs = named.inputs("cuda")
    expected, _ = named.run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = named.run(inputs)
    stream = torch.cuda.Stream()
    results = []
    for _ in range(20):
        with torch.cuda.stream(stream):
            graph.replay()
        results.append(named.run(inputs)[0])
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    assert all(torch.equal(out, expected) for out in results)


def test_results_live_on_the_second_gpu_when_the_inputs_do():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    named = case(DYNAMIC)
    inputs = named.inputs("cuda:1")
    assert torch.cuda.current_device() == 0
    with poisoned_memory():
        out, lse = named.run(inputs)
    assert out.device == lse.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    judge(out, lse, oracle(named, inputs), eager(named, inputs))


def test_reference_backend_runs_on_the_gpu_with_gradients():
    named = case("dim 64 causal")
    inputs = named.inputs("cuda")
    q = inputs.q.requires_grad_()
    out = flash_attn_func(q, inputs.k, inputs.v, causal=True, backend="reference")
    out.float().sum().backward()
    assert q.grad.isfinite().all()


def _packed(**keywords):
    q = torch.randn(9, 2, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([0, 3, 9], device="cuda", dtype=torch.int32)
    return flash_attn_varlen_func(q, q, q, **{"cu_seqlens_q": lengths, "cu_seqlens_k": lengths} | keywords)


@pytest.mark.parametrize(
    ("keywords", "word"),
    [
        ({"max_seqlen_q": torch.tensor(6)}, "max_seqlen_q is a tensor"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 9], dtype=torch.int32)}, "is on cpu"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 9])}, "int64"),
        ({"seqused_k": torch.tensor([1], dtype=torch.int32)}, "seqused_k"),
    ],
)
def test_bad_lengths_are_refused_before_a_launch(keywords, word):
    with pytest.raises(ValueError, match=word):
        _packed(**keywords)


def test_float32_and_mixed_devices_are_refused():
    q = torch.randn(1, 16, 2, 64, device="cuda")
    with pytest.raises(NotImplementedError, match="float32"):
        flash_attn_func(q, q, q)
    q = q.bfloat16()
    with pytest.raises(ValueError, match="cpu"):
        flash_attn_func(q, q.cpu(), q)


def test_a_steady_call_allocates_its_results_and_nothing_else():
    named = case("dim 64 full")
    inputs = named.inputs("cuda")
    named.run(inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    kept = [named.run(inputs) for _ in range(10)]
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2 * len(kept)
