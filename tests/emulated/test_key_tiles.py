"""The backward kernel takes tiles of keys in the order that the host's model says, and so do the turns."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")
if importlib.util.find_spec("cutlass") is None:
    pytest.skip("CuTe DSL is not installed", allow_module_level=True)

from attn4.emulator import device
from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.plan.turns import Order, query_blocks, tiles, turned_heads
from attn4.problem import Problem

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

UNBOUNDED = 2**30
SECTION = 1000 * 512
"""Room for Q and dO of 1000 queries, so that small problems have several sections of heads."""

PLAIN = Problem(
    batch=2,
    seqlen_q=500,
    seqlen_k=700,
    heads=3,
    kv_heads=3,
    head_dim=128,
    head_dim_v=128,
    direction="backward",
)
MASKS = {"full": Mask(), "causal": Mask.of(True), "window": Mask(150, 20), "off diagonal": Mask(90, -40)}


def found(problem: Problem, plan, count: int | None = None) -> list[list[int]]:
    """What the device says of the first ``count`` tiles, or all and one more; a turn not taken is -1."""
    from cutlass import Int32

    from emulated.tile_order import KeyOrderProbe

    count = count or len(list(tiles(problem, plan, Order.of(plan)))) + 1
    out = torch.full((count, 6 + -(-problem.seqlen_q // plan.tile_m)), -1, dtype=torch.int32)
    sizes = (problem.batch, problem.heads, problem.group, problem.seqlen_q, problem.seqlen_k)
    mask = problem.mask
    window = [UNBOUNDED if bound is None else bound for bound in (mask.left, mask.right)]
    with device(plan.arch):
        KeyOrderProbe(plan)(out, tuple(map(Int32, sizes)), tuple(map(Int32, window)))
    return out.tolist()


@pytest.mark.parametrize(
    "sizes",
    [pytest.param((500, 700), marks=pytest.mark.slow), (700, 300)],
    ids=["more keys", "more queries"],
)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_tiles_of_keys_come_in_order_and_turns_count_those_before(mask, deterministic, sizes) -> None:
    seqlen_q, seqlen_k = sizes
    problem = replace(
        PLAIN, mask=MASKS[mask], deterministic=deterministic, seqlen_q=seqlen_q, seqlen_k=seqlen_k
    )
    plan = choose(problem, machine("sm_100a"), cta_group=1)
    in_order(problem, replace(plan, schedule=replace(plan.schedule, section_bytes=SECTION)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_so_do_those_of_an_order_whose_end_is_turned(batch, mask) -> None:
    """Nobody waits for a tile that comes later, in either direction; of three heads (batch 1) one is
    turned, of nine the last two.
    """
    problem = replace(PLAIN, mask=MASKS[mask], deterministic=True, batch=batch)
    plan = choose(problem, machine("sm_90a"))
    schedule = replace(plan.schedule, section_bytes=SECTION, turned_end=True)
    plan = replace(plan, schedule=schedule)
    assert turned_heads(problem, plan, Order.of(plan)) == {1: 1, 3: 2}[batch]
    in_order(problem, plan)


def in_order(problem: Problem, plan) -> None:
    """The tiles are those of the model, and each turn counts those before it that see the block."""
    *entries, end = found(problem, plan)
    assert end[0] < 0
    order = Order.of(plan)
    turned = problem.batch * problem.kv_heads - turned_heads(problem, plan, order)
    before: Counter[tuple[int, int]] = Counter()
    for (block, joint), entry in zip(tiles(problem, plan, order), entries, strict=True):
        assert entry[:3] == [block, joint % problem.kv_heads, joint // problem.kv_heads]
        seen = query_blocks(problem, plan, block)
        assert list(range(entry[3], entry[4])) == list(seen)
        assert entry[5] == (joint >= turned)
        if problem.deterministic:
            assert [entry[6 + query] for query in seen] == [before[joint, query] for query in seen]
        before.update((joint, query) for query in seen)


def test_sections_of_heads_whose_tiles_pass_2_to_31_are_found() -> None:
    """A public fault: 4 million keys and a query, so that L2 has room for more tiles than int32 counts."""
    problem = replace(PLAIN, seqlen_q=1, seqlen_k=2**22, heads=2, kv_heads=2, head_dim=64, head_dim_v=64)
    problem = replace(problem, mask=Mask.of(True))
    plan = choose(problem, machine("sm_100a"), cta_group=1)
    together = plan.schedule.section_bytes // 256
    assert together * (problem.seqlen_k // plan.tile_n) >= 2**31
    entries = found(problem, plan, 40)
    wanted = list(islice(tiles(problem, plan, Order.of(plan)), 40))
    assert [entry[:3] for entry in entries] == [[block, joint % 2, joint // 2] for block, joint in wanted]
