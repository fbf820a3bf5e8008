"""The reference path against the oracle, over the whole list of cases, and the pieces it is made of."""

import pytest
import torch

from attn4.mask import Mask
from attn4.plan.plan import SoftmaxPlan
from attn4.reference import Lengths, Tiling, dense, exp2_polynomial, forward, online
from attn4.reference.masking import Band
from cases import CASES, MASKS
from judge import eager, judge, oracle


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_is_as_exact_as_twice_torch(case):
    inputs = case.inputs("cpu")
    result = case.run(inputs)
    out, lse = result if case.lse else (result, None)
    assert out.dtype == case.torch_dtype
    assert out.is_contiguous()
    judge(out, lse, oracle(case, inputs, torch.float64), eager(case, inputs))


def _tensors(seqlen_q=150, seqlen_k=333, heads=4, kv_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, seqlen_q, heads, 32), (2, seqlen_k, kv_heads, 32), (2, seqlen_k, kv_heads, 24))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
def test_oracle_agrees_with_torch_sdpa(causal):
    q, k, v = _tensors(seqlen_q=200, seqlen_k=200)
    out, _ = dense(q, k, v, mask=Mask.of(causal))
    x = [t.transpose(1, 2) for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_oracle_masks_align_bottom_right_and_are_inclusive():
    seen = Band(Mask(1, 0), 2, 4).visible(range(2), range(4), torch.device("cpu"))
    assert seen.tolist() == [[False, True, True, False], [False, False, True, True]]


def test_oracle_computes_in_the_precision_asked_for():
    q, k, v = _tensors(dtype=torch.bfloat16)
    assert [x.dtype for x in dense(q, k, v)] == [torch.float32] * 2
    assert [x.dtype for x in dense(q, k, v, precision=torch.float64)] == [torch.float64] * 2


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("threshold", [0.0, 8.0])
@pytest.mark.parametrize("tile", [(64, 48), (25, 7), (512, 512)])
def test_tiled_algorithm_is_exact_for_any_tile_and_threshold(mask, threshold, tile):
    q, k, v = _tensors()
    bounds = Mask.of(mask.get("causal", False), mask.get("window", (None, None)))
    tiling = Tiling(tile_m=tile[0], tile_n=tile[1], softmax=SoftmaxPlan(rescale_threshold=threshold))
    result = online(q * 5, k, v, mask=bounds, tiling=tiling)
    out, lse = dense(q * 5, k, v, mask=bounds)
    torch.testing.assert_close(result.out, out)
    torch.testing.assert_close(result.lse, lse)


def test_threshold_skips_most_rescales_and_zero_skips_none():
    q, k, v = _tensors(seqlen_k=4096)
    always = online(q, k, v, tiling=Tiling(softmax=SoftmaxPlan(rescale_threshold=0.0))).rescales
    lazy = online(q, k, v, tiling=Tiling(softmax=SoftmaxPlan(rescale_threshold=8.0))).rescales
    rows_and_steps = 2 * 4 * 150 * (4096 // 128 - 1)
    assert always.skipped == 0
    assert always.done > 1000
    assert lazy.done == 0
    assert lazy.skipped > 0
    for counts in (always, lazy):
        assert counts.done + counts.skipped + counts.unneeded == rows_and_steps


def test_growth_past_the_threshold_rescales_every_tile():
    q, k, v = _tensors(seqlen_k=512, heads=1, kv_heads=1)
    q[..., 0], k[..., 0] = 32**0.5, torch.arange(512.0, dtype=torch.float64)[:, None]
    result = online(q, k, v)
    assert result.rescales.done == 2 * 150 * 3
    torch.testing.assert_close(result.out, dense(q, k, v)[0])


def test_lagging_maximum_keeps_numerators_below_two_to_the_threshold():
    q, k, v = _tensors(seqlen_k=2048, heads=2, kv_heads=2, dtype=torch.float16)
    tiling = Tiling(probabilities=torch.float16, softmax=SoftmaxPlan(rescale_threshold=8.0))
    result = online(q * 3, k, v, tiling=tiling)
    assert result.rescales.skipped > 0
    torch.testing.assert_close(result.out, dense(q * 3, k, v)[0], rtol=2e-3, atol=2e-3)


def test_forward_needs_no_score_matrix():
    """32k x 32k scores would take 4 GiB; all tensors together are 12 MiB."""
    q, k, v = (torch.randn(1, 32768, 1, 8) for _ in range(3))
    out, lse = forward(q, k, v, softmax_scale=0.3, mask=Mask(100, 0), lengths=Lengths())
    rows = slice(20000, 20064)
    keys = slice(20000 - 100, 20064)
    part, part_lse = dense(q[:, rows], k[:, keys], v[:, keys], softmax_scale=0.3, mask=Mask(100, 0))
    torch.testing.assert_close(out[:, rows], part, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[..., rows], part_lse, rtol=1e-4, atol=1e-5)


def _grid():
    return torch.linspace(0, 1, 2**20 + 1)[:-1]


def _relative_error(found, x):
    exact = x.double().exp2()
    return (found.double() - exact).abs() / exact


def test_polynomial_exp2_errs_by_at_most_8_8e_5():
    worst = _relative_error(exp2_polynomial(_grid()), _grid()).max().item()
    assert 8.6e-5 < worst < 8.85e-5


def test_polynomial_exp2_holds_its_error_over_the_whole_range():
    x = torch.linspace(-125.999, 20, 2**20)
    assert _relative_error(exp2_polynomial(x), x).max() < 8.85e-5


def test_polynomial_exp2_is_exact_at_integers_and_zero_far_below():
    x = torch.arange(-126.0, 128.0)
    assert torch.equal(exp2_polynomial(x), x.exp2())
    assert exp2_polynomial(torch.tensor([-torch.inf, -1e30, -127.0])).tolist() == [0, 0, 0]


def test_polynomial_exp2_refuses_other_dtypes():
    with pytest.raises(TypeError, match="float32"):
        exp2_polynomial(torch.zeros(3, dtype=torch.float64))


def test_polynomial_exp2_rounded_to_bfloat16_is_as_good_as_exact():
    exact = _relative_error(_grid().exp2().bfloat16(), _grid())
    polynomial = _relative_error(exp2_polynomial(_grid()).bfloat16(), _grid())
    assert polynomial.max() < exact.max() * 1.03
    assert polynomial.mean() < exact.mean() * 1.001


def test_polynomial_share_does_not_cost_accuracy_in_16_bits():
    q, k, v = _tensors(seqlen_k=1024, dtype=torch.bfloat16)
    truth = dense(q, k, v, precision=torch.float64)[0]

    def error(every):
        softmax = SoftmaxPlan(rescale_threshold=8.0, fma_exp_every=every)
        out = online(q, k, v, tiling=Tiling(softmax=softmax, probabilities=torch.bfloat16)).out
        return (out.bfloat16().double() - truth).square().mean().sqrt()

    exact = online(q, k, v, tiling=Tiling(softmax=SoftmaxPlan(fma_exp_every=0))).out
    assert not torch.equal(online(q, k, v, tiling=Tiling(softmax=SoftmaxPlan(fma_exp_every=4))).out, exact)
    assert error(4) < error(0) * 1.01
    assert error(1) < error(0) * 1.01
