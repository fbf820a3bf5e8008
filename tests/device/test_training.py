"""Gradients by PyTorch's ways: CUDA graphs, devices, compiled graphs, autocast, checkpoints, memory.

Deterministic passes, so that the same bits are expected of each.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from attn4 import flash_attn_func, flash_attn_varlen_func
from cases import case
from judge import same

NAMED = case("dim 128 causal")
PACKED = case("packed self 128 causal")
SANITIZED = Path(__file__).parent / "sanitized.py"


def attention(q, k, v):
    """The listed case's call, so that its kernels are in the bundle."""
    return flash_attn_func(q, k, v, causal=True, deterministic=True, return_lse=True)


def fresh(seed=0, device="cuda", rows=None):
    """Leaves and an incoming gradient."""
    inputs = NAMED.inputs(device, seed=seed)
    q = inputs.q[:, :rows].clone(memory_format=torch.contiguous_format)
    leaves = [x.requires_grad_() for x in (q, inputs.k, inputs.v)]
    generator = torch.Generator(device).manual_seed(seed)
    return leaves, torch.randn(q.shape, generator=generator, device=device, dtype=q.dtype)


def passes(leaves, dout, function=attention):
    """Out, LSE and the gradients of out and of the sum of the LSE."""
    out, lse = function(*leaves)
    return (out, lse, *torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse))))


def captured(function):
    """A CUDA graph of ``function``, and its results, after a first run on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def test_a_graph_of_both_passes_replays_on_new_values():
    leaves, dout = fresh()
    graph, results = captured(lambda: passes(leaves, dout))
    for seed in (1, 2, 1):
        others, arriving = fresh(seed)
        with torch.no_grad():
            for static, new in zip((*leaves, dout), (*others, arriving), strict=True):
                static.copy_(new)
        for x in results:
            x.detach().fill_(torch.nan)
        graph.replay()
        assert same(results, passes(others, arriving))


@pytest.mark.fault("C14")
def test_a_graph_of_both_passes_replays_on_new_lengths():
    """Captured with short sequences; the longest length is a hint that says 1."""
    inputs = PACKED.inputs("cuda")
    leaves = [x.nan_to_num(0.0).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    dout = torch.randn_like(inputs.q)
    lengths = inputs.lengths["cu_seqlens_q"]
    short = torch.arange(lengths.numel(), dtype=torch.int32, device="cuda")
    static = short.clone()

    def both(cu_seqlens):
        out = flash_attn_varlen_func(
            *leaves, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=1, max_seqlen_k=1,
            causal=True, deterministic=True, return_lse=True,
        )  # fmt: skip
        return torch.autograd.grad(out, leaves, (dout, torch.ones_like(out[1])))

    # Autograd would refuse lengths that are overwritten between the passes, and so each replay runs both.
    graph, results = captured(lambda: both(static))
    for given in (lengths, short, lengths):
        static.copy_(given)
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        assert same(results, both(given.clone()))


def test_gradients_live_where_the_inputs_do_whatever_the_current_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = [x.cpu() for x in passes(*fresh())]
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        for current in (0, 1):
            leaves, dout = fresh(device="cuda:0")
            there = [x.detach().to(device).requires_grad_() for x in leaves]
            with torch.cuda.device(current):
                found = passes(there, dout.to(device))
                assert torch.cuda.current_device() == current
            assert {x.device for x in found} == {torch.device(device)}
            assert same([x.cpu() for x in found], expected)


@pytest.mark.fault("G7", "G8")
@pytest.mark.timeout(300)
def test_a_compiled_graph_has_the_eager_gradients_at_every_length(dynamo):
    function = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (150, 149, 64, 7):
        leaves, dout = fresh(rows=rows)
        assert same(passes(leaves, dout, function), passes(leaves, dout))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.timeout(300)
def test_gradients_under_autocast_are_those_of_cast_tensors_in_the_dtype_of_the_leaves(dynamo):
    leaves, dout = fresh()
    expected = passes(leaves, dout)
    for function in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        wide = [x.detach().float().requires_grad_() for x in leaves]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out, lse = function(*wide)
        found = torch.autograd.grad((out, lse), wide, (dout, torch.ones_like(lse)))
        assert all(x.dtype == torch.float32 for x in found)
        assert same([out, lse], expected[:2])
        assert same(found, [x.float() for x in expected[2:]])


def test_second_derivatives_are_refused_not_zero():
    leaves, _ = fresh()
    out, _ = attention(*leaves)
    (dq,) = torch.autograd.grad(out.float().square().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="once differentiable"):
        dq.float().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_to_the_same_gradients(reentrant):
    leaves, dout = fresh()
    out, lse = checkpoint(attention, *leaves, use_reentrant=reentrant)
    torch.autograd.backward((out, lse), (dout, torch.ones_like(lse)))
    assert same((out, lse, *(x.grad for x in leaves)), passes(leaves, dout))


def test_only_what_requires_a_gradient_gets_one_call_after_call():
    leaves, dout = fresh()
    expected = passes(leaves, dout)
    for needs in ((True, False, False), (False, True, True), (True, True, True), (False, True, True)):
        given = [x.detach().requires_grad_(needed) for x, needed in zip(leaves, needs, strict=True)]
        out, lse = attention(*given)
        torch.autograd.backward((out, lse), (dout, torch.ones_like(lse)))
        for x, gradient in zip(given, expected[2:], strict=True):
            assert x.grad is None if not x.requires_grad else torch.equal(x.grad, gradient)


def test_both_passes_need_little_more_than_their_results():
    """Sums of dQ in float32, and statistics of rows: twice the size of Q in bfloat16 and a little."""
    named = case("long causal")
    inputs = named.inputs("cuda")
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    dout = torch.randn_like(inputs.q)
    torch.autograd.grad(named.run(inputs.with_tensors(*leaves))[0], leaves, dout)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = named.run(inputs.with_tensors(*leaves))
    found = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    results = sum(x.numel() * x.element_size() for x in (out, *found))
    q_bytes = inputs.q.numel() * inputs.q.element_size()
    assert torch.cuda.max_memory_allocated() - before - results < 2.5 * q_bytes


def run_sanitized(request, *options, **environment):
    """A process of its own that runs the cases of ``sanitized.py``."""
    bundle = request.config.getoption("--bundle")
    words = [sys.executable, str(SANITIZED), *([] if bundle is None else [bundle]), *options]
    done = subprocess.run(
        words, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cases ran" in done.stdout


@pytest.mark.fault("C3", "F11")
@pytest.mark.timeout(240)
def test_memory_given_back_at_once_is_not_used_any_more(request):
    """Without PyTorch's cache what is freed too early is unmapped."""
    run_sanitized(request, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


@pytest.mark.fault("F10")
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_first_launches_of_fresh_processes_do_not_crash(request):
    for _ in range(10):
        run_sanitized(request, "--cases=1")
