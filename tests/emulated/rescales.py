"""The conditional rescale of the Blackwell forward: a model of its rule, and a count of what a kernel did.

The correction role multiplies the rows of a warp in a step but the first of a tile if the maximum of any of
them has grown by more than the threshold since it last moved.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

import attn4.emulator
from attn4.machine import machine
from attn4.ops.call import NO_VECTORS
from attn4.ops.emulated import emulated_kernel
from attn4.plan.choose import choose
from attn4.plan.plan import SoftmaxPlan

WARP, TILE = 32, 128
UNBOUNDED = 2**30


def modelled(q, k, *, causal, scale, threshold):
    """(rescales, most that there could be) of all heads, in warps, for (seqlen, heads, head_dim), as many
    heads of K. A CTA has two query tiles and goes through key blocks from the last that either sees.
    """
    done = most = 0
    for head in range(q.shape[1]):
        scores = (q[:, head].double() @ k[:, head].double().T).numpy() * (scale * math.log2(math.e))
        if causal:
            seen = np.tri(*scores.shape, k=scores.shape[1] - scores.shape[0], dtype=bool)
            scores[~seen] = -np.inf
        for first in range(0, len(scores), 2 * TILE):
            counts = _of_tile(scores[first : first + 2 * TILE], threshold)
            done, most = done + counts[0], most + counts[1]
    return done, most


def _of_tile(scores, threshold):
    # Rows past the last query are zeros: their scores are equal and rescale nothing.
    rows = np.zeros((2 * TILE, scores.shape[1]))
    rows[: len(scores)] = scores
    seen = np.flatnonzero(np.isfinite(scores).any(axis=0))
    blocks = range(seen[0] // TILE, seen[-1] // TILE + 1)
    row_max = np.full(2 * TILE, -np.inf)
    done = 0
    for step, block in enumerate(reversed(blocks)):
        new = np.maximum(row_max, rows[:, block * TILE : (block + 1) * TILE].max(axis=1))
        # A row that has seen no key has a maximum of -inf, which counts as grown, whatever comes.
        grown = ~(row_max - np.where(np.isinf(new), 0, new) >= -threshold)
        row_max = np.where(grown, new, row_max)
        done += int(grown.reshape(-1, WARP).any(axis=1).sum()) if step else 0
    return done, (len(blocks) - 1) * 2 * TILE // WARP


def counted(q, k, v, case, threshold):
    """Warps that wrote rescaled rows to tensor memory, by the emulator's report."""
    plan = choose(case.problem(), machine("sm_100a"))
    plan = replace(plan, softmax=replace(plan.softmax, rescale_threshold=threshold))
    assert isinstance(plan.softmax, SoftmaxPlan)
    out = torch.empty_like(q)
    lse = torch.empty(1, q.shape[2], q.shape[1])
    counter = torch.zeros(2, dtype=torch.int32) if plan.schedule.dynamic else None
    bounds = (UNBOUNDED, 0 if case.causal else UNBOUNDED)
    with attn4.emulator.device("sm_100a", sms=2) as gpu:
        emulated_kernel(plan)(q, k, v, out, lse, case.softmax_scale, *bounds, *NO_VECTORS, counter, 2)
    (kernel,) = gpu.report.kernels
    stored = kernel.roles["correction"].get("tensor store bytes", 0)
    return stored // (4 * WARP * plan.head_dim_v)
