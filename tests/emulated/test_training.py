"""Gradients through the public functions on the virtual B200, up to a transformer that trains on it."""

import pytest
import torch

import attn4.emulator
from attn4 import flash_attn_func, flash_attn_varlen_func
from emulated.training_curves import CURVES, curve, draw


def _qkv(rows, keys, heads, kv_heads, dim=64):
    shapes = [(rows, heads, dim), *[(keys, kv_heads, dim)] * 2]
    return [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(shapes)]


def results(function, tensors, **keywords):
    """Out, LSE and the gradients of a loss that weighs both."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*leaves, return_lse=True, **keywords)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    loss = (out.float() * weights).sum() + lse.masked_fill(lse == -torch.inf, 0).sin().sum()
    return (out, lse, *torch.autograd.grad(loss, leaves))


def agree(found, expected):
    for x, y in zip(found, expected, strict=True):
        seen = y != -torch.inf
        assert torch.equal(x != -torch.inf, seen)
        assert (x.float() - y)[seen].norm() < 4e-3 * y[seen].norm()


def test_gradients_of_the_kernels_are_those_of_the_reference():
    tensors = [x[None].bfloat16() for x in _qkv(90, 140, 2, 1)]
    with attn4.emulator.device("sm_100a", hazards=True) as gpu:
        found = results(flash_attn_func, tensors, causal=True, backend="emulator")
    agree(found, results(flash_attn_func, [x.float() for x in tensors], causal=True))
    assert gpu.hazards == []


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
def test_gradients_of_wide_heads_are_those_of_the_reference(dims):
    q, k = (x[None].bfloat16() for x in _qkv(90, 140, 2, 1, dims[0])[:2])
    tensors = q, k, _qkv(90, 140, 2, 1, dims[1])[2][None].bfloat16()
    found = results(flash_attn_func, tensors, causal=True, backend="emulator", arch="sm_100a")
    agree(found, results(flash_attn_func, [x.float() for x in tensors], causal=True))


@pytest.mark.slow
def test_deterministic_gradients_are_the_same_bits_in_any_order():
    tensors = [x[None].bfloat16() for x in _qkv(200, 300, 2, 1)]
    found = []
    for seed in range(3):
        with attn4.emulator.device("sm_100a", schedule="random", seed=seed):
            found.append(results(flash_attn_func, tensors, deterministic=True, backend="emulator"))
    agree(found[0], results(flash_attn_func, [x.float() for x in tensors]))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_nan_that_arrives_for_a_row_without_a_key_reaches_no_gradient(arch):
    """Rows 0 to 49 see no key, and share their block with rows that do."""
    tensors = [x[None].bfloat16() for x in _qkv(130, 80, 2, 1)]
    found = []
    for cast, keywords in (("bfloat16", {"backend": "emulator", "arch": arch}), ("float32", {})):
        leaves = [x.to(getattr(torch, cast)).requires_grad_() for x in tensors]
        out, lse = flash_attn_func(*leaves, causal=True, return_lse=True, **keywords)
        arriving = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
        arriving_lse = torch.ones_like(lse)
        arriving[:, :50], arriving_lse[..., :50] = torch.nan, torch.nan
        found.append(torch.autograd.grad((out, lse), leaves, (arriving, arriving_lse)))
    agree(*found)
    assert found[0][0][:, :50].count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_packed_gradients_with_a_tail_and_an_empty_sequence(compiled):
    torch._dynamo.reset()
    tensors = [x.half() for x in _qkv(150, 150, 2, 2)]
    for x in tensors:
        x[141:] = torch.nan
    cu_seqlens = torch.tensor([0, 70, 70, 141], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "window_size": (30, 5)}
    function = flash_attn_varlen_func
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = results(function, tensors, backend="emulator", arch="sm_100a", **lengths)
    agree(found, results(flash_attn_varlen_func, [x.float() for x in tensors], **lengths))
    assert all(x[141:].count_nonzero() == 0 for x in found[2:])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_transformer_trains_on_the_virtual_b200_as_on_the_reference(tmp_path):
    found = {name: torch.tensor(curve(name)) for name in CURVES}
    exact, reference, virtual = found.values()
    assert virtual[-1] < virtual[0] / 2
    # Rounding to bfloat16 moves both from the float32 curve; they move no further from each other.
    assert (virtual - reference).abs().max() <= 2 * (reference - exact).abs().max()
    draw([{"curve": name, "losses": losses.tolist()} for name, losses in found.items()], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
