"""torch.compile and torch.export: one graph without a break, no compile for each length, the eager bits."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from attn4 import flash_attn_func, flash_attn_varlen_func, get_scheduler_metadata
from judge import same
from small_transformer import Transformer, train

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    """How many graphs were compiled since the test began."""
    return counters["stats"]["unique_graphs"]


def whole(function, **keywords):
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager"} | keywords)


def _qkv(*shape, dtype=torch.float32, grad=True):
    return [torch.randn(*shape, dtype=dtype).requires_grad_(grad) for _ in range(3)]


def dense(q, k, v):
    return flash_attn_func(q, k, v, causal=True, window_size=(7, None), return_lse=True)


def packed(q, k, v, cu_seqlens, longest):
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
        return_lse=True,
    )


def results(function, *arguments):
    """Out, LSE and the gradients of q, k, v of a loss that weighs both."""
    out, lse = function(*arguments)
    loss = out.square().sum() + lse.sin().sum()
    return (out, lse, *torch.autograd.grad(loss, arguments[:3]))


EITHER_WAY = pytest.mark.parametrize("dynamic", [pytest.param(None, marks=pytest.mark.slow), True])


@pytest.mark.fault("G7")
@EITHER_WAY
def test_lengths_change_without_a_compile_for_each(dynamic):
    compiled = whole(dense, dynamic=dynamic)
    for rows in (9, 12, 33, 70):
        tensors = _qkv(2, rows, 4, 8)
        assert same(results(compiled, *tensors), results(dense, *tensors))
    # The first length is taken for a constant, the second shows that it is none.
    assert graphs() == (1 if dynamic else 2)


def test_query_and_key_lengths_change_apart_from_each_other():
    compiled = whole(dense, dynamic=True)
    for rows, keys in ((9, 20), (30, 12), (14, 15), (8, 64)):
        q = torch.randn(2, rows, 4, 8, requires_grad=True)
        k, v = (torch.randn(2, keys, 4, 8, requires_grad=True) for _ in range(2))
        assert same(results(compiled, q, k, v), results(dense, q, k, v))
    assert graphs() == 1


@EITHER_WAY
def test_packed_batches_and_their_longest_length_change_without_a_compile_for_each(dynamic):
    compiled = whole(packed, dynamic=dynamic)
    for total in (9, 12, 33):
        tensors = _qkv(total, 4, 8)
        cu_seqlens = torch.tensor([0, 3, total], dtype=torch.int32)
        arguments = (*tensors, cu_seqlens, total - 3)
        assert same(results(compiled, *arguments), results(packed, *arguments))
    assert graphs() == (1 if dynamic else 2)


@pytest.mark.fault("G8")
def test_three_values_of_the_longest_length_alone_are_two_graphs():
    """The fault of compiling anew, each backward pass, for a number that is only a hint."""
    compiled = whole(packed)
    tensors, cu_seqlens = _qkv(20, 4, 8), torch.tensor([0, 8, 20], dtype=torch.int32)
    expected = results(packed, *tensors, cu_seqlens, 12)
    for longest in (12, 13, 14, 15):
        assert same(results(compiled, *tensors, cu_seqlens, longest), expected)
    assert graphs() == 2


def test_contents_of_length_tensors_are_read_when_the_graph_runs():
    compiled = whole(packed)
    tensors = _qkv(20, 4, 8)
    for split in (0, 5, 20):
        cu_seqlens = torch.tensor([0, split, 20], dtype=torch.int32)
        arguments = (*tensors, cu_seqlens, 20)
        assert same(results(compiled, *arguments), results(packed, *arguments))
    assert graphs() == 1
    with pytest.raises(ValueError, match="21, but the packed tensor has only 20 rows"):
        compiled(*tensors, torch.tensor([0, 5, 21], dtype=torch.int32), 20)


@pytest.mark.parametrize("inputs", [(0,), (1, 2)], ids=str)
def test_only_what_requires_a_gradient_gets_one(inputs):
    q, k, v = _qkv(2, 9, 4, 8, grad=False)
    compiled = whole(lambda q, k, v: flash_attn_func(q, k, v, causal=True))
    found, expected = (
        [x.clone().requires_grad_(i in inputs) for i, x in enumerate((q, k, v))] for _ in range(2)
    )
    compiled(*found).square().sum().backward()
    flash_attn_func(*expected, causal=True).square().sum().backward()
    for x, y in zip(found, expected, strict=True):
        assert (x.grad is None) == (y.grad is None)
        assert x.grad is None or torch.equal(x.grad, y.grad)


def test_a_graph_without_gradients_asks_for_no_lse():
    seen = []

    def look(graph, _inputs):
        seen.extend(node for node in graph.graph.nodes if "attn4" in str(node.target))
        return graph

    torch.compile(flash_attn_func, fullgraph=True, backend=look)(*_qkv(1, 5, 2, 8, grad=False))
    (node,) = seen
    names = [x.name for x in torch.ops.attn4.forward.default._schema.arguments]
    assert node.args[names.index("return_lse")] is False


def test_autocast_in_a_graph_gives_the_eager_bits():
    q, k, v = _qkv(2, 9, 4, 8)

    def region(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flash_attn_func(q, k, v, causal=True)

    found, expected = whole(region)(q, k, v), region(q, k, v)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    for x, y in zip(
        torch.autograd.grad(found.float().square().sum(), (q, k, v)),
        torch.autograd.grad(expected.float().square().sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_expanded_keys_in_a_graph_sum_their_gradients():
    q = torch.randn(2, 9, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, 9, 1, 8, requires_grad=True) for _ in range(2))

    def expanded(q, k, v):
        return flash_attn_func(q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1), return_lse=True)

    assert same(results(whole(expanded), q, k, v), results(expanded, q, k, v))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"softcap": 3.0}, "softcap=3.0"),
        ({"softmax_scale": -1.0}, "greater than 0"),
        ({"window_size": (1, 2, 3)}, "left, right"),
        ({"score_mod": max}, "score_mod is not built"),
        ({"backend": "cuda"}, "'cuda' is unknown"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_refused_is_refused_while_tracing_by_its_own_words(keywords, words):
    tensors = _qkv(1, 5, 2, 8)
    with pytest.raises(Exception, match=words):
        whole(lambda *x: flash_attn_func(*x, **keywords))(*tensors)


def test_tensors_that_do_not_fit_are_refused_while_tracing():
    q, k, v = _qkv(1, 5, 2, 8)
    with pytest.raises(Exception, match="must agree in batch, length and heads"):
        whole(flash_attn_func)(q, k[:, :3], v)


@pytest.mark.fault("G8")
def test_a_tensor_as_longest_length_is_refused_with_the_way_out():
    tensors, cu_seqlens = _qkv(20, 4, 8), torch.tensor([0, 8, 20], dtype=torch.int32)
    with pytest.raises(Exception, match="max_seqlen_q is a tensor; pass an int"):
        whole(packed)(*tensors, cu_seqlens, torch.tensor(12))


def test_scheduler_metadata_passes_through_a_graph():
    def sorted_batch(q, k, v, cu_seqlens, metadata):
        lengths = {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": 17,
            "max_seqlen_k": 17,
        }
        return flash_attn_varlen_func(
            q, k, v, causal=True, return_lse=True, scheduler_metadata=metadata, **lengths
        )

    def metadata(cu_seqlens, **keywords):
        sizes = {"num_heads_q": 4, "num_heads_kv": 4, "headdim": 8, "max_seqlen_q": 17, "max_seqlen_k": 17}
        return get_scheduler_metadata(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **sizes, **keywords)

    compiled = whole(sorted_batch)
    tensors = _qkv(20, 4, 8)
    for split in (3, 10):
        cu_seqlens = torch.tensor([0, split, 20], dtype=torch.int32)
        arguments = (*tensors, cu_seqlens, metadata(cu_seqlens, causal=True))
        assert same(results(compiled, *arguments), results(sorted_batch, *arguments))
    assert graphs() == 1
    with pytest.raises(Exception, match="scheduler_metadata was made for the mask"):
        compiled(*tensors, cu_seqlens, metadata(cu_seqlens))


def unpadded(x, real, **keywords):
    """Attention over the tokens of a padded (batch * rows, heads, dim) tensor that are ``real``."""
    tokens = x[real.flatten().nonzero().flatten()]
    lengths = real.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths, (1, 0))
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    return flash_attn_varlen_func(tokens, tokens, tokens, causal=True, **lengths, **keywords)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_tokens_that_only_the_data_tells_stays_in_the_graph():
    compiled = whole(unpadded)
    x = torch.randn(2 * 9, 4, 8, requires_grad=True)
    for counts in ((9, 5), (3, 7), (1, 1)):
        real = torch.arange(9) < torch.tensor(counts)[:, None]
        found, expected = compiled(x, real), unpadded(x, real)
        assert torch.equal(found, expected)
        gradients = (torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected))
        assert torch.equal(*gradients)
    assert graphs() == 1


def attentions(traced):
    """The operators of attn4 in a traced graph, in its order."""
    return [node.target for node in traced.graph.nodes if "attn4" in str(node.target)]


BOTH_PASSES = [torch.ops.attn4.forward.default, torch.ops.attn4.backward.default]

ARCHES = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])


@ARCHES
def test_both_passes_on_kernels_are_traced_with_batch_length_and_heads_as_symbols(arch):
    def both(q, k, v):
        out, lse = flash_attn_func(q, k, v, return_lse=True, backend="emulator", arch=arch)
        return torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))

    inputs = [torch.zeros(3, 9, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    traced = make_fx(both, tracing_mode="symbolic")(*inputs)
    assert attentions(traced) == BOTH_PASSES
    for node in traced.graph.find_nodes(op="placeholder"):
        *sizes, head_dim = node.meta["val"].shape
        assert [size.node.maybe_as_int() for size in sizes] == [None, None, None]
        assert head_dim == 64


@ARCHES
def test_both_passes_on_kernels_are_traced_over_a_number_of_tokens_that_only_the_data_tells(arch):
    def both(x, real):
        out = unpadded(x, real, backend="emulator", arch=arch)
        return torch.autograd.grad(out, x, torch.ones_like(out))

    x = torch.zeros(2 * 9, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    traced = make_fx(both, tracing_mode="symbolic")(x, torch.ones(2, 9, dtype=torch.bool))
    assert attentions(traced) == BOTH_PASSES


def test_a_given_out_is_filled_by_the_graph():
    q, k, v = _qkv(2, 9, 4, 8, grad=False)
    out = torch.full_like(q, torch.nan)
    compiled = whole(lambda *x, out: flash_attn_func(*x, out=out))
    assert torch.equal(compiled(q, k, v, out=out), flash_attn_func(q, k, v))
    assert torch.equal(out, flash_attn_func(q, k, v))
    with pytest.raises(Exception, match="out has shape"):
        compiled(q, k, v, out=out[:1])


def test_a_trace_of_jit_records_the_operator_not_its_result():
    q, k, v = _qkv(2, 9, 4, 8, grad=False)
    traced = torch.jit.trace(lambda *x: flash_attn_func(*x, causal=True), (q, k, v))
    others = _qkv(2, 30, 4, 8, grad=False)
    assert torch.equal(traced(*others), flash_attn_func(*others, causal=True))
    assert "attn4::forward" in str(traced.graph)


def test_export_keeps_one_operator_and_a_dynamic_length():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    q, k, v = _qkv(2, 9, 4, 8)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(Layer(), (q, k, v), dynamic_shapes=[{1: rows}] * 3)
    assert sum("attn4.forward" in str(node.target) for node in program.graph.nodes) == 1
    longer = _qkv(2, 30, 4, 8, grad=False)
    assert torch.equal(program.module()(*longer), flash_attn_func(*longer, causal=True))


@pytest.mark.slow
@needs_compiler
def test_inductor_gives_the_eager_bits():
    compiled = whole(dense, backend="inductor")
    for rows in (9, 33):
        tensors = _qkv(2, rows, 4, 8)
        found, expected = results(compiled, *tensors), results(dense, *tensors)
        assert same(found[:2], expected[:2])
        for x, y in zip(found[2:], expected[2:], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.fault("D4")
def test_stride_zero_of_a_batch_of_one_is_not_taken_for_every_batch():
    compiled = whole(dense, dynamic=True)
    single = [
        x.as_strided((1, *x.shape[1:]), (0, *x.stride()[1:])).requires_grad_()
        for x in _qkv(1, 9, 4, 8, grad=False)
    ]
    for tensors in (single, _qkv(3, 9, 4, 8)):
        assert same(results(compiled, *tensors), results(dense, *tensors))


def torch_attention(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def causal(q, k, v):
    return flash_attn_func(q, k, v, causal=True)


def test_a_transformer_trains_as_it_does_on_torchs_attention():
    models = [Transformer(attend) for attend in (causal, torch_attention)]
    found, expected = (train(model, model) for model in models)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert found[-1] < found[0] / 2


@pytest.mark.slow
def test_a_transformer_trains_compiled_as_it_does_eagerly():
    models = [Transformer(causal) for _ in range(2)]
    found = train(models[0], whole(models[0]))
    expected = train(models[1], models[1])
    assert graphs() == 1
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)
