"""A plan that does not add up is refused, with the arithmetic written out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from attn4.machine import Machine, machine
from attn4.mask import Mask
from attn4.plan import sm100
from attn4.plan.channels import faults, validate
from attn4.plan.choose import choose
from attn4.plan.explain import explain
from attn4.plan.launch_control import with_launch_control
from attn4.plan.plan import Plan
from attn4.problem import Problem

B200 = machine("B200")
H200 = machine("H200")

PLAIN = Problem(batch=2, seqlen_q=4096, seqlen_k=4096, heads=8, kv_heads=8, head_dim=128, head_dim_v=128)
FORWARD = choose(PLAIN, B200, cta_group=1)
FORWARD_PAIR = choose(PLAIN, B200, cta_group=2)
DYNAMIC = choose(replace(PLAIN, mask=Mask.of(True)), B200)
UNEQUAL = choose(replace(PLAIN, head_dim=192), B200, cta_group=1)
UNEQUAL_PAIR = choose(replace(PLAIN, head_dim=192), B200, cta_group=2)
SINGLE = choose(replace(PLAIN, direction="backward"), B200, cta_group=1)
PAIR = choose(replace(PLAIN, direction="backward"), B200, cta_group=2)
HOPPER = choose(PLAIN, H200)
CLUSTER = choose(replace(PLAIN, direction="backward", head_dim=256, head_dim_v=256), H200)


def changed(plan: Plan, kind: str, name: str, **fields: Any) -> Plan:
    """``plan`` with fields of one role, buffer or channel replaced."""
    items = getattr(plan, kind)
    assert any(item.name == name for item in items)
    new = tuple(replace(item, **fields) if item.name == name else item for item in items)
    return replace(plan, **{kind: new})


def one_fault(plan: Plan, where: Machine, text: str) -> None:
    """``plan`` has exactly one fault, and it says ``text``."""
    found = faults(plan, where)
    assert len(found) == 1, found
    assert text in found[0]
    with pytest.raises(ValueError, match=re.escape(text)):
        validate(plan, where)


@pytest.mark.parametrize(
    ("plan", "where"),
    [
        (FORWARD, B200),
        (FORWARD_PAIR, B200),
        (UNEQUAL_PAIR, B200),
        (DYNAMIC, B200),
        (UNEQUAL, B200),
        (SINGLE, B200),
        (PAIR, B200),
        (HOPPER, H200),
    ],
)
def test_chosen_plans_have_no_fault(plan: Plan, where: Machine) -> None:
    assert faults(plan, where) == ()


@pytest.mark.parametrize(
    ("queries", "options", "text"),
    [
        (
            4096,
            {"score_stages": 2},
            "scores0 256 + scores1 256 + output0 128 + output1 128 end at 768 columns",
        ),
        (100, {"softmax_turns": True}, "turn: a named barrier of 256 threads, but warpgroups of softmax0"),
    ],
)
def test_options_of_a_forward_plan_that_do_not_fit_are_refused(
    queries: int, options: dict[str, Any], text: str
) -> None:
    one_fault(sm100.forward(replace(PLAIN, seqlen_q=queries), B200, **options), B200, text)


@pytest.mark.parametrize(
    ("plan", "channel", "fields", "text"),
    [
        (FORWARD, "probabilities0", {"full_arrivals": 5}, "full_arrivals is 5, but softmax0 4 warps = 4"),
        (FORWARD, "probabilities0", {"full_arrivals": 128}, "full_arrivals is 128, but softmax0 4 warps = 4"),
        (FORWARD, "row_stats1", {"empty_arrivals": 3}, "empty_arrivals is 3, but correction 4 warps = 4"),
        (
            FORWARD,
            "key_value",
            {"full_arrivals": 2},
            "full_arrivals is 2, but one warp announces the bytes = 1",
        ),
        (FORWARD, "scores0", {"full_arrivals": 4}, "full_arrivals is 4, but one commit = 1"),
        (
            FORWARD,
            "key_value",
            {"transaction_bytes": 65536},
            "transaction_bytes is 65536, but a stage of key_value is 128 x 128 bfloat16 = 32768 bytes",
        ),
        (
            FORWARD,
            "out",
            {"transaction_bytes": 1},
            "transaction_bytes is 1, but no asynchronous copy reports",
        ),
        (
            FORWARD,
            "out",
            {"stages": 2, "buffer": "nowhere"},
            "hands over buffer nowhere, which does not exist",
        ),
        (FORWARD, "query", {"consumers": ("mna",)}, "names mna; roles are softmax0"),
        (
            DYNAMIC,
            "tile",
            {"empty_arrivals": 14},
            "softmax0 4 + softmax1 4 + correction 4 + mma 1 + store 1 + load 1 warps = 15",
        ),
        (UNEQUAL, "query", {"empty_arrivals": 1}, "empty_arrivals is 1, but mma 1 + store 1 warps = 2"),
        (
            FORWARD_PAIR,
            "probabilities0_last",
            {"full_arrivals": 4},
            "full_arrivals is 4, but (softmax0 4 warps) x 2 CTAs = 8",
        ),
        (FORWARD_PAIR, "row_stats0", {"full_arrivals": 8}, "full_arrivals is 8, but softmax0 4 warps = 4"),
        (FORWARD_PAIR, "scores1", {"full_arrivals": 2}, "full_arrivals is 2, but one commit = 1"),
        (
            UNEQUAL_PAIR,
            "value",
            {"transaction_bytes": 16384},
            "a stage of value is 128 x 64 bfloat16 = 16384 bytes, x 2 CTAs = 32768",
        ),
        (UNEQUAL_PAIR, "query", {"empty_arrivals": 3}, "empty_arrivals is 3, but mma 1 + store 1 warps = 2"),
        (PAIR, "dscores", {"full_arrivals": 8}, "full_arrivals is 8, but (compute 8 warps) x 2 CTAs = 16"),
        (PAIR, "dq", {"empty_arrivals": 4}, "empty_arrivals is 4, but (reduce 4 warps) x 2 CTAs = 8"),
        (
            PAIR,
            "query",
            {"transaction_bytes": 16384},
            "a stage of query is 64 x 128 bfloat16 = 16384 bytes, x 2 CTAs = 32768",
        ),
        (PAIR, "dq_slice", {"full_arrivals": 100}, "a named barrier of 100 threads"),
        (PAIR, "dq_slice", {"full_arrivals": 256}, "multiples of 128 up to 128"),
    ],
)
def test_a_wrong_count_is_refused_with_its_arithmetic(
    plan: Plan, channel: str, fields: dict[str, Any], text: str
) -> None:
    one_fault(changed(plan, "channels", channel, **fields), B200, text)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"mask": "causal"}, "the causal mask"),
        ({"seqused_k": True}, "seqused_k"),
        (
            {"schedule": replace(FORWARD_PAIR.schedule, dynamic=True)},
            "a schedule that each CTA takes for itself",
        ),
    ],
)
def test_a_pair_whose_ctas_may_take_other_steps_is_refused(fields: dict[str, Any], cause: str) -> None:
    one_fault(
        replace(FORWARD_PAIR, **fields), B200, f"the same steps, one at least, but {cause} may give others"
    )


def test_a_wrong_count_on_hopper_is_refused_with_its_arithmetic() -> None:
    warps = HOPPER.role("attend").warps
    text = f"empty_arrivals is {warps - 1}, but attend {warps} warps = {warps}"
    one_fault(changed(HOPPER, "channels", "key", empty_arrivals=warps - 1), H200, text)


@pytest.mark.parametrize(
    ("channel", "fields", "text"),
    [
        (
            "query",
            {"empty_arrivals": 8},
            "empty_arrivals is 8, but (probability 4 + gradient 4 warps) x 2 CTAs of the cluster = 16",
        ),
        ("dscores", {"full_arrivals": 8}, "full_arrivals is 8, but gradient 4 warps = 4"),
        (
            "dscores",
            {"transaction_bytes": 16384},
            "the other CTAs of the cluster copy theirs of the 16384 bytes of a stage",
        ),
        ("row_stats", {"ctas": 3}, "row_stats is filled by 3 CTAs; a cluster has 2"),
    ],
)
def test_a_wrong_count_of_a_cluster_is_refused(channel: str, fields: dict[str, Any], text: str) -> None:
    one_fault(changed(CLUSTER, "channels", channel, **fields), H200, text)


def test_an_empty_side_that_vanishes_is_missed_in_the_barrier_count() -> None:
    found = faults(changed(FORWARD, "channels", "row_stats0", empty_arrivals=0), B200)
    assert any("224 bytes, but the channels have 27 barriers: 27 x 8 = 216" in fault for fault in found)


def test_a_slot_that_never_comes_back_is_refused() -> None:
    cut = changed(FORWARD, "channels", "key_value", empty_arrivals=0)
    cut = changed(cut, "channels", "query", empty_arrivals=0)
    text = "channel key_value has no empty barrier, and no other channel leads from mma back to load"
    assert any(text in fault for fault in faults(cut, B200))


@pytest.mark.parametrize(
    ("role", "fields", "text"),
    [
        ("mma", {"first_warp": 13}, "role mma begins at warp 13, but those before it end at 12"),
        ("softmax1", {"registers": 200}, "softmax0 4 x 176 + softmax1 4 x 200 + correction 4 x 96"),
        (
            "softmax1",
            {"registers": 188},
            "role softmax1 has 188 registers, not a multiple of 8 from 24 to 256",
        ),
        ("load", {"registers": 48}, "share a warpgroup, which has one register count"),
        ("idle", {"warps": 2}, "the roles have 17 warps"),
    ],
)
def test_roles_out_of_their_bounds_are_refused(role: str, fields: dict[str, Any], text: str) -> None:
    found = faults(changed(FORWARD, "roles", role, **fields), B200)
    assert any(text in fault for fault in found), found


def test_the_register_budget_is_spelled_out() -> None:
    text = "= 2144 a lane, but 16 warps are launched with 128 each (65536 / 512 threads, rounded down to 8)"
    one_fault(changed(FORWARD, "roles", "softmax1", registers=200), B200, text)


@pytest.mark.parametrize(
    ("buffer", "fields", "text"),
    [
        (
            "key_value",
            {"size": 98303},
            "key_value has 98303 bytes, but 3 stages of 128 x 128 bfloat16 are 3 x 32768 = 98304",
        ),
        ("query", {"offset": 512}, "query begins at byte 512, 512 past a multiple of 1024"),
        ("row_stats1", {"offset": 229_376}, "row_stats0 (229376 + 1024 = 230400) and row_stats1"),
        ("output1", {"offset": 385}, "end at 513 columns, but sm_100a has 512"),
        (
            "output1",
            {"offset": 383},
            "output0 (256 + 128 = 384) and output1 (from 383) overlap in tensor memory",
        ),
        (
            "probabilities1",
            {"offset": 200},
            "probabilities1 at 200..264 leaves scores1, which it borrows, at 128..256",
        ),
        ("probabilities1", {"borrows": "scores2"}, "borrows scores2, which does not exist"),
        ("probabilities1", {"borrows": "probabilities0"}, "which owns no tensor memory"),
        ("barriers", {"offset": 232_400}, "end at 232624 bytes, but sm_100a has 232448"),
    ],
)
def test_memory_out_of_its_bounds_is_refused_with_its_arithmetic(
    buffer: str, fields: dict[str, Any], text: str
) -> None:
    found = faults(changed(FORWARD, "buffers", buffer, **fields), B200)
    assert any(text in fault for fault in found), found


def test_hopper_has_no_tensor_memory() -> None:
    found = faults(FORWARD, H200)
    assert any("tensor memory" in fault and "but sm_90a has 0" in fault for fault in found)


def test_a_misaligned_stage_is_refused() -> None:
    odd = changed(FORWARD, "buffers", "key_value", shape=(100, 136), size=3 * 100 * 136 * 2)
    odd = changed(odd, "channels", "key_value", transaction_bytes=100 * 136 * 2)
    one_fault(odd, B200, "a stage of buffer key_value is 27200 bytes, 576 past a multiple of 1024")


def test_a_name_declared_twice_is_refused() -> None:
    one_fault(
        replace(FORWARD, channels=(*FORWARD.channels, FORWARD.channels[0])),
        B200,
        "channel query is declared 2",
    )


def test_a_barrier_buffer_of_another_size_is_refused() -> None:
    one_fault(
        changed(FORWARD, "buffers", "barriers", shape=(27,), size=216),
        B200,
        "buffer barriers has 216 bytes, but the channels have 28 barriers: 28 x 8 = 224",
    )


def test_more_named_barriers_than_the_hardware_has_are_refused() -> None:
    one_fault(changed(PAIR, "channels", "dq_slice", stages=16), B200, "take 16 named barriers; a CTA has 15")


def test_launch_control_adds_a_response_that_adds_up() -> None:
    found = with_launch_control(DYNAMIC)
    assert faults(found, B200) == ()
    assert found.channel("response").transaction_bytes == 16
    assert found.shared_bytes == DYNAMIC.shared_bytes + 16 + 8
    assert not found.schedule.counted
    explained = replace(explain(replace(PLAIN, mask=Mask.of(True)), B200), plan=found)
    assert "one CTA a tile, longest first order, taken over from CTAs that have not started" in str(explained)


@pytest.mark.parametrize(
    ("fields", "arch", "reason"),
    [
        ({"mask": Mask.of(True)}, "sm_90a", "no forward pass on Blackwell"),
        ({"cu_seqlens_q": True}, "sm_100a", "number of tiles of packed sequences"),
        ({}, "sm_100a", "a pair of CTAs would have to take over a pair"),
        ({"head_dim": 64, "head_dim_v": 64}, "sm_100a", "dealt in advance"),
        ({"direction": "backward"}, "sm_100a", "no forward pass"),
    ],
)
def test_launch_control_is_refused_where_it_cannot_be(fields: dict[str, Any], arch: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        with_launch_control(choose(replace(PLAIN, **fields), machine(arch)))
