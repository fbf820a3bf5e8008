"""Plots are drawn from rows alone, and say what they show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attn4.bench.cases import CASE_SETS, cases
from attn4.bench.rows import Row
from host.bench_rows import SETTING, forward_rows, timed, untimed

pytest.importorskip("matplotlib")

from attn4.bench.plots import draw, figure


def some_rows(case_set: str) -> list[Row]:
    return [
        timed(case, backend, 100.0 + 50 * number)
        for case in cases(case_set)
        for number, backend in enumerate(("attn4", "cudnn", "fa3"))
    ]


@pytest.mark.parametrize("case_set", CASE_SETS)
def test_every_case_set_is_drawn_into_a_file(case_set: str, tmp_path: Path) -> None:
    (file,) = draw(some_rows(case_set), tmp_path / "plots")
    assert file.name == f"{case_set}-nvidia-h200-measured.png"
    assert file.stat().st_size > 10_000


def test_vertical_axis_says_that_it_is_measured_and_on_which_device() -> None:
    labels = [panel.get_ylabel() for panel in figure(some_rows("forward")).axes if panel.get_ylabel()]
    assert labels == ["TFLOP/s, measured on\nNVIDIA H200"] * 3
    (host,) = [panel.get_ylabel() for panel in figure(some_rows("host")).axes if panel.get_ylabel()]
    assert host == "host cost of a call (us), measured on\nNVIDIA H200"


def test_a_bar_is_as_high_as_the_median_of_its_row() -> None:
    rows = [row for row in some_rows("forward") if row.case.name == "forward-d64-full-1k"]
    (panel,) = figure(rows).axes
    heights = [bar.get_height() for bar in panel.patches]
    assert heights == pytest.approx([row.tflops for row in rows])


def test_figures_of_two_devices_and_two_origins_never_share_an_axis(tmp_path: Path) -> None:
    rows = forward_rows()[:2]
    other = [replace(row, setting=replace(SETTING, device="NVIDIA B200")) for row in rows]
    modelled = [replace(row, setting=replace(SETTING, origin="modelled")) for row in rows]
    names = {file.name for file in draw([*rows, *other, *modelled], tmp_path)}
    assert names == {
        "forward-nvidia-h200-measured.png",
        "forward-nvidia-b200-measured.png",
        "forward-nvidia-h200-modelled.png",
    }


def test_a_case_without_one_of_its_backends_is_drawn(tmp_path: Path) -> None:
    assert len(draw(forward_rows()[:4], tmp_path)) == 1


def test_panels_without_rows_are_not_shown() -> None:
    # Head dimensions 64 and 256 have only a causal case in this set.
    shown = {panel.get_title() for panel in figure(some_rows("gqa")).axes if panel.get_visible()}
    assert "head dimension 128, full" in shown
    assert "head dimension 64, causal" in shown
    assert "head dimension 64, full" not in shown


def test_rows_without_a_time_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([untimed(cases("quick")[0], "fa3", "missing", "not there")], tmp_path)
