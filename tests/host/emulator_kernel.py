"""The kernel that the launch tests share: the causal forward of head dim 128 for Hopper, and a call of it."""

from functools import cache

import torch

from attn4.artifact import artifact_for
from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.problem import Problem

HEADS, SEQLEN, CTAS = 2, 256, 132
UNBOUNDED = 2**30


@cache
def forward_artifact():
    """Compiled once, or taken from the user's cache."""
    problem = Problem(
        batch=1,
        seqlen_q=SEQLEN,
        seqlen_k=SEQLEN,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=128,
        head_dim_v=128,
        mask=Mask(None, 0),
    )
    return artifact_for(choose(problem, machine("sm_90a")))


class Inputs:
    """Tensors of one call, and the call."""

    def __init__(self, artifact, seed=0):
        generator = torch.Generator().manual_seed(seed)
        shape = (1, SEQLEN, HEADS, 128)
        self.q, self.k, self.v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(3))
        self.out = torch.zeros_like(self.q)
        self.lse = torch.zeros(1, HEADS, SEQLEN)
        dynamic = artifact.description.plan["schedule"]["dynamic"]
        self.counter = torch.zeros(2, dtype=torch.int32) if dynamic else None

    def __iter__(self):
        yield from (self.q, self.k, self.v, self.out, self.lse, 0.125, UNBOUNDED, UNBOUNDED)
        yield from (None, None, None, None, None, self.counter, CTAS)
