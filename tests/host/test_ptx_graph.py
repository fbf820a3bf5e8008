"""Blocks end where control may leave, and dominators are what removing a node shows."""

from hypothesis import given
from hypothesis import strategies as st

from attn4.emulator.ptx import parse
from attn4.emulator.ptx.graph import immediate_dominators
from host.ptx_text import head

REGISTERS = ".reg .pred p; .reg .b32 r;"


def blocks(body):
    (kernel,) = parse(head(REGISTERS + body)).kernels
    return kernel.blocks


def successors(body):
    return [block.successors for block in blocks(body)]


def meets(body):
    """The label of the block where lanes meet after each block."""
    found = blocks(body)
    return [None if b.post_dominator is None else found[b.post_dominator].label for b in found]


def test_a_block_ends_at_a_branch_and_before_a_label():
    found = blocks("mov.b32 r, 1; mov.b32 r, 2; A: mov.b32 r, 3; @p bra A; B: C: ret;")
    assert [(b.label, len(b.instructions)) for b in found] == [(None, 2), ("A", 2), ("B", 1)]
    assert [b.successors for b in found] == [(1,), (1, 2), ()]


def test_labels_of_one_place_lead_to_one_block():
    (kernel,) = parse(head("A: B: ret; C: ")).kernels
    assert kernel.labels == {"A": 0, "B": 0, "C": 1}
    assert kernel.blocks[1].instructions == ()


def test_a_taken_branch_comes_before_what_follows():
    assert successors("@p bra B; ret; B: ret;") == [(2, 1), (), ()]
    assert successors("@p bra B; B: ret;") == [(1,), ()]


def test_a_list_of_targets_leads_to_each_of_them():
    body = "T: .branchtargets A, B, A; @p brx.idx r, T; ret; A: ret; B: ret;"
    assert successors(body) == [(5, 1), (6, 2), (5, 3), (4,), (), (), ()], "a comparison each, then a trap"


def test_a_thread_may_end_in_the_middle():
    assert successors("@p exit; @p trap; mov.b32 r, 1; trap; ret;") == [(1,), (2,), (), ()]


def test_sides_of_a_branch_meet_behind_it():
    assert meets("@p bra B; mov.b32 r, 1; bra C; B: mov.b32 r, 2; C: ret;") == ["C", "C", "C", None]


def test_lanes_meet_behind_a_loop():
    assert meets("L: mov.b32 r, 1; @p bra L; D: ret;") == ["D", None]


def test_lanes_that_end_or_trap_are_not_waited_for():
    assert meets("@p exit; A: @p bra B; trap; B: ret;") == ["A", "B", None, None]


def test_lanes_of_an_endless_loop_meet_nowhere():
    assert meets("@p bra D; L: bra L; D: ret;") == ["D", None, None]


def reached(edges, start, without):
    seen, waiting = set(), [start]
    while waiting:
        node = waiting.pop()
        if node not in seen and node != without:
            seen.add(node)
            waiting += edges[node]
    return seen


GRAPHS = st.integers(1, 9).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, n - 1), max_size=3), min_size=n, max_size=n)
)


@given(GRAPHS)
def test_the_immediate_dominator_is_the_nearest_node_that_cuts_off(edges):
    alive = reached(edges, 0, None)
    cutters = {
        node: {other for other in alive - {node} if node not in reached(edges, 0, other)} for node in alive
    }
    for node, found in enumerate(immediate_dominators(edges, 0)):
        nearest = [d for d in cutters.get(node, ()) if cutters[node] - {d} == cutters[d]]
        assert [found] == (nearest or [None])
