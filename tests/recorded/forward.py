"""Problems of attention whose results on a chip are recorded, and their inputs, the same bits everywhere."""

from __future__ import annotations

import numpy as np
import torch

from case_inputs import Inputs
from problem_case import Case
from recorded.program import uniform

CASES = (
    Case(
        name="128 causal", batch=1, seqlen_q=257, seqlen_k=257, heads=1, kv_heads=1, head_dim=128, causal=True
    ),
    Case(name="64 full", batch=1, seqlen_q=200, seqlen_k=330, heads=1, kv_heads=1, head_dim=64),
    Case(
        name="128 window",
        batch=1,
        seqlen_q=192,
        seqlen_k=192,
        heads=1,
        kv_heads=1,
        head_dim=128,
        window=(70, 0),
    ),
    Case(
        name="64 packed causal",
        heads=2,
        kv_heads=1,
        head_dim=64,
        causal=True,
        lens_q=(1, 130, 70),
        lens_k=(65, 150, 70),
    ),
)


def inputs(case: Case, device: str) -> Inputs:
    """Sums of four uniform numbers, of variance 1: nearly normal, and exact in any library."""

    def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
        count = int(np.prod(shape))
        total = sum(uniform(count, seed * 4 + n, -0.5, 0.5) for n in range(4)) * 3**0.5
        return torch.from_numpy(total.reshape(shape)).to(case.torch_dtype).to(device)

    start = 10 * (1 + [known.name for known in CASES].index(case.name))
    q, k, v = (
        numbers(shape, start + n) for n, shape in enumerate((case.q_shape, case.k_shape, case.v_shape))
    )
    lengths = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in case.lengths().items()}
    return Inputs(q=q, k=k, v=v, lengths=lengths)
