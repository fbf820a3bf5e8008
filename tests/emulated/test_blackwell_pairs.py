"""The Blackwell forward by pairs of CTAs: the bits of single CTAs, no hazard, and half of K and V a CTA."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

import attn4.emulator
from attn4.emulator.grid import Limits
from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from attn4.machine import machine
from attn4.ops.emulated import emulated_kernel
from attn4.plan.choose import choose
from attn4.plan.plan import SoftmaxPlan
from emulated.forward_kernel import UNBOUNDED, attend
from emulated.forward_kernel import Case as Call
from emulated.judged import attended
from judge import eager, judge, oracle
from needs import COMPILES
from planted.replay import recorded
from problem_case import Case

pytestmark = COMPILES

SCHEDULES = {
    "in turn": RoundRobin,
    "random": lambda: Random(1),
    "random, four together": lambda: Random(2, warps_together=4),
    "late": lambda: Adversarial(late=True),
    "at once": lambda: Adversarial(late=False),
}


def by(case, cta_group, schedule, *, hazards=False, arch="sm_100a", sms=2):
    """Output, LSE and device of the kernel for groups of ``cta_group`` CTAs."""
    plan = choose(case.problem(), machine(arch), cta_group=cta_group)
    assert plan.cta_group == cta_group
    inputs = case.inputs("cpu")
    out = torch.full((*case.q_shape[:-1], case.dim_v), torch.nan, dtype=case.torch_dtype)
    lse = torch.full((case.batch, case.heads, case.seqlen_q), torch.nan) if case.lse else None
    tensors = (inputs.q, inputs.k, inputs.v, out, lse)
    with attn4.emulator.device(arch, schedule=schedule, sms=sms, hazards=hazards) as gpu:
        emulated_kernel(plan)(*tensors, case.softmax_scale, UNBOUNDED, UNBOUNDED, *[None] * 6, sms)
    return out, lse, gpu


def same_bits(case, schedule, **options):
    """The oracle's answer, no hazard, and what single CTAs give, which add in the same order."""
    out, lse, gpu = by(case, 2, schedule, hazards=True, **options)
    inputs = case.inputs("cpu")
    judge(out, lse, oracle(case, inputs), eager(case, inputs))
    assert gpu.hazards == []
    single, single_lse, _ = by(case, 1, RoundRobin(), **options)
    assert torch.equal(out.view(torch.int16), single.view(torch.int16))
    assert lse is None or torch.equal(lse, single_lse)


