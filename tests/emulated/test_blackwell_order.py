"""What the roles of the Blackwell forward do in which order, seen by the schedule that runs them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.schedule import Random, RoundRobin
from emulated.forward_kernel import Case, attend
from needs import COMPILES

pytestmark = COMPILES


CAUSAL = Case(128, "causal", 300, 300, ctas=1, arch="sm_100a")


class WatchedCopies(RoundRobin):
    """Keeps every copy that it sees in flight."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def due(self, copies):
        """As for any round robin."""
        self.seen.update({id(copy): copy for copy in copies})
        return super().due(copies)

    def stores(self):
        """Output tiles by the number of the CTA that stored them."""
        found = (re.match(r"a tensor store .* of CTA \((\d+),", copy.label) for copy in self.seen.values())
        return Counter(int(match[1]) for match in found if match)


def test_a_cta_with_a_long_tile_leaves_the_next_to_others():
    """The record of a tile is held until the tile is nearly loaded: only then is another one taken."""
    short = 3
    lens_q, lens_k = (64,) * (2 + short), (2048, *(64,) * (1 + short))
    case = Case(64, "full", 64, 2048, lens_q=lens_q, lens_k=lens_k, ctas=2, arch="sm_100a")
    watched = WatchedCopies()
    attend(case, watched, sms=2)
    assert watched.stores() == {0: 1, 1: 1 + short}


class WatchedTurns(Random):
    """Lets warps that are about to exponentiate wait for all that may get there, and notes who goes on."""

    def __init__(self, seed):
        super().__init__(seed)
        self.groups = []
        self.chosen = None

    def quantum(self):
        """A segment of code."""
        return 1

    def pick(self, ready, changes):
        """Any that does something else, if there is one."""
        if self.chosen is not None:
            warp, executed = self.chosen
            # Else it was at the wait that the segment begins with.
            if warp.executed > executed:
                self.groups.append(warp.numbers[0] // 4)
        others = [warp for warp in ready if not exponentiates(warp)]
        chosen = others or ready
        warp = chosen[super().pick(chosen, changes)]
        self.chosen = None if others else (warp, warp.executed)
        return ready.index(warp)


def exponentiates(warp):
    """Whether the next segment of ``warp`` has exponentials; one alone is the factor of the sum before."""
    operations = warp.program.segments[warp.paths[0].segment].operations
    return sum(operation.instruction.opcode == "ex2" for _, operation, *_ in operations) > 1


def turns(case):
    """(warpgroup, segments) of those that exponentiate, in the order in which they do."""
    watched = WatchedTurns(seed=5)
    attend(case, watched)
    return [(group, len(list(run))) for group, run in groupby(watched.groups)]


@pytest.mark.slow
def test_with_turns_one_warpgroup_exponentiates_at_a_time():
    """Two CTA tiles of 2 and 3 steps; in a step four warps run a segment each, and one for the last of P."""
    assert turns(replace(CAUSAL, options=(("softmax_turns", True),))) == [(0, 8), (1, 8)] * (2 + 3)


@pytest.mark.slow
def test_without_turns_warpgroups_exponentiate_at_the_same_time():
    """So the test above can tell."""
    found = turns(CAUSAL)
    assert sum(count for _, count in found) == 16 * (2 + 3)
    assert len(found) > 2 * 2 * (2 + 3)
