"""The case sets, and the operations that a case counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn4.bench.attainable import attainable_tflops
from attn4.bench.cases import (
    CASE_SETS,
    CAUSAL,
    Case,
    cases,
    counted_pairs,
    flops,
    skewed_lengths,
    visible_pairs,
)
from attn4.machine import machine
from attn4.mask import Mask


def brute_force_pairs(seqlen_q: int, seqlen_k: int, mask: Mask) -> int:
    left = seqlen_k + seqlen_q if mask.left is None else mask.left
    right = seqlen_k + seqlen_q if mask.right is None else mask.right
    shift = seqlen_k - seqlen_q
    return sum(-left <= j - i - shift <= right for i in range(seqlen_q) for j in range(seqlen_k))


MASKS = (Mask(), CAUSAL, Mask(left=5, right=0), Mask(left=3, right=4), Mask(left=0), Mask(left=7, right=-8))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlens", [(1, 1), (17, 17), (9, 30), (30, 9), (0, 4)])
def test_visible_pairs_are_those_a_loop_over_all_pairs_counts(mask: Mask, seqlens: tuple[int, int]) -> None:
    assert visible_pairs(*seqlens, mask) == brute_force_pairs(*seqlens, mask)


def small(mask: Mask, seqlens: tuple[int, ...], packed: bool) -> Case:
    return Case(case_set="test", head_dim=64, heads=6, kv_heads=2, seqlens=seqlens, mask=mask, packed=packed)


@pytest.mark.parametrize("mask", MASKS)
def test_flops_of_a_packed_case_are_4_d_for_each_visible_pair_and_query_head(mask: Mask) -> None:
    lengths = (17, 3, 40)
    pairs = sum(brute_force_pairs(length, length, mask) for length in lengths)
    assert flops(small(mask, lengths, packed=True)) == 4 * pairs * 64 * 6


def test_flops_of_a_dense_window_count_its_visible_pairs() -> None:
    mask = Mask(left=10, right=0)
    assert flops(small(mask, (50, 50), packed=False)) == 4 * 2 * brute_force_pairs(50, 50, mask) * 64 * 6


def test_flops_of_dense_cases_follow_the_published_convention() -> None:
    # 4 S^2 D H B, halved when causal, and 2.5 times that backward.
    full, causal = small(Mask(), (48, 48), packed=False), small(CAUSAL, (48, 48), packed=False)
    assert flops(full) == 4 * 48**2 * 64 * 6 * 2
    assert flops(causal) == flops(full) / 2
    assert flops(replace(full, direction="backward")) == 2.5 * flops(full)
    assert flops(replace(full, direction="both")) == 3.5 * flops(full)


def test_flops_of_other_head_dims_of_v_count_each_product() -> None:
    case = replace(small(Mask(), (48,), packed=False), head_dim=192, head_dim_v=128)
    pairs = 48**2 * case.heads
    assert flops(case) == pairs * (2 * 192 + 2 * 128)
    assert flops(replace(case, direction="backward")) == pairs * (3 * 2 * 192 + 2 * 2 * 128)
    assert case.name == "test-d192,128-6:2-full-48"
    assert (case.problem().head_dim, case.problem().head_dim_v) == (192, 128)


def test_forward_set_is_18_cells_of_16384_tokens_and_width_2048() -> None:
    cells = cases("forward")
    assert len(cells) == 18
    assert {cell.tokens for cell in cells} == {16_384}
    assert {cell.heads * cell.head_dim for cell in cells} == {2_048}
    assert {(cell.head_dim, cell.mask_name, cell.seqlen) for cell in cells} == {
        (head_dim, mask, seqlen)
        for head_dim in (64, 128, 256)
        for mask in ("full", "causal")
        for seqlen in (1024, 4096, 16384)
    }


def test_other_sets_are_what_their_names_say() -> None:
    assert {cell.heads // cell.kv_heads for cell in cases("gqa")} == {8}
    assert {cell.dims for cell in cases("wide")} == {"192", "192,128"}
    assert {cell.direction for cell in cases("both")} == {"both"}
    assert {cell.mask_name for cell in cases("window")} == {"window(1024,0)"}
    for cell in cases("varlen"):
        assert cell.tokens == 16_384
        assert cell.packed
        assert max(cell.seqlens) == 8_192
        assert sorted(cell.seqlens)[-2] < 512
    for cell in cases("schedule"):
        assert cell.packed or cell.mask == CAUSAL
        assert cell.seqlens[-1] == max(cell.seqlens)
    assert all(cell.host for cell in cases("host"))
    assert all(flops(cell) < 1e9 for cell in cases("quick"))


def test_case_names_are_unique() -> None:
    names = [cell.name for name in CASE_SETS for cell in cases(name)]
    assert len(names) == len(set(names))


def test_skewed_lengths_add_up_and_end_with_the_longest() -> None:
    lengths = skewed_lengths(1000, 400)
    assert sum(lengths) == 1000
    assert lengths[-1] == 400 == max(lengths)
    assert min(lengths) > 0
    with pytest.raises(ValueError, match="1001"):
        skewed_lengths(1000, 1001)


def test_cases_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="packed=True"):
        small(Mask(), (3, 4), packed=False)
    with pytest.raises(ValueError, match="multiple of 4"):
        Case(case_set="test", head_dim=64, heads=6, kv_heads=4, seqlens=(8,))
    with pytest.raises(ValueError, match="no case set 'nothing'; there are forward"):
        cases("nothing")


def test_problem_of_a_case_has_its_shapes() -> None:
    problem = cases("varlen")[1].problem()
    assert (problem.seqlen_q, problem.heads, problem.head_dim) == (8_192, 32, 64)
    assert problem.cu_seqlens_q
    assert problem.cu_seqlens_k
    assert problem.mask == CAUSAL


def test_attainable_rate_is_that_of_the_tensor_cores_at_the_clock_given() -> None:
    h200 = machine("H200")
    wide = cases("forward")[6]
    # 132 SMs of 4096 operations a cycle.
    assert attainable_tflops(wide, h200, 132, 1_000.0) == pytest.approx(132 * 4096 * 1e9 / 1e12)
    highest = attainable_tflops(wide, h200, 132)
    assert highest == pytest.approx(132 * 4096 * h200.clock_ghz * 1e9 / 1e12)


def test_attainable_rate_of_a_narrow_head_is_bound_by_exponentials() -> None:
    narrow = replace(cases("forward")[0], head_dim=32)
    # 4*32 operations and one of 16 exponentials a cycle for each pair: half of the tensor cores' 4096.
    expected = 132 * 16 * 4 * 32 * 1e9 / 1e12
    assert attainable_tflops(narrow, machine("H200"), 132, 1_000.0) == pytest.approx(expected)


def test_attainable_time_of_both_passes_is_at_least_that_of_each() -> None:
    h200 = machine("H200")

    def seconds(case: Case) -> float:
        rate = attainable_tflops(case, h200, 132)
        assert rate is not None
        return flops(case) / rate

    for head_dim in (32, 128):
        case = replace(cases("forward")[0], head_dim=head_dim)
        apart = [seconds(replace(case, direction=passes)) for passes in ("forward", "backward")]
        assert max(apart) < seconds(replace(case, direction="both")) <= sum(apart) * (1 + 1e-9)


def test_attainable_rate_is_unknown_for_float32() -> None:
    case = replace(cases("quick")[0], dtype="float32")
    assert attainable_tflops(case, machine("H200"), 132) is None


def test_causal_convention_is_the_exact_count_less_half_of_the_diagonal() -> None:
    case = small(CAUSAL, (64,), packed=False)
    assert counted_pairs(case) == brute_force_pairs(64, 64, CAUSAL) - 64 / 2
