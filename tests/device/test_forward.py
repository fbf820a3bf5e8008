"""The kernels against the float32 oracle, over the whole list of cases, into poisoned memory."""

import itertools

import pytest
import torch

from cases import CASES, HEAD_DIMS, case
from judge import eager, judge, oracle
from poison import poisoned_memory


def test_poison_reaches_every_result():
    with poisoned_memory():
        assert torch.empty_like(torch.zeros(1, device="cuda").expand(3, 5)).isnan().all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_errs_by_at_most_twice_torch_and_repeats_its_bits(case):
    inputs = case.inputs("cuda")
    with poisoned_memory():
        first = case.run(inputs)
        second = case.run(inputs)
    out, lse = first if case.lse else (first, None)
    assert out.dtype == case.torch_dtype
    assert out.is_contiguous()
    judge(out, lse, oracle(case, inputs), eager(case, inputs))
    again, lse_again = second if case.lse else (second, None)
    assert torch.equal(out, again)
    assert lse is None or torch.equal(lse, lse_again)


@pytest.mark.parametrize(
    "name", ["no lse 64 full", "no lse 128 causal", "no lse 128 window", "packed, no lse"]
)
def test_out_does_not_depend_on_whether_the_lse_is_asked_for(name):
    named = case(name)
    inputs = named.inputs("cuda")
    with_lse, _ = case(name, lse=True).run(inputs)
    assert torch.equal(named.run(inputs), with_lse)


@pytest.mark.parametrize(
    "name", ["dim 64 full", "dim 72 causal", "layout odd_rows 128 causal", "packed float16"]
)
def test_preallocated_out_is_written_whole_and_returned(name):
    named = case(name)
    inputs = named.inputs("cuda")
    expected, expected_lse = named.run(inputs)
    out = torch.full_like(expected, torch.nan)
    result, lse = named.run(inputs, out=out)
    assert result is out
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_deterministic_is_a_legal_flag_that_changes_nothing():
    named = case("dim 128 causal")
    inputs = named.inputs("cuda")
    for x, y in zip(named.run(inputs), named.run(inputs, deterministic=True), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("dim 64 full", "dim 64 causal"),
        ("dim 128 causal", "dim 120 causal"),
        ("full 128 40x300", "full 128 300x40"),
        ("packed self 128 causal", "packed cross 128 causal"),
        ("layout bhsd 64 full", "layout odd_rows 64 full"),
        ("dim 128 full", "no lse 128 full"),
    ],
)
def test_two_signatures_in_both_orders_do_not_disturb_each_other(first, second):
    named = {name: case(name) for name in (first, second)}
    inputs = {name: named[name].inputs("cuda") for name in named}
    seen = {}
    for name in (first, second, first, second, second, first):
        result = named[name].run(inputs[name])
        out = result[0] if named[name].lse else result
        assert torch.equal(out, seen.setdefault(name, out))
    assert len(seen) == 2


def test_calls_that_differ_in_their_tensors_alone_give_their_own_results():
    named = case("layout bhsd 128 causal")
    for seed in range(3):
        inputs = named.inputs("cuda", seed=seed)
        out, lse = named.run(inputs)
        judge(out, lse, oracle(named, inputs), eager(named, inputs))


def test_every_head_dim_is_in_the_list():
    dims = {c.head_dim for c in CASES}
    assert dims >= set(HEAD_DIMS)
    assert any((c.head_dim, c.dim_v) == (192, 128) for c in CASES)
    ratios = {c.heads // c.kv_heads for c in CASES}
    assert ratios >= {1, 3, 4, 5, 7, 8, 12, 71}


@pytest.mark.parametrize("values", ["gaussian", "ascending"])
def test_repeats_are_bit_equal_under_load(values):
    """Races show in a fraction of launches; dozens in flight at once find more than one alone."""
    for name in ("packed self 128 causal", "full 128 261x261", "causal 64 261x261"):
        named = case(name, values=values)
        inputs = named.inputs("cuda")
        results = [named.run(inputs) for _ in range(100)]
        for (out, lse), (first, first_lse) in zip(results, itertools.repeat(results[0]), strict=False):
            assert torch.equal(out, first)
            assert torch.equal(lse, first_lse)
