"""Gradients of the public functions on the CPU against torch's own, taken through the oracle in float64."""

import itertools
from dataclasses import replace

import pytest
import torch

from attn4 import flash_attn_func, flash_attn_varlen_func
from attn4.mask import Mask
from attn4.reference import Lengths, backward, dense, forward
from attn4.reference.backward import Saved
from cases import CASES, MASKS, SKEWED, Case, case

SMALL = [
    *(
        Case(
            name=f"{name} {heads} {q}x{k}", heads=heads[0], kv_heads=heads[1], seqlen_q=q, seqlen_k=k, **mask
        )
        for (name, mask), heads, (q, k) in itertools.product(
            MASKS.items(), ((2, 2), (6, 2)), ((70, 90), (90, 40))
        )
    ),
    Case(name="several tiles", seqlen_q=600, seqlen_k=1100, causal=True, batch=1),
    Case(name="skewed", lens_q=SKEWED, lens_k=SKEWED, causal=True, tail=5),
    *(
        c
        for c in CASES
        if c.dtype == "bfloat16"
        and c.values == "gaussian"
        and (c.fault[:1] == "C" or c.name.startswith(("packed", "padded", "used", "no ")))
        and 64 in (c.head_dim, c.head_dim - 64)
    ),
]


def _double(case):
    """The case in float64, small heads, all three inputs requiring gradients."""
    case = replace(case, dtype="float64", head_dim=16, head_dim_v=16 if case.layout == "fused" else 24)
    inputs = case.inputs("cpu")
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    return case, inputs.with_tensors(*leaves), leaves


