"""Which plan a problem gets: always one that adds up, never one that depends on a call's lengths."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn4.machine import MACHINES, Machine, machine
from attn4.mask import Mask
from attn4.plan.channels import faults
from attn4.plan.choose import choose, cta_groups, runnable, unsupported
from attn4.plan.layout import padded
from attn4.problem import Problem

B200 = machine("B200")
PLAIN = Problem(batch=2, seqlen_q=4096, seqlen_k=4096, heads=8, kv_heads=8, head_dim=128, head_dim_v=128)
MASKS = (Mask(), Mask.of(True), Mask(128, 0), Mask(7, -8))
LENGTHS = st.sampled_from((0, 1, 64, 65, 127, 128, 129, 256, 257, 5000))
EXAMPLES = settings(max_examples=120, deadline=None)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Valid problems, supported or not."""
    head_dim = 8 * draw(st.integers(1, 32))
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    return Problem(
        batch=draw(st.integers(0, 3)),
        seqlen_q=draw(LENGTHS),
        seqlen_k=draw(LENGTHS),
        heads=kv_heads * draw(st.sampled_from((1, 2, 3, 8, 71))),
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from((head_dim, 64, 128))),
        dtype=draw(st.sampled_from(("bfloat16", "float16"))),
        mask=draw(st.sampled_from(MASKS)),
        cu_seqlens_q=draw(st.booleans()),
        cu_seqlens_k=draw(st.booleans()),
        seqused_q=draw(st.booleans()),
        seqused_k=draw(st.booleans()),
        lse=draw(st.booleans()),
        direction=draw(st.sampled_from(("forward", "backward"))),
        deterministic=draw(st.booleans()),
    )


@pytest.mark.parametrize("where", MACHINES, ids=lambda m: m.name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_head_dim_mask_and_group_has_a_plan_that_adds_up(where: Machine, direction: str) -> None:
    pairs = [(head_dim, head_dim) for head_dim in range(8, 257, 24)] + [(192, 128), (256, 256)]
    groups = set()
    for head_dim, head_dim_v in pairs:
        for mask in MASKS:
            for queries in (64, 4096):
                dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
                problem = replace(PLAIN, **dims, mask=mask, seqlen_q=queries, direction=direction)
                for group in () if unsupported(problem, where) else cta_groups(problem, where):
                    assert faults(choose(problem, where, cta_group=group), where) == ()
                    groups.add(group)
    assert groups == set(where.cta_groups)


@EXAMPLES
@given(problem=problems(), where=st.sampled_from(MACHINES))
def test_every_supported_problem_has_a_plan_that_adds_up_and_no_other_has_one(
    problem: Problem, where: Machine
) -> None:
    if unsupported(problem, where):
        with pytest.raises(NotImplementedError):
            choose(problem, where)
        return
    for group in cta_groups(problem, where):
        plan = choose(problem, where, cta_group=group)
        assert faults(plan, where) == ()
        assert (plan.arch, plan.cta_group, plan.mask) == (where.name, group, problem.mask.kind)
        assert plan.head_dim >= problem.head_dim
        assert plan.head_dim_v >= problem.head_dim_v
        owned = [b for b in plan.buffers if b.borrows is None]
        assert sum(b.size for b in owned if b.space == "shared") <= where.shared_memory
        assert sum(b.size for b in owned if b.space == "tensor") <= where.tensor_columns


@EXAMPLES
@given(
    problem=problems(),
    where=st.sampled_from(MACHINES),
    batch=st.integers(0, 9),
    queries=LENGTHS,
    keys=LENGTHS,
    groups=st.integers(1, 4),
)
def test_lengths_and_head_counts_leave_no_trace_but_three_choices(
    problem: Problem, where: Machine, batch: int, queries: int, keys: int, groups: int
) -> None:
    if unsupported(problem, where):
        return
    heads = {"heads": problem.heads * groups, "kv_heads": problem.kv_heads * groups}
    other = replace(problem, batch=batch, seqlen_q=queries, seqlen_k=keys, **heads)
    first, second = choose(problem, where), choose(other, where)
    if all(getattr(first, f) == getattr(second, f) for f in ("tile_m", "pack_gqa", "cta_group")):
        assert first == second
    assert first.tile_m in {second.tile_m, 2 * second.tile_m, second.tile_m // 2}
    assert {first.pack_gqa, second.pack_gqa} <= {1, problem.group}


@pytest.mark.parametrize("where", MACHINES, ids=lambda m: m.name)
@pytest.mark.parametrize("keys", [0, 1, 3000, 2**22])
def test_the_number_of_keys_never_changes_a_plan(where: Machine, keys: int) -> None:
    assert choose(PLAIN, where) == choose(replace(PLAIN, seqlen_k=keys), where)


def test_window_bounds_and_forward_determinism_never_change_a_plan() -> None:
    for where in MACHINES:
        window = choose(replace(PLAIN, mask=Mask(1024, 0)), where)
        assert window == choose(replace(PLAIN, mask=Mask(3, -1)), where)
        assert choose(replace(PLAIN, deterministic=True), where) == choose(PLAIN, where)


def test_two_query_tiles_share_a_cta_unless_one_holds_all_or_columns_run_out() -> None:
    assert choose(PLAIN, B200).tile_m == 256
    assert choose(replace(PLAIN, seqlen_q=128), B200).tile_m == 128
    assert choose(replace(PLAIN, head_dim=256, head_dim_v=256), B200).tile_m == 128


@pytest.mark.parametrize(("heads", "queries", "packed"), [(64, 1, 8), (64, 65, 1), (24, 1, 1), (8, 1, 1)])
def test_query_heads_are_packed_where_tiles_would_be_half_empty_and_divide(
    heads: int, queries: int, packed: int
) -> None:
    problem = replace(PLAIN, heads=heads, seqlen_q=queries)
    assert choose(problem, B200).pack_gqa == packed


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "cta_group", "stages"),
    # flash-attn-4's ring depths on the same 227 KB: 10, 5, 3, and K, V, K of unequal size; of a pair 6.
    [(64, 64, 1, {"key_value": 10}), (96, 96, 1, {"key_value": 5}), (128, 128, 1, {"key_value": 3}),
     (192, 128, 1, {"key": 2, "value": 1}), (128, 128, 2, {"key_value": 6}),
     (192, 128, 2, {"key": 3, "value": 3})],
)  # fmt: skip
def test_rings_of_blackwell_are_as_deep_as_shared_memory_allows(
    head_dim: int, head_dim_v: int, cta_group: int, stages: dict[str, int]
) -> None:
    plan = choose(replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v), B200, cta_group=cta_group)
    assert {c.name: c.stages for c in plan.channels if c.name in ("key_value", "key", "value")} == stages


