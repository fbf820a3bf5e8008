"""Scheduler metadata: what it is made from, and which calls refuse it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn4 import flash_attn_varlen_func, get_scheduler_metadata
from attn4.mask import Mask
from attn4.ops import emulated
from attn4.ops.schedule import MadeFor, SchedulerMetadata

CU = torch.tensor([0, 3, 10], dtype=torch.int32)
ASKED: dict[str, Any] = {
    "max_seqlen_q": 7,
    "max_seqlen_k": 7,
    "num_heads_q": 2,
    "num_heads_kv": 1,
    "headdim": 64,
    "cu_seqlens_q": CU,
    "cu_seqlens_k": CU,
}
MADE_FOR = MadeFor(2, Mask(), ("cu_seqlens_q", "cu_seqlens_k"), "cpu", "sm_90a", (128, 128, 1))


def call(metadata: Any, **changes: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(10, 2, 64, generator=generator).bfloat16()
    k, v = (torch.randn(10, 1, 64, generator=generator).bfloat16() for _ in range(2))
    options = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 7, "max_seqlen_k": 7} | changes
    return flash_attn_varlen_func(q, k, v, scheduler_metadata=metadata, **options)


def made(**changes: Any) -> SchedulerMetadata:
    return SchedulerMetadata(torch.arange(3, dtype=torch.int32), replace(MADE_FOR, **changes))


def test_the_reference_takes_metadata_and_gives_the_same_result():
    metadata = get_scheduler_metadata(**ASKED, causal=True)
    assert metadata.batch_order.tolist() == [0, 1, 2]
    assert torch.equal(call(metadata, causal=True), call(None, causal=True))
    # Made for a kernel, it serves the reference too.
    assert torch.equal(call(made(mask=Mask.of(True)), causal=True), call(None, causal=True))


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"batch": 3}, "a batch of 3, and this call has 2"),
        ({"mask": Mask.of(True)}, "the mask causal (None, 0), and this call has full (None, None)"),
        (
            {"lengths": ("cu_seqlens_q",)},
            "calls with cu_seqlens_q, and this call has cu_seqlens_q, cu_seqlens_k",
        ),
        ({"device": "cuda:1"}, "the device cuda:1, and this call has cpu"),
    ],
)
def test_metadata_of_another_call_is_refused(theirs, message, backend):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(made(**theirs), backend=backend)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"target": "sm_100a"}, "made for sm_100a, and this call runs on sm_90a"),
        ({"target": "reference", "tile": None}, "made for reference, and this call runs on sm_90a"),
        ({"tile": (192, 128, 1)}, "made for tiles of 192 queries x 128 keys, and this call has tiles of 128"),
        ({"tile": (128, 128, 2)}, "made for tiles of 128 queries of 2 packed heads x 128 keys"),
    ],
)
def test_metadata_of_another_plan_is_refused_by_a_kernel(theirs, message):
    with pytest.raises(ValueError, match=message):
        call(made(**theirs), backend="emulator")


def test_a_kernel_for_sorted_batches_gets_the_order(monkeypatch):
    launched = []

    def kernel_of(plan):
        return lambda *arguments: launched.append((plan, arguments))

    monkeypatch.setattr(emulated, "emulated_kernel", kernel_of)
    metadata = made()
    call(metadata, backend="emulator")
    call(None, backend="emulator")
    call(metadata, backend="emulator")
    assert [plan.schedule.sorted_batches for plan, _ in launched] == [True, False, True]
    assert [arguments[12] is metadata.batch_order for _, arguments in launched] == [True, False, True]
    assert launched[1][1][12] is None


@pytest.mark.parametrize("other", [torch.arange(3, dtype=torch.int32), (1, 2), "metadata"])
def test_what_is_no_metadata_of_attn4_is_refused(other):
    with pytest.raises(TypeError, match=r"must be what attn4.get_scheduler_metadata returned"):
        call(other)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cu_seqlens_q": None, "cu_seqlens_k": None}, ValueError, "at least one of cu_seqlens_q"),
        ({"cu_seqlens_k": CU[:2]}, ValueError, r"cu_seqlens_k has shape \(2,\); with 2 sequences"),
        ({"seqused_k": CU}, ValueError, r"seqused_k has shape \(3,\)"),
        ({"cu_seqlens_q": CU.long()}, ValueError, "has dtype torch.int64; it must be int32"),
        ({"cu_seqlens_q": CU[:0]}, ValueError, "must be an int32 vector"),
        ({"cu_seqlens_q": [0, 3]}, ValueError, "must be an int32 vector"),
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q must be an int, got NoneType"),
        ({"max_seqlen_k": -1}, ValueError, "must not be negative"),
        ({"num_heads_q": 2.0}, TypeError, "num_heads_q must be an int, got float"),
        ({"num_heads_kv": 3}, ValueError, "2 query heads and 3 key/value heads"),
        ({"headdim": 63}, ValueError, "head_dim is 63"),
        ({"qkv_dtype": torch.float32}, ValueError, "qkv_dtype is torch.float32"),
        ({"window_size": 3}, TypeError, r"window_size must be \(left, right\)"),
        ({"backend": "gpu"}, ValueError, "needs CUDA tensors"),
    ],
)
def test_what_cannot_be_sorted_is_an_error(changes, error, message):
    with pytest.raises(error, match=message):
        get_scheduler_metadata(**(ASKED | {"backend": "emulator"} | changes))
