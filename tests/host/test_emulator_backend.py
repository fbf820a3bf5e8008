"""The public functions with ``backend="emulator"``: the compiled Hopper kernel on CPU tensors."""

import dataclasses

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4 import flash_attn_func, flash_attn_varlen_func
from attn4.ops import dispatch, gpu, prepared
from attn4.plan.choose import choose
from attn4.plan.plan import SoftmaxPlan
from needs import COMPILES

pytestmark = COMPILES


def tensors(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape, dtype=torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (30, 5)}], ids=str)
def test_kernel_on_the_emulator_gives_what_the_reference_gives(options):
    q, k, v = tensors(1, 150, 2, 64)
    out, lse = flash_attn_func(q, k, v, return_lse=True, backend="emulator", **options)
    expected, expected_lse = flash_attn_func(
        q.float(), k.float(), v.float(), return_lse=True, backend="reference", **options
    )
    assert (out.float() - expected).norm() / expected.norm() < 2.5e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "softmax", [SoftmaxPlan(rescale_threshold=8.0), SoftmaxPlan(8.0, fma_exp_every=4)], ids=str
)
def test_savings_that_no_hopper_plan_takes_are_right_too(softmax, monkeypatch):
    monkeypatch.setattr(
        gpu, "choose", lambda problem, target: dataclasses.replace(choose(problem, target), softmax=softmax)
    )
    for module, table in ((prepared, "_launches"), (dispatch, "_known"), (dispatch, "_recent")):
        monkeypatch.setattr(module, table, {})
    q, k, v = tensors(1, 200, 1, 64)
    q = 8 * q  # so that maxima jump
    out = flash_attn_func(q, k, v, causal=True, backend="emulator")
    expected = flash_attn_func(q.float(), k.float(), v.float(), causal=True, backend="reference")
    assert (out.float() - expected).norm() / expected.norm() < 2.5e-3


def test_packed_sequences_with_a_tail_and_an_empty_one():
    q, k, v = tensors(150, 2, 64)
    cu_seqlens = torch.tensor([0, 70, 70, 141], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "causal": True}
    out = flash_attn_varlen_func(q, k, v, backend="emulator", **lengths)
    expected = flash_attn_varlen_func(q.float(), k.float(), v.float(), backend="reference", **lengths)
    assert (out.float() - expected).norm() / expected.norm() < 2.5e-3
    assert not out[141:].any()


def displaced(x: torch.Tensor) -> torch.Tensor:
    """The same numbers one element past an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.fault("D7")
def test_addresses_that_a_kernel_refuses_are_copied_from(monkeypatch):
    copies = []
    copied = gpu.movable
    monkeypatch.setattr(gpu, "movable", lambda x: copies.append(x) or copied(x))
    q, k, v = tensors(1, 70, 2, 64)
    expected = flash_attn_func(q, k, v, causal=True, backend="emulator")
    assert not copies
    for given in ((displaced(q), k, v), (q, k, displaced(v))):
        assert torch.equal(flash_attn_func(*given, causal=True, backend="emulator"), expected)
        assert len(copies) == 3
        copies.clear()
