"""Faults of other packages whose right behaviour is more than agreement with the oracle.

Each function takes a device and raises AssertionError; the host suite runs them on the reference, the device
suite on the kernels. Every call is that of a listed case, so that its kernel is in the bundle.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cases import Case, case


def _run(named: Case, device: str, **extra) -> tuple[Tensor, Tensor]:
    return named.run(named.inputs(device), return_lse=True, **extra)


def _same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


def a1_left_minus_one_with_causal_is_causal(device: str) -> None:
    named = case("window left -1 with causal")
    _same(_run(named, device), _run(replace(named, window=(None, None)), device))


def a2_band_past_every_key_is_empty(device: str) -> None:
    out, lse = _run(case("window that is empty"), device)
    assert out.count_nonzero() == 0
    assert (lse == -torch.inf).all()


def a3_minus_one_on_both_sides_is_no_window(device: str) -> None:
    for causal in (False, True):
        named = replace(case("full 64 261x261"), causal=causal)
        _same(_run(replace(named, window=(-1, -1)), device), _run(named, device))


def a5_right_bound_over_all_queries_is_no_bound(device: str) -> None:
    results = [_run(case(f"right bound {right}"), device) for right in (299, 2**31 - 1, 10**12)]
    _same(results[0], results[1])
    _same(results[0], results[2])


def a6_window_over_all_keys_is_close_to_causal(device: str) -> None:
    named = case("window over all keys")
    out, lse = _run(named, device)
    causal_out, causal_lse = _run(replace(case("float16 128 causal"), **_shape(named)), device)
    torch.testing.assert_close(out, causal_out, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(lse, causal_lse, rtol=1e-4, atol=1e-4)


def _shape(named: Case) -> dict[str, int]:
    return {name: getattr(named, name) for name in ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads")}


def a9_window_counts_the_token_itself_apart(device: str) -> None:
    """A key that dominates is seen from exactly ``left`` tokens later, and no further."""
    named = case("window of 129")
    inputs = named.inputs(device)
    key = 100
    inputs.q.fill_(1), inputs.k.zero_(), inputs.v.zero_()
    inputs.k[:, key] = 16
    inputs.v[:, key] = 1
    out, _ = named.run(inputs)
    sees = (out[0, :, 0, 0] > 0.5).nonzero().flatten()
    assert sees.tolist() == list(range(key, key + 128 + 1))


def a10_rows_before_the_first_key_are_empty(device: str) -> None:
    out, lse = _run(case("causal, more queries than keys"), device)
    assert out[:, :200].count_nonzero() == 0
    assert (lse[..., :200] == -torch.inf).all()
    assert lse[..., 200:].isfinite().all()


def a11_uniform_weights_give_the_mean(device: str) -> None:
    named = case("uniform, no whole tile")
    inputs = named.inputs(device)
    out, lse = named.run(inputs)
    mean = inputs.v.double().mean(dim=1, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.double(), mean, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse, torch.full_like(lse, 513).log(), rtol=1e-6, atol=1e-5)


def b7_a_single_key_gives_its_value_back(device: str) -> None:
    inputs = case("one huge key").inputs(device)
    out, _ = case("one huge key").run(inputs)
    assert torch.equal(out, inputs.v)


def b10_the_last_row_alone_is_the_last_row_of_all(device: str) -> None:
    named = case("dim 192,128 causal")
    inputs = named.inputs(device)
    whole = named.run(inputs)
    last = named.run(inputs.with_tensors(inputs.q[:, -1:], inputs.k, inputs.v))
    # torch's own matrix products differ in the last bit with the number of rows.
    same = torch.equal if device == "cuda" else torch.allclose
    assert same(last[0], whole[0][:, -1:])
    assert same(last[1], whole[1][..., -1:])


def b13_halves_merge_by_their_natural_lse(device: str) -> None:
    named = case("dim 128 full")
    inputs = named.inputs(device)
    out, lse = named.run(inputs)
    half = 170
    parts = [
        named.run(inputs.with_tensors(inputs.q, inputs.k[:, at], inputs.v[:, at]))
        for at in (slice(0, half), slice(half, None))
    ]
    merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(o.float() * (s - merged_lse).exp().transpose(1, 2)[..., None] for o, s in parts)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(merged, out.float(), rtol=1e-2, atol=4e-3)


def c2_nothing_in_nothing_out(device: str) -> None:
    for name in ("no batch", "no queries", "no packed queries"):
        named = case(name)
        out, lse = _run(named, device)
        assert out.numel() == lse.numel() == 0
        assert out.shape == (*named.q_shape[:-1], named.dim_v)


def c7_what_lies_past_the_used_keys_changes_nothing(device: str) -> None:
    named = case("decode over a cache")
    inputs = named.inputs(device)
    poisoned = named.run(inputs)
    for tensor in (inputs.k, inputs.v):
        assert tensor.isnan().any()
        tensor.nan_to_num_(7.0)
    _same(poisoned, named.run(inputs))


def c13_no_hint_of_a_length_changes_the_result(device: str) -> None:
    named = case("packed self 128 causal")
    inputs = named.inputs(device)
    expected = named.run(inputs)
    for hint in (0, 1, 64, 10**6):
        _same(named.run(inputs, max_seqlen_q=hint, max_seqlen_k=hint), expected)


def d1_strides_change_nothing(device: str) -> None:
    for dim, mask in ((64, "full"), (128, "causal"), (256, "causal")):
        for layout in ("bhsd", "sbhd", "odd_rows", "offset", "fused"):
            named = case(f"layout {layout} {dim} {mask}")
            strided = _run(named, device)
            _same(strided, _run(replace(named, layout="contiguous"), device))


def d4_a_batch_of_one_with_stride_zero_then_a_real_batch(device: str) -> None:
    named = case("layout bhsd 128 causal", layout="contiguous")
    inputs = named.inputs(device)
    tensors = (inputs.q, inputs.k, inputs.v)
    expected = named.run(inputs)
    single = [x[:1].as_strided((1, *x.shape[1:]), (0, *x.stride()[1:])) for x in tensors]
    out, lse = named.run(inputs.with_tensors(*single))
    _close_or_same(device, out, expected[0][:1])
    _close_or_same(device, lse, expected[1][:1])
    _same(named.run(inputs), expected)


def _close_or_same(device: str, found: Tensor, expected: Tensor) -> None:
    same = torch.equal if device == "cuda" else torch.allclose
    assert same(found, expected)


def d5_keys_expanded_over_heads_or_batch_equal_copies(device: str) -> None:
    for layout in ("heads_expanded", "batch_expanded"):
        named = case(f"layout {layout} 128 causal")
        inputs = named.inputs(device)
        assert 0 in inputs.k.stride()
        copies = inputs.with_tensors(inputs.q, inputs.k.contiguous(), inputs.v.contiguous())
        _same(named.run(inputs), named.run(copies))


def e7_grouped_heads_equal_repeated_keys(device: str) -> None:
    for heads, kv_heads in ((3, 1), (14, 2), (71, 1)):
        named = case(f"heads {heads}:{kv_heads} causal 200")
        inputs = named.inputs(device)
        out, lse = named.run(inputs)
        repeated = [x.repeat_interleave(heads // kv_heads, dim=2) for x in (inputs.k, inputs.v)]
        full = replace(named, kv_heads=heads)
        full_out, full_lse = full.run(inputs.with_tensors(inputs.q, *repeated))
        torch.testing.assert_close(out, full_out, rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(lse, full_lse, rtol=1e-5, atol=1e-4)


CHECKS = {
    name: check
    for name, check in list(globals().items())
    if callable(check) and name.split("_")[0][:1] in "abcde" and name[1:2].isdigit()
}
