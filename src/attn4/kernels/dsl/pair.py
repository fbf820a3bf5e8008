"""CTAs that multiply together: one alone, or a pair whose first CTA, the leader, multiplies for both.

What the multiplying warp waits for is said at the leader's barriers; what it says is said at the barriers
of both, at the same offset of their shared memory. A ring between roles of one CTA is that of a CTA alone.
Copies from one to the other's shared memory report to the other's barriers.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import tcgen05
from attn4.kernels.dsl.carried import Fixed

LEADER = 0


def launch_shape(ctas, size: int):
    """Grid and cluster of at most ``ctas`` CTAs, but one group of ``size`` at least."""
    if size == 1:
        return {"grid": [ctas, 1, 1]}
    return {"grid": [cutlass.max(ctas // size, 1) * size, 1, 1], "cluster": [size, 1, 1]}


class Pair(Fixed):
    """``size`` CTAs (1 or 2); ``rank`` is this one's number among them."""

    def __init__(self, size: int):
        self.size = size
        self.rank = cute.arch.block_idx_in_cluster() if size > 1 else LEADER

    def leads(self, chosen):
        """Whether ``chosen`` holds in the leader."""
        return chosen if self.size == 1 else cutlass.and_(chosen, self.rank == LEADER)

    def arrive(self, barrier, scope=None):
        """Arrive at the leader's ``barrier``; by one thread."""
        # Not in the scope of the cluster, which is a MEMBAR before every arrival: what most of these hand
        # over is tensor memory, ordered by tcgen05.fence.
        cute.arch.mbarrier_arrive(barrier, LEADER if self.size > 1 else None, scope=scope)

    def commit(self, barrier):
        """Arrive at every CTA's ``barrier`` when this thread's products are complete; by one thread."""
        tcgen05.commit(barrier, self.size)

    def synchronise(self):
        """Wait for all threads of all CTAs."""
        if self.size == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive(aligned=True)
            cute.arch.cluster_wait()
