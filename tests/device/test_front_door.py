"""PyTorch's ways to a kernel: compiled graphs, autocast, streams and CUDA graphs around the operator."""

import pytest
import torch
from torch._dynamo.utils import counters

from attn4 import flash_attn_func
from cases import case
from judge import same

NAMED = case("dim 128 causal")
DEVICE = "cuda"


pytestmark = pytest.mark.usefixtures("dynamo")


def attention(q, k, v):
    """The listed case's call, so that its kernel is in the bundle."""
    return flash_attn_func(q, k, v, causal=True, return_lse=True)


def compiled(function=attention, **keywords):
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager"} | keywords)


def tensors():
    inputs = NAMED.inputs(DEVICE)
    return inputs.q, inputs.k, inputs.v


@pytest.mark.fault("G7")
@pytest.mark.timeout(300)
def test_a_compiled_graph_gives_the_eager_bits_at_every_length():
    function, (q, k, v) = compiled(dynamic=True), tensors()
    for rows in (150, 149, 64, 7):
        given = (q[:, :rows].clone(memory_format=torch.contiguous_format), k, v)
        assert same(function(*given), attention(*given))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_inductor_gives_the_eager_bits():
    given = tensors()
    assert same(compiled(backend="inductor")(*given), attention(*given))


def test_autocast_gives_the_bits_of_cast_tensors():
    given = tensors()
    expected = attention(*given)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert same(attention(*(x.float() for x in given)), expected)
        assert same(compiled()(*(x.float() for x in given)), expected)


@pytest.mark.timeout(300)
def test_a_compiled_graph_gives_the_eager_gradients():
    def gradients(function):
        leaves = [x.clone().requires_grad_() for x in tensors()]
        out, lse = function(*leaves)
        return (out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves))

    found, expected = gradients(compiled()), gradients(attention)
    assert same(found[:2], expected[:2])
    for x, y in zip(found[2:], expected[2:], strict=True):
        # Sums of dQ come in any order.
        torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-6)


@pytest.mark.fault("G6")
def test_a_compiled_graph_launches_on_the_current_stream():
    function, (q, k, v) = compiled(), tensors()
    expected = function(q, k, v)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(4096, 4096, device=DEVICE)
        for _ in range(10):
            x = x @ x / 4096
        late.copy_(q)
        found = function(late, k, v)
    stream.synchronize()
    assert same(found, expected)


def test_a_cuda_graph_of_the_operator_replays_on_new_values():
    q, k, v = tensors()
    attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.attn4.forward(q, k, v, window_right=0)
    q.copy_(q.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, attention(q, k, v))
