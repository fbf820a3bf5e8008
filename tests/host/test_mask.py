"""Masks: how causal and window_size become bounds, and which kind a kernel needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn4.mask import Mask
from attn4.problem import Problem
from attn4.reference.masking import Band

BOUNDS = st.one_of(st.none(), st.integers(-9, 9))


@pytest.mark.parametrize("nothing", [(None, None), (-1, -1), (None, -1), (-1, None)])
def test_minus_one_and_none_both_mean_unbounded(nothing: tuple[int | None, int | None]) -> None:
    assert Mask.of(False, nothing) == Mask(None, None)
    assert Mask.of(False, nothing).kind == "full"


@pytest.mark.parametrize("window", [(None, None), (-1, -1), (-1, 0), (None, 0), (-1, 5)])
def test_causal_with_an_unbounded_left_side_is_plain_causal(window: tuple[int | None, int | None]) -> None:
    # Public fault: causal=True with window_size=(-1, 0) gave an empty band and zeros.
    assert Mask.of(True, window) == Mask(None, 0)
    assert Mask.of(True, window).kind == "causal"


def test_an_empty_window_stays_empty() -> None:
    # Public fault: (7, -8) was widened to full attention.
    mask = Mask.of(False, (7, -8))
    assert (mask.left, mask.right, mask.kind) == (7, -8, "window")


def test_causal_keeps_a_right_bound_left_of_the_diagonal() -> None:
    assert Mask.of(True, (3, -2)) == Mask(3, -2)


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (Mask(), "full"),
        (Mask(right=0), "causal"),
        (Mask(right=1), "window"),
        (Mask(left=0), "window"),
        (Mask(left=128, right=0), "window"),
    ],
)
def test_the_kind_is_the_least_masking_code_that_serves(mask: Mask, kind: str) -> None:
    assert mask.kind == kind


@settings(max_examples=60, deadline=None)
@given(causal=st.booleans(), left=BOUNDS, right=BOUNDS)
def test_bounds_select_the_pairs_that_the_words_say(
    causal: bool, left: int | None, right: int | None
) -> None:
    mask = Mask.of(causal, (left, right))
    for distance in range(-12, 13):  # key minus query, both counted from the bottom right corner
        said = (left in (None, -1) or distance >= -left) and (right in (None, -1) or distance <= right)
        said = said and not (causal and distance > 0)
        got = (mask.left is None or distance >= -mask.left) and (mask.right is None or distance <= mask.right)
        assert got == said


@given(left=BOUNDS, right=BOUNDS, queries=st.integers(1, 12), keys=st.integers(1, 12))
@settings(deadline=None)
def test_a_problem_knows_whether_a_query_may_see_no_key(
    left: int | None, right: int | None, queries: int, keys: int
) -> None:
    mask = Mask(left, right)
    band = Band(mask, queries, keys)
    empty = any(not band.keys(range(row, row + 1)) for row in range(queries))
    shape = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 64, "head_dim_v": 64}
    problem = Problem(seqlen_q=queries, seqlen_k=keys, mask=mask, **shape)
    packed = replace(problem, cu_seqlens_q=True, cu_seqlens_k=True)
    # A left bound below 0 may leave rows of longer sequences alone: then a copy is made in vain.
    assert empty <= problem.may_have_empty_rows(False)
    assert (left is not None and left < 0) or problem.may_have_empty_rows(False) == empty
    assert empty <= packed.may_have_empty_rows(same_lengths=queries == keys)
