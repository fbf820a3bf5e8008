"""Gradients far into large tensors: of the last head or sequence, whose CTAs alone run.

Memory is touched where there is something in it, so that tensors of many gigabytes cost nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.artifact import artifact_for
from attn4.artifact.emulated import emulated, load_emulated
from attn4.emulator.grid import Cluster, ClusterBarrier, Grid, extent
from attn4.emulator.runner import Runner
from attn4.plan.plan import Plan
from attn4.plan.workspace import workspace
from emulated.backward_kernel import UNBOUNDED, backward_plan
from gradient_judge import eager_gradients, gradient_oracle, incoming, judge_gradients
from needs import COMPILES
from problem_case import Case

pytestmark = COMPILES

NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: memory that is not there until it is touched."""


@dataclass(frozen=True)
class Far:
    """``count`` heads or sequences, each ``step`` times as far from the next as it is long."""

    of: Literal["heads", "batch"]
    count: int
    step: int = 1

    def rows(self, x: Tensor) -> Tensor:
        """(1, rows, 1, dim) as the last of (batch, rows, heads, dim)."""
        return self._last(x, 2 if self.of == "heads" else 0, self.step)

    def lse(self, x: Tensor) -> Tensor:
        """(1, 1, rows) as the last of (batch, heads, rows), contiguous."""
        return self._last(x, 1 if self.of == "heads" else 0, 1)

    def own(self, shape: tuple[int, int, int]) -> Tensor:
        """The kernels' own memory, of which that of one entry is (1, blocks, elements); its last is NaN."""
        axis, step = (0, self.step) if self.of == "heads" else (1, 1)
        return self._last(torch.full(shape, torch.nan), axis, step)

    def _last(self, x: Tensor, axis: int, step: int) -> Tensor:
        """``x`` as the last along ``axis``, in memory that is touched nowhere else."""
        apart = x.numel() * step
        strides = [*x.stride()[:axis], apart, *x.stride()[axis + 1 :]]
        nbytes = self.count * apart * x.element_size()
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        shape = [*x.shape[:axis], self.count, *x.shape[axis + 1 :]]
        large = torch.frombuffer(memory, dtype=x.dtype).as_strided(shape, strides)
        large.narrow(axis, self.count - 1, 1).copy_(x)
        return large


def only_last(monkeypatch, far: Far, shares: int) -> None:
    """Of each launch only the CTAs of the last head or sequence run, as many as there are column shares."""

    def last(grid: Grid) -> Iterator[Cluster]:
        across, down, layers = (n // c for n, c in zip(grid.shape.grid, grid.shape.cluster, strict=True))
        main = "process" not in grid.program.kernel.name
        places = [(across - 1 - share, 0, 0) for share in range(shares if main else 1)]
        if far.of == "heads" and not main:
            assert far.count <= down * layers
            layer, row = divmod(far.count - 1, down)
            places = [(x, row, layer) for x in range(across)]
        for place in places:
            yield Cluster(
                place,
                grid.shape.cluster,
                barrier=ClusterBarrier(extent(grid.shape.block) * extent(grid.shape.cluster)),
            )

    monkeypatch.setattr(Grid, "_clusters", last)


def judged_far(monkeypatch, case: Case, far: Far, plan: Plan) -> None:
    """A pass whose last head or sequence is that of ``case``, which has one of either, judged."""
    inputs = case.inputs("cpu")
    given = incoming(case, inputs)
    room = workspace(plan, 1, 1, case.seqlen_q)
    results = [far.rows(torch.full_like(x, torch.nan)) for x in (inputs.q, inputs.k, inputs.v)]
    only_last(monkeypatch, far, plan.column_shares)
    with emulated(Runner()):
        load_emulated(artifact_for(plan))(
            *map(far.rows, (inputs.q, inputs.k, inputs.v, given.out, given.dout)),
            *map(far.lse, (given.lse, given.dlse)),
            *results,
            *map(far.own, (room.row_stats, room.row_stats, room.dq_sum)),
            case.softmax_scale,
            UNBOUNDED,
            UNBOUNDED,
            *(None, None, None, None),
            torch.zeros(2, dtype=torch.int32) if plan.schedule.counted else None,
            far.count * 2,
        )
    axis = 2 if far.of == "heads" else 0
    found = tuple(x.narrow(axis, far.count - 1, 1) for x in results)
    judge_gradients(found, gradient_oracle(case, inputs, given), eager_gradients(case, inputs, given), given)


ARCHES = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])

SMALL = Case(name="small", batch=1, heads=1, kv_heads=1, seqlen_q=5, seqlen_k=7, head_dim=128)


@ARCHES
@pytest.mark.fault("D14")
def test_more_heads_than_a_grid_has_rows(monkeypatch, arch):
    judged_far(monkeypatch, SMALL, Far("heads", 71280), backward_plan(SMALL, arch=arch))


@ARCHES
@pytest.mark.fault("D13")
@pytest.mark.parametrize(
    ("head_dim", "deterministic"), [(128, False), pytest.param(192, True, marks=pytest.mark.slow)]
)
def test_short_sequences_whose_sums_pass_2_to_31_elements(monkeypatch, head_dim, deterministic, arch):
    """A block of sums is 64 or 128 rows of all columns, however few queries a sequence has."""
    case = replace(SMALL, head_dim=head_dim)
    judged_far(monkeypatch, case, Far("batch", 300_000), backward_plan(case, deterministic, arch))


@ARCHES
@pytest.mark.slow
@pytest.mark.fault("D13")
def test_heads_that_are_2_to_31_elements_apart(monkeypatch, arch):
    far = Far("heads", 2, 2**31 // (SMALL.seqlen_q * SMALL.head_dim) + 1)
    judged_far(monkeypatch, SMALL, far, backward_plan(SMALL, arch=arch))
