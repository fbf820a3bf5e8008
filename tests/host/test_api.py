"""The contract of the public functions, on the CPU."""

import inspect
import subprocess
import sys

import pytest
import torch

import attn4
from attn4 import flash_attn_func, flash_attn_varlen_func
from attn4.ops.call import NO_VECTORS, Options
from attn4.ops.dispatch import attend
from cases import CASES, case, required_plans

CU = torch.tensor([0, 3, 9], dtype=torch.int32)


def _qkv(*shape, dtype=torch.float32):
    return tuple(torch.randn(*shape, dtype=dtype) for _ in range(3))


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
def test_everything_after_v_is_keyword_only(function):
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    assert kinds[:3] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 3
    assert set(kinds[3:-1]) == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError):
        function(*_qkv(1, 4, 1, 8), 0.5)


def test_options_travel_in_the_order_that_their_names_say():
    """The public functions pass a bare tuple; a swap of two fields must not go unnoticed."""
    q, k, v = _qkv(2, 9, 2, 8)
    lengths = torch.tensor([9, 5], dtype=torch.int32)
    found = flash_attn_varlen_func(
        q, k, v, seqused_k=lengths, causal=True, window_size=(3, 1), return_lse=True
    )
    options = Options(causal=True, window_size=(3, 1), return_lse=True)
    expected = attend(q, k, v, (None, None, None, lengths), tuple(options), None)
    torch.testing.assert_close(found, expected)
    dense = flash_attn_func(q, k, v, softmax_scale=0.3, window_size=(3, 1), deterministic=True)
    options = Options(softmax_scale=0.3, window_size=(3, 1), deterministic=True)
    torch.testing.assert_close(dense, attend(q, k, v, NO_VECTORS, tuple(options), None))


def test_result_is_out_or_a_pair():
    q, k, v = _qkv(2, 5, 2, 8)
    out = flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor)
    pair = flash_attn_func(q, k, v, return_lse=True)
    assert isinstance(pair, tuple)
    assert len(pair) == 2
    assert torch.equal(pair[0], out)


def test_lse_is_float32_of_batch_heads_rows_or_heads_total():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        out, lse = flash_attn_func(*_qkv(2, 9, 3, 8, dtype=dtype), return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert (out.shape, lse.shape) == ((2, 9, 3, 8), (2, 3, 9))
    out, lse = flash_attn_varlen_func(*_qkv(9, 3, 8), cu_seqlens_q=CU, cu_seqlens_k=CU, return_lse=True)
    assert (out.shape, lse.shape) == ((9, 3, 8), (3, 9))


def test_lse_is_the_natural_log_of_the_denominator():
    q, k, v = _qkv(1, 1, 1, 8)
    _, lse = flash_attn_func(q, k, v, softmax_scale=0.5, return_lse=True)
    torch.testing.assert_close(lse.flatten(), (q * k).sum().mul(0.5).reshape(1))


def test_default_scale_is_one_over_the_root_of_the_head_dim():
    q, k, v = _qkv(1, 7, 1, 16)
    assert torch.equal(flash_attn_func(q, k, v), flash_attn_func(q, k, v, softmax_scale=0.25))


def test_none_and_minus_one_are_no_bound():
    q, k, v = _qkv(1, 9, 1, 8)
    full, causal = flash_attn_func(q, k, v), flash_attn_func(q, k, v, causal=True)
    assert not torch.equal(full, causal)
    for window in ((None, None), (-1, -1), (None, -1), [-1, None]):
        assert torch.equal(flash_attn_func(q, k, v, window_size=window), full)
        assert torch.equal(flash_attn_func(q, k, v, window_size=window, causal=True), causal)
    for window in ((None, 0), (-1, 0)):
        assert torch.equal(flash_attn_func(q, k, v, window_size=window), causal)


def test_packed_equals_each_sequence_alone():
    q, k, v = _qkv(9, 2, 8)
    out = flash_attn_varlen_func(q, k, v, cu_seqlens_q=CU, cu_seqlens_k=CU, causal=True)
    for start, stop in ((0, 3), (3, 9)):
        alone = flash_attn_func(*(x[None, start:stop] for x in (q, k, v)), causal=True)
        torch.testing.assert_close(out[start:stop], alone[0])


@pytest.mark.parametrize("hint", [None, 0, 1, 6, 10**6])
def test_max_seqlen_is_only_a_hint(hint):
    q, k, v = _qkv(9, 2, 8)
    keywords = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "causal": True}
    expected = flash_attn_varlen_func(q, k, v, **keywords)
    assert torch.equal(
        flash_attn_varlen_func(q, k, v, max_seqlen_q=hint, max_seqlen_k=hint, **keywords), expected
    )


def test_out_is_filled_and_returned():
    q, k, v = _qkv(2, 5, 2, 8)
    out = torch.full_like(q, torch.nan)
    result = flash_attn_func(q, k, v, out=out)
    assert result is out
    assert torch.equal(out, flash_attn_func(q, k, v))


@pytest.mark.parametrize("name", [c.name for c in CASES if c.fault])
def test_preallocated_and_allocated_results_are_equal(name):
    named = case(name)
    inputs = named.inputs("cpu")
    out = torch.full((*named.q_shape[:-1], named.dim_v), torch.nan, dtype=named.torch_dtype)
    named.run(inputs, out=out)
    expected = named.run(inputs)
    assert torch.equal(out, expected[0] if named.lse else expected)


def test_backend_none_is_the_reference_on_the_cpu():
    q, k, v = _qkv(1, 5, 1, 8)
    assert torch.equal(flash_attn_func(q, k, v), flash_attn_func(q, k, v, backend="reference"))


def test_neutral_values_of_unbuilt_features_are_accepted():
    q, k, v = _qkv(1, 5, 1, 8)
    out = flash_attn_func(
        q, k, v, softcap=0.0, dropout_p=0.0, learnable_sink=None, num_splits=1, page_table=None
    )
    assert torch.equal(out, flash_attn_func(q, k, v))


def test_importing_the_package_loads_no_torch():
    code = "import attn4, sys; assert not {'torch', 'cutlass', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="src", timeout=60)


def test_explain_is_public():
    plan = required_plans()[0]
    text = str(attn4.explain(case("dim 64 full").problem(), "sm_90a"))
    assert "sm_90a" in text
    assert plan.arch == "sm_90a"


def test_plans_of_the_device_tests_are_few_enough_to_compile_beforehand():
    assert 30 < len(required_plans()) < 100