def test_a_cta_of_a_pair_holds_half_of_the_keys_and_half_of_the_columns_of_values() -> None:
    single, pair = (choose(PLAIN, B200, cta_group=group) for group in (1, 2))
    assert single.buffer("key_value").shape == (128, 128)
    assert (pair.buffer("key_value").shape, pair.buffer("value").shape) == ((64, 128), (128, 64))
    assert pair.buffer("value").borrows == "key_value"


@pytest.mark.parametrize(
    ("fields", "group"),
    [
        ({}, 2),
        ({"head_dim": 192}, 2),
        ({"head_dim": 104, "head_dim_v": 128}, 2),
        ({"head_dim": 96, "head_dim_v": 96}, 1),
        ({"head_dim": 256, "head_dim_v": 256}, 1),
        ({"mask": Mask.of(True)}, 1),
        ({"seqused_k": True}, 1),
        ({"seqlen_q": 256}, 1),
        ({"seqlen_q": 257}, 2),
        # Three row blocks of 256 would leave a quarter of two pairs idle, seventeen one in eighteen.
        ({"seqlen_q": 700}, 1),
        ({"seqlen_q": 16 * 256 + 1}, 2),
    ],
)
@pytest.mark.parametrize("where", [m for m in MACHINES if m.tensor_columns], ids=lambda m: m.name)
def test_full_attention_over_enough_rows_is_by_pairs_where_shared_memory_is_busy(
    where: Machine, fields: dict[str, Any], group: int
) -> None:
    assert choose(replace(PLAIN, **fields), where).cta_group == group


@pytest.mark.parametrize(("head_dim", "lender"), [(128, None), (160, None), (192, "query"), (256, "query")])
def test_the_output_borrows_the_querys_storage_where_three_slots_would_not_fit(
    head_dim: int, lender: str | None
) -> None:
    plan = choose(replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim), B200, cta_group=1)
    assert plan.buffer("out").borrows == lender
    # Such a slot is free only when the output has left it.
    assert plan.channel("query").consumers == (("mma", "store") if lender else ("mma",))
    assert plan.buffer("key_value").stages == (2 if head_dim == 256 else 3)


def columns(problem: Problem, cta_group: int) -> dict[str, int]:
    plan = choose(problem, B200, cta_group=cta_group)
    return {b.name: b.offset for b in plan.buffers if b.space == "tensor"}


