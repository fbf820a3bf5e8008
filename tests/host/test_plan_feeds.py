"""The feeds-and-speeds bound: published numbers, and the arithmetic behind them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn4.machine import MACHINES, Machine, machine
from attn4.plan.feeds import UNITS, Feeds, Step, feeds


def bound(name: str, rows: int = 128, keys: int = 128, dim: int = 128, **more: object) -> Feeds:
    step = Step(tile_m=rows, tile_n=keys, head_dim=dim, head_dim_v=dim, **more)  # type: ignore[arg-type]
    return feeds(machine(name), step)


def cycles(found: Feeds) -> tuple[float, ...]:
    return tuple(found.cycles(unit) for unit in UNITS)


@pytest.mark.parametrize(
    ("direction", "cta_group", "expected"),
    [
        ("forward", 1, (1024, 1024, 768)),
        ("backward", 1, (2560, 1024, 3328)),
        ("backward", 2, (2560, 1024, 2688)),
    ],
)
def test_a_b200_tile_of_128_takes_the_published_cycles(
    direction: str, cta_group: int, expected: tuple[int, int, int]
) -> None:
    # FlashAttention-4 post and arXiv 2603.05451, M = N = D = 128.
    assert cycles(bound("B200", direction=direction, cta_group=cta_group)) == expected


def test_the_backward_terms_of_shared_memory_are_the_published_ones() -> None:
    def terms(cta_group: int) -> dict[str, float]:
        found = bound("B200", direction="backward", cta_group=cta_group)
        shared = [term for term in found.terms if term.unit == "shared memory"]
        named = {term.name: term.cycles for term in shared if " of " not in term.name}
        return {"operands": sum(term.cycles for term in shared if " of " in term.name), **named}

    assert terms(1) == {"operands": 2048, "dS written": 256, "dQ written and reduced": 1024}
    assert terms(2) == {
        "operands": 1536,
        "dS written": 256,
        "dS exchanged (DSMEM)": 384,
        "dQ written and reduced": 512,
    }


def test_what_binds_is_the_exponential_forward_and_shared_memory_backward() -> None:
    forward = bound("B200")
    assert forward.binds == ("tensor core", "exponential")
    assert forward.tensor_share == 1
    single = bound("B200", direction="backward")
    assert single.binds == ("shared memory",)
    assert single.tensor_share == pytest.approx(2560 / 3328)
    assert bound("B200", direction="backward", cta_group=2).tensor_share == pytest.approx(2560 / 2688)
    assert bound("B200", dim=64).binds == ("exponential",)
    assert bound("B200", dim=64).tensor_share == 0.5


def test_b300_exponentials_take_half_the_cycles() -> None:
    assert cycles(bound("B300")) == (1024, 512, 768)
    assert bound("B300").binds == ("tensor core",)


def test_hopper_reads_keys_and_values_again_for_every_64_rows() -> None:
    # 128 rows are two wgmma blocks: Q once (256), K and V twice (512 each).
    assert cycles(bound("H200")) == (2048, 1024, 1280)
    assert cycles(bound("H200", rows=64)) == (1024, 512, 640)


@pytest.mark.parametrize(
    ("rows", "keys", "dim", "measured"),
    # FA3 on an H200 under ncu, S 4096: shared-memory share over tensor-pipe share.
    [(128, 176, 128, 52 / 86), (128, 80, 256, 68 / 94)],
)
def test_hopper_shared_memory_share_is_what_ncu_measures(
    rows: int, keys: int, dim: int, measured: float
) -> None:
    found = bound("H200", rows, keys, dim)
    assert found.cycles("shared memory") / found.cycles("tensor core") == pytest.approx(measured, rel=0.05)


def test_hopper_reads_the_left_operand_again_for_every_256_columns() -> None:
    once, twice = bound("H200", keys=256), bound("H200", keys=512)

    def query(found: Feeds) -> float:
        return next(term.cycles for term in found.terms if term.name.startswith("Q of S"))

    assert (query(once), query(twice)) == (256, 512)


def test_hopper_has_no_pairs() -> None:
    with pytest.raises(ValueError, match="sm_90a works in groups of 1 CTAs, not of 2"):
        bound("H200", cta_group=2)


@settings(max_examples=40, deadline=None)
@given(
    where=st.sampled_from(MACHINES),
    rows=st.sampled_from((64, 128, 192, 256)),
    keys=st.sampled_from((64, 80, 128, 176)),
    dims=st.tuples(*[st.sampled_from((32, 64, 128, 192, 256))] * 2),
    direction=st.sampled_from(("forward", "backward")),
)
def test_tensor_and_exponential_cycles_are_operations_over_rates(
    where: Machine, rows: int, keys: int, dims: tuple[int, int], direction: str
) -> None:
    d, dv = dims
    step = Step(tile_m=rows, tile_n=keys, head_dim=d, head_dim_v=dv, direction=direction)  # type: ignore[arg-type]
    found = feeds(where, step)
    widths = d + dv if direction == "forward" else 3 * d + 2 * dv
    assert found.cycles("tensor core") == pytest.approx(2 * rows * keys * widths / where.tensor_flops)
    assert found.cycles("exponential") == rows * keys / where.exponentials
    assert found.bound == max(cycles(found))
    assert 0 < found.tensor_share <= 1
