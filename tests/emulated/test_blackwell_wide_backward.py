"""The Blackwell backward for head dimensions over 128 gives what the oracle gives, without a hazard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.artifact import artifact_for
from attn4.compiled import read
from attn4.emulator.report.report import report
from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from attn4.machine import machine
from attn4.plan.feeds import Step, feeds
from attn4.plan.sm100_backward_wide import COLUMNS_OUTSIDE
from emulated.backward_kernel import backward_plan, differentiate, judged, sum_bits
from gradient_judge import incoming
from needs import COMPILES
from problem_case import Case

pytestmark = COMPILES

GRADIENTS = 1
"""Of the three launches, the second."""

DIMS = ((136, 136), (160, 160), (168, 168), (192, 192), (192, 128), (256, 256))
"""Head dimensions of Q and K, and of V: halves of 192 and 256 columns, and all columns of (192, 128)."""

KERNELS = DIMS[3:]
"""Those that fill their tiles."""

BASE = Case(name="", batch=1, seqlen_q=100, seqlen_k=150, heads=1, kv_heads=1)
PACKED = {
    "heads": 2,
    "kv_heads": 1,
    "lens_q": (100, 0, 40, 3),
    "lens_k": (130, 5, 0, 90),
    "used_q": (50, 0, 40, 3),
    "used_k": (130, 5, 0, 70),
    "tail": 7,
}
KINDS = {
    "causal, grouped": {"causal": True, "heads": 4, "kv_heads": 2},
    "one past whole tiles": {"seqlen_q": 129, "seqlen_k": 257},
    "more queries than keys": {"seqlen_q": 300, "seqlen_k": 70, "causal": True, "dtype": "float16"},
    "window": {"seqlen_q": 300, "seqlen_k": 260, "window": (70, 20)},
    "one query": {"seqlen_q": 1, "seqlen_k": 200},
    "one key": {"seqlen_q": 150, "seqlen_k": 1},
    "packed": PACKED,
    "packed, causal": {**PACKED, "causal": True},
}
"""What cases differ in besides head dimensions; the padding of packed ones is NaN."""

SCHEDULES = {
    "in turn": RoundRobin,
    "random": lambda: Random(1),
    "random, together": lambda: Random(2, warps_together=4),
    "late": lambda: Adversarial(late=True),
    "at once": lambda: Adversarial(late=False),
}


def of(dims: tuple[int, int], **fields: object) -> Case:
    return replace(BASE, head_dim=dims[0], head_dim_v=dims[1], **fields)


def test_all_columns_of_keys_are_differentiated_in_one_cta():
    judged(of((192, 128), causal=True, seqlen_k=130), Adversarial(late=True))


def test_halves_of_the_columns_of_keys_are_differentiated_in_two_ctas():
    judged(of((256, 256), **PACKED), Adversarial(late=True))


def refused(dims, kind) -> bool:
    """Whether a box of columns would lie wholly outside a ragged tensor."""
    return dims[0] <= COLUMNS_OUTSIDE and of(dims, **KINDS[kind]).problem().ragged


PAIRS = tuple((dims, kind) for dims in DIMS for kind in KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("dims,kind", [pair for pair in PAIRS if not refused(*pair)], ids=str)
def test_gradients_are_those_of_attention(dims, kind):
    judged(of(dims, **KINDS[kind]), Random(3))


@pytest.mark.parametrize("dims,kind", [pair for pair in PAIRS if refused(*pair)], ids=str)
def test_columns_wholly_outside_a_ragged_tensor_are_refused(dims, kind):
    with pytest.raises(NotImplementedError, match="Pad head_dim with zeros to 168"):
        judged(of(dims, **KINDS[kind]), Random(3))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dims", KERNELS, ids=str)
def test_every_interleaving_gives_the_same_dk_and_dv_without_a_hazard(dims, schedule):
    case = of(dims, seqlen_q=200, heads=2, kv_heads=1)
    inputs = case.inputs("cpu")
    expected = differentiate(case, inputs, incoming(case, inputs), RoundRobin(), hazards=False)
    found = judged(case, SCHEDULES[schedule]())
    for x, y in zip(expected.gradients[1:], found.gradients[1:], strict=True):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))


def of_sums(dims: tuple[int, int]) -> Case:
    """Three tiles of keys, which add to one block of dQ at the same time."""
    return of(dims, seqlen_q=64, seqlen_k=300, lse=False)


@pytest.mark.slow
@pytest.mark.parametrize("dims", KERNELS, ids=str)
def test_deterministic_sums_have_the_same_bits_under_every_schedule(dims):
    first, *others = sum_bits(of_sums(dims), range(8), deterministic=True)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("dims", KERNELS, ids=str)
def test_other_sums_differ_under_the_same_schedules(dims):
    first, *others = sum_bits(of_sums(dims), range(8))
    assert any(not torch.equal(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window": (100, 30)}], ids=["full", "causal", "window"]
)
def test_a_deterministic_grid_of_which_only_one_cta_is_resident_comes_to_its_end(mask):
    judged(of((256, 256), seqlen_k=300, **mask), RoundRobin(), deterministic=True, sms=1)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["full", "packed"])
@pytest.mark.parametrize("dims", KERNELS, ids=str)
def test_no_role_spills_or_takes_more_registers_than_planned(dims, packed):
    case = of(dims, **({**PACKED, "causal": True} if packed else {}))
    plan = backward_plan(case, deterministic=packed)
    found = read(plan, artifact_for(plan))
    assert found.compiled.stack == 0
    assert found.problems() == ()


@pytest.mark.slow
@pytest.mark.parametrize("dims", KERNELS, ids=str)
def test_a_step_counts_what_feeds_and_speeds_say(dims):
    """Of all CTAs of 128 keys; and statistics, which each thread reads for its 32 queries."""
    b200 = machine("sm_100a")
    counts = []
    for steps in (2, 4):
        case = of(dims, seqlen_q=64 * steps, seqlen_k=128)
        inputs = case.inputs("cpu")
        run = differentiate(case, inputs, incoming(case, inputs), RoundRobin(), hazards=False)
        counts.append(report(run.grids).kernels[GRADIENTS].counts)
    step = {name: (counts[1][name] - counts[0].get(name, 0)) // 2 for name in counts[1]}
    plan = backward_plan(of(dims))
    bound = feeds(b200, Step.of(plan))
    shares = plan.column_shares
    assert step["flop"] == shares * bound.cycles("tensor core") * b200.tensor_flops
    assert step["mufu.ex2"] == shares * 64 * 128 // 32
    assert step["bulk reduce bytes"] == 64 * plan.head_dim * 4
    assert step["shared store bytes"] == shares * 128 * 64 * 2 + 64 * plan.head_dim * 4
    assert step["shared load bytes"] == shares * 256 * 2 * 32 * 4
    moved = step["operand bytes"] + step["shared store bytes"] + step["bulk reduce bytes"]
    assert moved == shares * bound.cycles("shared memory") * b200.shared_bytes