def test_tensor_memory_of_the_forward_pass_is_two_score_tiles_and_two_outputs() -> None:
    assert columns(PLAIN, 1) == {
        "scores0": 0, "scores1": 128, "output0": 256, "output1": 384,
        "probabilities0": 64, "probabilities1": 192,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "cta_group", "expected"),
    [
        (128, 1, {"scores": 0, "probabilities0": 0, "probabilities1": 64, "dv": 128, "dprobabilities": 256,
                  "dscores0": 256, "dscores1": 320, "dq": 256, "dk": 384}),
        (128, 2, {"scores": 0, "probabilities0": 0, "probabilities1": 96, "dq": 32, "dv": 128,
                  "dprobabilities": 256, "dscores0": 256, "dscores1": 320, "dk": 384}),
        (96, 1, {"scores": 0, "probabilities0": 0, "probabilities1": 64, "dv": 128, "dprobabilities": 224,
                 "dscores0": 224, "dscores1": 288, "dq": 224, "dk": 352}),
        (64, 1, {"scores": 0, "dv": 128, "dprobabilities": 192, "dq": 192, "dk": 320, "probabilities0": 384,
                 "probabilities1": 416, "dscores0": 448, "dscores1": 480}),
    ],
)  # fmt: skip
def test_tensor_memory_of_the_backward_pass_is_the_references_but_for_halves_of_p_and_ds(
    head_dim: int, cta_group: int, expected: dict[str, int]
) -> None:
    problem = replace(PLAIN, direction="backward", head_dim=head_dim, head_dim_v=head_dim)
    assert columns(problem, cta_group) == expected


@pytest.mark.parametrize(
    ("dims", "shares", "expected"),
    [
        ((192, 128), 1, {"scores": 64, "dprobabilities": 64, "dv": 128, "dk": 192, "dq": 64}),
        (
            (136, 136),
            2,
            {"scores": 64, "dprobabilities": 64, "dv": 96, "dk": 96, "dq": 64, "kept_keys": 48},
        ),
        (
            (256, 256),
            2,
            {"scores": 64, "dprobabilities": 64, "dv": 128, "dk": 128, "dq": 64, "kept_keys": 64},
        ),
    ],
)
def test_wide_heads_take_half_a_tile_of_queries_and_as_many_columns_as_tensor_memory_holds(
    dims: tuple[int, int], shares: int, expected: dict[str, int]
) -> None:
    plan = choose(replace(PLAIN, direction="backward", head_dim=dims[0], head_dim_v=dims[1]), B200)
    assert (plan.tile_m, plan.column_shares) == (64, shares)
    own = {b.name: b.size for b in plan.buffers if b.space == "tensor" and b.borrows is None}
    assert own == expected


def test_a_pair_needs_each_operand_twice_but_half_of_the_reductions() -> None:
    backward = replace(PLAIN, direction="backward")
    single, pair = (choose(backward, B200, cta_group=group) for group in (1, 2))
    assert choose(backward, B200) == pair
    assert pair.buffer("dq").shape == (64, 128)
    assert single.buffer("dq").shape == (128, 128)
    assert {"key_columns", "query_columns", "dout_columns"} <= {b.name for b in pair.buffers}
    assert pair.channel("dscores_peer").transaction_bytes == 128 * 128 * 2 // 2
    assert pair.role("mma").leader_only


def test_pairs_are_left_out_where_a_box_of_half_the_columns_of_a_sequence_lies_outside() -> None:
    """As runs on the emulator end: at 8, 16, 72 and 80 in a fault, at 24, 40, 88 and 104 not."""
    packed = replace(PLAIN, direction="backward", cu_seqlens_q=True, cu_seqlens_k=True)
    dims = range(8, 136, 8)
    single = [d for d in dims if cta_groups(replace(packed, head_dim=d, head_dim_v=d), B200) == (1,)]
    assert single == [8, 16, 72, 80]
    padded = replace(PLAIN, direction="backward")
    assert all(len(cta_groups(replace(padded, head_dim=d, head_dim_v=d), B200)) == 2 for d in dims)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
def test_shortest_tiles_come_first_only_where_sums_wait_for_each_other(mask: Mask) -> None:
    problem = replace(PLAIN, direction="backward", mask=mask)
    assert choose(problem, B200).schedule.order == ("linear" if mask.kind == "full" else "longest_first")
    assert choose(replace(problem, deterministic=True), B200).schedule.order == "shortest_first"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