def case(name, **fields):
    return Case(name=name, **{"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 128, **fields})


UNEVEN = case("half of the last pair past the end", seqlen_q=520, seqlen_k=300)
UNEQUAL = case("dim 192 and 128", seqlen_q=300, seqlen_k=385, head_dim=192, head_dim_v=128)
CASES = (
    case("one key", seqlen_q=512, seqlen_k=1),
    case("a key in the second half only", seqlen_q=257, seqlen_k=128 + 65),
    case("a key past a tile", seqlen_q=511, seqlen_k=257, heads=4, kv_heads=2),
    case("float16 without LSE", seqlen_q=600, seqlen_k=200, dtype="float16", lse=False, heads=2, kv_heads=2),
    case("two batches", batch=2, seqlen_q=513, seqlen_k=140, heads=2),
    case("dim 192 and 128, grouped", seqlen_q=769, seqlen_k=129, heads=3, head_dim=192, head_dim_v=128),
    case("dim 192 and 128, one key", seqlen_q=260, seqlen_k=1, head_dim=192, head_dim_v=128),
    *(case(f"dim {dim}", seqlen_q=300, seqlen_k=200, head_dim=dim) for dim in (32, 64, 72, 96, 256)),
)


def test_half_a_pair_past_the_end_gives_the_bits_of_single_ctas():
    same_bits(UNEVEN, SCHEDULES["late"]())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("one", [UNEVEN, UNEQUAL, *CASES], ids=lambda one: one.name)
def test_pairs_give_the_bits_of_single_ctas_under_every_schedule(one, schedule):
    same_bits(one, SCHEDULES[schedule]())


@pytest.mark.slow
@pytest.mark.parametrize("sms", [3, 6])
def test_pairs_step_through_the_tiles_on_any_number_of_sms(sms):
    """An odd SM stays out."""
    several = case("several tiles a pair", batch=2, seqlen_q=1100, seqlen_k=140, heads=2)
    out, lse, gpu = by(several, 2, Random(4), hazards=True, sms=sms)
    inputs = several.inputs("cpu")
    judge(out, lse, oracle(several, inputs), eager(several, inputs))
    assert gpu.hazards == []


KNOBS = {
    "turns of the softmaxes": {"options": (("cta_group", 2), ("softmax_turns", True))},
    "one query tile, two score slots": {"head_dim": 256},
    "one query tile, one score slot": {"head_dim": 256, "options": (("cta_group", 2), ("score_stages", 1))},
    "probabilities in one piece": {"changes": (("late_keys", 0),)},
    "no threshold, a quarter by polynomial": {"changes": (("softmax", SoftmaxPlan(0.0, 4)),)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOBS)
def test_the_knobs_of_a_plan_give_attention_by_pairs_too(name):
    fields = {"head_dim": 128, "options": (("cta_group", 2),), **KNOBS[name]}
    call = Call(mask="full", seqlen_q=520, seqlen_k=390, ctas=2, arch="sm_100a", **fields)
    result = attend(call, Adversarial(late=True), hazards=True)
    assert result.error < 2.5e-3
    assert list(result.grid.findings) == []


@pytest.mark.slow
def test_pairs_on_an_emulated_b300():
    same_bits(UNEVEN, Random(5), arch="sm_103a")


@pytest.mark.slow
def test_the_public_function_takes_pairs_by_itself():
    """By hand, for 300 x 385 of dims 192 and 128: 2 CTAs of 2 query tiles and 4 steps; K and V once."""
    gpu = attended(UNEQUAL)
    total = gpu.report.to_dict()[0]["total"]
    query, key, value = (2 * 128 * size for size in (192, 192, 128))
    assert total["flop"] == 2 * 2 * 4 * 2 * 128 * 128 * (192 + 128)
    assert total["bulk load bytes"] == 2 * 2 * query + 4 * (key + value)


def test_a_pair_loads_and_reads_half_of_the_keys_and_values_of_single_ctas():
    """By hand, for 520 x 300: 3 CTAs' rows of 2 query tiles and 3 steps, or 4 of which pairs make 2."""
    bytes_of = 128 * 128 * 2
    single, pair = (by(UNEVEN, group, RoundRobin())[2].report.to_dict()[0]["total"] for group in (1, 2))
    assert single["bulk load bytes"] == 3 * (2 + 3 * 2) * bytes_of
    assert pair["bulk load bytes"] == 4 * (2 + 3 * 2 / 2) * bytes_of
    # Q, K and V of each product of 128 rows; P comes from tensor memory.
    assert single["operand bytes"] == 3 * 2 * 3 * 3 * bytes_of
    assert pair["operand bytes"] == 4 * 2 * 3 * (1 + 1 / 2 + 1 / 2) * bytes_of


PLANTED = Call(128, "full", 768, 250, ctas=2, arch="sm_100a", options=(("cta_group", 2),))
"""Two tiles of a pair: what is signalled in the first is waited for in the second."""


@cache
def kernel():
    with recorded() as found:
        attend(PLANTED, RoundRobin(), sms=2)
    return found[-1]


def reported(ptx):
    """What is reported, and under which order first; nothing under any is an error."""
    for name, order in SCHEDULES.items():
        limits = Limits(seconds=60, idle_instructions=100_000)
        done = kernel().replay(order(), ptx=ptx, sms=2, limits=limits)
        if done.kinds:
            return name, done.kinds
    raise AssertionError("nothing was reported")


def each(pattern, replacement):
    """The kernel's text with one match changed, for each of them."""
    ptx = kernel().launch.ptx
    for match in re.finditer(pattern, ptx):
        yield ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]


FAULTS = {
    "a commit that the peer does not hear": (
        r"(tcgen05\.commit\S*multicast::cluster\.b64\s+\[[^\]]*\], )%rs\d+;",
        r"{ .reg .b16 one; mov.b16 one, 1; \1one; }",
    ),
    "arrivals at a CTA's own barrier": (
        r"mapa\.shared::cluster\.u32\s+(%r\d+), (%r\d+), 0;",
        r"mov.u32 \1, \2;",
    ),
    "an arrival dropped": (r"mbarrier\.arrive\.\S*shared::cluster\.b64 _, [^;]*;", ""),
    "bytes of one CTA alone": (
        r"(mbarrier\.arrive\.expect_tx\S* %rd\d+, \[[^\]]*\], )(%r\d+);",
        r"{ .reg .b32 half; shr.u32 half, \2, 1; \1half; }",
    ),
    "bytes reported to a CTA's own barrier": (
        r"and\.b32\s+(%r\d+), (%r\d+), -1677\d{4};",
        r"and.b32 \1, \2, -8;",
    ),
    "no barrier of the cluster at the start": (
        r"(fence\.mbarrier_init.*?)barrier\.cluster\.arrive\.aligned;\s*barrier\.cluster\.wait;",
        r"\1bar.sync 0;",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_planted_between_the_ctas_is_reported(name):
    pattern, replacement = FAULTS[name]
    texts = list(each("(?s)" + pattern if ".*?" in pattern else pattern, replacement))
    assert texts
    for text in texts:
        print(reported(text))


@pytest.mark.slow
def test_a_barrier_that_hears_one_cta_of_two_is_reported():
    ptx = kernel().launch.ptx
    eight = re.findall(r"mov\.b32\s+(%r\d+), 8;", ptx)
    sites = [m for m in re.finditer(r"(mbarrier\.init\S*\s+\[[^\]]*\], )(%r\d+);", ptx) if m[2] in eight]
    assert len(sites) == 2 * 3
    for site in sites:
        four = f"{{ .reg .b32 four; mov.b32 four, 4; {site[1]}four; }}"
        print(reported(ptx[: site.start()] + four + ptx[site.end() :]))
