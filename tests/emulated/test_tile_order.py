"""The kernels take tiles in the order that the host's model of the schedule says."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

np = pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")
if importlib.util.find_spec("cutlass") is None:
    pytest.skip("CuTe DSL is not installed", allow_module_level=True)

from attn4.emulator import device
from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.plan.makespan import alternatives
from attn4.plan.order import Batch, Sequence, sequence_order, tiles_in_order
from attn4.problem import Problem

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

UNBOUNDED = 2**30
SECTION = 600 * 512
"""Room for K and V of 600 keys, so that small problems have several sections of heads."""

PLAIN = Problem(
    batch=3, seqlen_q=300, seqlen_k=500, heads=6, kv_heads=2, head_dim=128, head_dim_v=128, mask=Mask.of(True)
)
QUERIES = (0, 129, 128, 700, 5, 0) + (1,) * 40 + (257,)
KEYS = (0, 300, 900, 40, 1300, 10) + (7,) * 40 + (200,)


def taken(plan, batch: Batch, vectors: tuple[Any, ...], tiles: range) -> list[list[int]]:
    """The tiles of these numbers as the device finds them."""
    from cutlass import Int32

    from emulated.tile_order import OrderProbe

    heads = batch.heads // plan.pack_gqa
    rows_q = sum(one.q_rows for one in batch.sequences) + batch.tail
    if not plan.cu_seqlens_q:
        rows_q = batch.sequences[0].q_rows
    sizes = (len(batch.sequences), heads, heads // batch.kv_heads, rows_q, batch.rows_k)
    window = [UNBOUNDED if bound is None else bound for bound in (batch.mask.left, batch.mask.right)]
    out = torch.full((len(tiles), 4), -9, dtype=torch.int32)
    with device(plan.arch):
        scalars = [tuple(map(Int32, values)) for values in (sizes, window)]
        OrderProbe(plan, tiles.step)(out, *scalars, vectors)
    return out.tolist()


def check(name: str, problem: Problem, batch: Batch, vectors: tuple[Any, ...], arch: str) -> None:
    """Each tile in turn, then the end; and every third, as a CTA among others takes them."""
    plan = alternatives(choose(problem, machine(arch)))[name]
    plan = replace(plan, schedule=replace(plan.schedule, section_bytes=SECTION))
    order = None
    if name == "sorted":
        order = torch.tensor([*sequence_order(plan, batch), len(batch.sequences)]).int()
    wanted = [[t.row_block, t.head, t.batch, t.steps] for t in tiles_in_order(plan, batch)]
    found = taken(plan, batch, (*vectors, order), range(len(wanted) + 2))
    assert found[:-2] == wanted
    assert [row_block for row_block, *_ in found[-2:]] == [-1, -1]
    assert taken(plan, batch, (*vectors, order), range(0, len(wanted), 3)) == wanted[::3]


@pytest.mark.parametrize("name", ["dealt", "longest first", "sorted"])
@pytest.mark.parametrize("mask", [Mask.of(True), Mask(100, 30)], ids=["causal", "window"])
def test_padded_batches(name, mask):
    problem = replace(PLAIN, mask=mask, seqused_k=True)
    used = (20, 500, 260)
    batch = replace(Batch.of(problem), sequences=tuple(Sequence(300, 300, length) for length in used))
    check(name, problem, batch, (None, None, None, torch.tensor(used).int()), "sm_100a")


@pytest.mark.parametrize("name", ["longest first", "sorted"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_packed_batches(name, arch):
    problem = replace(PLAIN, batch=len(QUERIES), cu_seqlens_q=True, cu_seqlens_k=True)
    batch = Batch(
        sequences=tuple(Sequence(q, q, k) for q, k in zip(QUERIES, KEYS, strict=True)),
        heads=6,
        kv_heads=2,
        mask=problem.mask,
        rows_k=sum(KEYS),
        tail=130,
    )
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (QUERIES, KEYS)]
    check(name, problem, batch, (*starts, None, None), arch)


def test_a_pair_of_ctas_takes_the_two_halves_of_a_tile():
    """The model's tile is the pair's; its two CTAs have consecutive numbers and row blocks."""
    problem = replace(PLAIN, seqlen_q=1100, mask=Mask())
    plan = choose(problem, machine("sm_100a"), cta_group=2)
    batch = Batch.of(problem)
    wanted = [
        [2 * t.row_block + rank, t.head, t.batch, t.steps]
        for t in tiles_in_order(plan, batch)
        for rank in range(2)
    ]
    vectors = (None, None, None, torch.full((3,), 500, dtype=torch.int32), None)
    found = taken(plan, batch, vectors, range(len(wanted) + 2))
    assert found[:-2] == wanted
    assert [row_block for row_block, *_ in found[-2:]] == [-1, -1]