def test_the_end_of_deterministic_sums_is_turned_on_hopper_where_tiles_differ(
    mask: Mask, head_dim: int
) -> None:
    problem = replace(PLAIN, direction="backward", mask=mask, head_dim=head_dim, head_dim_v=head_dim)
    assert not choose(problem, machine("H200")).schedule.turned_end
    schedule = choose(replace(problem, deterministic=True), machine("H200")).schedule
    assert (schedule.order, schedule.turned_end) == ("shortest_first", mask.kind == "causal")


def test_the_polynomial_is_for_where_exponentials_are_scarce() -> None:
    assert choose(PLAIN, B200).softmax.fma_exp_every == 8
    assert choose(PLAIN, machine("B300")).softmax.fma_exp_every == 0
    # Wider heads keep the tensor core busy for longer than their exponentials take.
    for dims in ((192, 128), (256, 256)):
        wide = replace(PLAIN, head_dim=dims[0], head_dim_v=dims[1])
        assert choose(wide, B200).softmax.fma_exp_every == 0


def test_a_rows_arithmetic_does_not_depend_on_mask_or_query_tiles() -> None:
    # Public fault: exponentials split by mask and tile count made decode and prefill differ in bits.
    variants = [replace(PLAIN, mask=mask, seqlen_q=queries) for mask in MASKS for queries in (1, 4096)]
    assert len({choose(problem, B200).softmax for problem in variants}) == 1


WRONG = [
    ({"dtype": "float32"}, r"dtype is float32; kernels take bfloat16 and float16"),
    ({"head_dim": 100, "head_dim_v": 100}, r"head_dim is 100; .* multiples of 8 from 8 to 256"),
    ({"head_dim": 264, "head_dim_v": 128}, r"head_dim is 264"),
    ({"head_dim_v": 0}, r"head_dim_v is 0"),
    ({"kv_heads": 3}, r"8 query heads and 3 key/value heads"),
    ({"kv_heads": 0}, r"8 query heads and 0 key/value heads"),
    ({"seqlen_k": -1}, r"seqlen_k is -1"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_wrong_problem_is_a_value_error_that_names_value_limit_and_way_out(
    fields: dict[str, Any], message: str
) -> None:
    problem = replace(PLAIN, **fields)
    for where in MACHINES:
        assert unsupported(problem, where)
        with pytest.raises(ValueError, match=message):
            choose(problem, where)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (168, 104), (192, 192), (120, 128), (8, 8)])
def test_head_dims_that_round_up_alike_or_to_192_and_128_are_supported(
    head_dim: int, head_dim_v: int
) -> None:
    problem = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v)
    for where in MACHINES:
        assert unsupported(problem, where) == ()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 64), (64, 128), (128, 192), (256, 128)])
def test_other_unequal_head_dims_are_refused(head_dim: int, head_dim_v: int) -> None:
    problem = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v)
    with pytest.raises(NotImplementedError, match=f"head_dim is {head_dim} and head_dim_v is {head_dim_v}"):
        choose(problem, B200)


def test_forward_and_backward_run_on_all_machines() -> None:
    for where in (machine("H200"), B200, machine("B300")):
        assert runnable(PLAIN, where) == ()
        for deterministic in (False, True):
            backward = replace(PLAIN, direction="backward", deterministic=deterministic)
            assert runnable(backward, where) == ()


@pytest.mark.parametrize(
    ("fields", "where", "group"),
    [
        ({}, "H200", 2),
        ({"mask": Mask.of(True)}, "B200", 2),
        ({"cu_seqlens_q": True}, "B200", 2),
        ({"direction": "backward", "head_dim": 192, "head_dim_v": 192}, "B200", 2),
        ({"direction": "backward", "head_dim": 72, "head_dim_v": 72, "seqused_q": True}, "B200", 2),
        ({}, "B200", 3),
    ],
)
def test_a_group_of_ctas_that_does_not_fit_is_refused(fields: dict[str, Any], where: str, group: int) -> None:
    with pytest.raises(ValueError, match=f"A group of {group} CTAs was asked for"):
        choose(replace(PLAIN, **fields), machine(where), cta_group=group)


def test_a_machine_without_plans_is_refused() -> None:
    other = replace(B200, name="sm_120a", chip="RTX 5090")
    assert "RTX 5090 (sm_120a) has no plans" in unsupported(PLAIN, other)[0]


def test_padding_is_to_32_and_no_further() -> None:
    dims = range(8, 257, 8)
    assert [padded(d) for d in dims] == [min(p for p in range(32, 257, 32) if p >= d) for d in dims]


def test_a_plan_is_plain_data() -> None:
    plan = choose(PLAIN, B200)
    assert hash(plan) == hash(choose(PLAIN, B200))
    assert asdict(plan)["tile_m"] == 256