def _gradients(out, lse, leaves):
    """Gradients of a loss in which every finite element of both results has a weight of its own."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    # float32 values, as the gradient of a float32 LSE passes through that dtype.
    lse_weights = torch.randn(lse.shape, generator=generator).to(lse.dtype)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    loss = (out * weights).sum() + (finite * lse_weights).sum().double()
    # An oracle that no row reaches is a constant; its gradients are 0.
    return torch.autograd.grad(loss + sum(0 * x.nan_to_num().sum() for x in leaves), leaves)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_gradients_equal_those_of_torch_through_the_oracle(case):
    case, inputs, leaves = _double(case)
    out, lse = case.run(inputs, return_lse=True)
    found = _gradients(out, lse, leaves)
    truth, truth_lse = dense(
        *leaves, softmax_scale=case.softmax_scale, mask=case.mask, lengths=Lengths(**inputs.lengths)
    )
    expected = _gradients(truth, truth_lse, leaves)
    torch.testing.assert_close(out, truth)
    for gradient, wanted in zip(found, expected, strict=True):
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal):
    q, k, v = (
        torch.randn(1, s, h, 3, dtype=torch.float64, requires_grad=True) for s, h in ((5, 4), (7, 2), (7, 2))
    )
    assert torch.autograd.gradcheck(lambda *x: flash_attn_func(*x, causal=causal), (q, k, v))


def test_lse_gradient_alone_and_out_gradient_alone_add_up():
    case, inputs, leaves = _double(Case(name="", causal=True))
    out, lse = case.run(inputs)
    both = torch.autograd.grad(out.sum() + lse.sum(), leaves, retain_graph=True)
    only_out = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    only_lse = torch.autograd.grad(lse.sum(), leaves[:2])
    torch.testing.assert_close(both[0], only_out[0] + only_lse[0])
    torch.testing.assert_close(both[1], only_out[1] + only_lse[1])


def test_empty_rows_and_unused_rows_get_exactly_zero_gradients_whatever_arrives():
    case, inputs, leaves = _double(
        Case(name="", batch=2, seqlen_q=60, seqlen_k=50, used_q=(60, 40), used_k=(50, 10), causal=True)
    )
    out, lse = case.run(inputs)
    empty = lse == -torch.inf
    arriving = torch.ones_like(out).masked_fill(empty.transpose(1, 2)[..., None], torch.nan)
    arriving_lse = torch.ones_like(lse).masked_fill(empty, torch.nan)
    grad_q, grad_k, grad_v = torch.autograd.grad((out, lse), leaves, (arriving, arriving_lse))
    assert grad_q.transpose(1, 2)[empty].count_nonzero() == 0
    assert grad_k[1, 10:].count_nonzero() == 0
    assert grad_v[1, 10:].count_nonzero() == 0
    assert all(x.isfinite().all() for x in (grad_q, grad_k, grad_v))
    assert grad_k[1, :10].count_nonzero() > 0


@pytest.mark.fault("D5")
def test_expanded_keys_receive_the_sum_over_their_copies():
    q, shared_k, shared_v = (
        torch.randn(2, 40, h, 16, dtype=torch.float64, requires_grad=True) for h in (4, 1, 1)
    )
    grouped = torch.autograd.grad(flash_attn_func(q, shared_k, shared_v).square().sum(), (shared_k, shared_v))
    k, v = shared_k.expand(2, 40, 4, 16), shared_v.expand(2, 40, 4, 16)
    expanded = torch.autograd.grad(flash_attn_func(q, k, v).square().sum(), (shared_k, shared_v))
    torch.testing.assert_close(expanded, grouped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["contiguous", "sbhd", "odd_rows"])
def test_low_precision_gradients_err_by_at_most_twice_those_of_torch(dtype, layout):
    named = replace(
        case(f"layout {layout} 64 full") if layout != "contiguous" else case("scale 1", scale=None),
        dtype=str(dtype).removeprefix("torch."),
    )
    inputs = named.inputs("cpu")

    def gradients(function, precision):
        leaves = [x.detach().to(precision).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = function(*leaves)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    def eager(q, k, v):
        return dense(q, k, v, precision=dtype)[0]

    truth = gradients(lambda *x: dense(*x)[0], torch.float64)
    for found, torch_found, wanted in zip(
        gradients(flash_attn_func, dtype), gradients(eager, dtype), truth, strict=True
    ):
        assert found.dtype == dtype
        error, allowed = ((x.double() - wanted).abs().max() for x in (found, torch_found))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * wanted.abs().max()


def test_backward_needs_no_score_matrix_and_keeps_causal_zeros():
    """32k x 32k scores would take 4 GiB: an out-of-memory error here is the failure."""
    q, k, v = (torch.randn(1, 32768, 1, 8) for _ in range(3))
    mask = Mask(64, 0)
    out, lse = forward(q, k, v, softmax_scale=0.3, mask=mask, lengths=Lengths())
    saved = Saved(q=q, k=k, v=v, out=out, lse=lse, lengths=Lengths(), softmax_scale=0.3, mask=mask)
    grad_out = torch.zeros_like(out)
    grad_out[:, 20000] = 1
    grad_q, grad_k, grad_v = backward(saved, grad_out, None)
    touched = [x[0].abs().sum(dim=(1, 2)).nonzero().flatten() for x in (grad_q, grad_k, grad_v)]
    assert touched[0].tolist() == [20000]
    assert touched[2].tolist() == list(range(20000 - 64, 20001))
    assert touched[1].min() >= 20000 - 64
    assert touched[1].max() <= 20000


def test_no_graph_is_recorded_without_need():
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    assert flash_attn_func(q, q, q).requires_grad
    with torch.no_grad():
        assert not flash_attn_func(q, q, q).requires_grad
    assert not flash_attn_func(q.detach(), q.detach(), q.detach()).requires_grad


def test_overwritten_lengths_are_an_error_in_backward():
    q = torch.randn(10, 1, 8, requires_grad=True)
    cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)
    out = flash_attn_varlen_func(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    cu_seqlens[1] = 6
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_second_derivative_is_refused_not_wrong():
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(flash_attn_func(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        (gradient.square().sum() + q.sum()).backward()
