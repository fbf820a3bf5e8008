"""The relaying role of a pair of CTAs: half of dS goes to the peer, and the leader hears when it has come.

Each CTA computes dS of its own keys, and dQ of half of the queries, for which it needs dS of all keys. So one
half of its dS stays and the other is copied into the peer's shared memory, behind the peer's own.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from attn4.kernels.dsl import bulk
from attn4.kernels.dsl.carried import Fixed


class Exchange(Fixed):
    """From ``source`` to ``place`` in the peer's shared memory: as many bytes as ``ring`` announces, in which
    the peer's half arrives.
    """

    def __init__(self, pair, ring, source, place):
        self.pair = pair
        self.ring = ring
        self.source = source
        self.place = place

    @cute.jit
    def send(self):
        """Start the copy; by one warp."""
        with cute.arch.elect_one():
            count = self.ring.channel.transaction_bytes
            bulk.send(1 - self.pair.rank, self.place, self.source, count, self.ring.full(0))


@cute.jit
def relay(count, exchange, ends):
    """The halves of ``count`` steps."""
    for _ in cutlass.range(count, unroll=1):
        ends.dscores_peer.announce()
        ends.dscores_own.wait()
        ends.dscores_own.advance()
        exchange.send()
        ends.dscores_peer.wait()
        ends.dscores_peer.advance()
        ends.dscores_whole.publish()
        ends.dscores_whole.advance()
