"""The pre-pass sorts a batch as numpy does, and the forward kernels of both machines take its order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

np = pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

import attn4.emulator
from attn4.artifact import artifact_for
from attn4.artifact.emulated import emulated, load_emulated
from attn4.emulator.grid import Residency
from attn4.emulator.runner import Runner
from attn4.emulator.schedule import Adversarial, Random, RoundRobin
from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.plan.order import Batch, Sequence, sequence_order
from attn4.plan.sorting import sorting_plan, with_sorted_batches
from attn4.problem import Problem
from emulated.forward_kernel import UNBOUNDED, Case, attend, batch_order
from judge import eager, judge, oracle
from needs import COMPILES
from problem_case import Case as ProblemCase

pytestmark = COMPILES

MASKS = {"full": Mask(), "causal": Mask.of(True), "window": Mask(300, 10)}


def packed_plan(mask: Mask, **fields):
    problem = Problem(
        batch=2,
        seqlen_q=4096,
        seqlen_k=4096,
        heads=4,
        kv_heads=4,
        head_dim=128,
        head_dim_v=128,
        mask=mask,
        **({"cu_seqlens_q": True, "cu_seqlens_k": True} | fields),
    )
    return with_sorted_batches(choose(problem, machine("sm_90a")))


def starts(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def sorted_by(plan, lengths, schedule=None) -> tuple[list[int], list]:
    runner = Runner(schedule or RoundRobin(), Residency(sms=1), hazards=True)
    with emulated(runner):
        order = batch_order(plan, lengths)
    return order.tolist(), list(runner.grids[-1].findings)


def drawn(count: int, seed: int = 0) -> list[int]:
    """Lengths of which some are equal, and some 0."""
    generator = np.random.default_rng(seed)
    return (generator.integers(0, 3000, count) * generator.integers(0, 2, count)).tolist()


LENGTHS = {
    "one": [5],
    "one that is empty": [0],
    "33": drawn(33),
    "257": drawn(257),
    "equal": [300] * 40,
    "empty": [0] * 40,
    "ascending": list(range(0, 128 * 50, 128)),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_pre_pass_sorts_as_numpy_does(name):
    lengths = LENGTHS[name]
    order, hazards = sorted_by(packed_plan(Mask()), (starts(lengths),) * 2 + (None, None))
    steps = (np.array(lengths) + 127) // 128
    assert order == [*np.argsort(-steps, kind="stable"), len(lengths)]
    assert hazards == []


@pytest.mark.parametrize(
    "schedule",
    [Random(1), Adversarial(late=True), Adversarial(late=False)],
    ids=["random", "late", "at once"],
)
def test_the_pre_pass_gives_the_same_order_in_every_interleaving(schedule):
    lengths = drawn(70)
    order, hazards = sorted_by(packed_plan(Mask()), (starts(lengths),) * 2 + (None, None), schedule)
    assert order == [*np.argsort(-((np.array(lengths) + 127) // 128), kind="stable"), len(lengths)]
    assert hazards == []


def test_a_batch_beyond_the_limit_keeps_its_order():
    plan = packed_plan(Mask())
    keys = sorting_plan(plan).buffers[0]
    small = replace(sorting_plan(plan), buffers=(replace(keys, shape=(64,), size=256),))
    for count in (64, 65):
        lengths = drawn(count)
        cu_seqlens, order = starts(lengths), torch.full((count + 1,), -1, dtype=torch.int32)
        with emulated(Runner(RoundRobin(), Residency(sms=1), hazards=True)):
            load_emulated(artifact_for(small))(
                order, 0, 0, UNBOUNDED, UNBOUNDED, cu_seqlens, cu_seqlens, None, None
            )
        steps = (np.array(lengths) + 127) // 128
        expected = np.argsort(-steps, kind="stable") if count == 64 else range(count)
        assert order.tolist() == [*expected, count]


@pytest.mark.parametrize("mask", MASKS)
def test_the_model_sorts_as_the_pre_pass_does(mask):
    """Queries and keys of different lengths, some unused; under every mask."""
    generator = np.random.default_rng(3)
    queries, keys = generator.integers(0, 900, 50), generator.integers(0, 3000, 50)
    used_q, used_k = generator.integers(0, queries + 1), generator.integers(0, keys + 1)
    plan = packed_plan(MASKS[mask], seqused_q=True, seqused_k=True)
    vectors = (starts(queries), starts(keys), torch.tensor(used_q).int(), torch.tensor(used_k).int())
    window = (300, 10) if mask == "window" else (UNBOUNDED, UNBOUNDED)
    order = torch.full((51,), -1, dtype=torch.int32)
    with emulated(Runner(RoundRobin(), Residency(sms=1))):
        load_emulated(artifact_for(sorting_plan(plan)))(order, 0, 0, *window, *vectors)
    sequences = tuple(Sequence(*map(int, one)) for one in zip(queries, used_q, used_k, strict=True))
    batch = Batch(sequences=sequences, heads=4, kv_heads=4, mask=MASKS[mask], rows_k=int(keys.sum()))
    assert order.tolist() == [*sequence_order(plan, batch), 50]


RAGGED = (5, 0, 300, 70, 33, 1, 260)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SLOW), "sm_100a"])
def test_a_sorted_batch_gives_the_bits_of_an_unsorted_one(arch):
    """Each tile is worked on: what is not written is NaN. 37 sequences are two groups to search."""
    lens = RAGGED + (3,) * 30
    case = Case(64, "causal", max(lens), max(lens), lens_q=lens, lens_k=lens, ctas=2, arch=arch)
    expected = attend(case, RoundRobin(), sms=2)
    result = attend(replace(case, sorted=True), Adversarial(late=True), sms=2, hazards=True)
    assert list(result.grid.findings) == []
    assert torch.equal(result.out.view(torch.int16), expected.out.view(torch.int16))
    assert torch.equal(result.lse, expected.lse)
    assert result.error < 2.5e-3


PACKED = ProblemCase(
    name="packed", lens_q=(5, 130, 0, 300), lens_k=(5, 130, 70, 300), heads=2, kv_heads=1, tail=9, causal=True
)
PADDED = ProblemCase(
    name="padded", batch=3, seqlen_q=1, seqlen_k=300, heads=4, kv_heads=2, used_k=(20, 300, 130)
)


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        pytest.param(PACKED, "sm_90a", id="packed, Hopper"),
        pytest.param(PADDED, "sm_90a", id="padded, Hopper", marks=SLOW),
        pytest.param(PACKED, "sm_100a", id="packed, Blackwell", marks=SLOW),
        pytest.param(PADDED, "sm_100a", id="padded, Blackwell", marks=SLOW),
    ],
)
def test_metadata_made_once_serves_calls_and_changes_no_bit(case, arch):
    inputs = case.inputs("cpu")
    with attn4.emulator.device(arch, schedule="random", seed=3, sms=2, hazards=True) as gpu:
        keywords = case.metadata(inputs, backend="emulator")
        sorted_once = case.run(inputs, backend="emulator", **keywords)
        unsorted = case.run(inputs, backend="emulator", **(keywords | {"scheduler_metadata": None}))
        # Of a batch in another order: slow at worst.
        order = keywords["scheduler_metadata"].batch_order
        assert sorted(order.tolist()) == list(range(order.numel()))
        order[:-1] = order[:-1].flip(0)
        reversed_order = case.run(inputs, backend="emulator", **keywords)
    judge(*sorted_once, oracle(case, inputs), eager(case, inputs))
    assert gpu.hazards == []
    for result in (unsorted, reversed_order):
        assert all(torch.equal(x, y) for x, y in zip(sorted_once, result, strict=True))
