"""What the roles of the Blackwell forward do in which order, seen by the schedule that runs them."""

from __future__ import annotations

import re
import shutil
from collections import Counter

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.artifact.key import toolchain
from attn4.emulator.schedule import RoundRobin
from emulated.forward_kernel import Case, attend

pytestmark = [
    pytest.mark.skipif(toolchain() is None, reason="CuTe DSL is not installed"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]


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
