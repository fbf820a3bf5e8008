"""Rows survive a file, and tables compute ratios from them."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from attn4.bench.cases import cases, flops
from attn4.bench.rows import append, by_device, from_json, latest, read, to_json, write_csv
from attn4.bench.table import by_case, compare, geometric_mean, render
from host.bench_rows import SETTING, forward_rows, timed, untimed


@pytest.mark.parametrize("case_set", ["forward", "varlen", "window", "host"])
def test_a_row_comes_back_from_json_as_it_was(case_set: str) -> None:
    row = timed(cases(case_set)[-1], "attn4", 123.4)
    assert from_json(to_json(row)) == row
    missing = untimed(row.case, "fa3", "missing", "not there")
    assert from_json(to_json(missing)) == missing


def test_json_holds_the_derived_figures_for_other_programs() -> None:
    row = timed(cases("forward")[0], "attn4", 200.0)
    record = json.loads(to_json(row))
    assert record["tflops"] == pytest.approx(flops(row.case) / 200e-6 / 1e12)
    assert record["share"] == pytest.approx(record["tflops"] / 892.0)
    assert record["case"]["name"] == "forward-d64-full-1k"


def test_appended_rows_are_read_in_order(tmp_path: Path) -> None:
    rows = forward_rows()
    append(rows[:3], tmp_path / "new" / "rows.jsonl")
    append(rows[3:], tmp_path / "new" / "rows.jsonl")
    assert read(tmp_path / "new" / "rows.jsonl") == rows


@pytest.mark.parametrize("line", ["{}", "not json", '{"case": 3}', "[]"])
def test_a_line_that_is_not_a_row_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a row"):
        from_json(line)


def test_csv_has_a_line_for_each_row_and_a_column_for_each_value(tmp_path: Path) -> None:
    rows = forward_rows()
    write_csv(rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    assert len(records) == len(rows)
    assert records[0]["case.name"] == "forward-d64-full-1k"
    assert float(records[0]["timing.p50_us"]) == 100.0
    assert records[0]["setting.device"] == "NVIDIA H200"
    assert records[-1]["timing.p50_us"] == ""


def test_host_cost_has_no_rate() -> None:
    assert timed(cases("host")[0], "attn4", 4.0).tflops is None


def test_of_repeated_rows_the_last_counts() -> None:
    case = cases("forward")[0]
    old, new = timed(case, "attn4", 100.0), timed(case, "attn4", 90.0)
    elsewhere = timed(case, "attn4", 80.0, replace(SETTING, device="NVIDIA B200"))
    assert latest([old, elsewhere, new]) == [new, elsewhere]


def test_rows_of_different_devices_or_origins_are_kept_apart() -> None:
    case = cases("forward")[0]
    rows = [
        timed(case, "attn4", 1.0, replace(SETTING, device=device, origin=origin))
        for device in ("NVIDIA H200", "NVIDIA B200")
        for origin in ("measured", "modelled")
    ]
    assert [group for _, group in by_device(rows).items()] == [[row] for row in rows]


def test_ratio_is_time_of_the_best_peer_over_time_of_attn4() -> None:
    cells = by_case(forward_rows())
    first = compare(cells["forward-d64-full-1k"])
    second = compare(cells["forward-d64-full-4k"])
    assert first is not None
    assert second is not None
    assert (first.peer, first.ratio) == ("fa3", 1.0)
    assert (second.peer, second.ratio) == ("fa3", 0.5)
    cudnn = compare(cells["forward-d64-full-4k"], against="cudnn")
    assert cudnn is not None
    assert cudnn.ratio == 4.0


def test_a_backend_that_was_not_timed_is_not_a_peer() -> None:
    case = cases("forward")[0]
    wrong = untimed(case, "fa3", "wrong", "error 1 where 0.01 is allowed")
    cell = by_case([timed(case, "attn4", 100.0), wrong])
    assert compare(cell[case.name]) is None
    assert compare(cell[case.name], against="fa3") is None


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 1.0, 8.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))


def test_table_shows_ratios_means_and_what_was_not_timed() -> None:
    text = render(forward_rows())
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["forward-d64-full-4k"][-2:] == ["fa3", "0.500"]
    mean = f"{math.sqrt(0.5):.3f}"
    assert f"the best peer  forward      2           {mean}  0.500     1.000" in text
    assert "fa2: failed in 1 cell(s): no kernel image" in text
    assert "fa4: missing in 1 cell(s): cannot be imported" in text
    assert "NVIDIA H200, measured" in text
    # A backend that is missing everywhere gets no column.
    header = next(line for line in text.splitlines() if line.startswith("TFLOP/s"))
    assert "fa4" not in header
    assert "fa2" in header


def test_figures_that_hold_host_time_are_marked() -> None:
    row = timed(cases("quick")[0], "attn4", 100.0)
    assert row.timing is not None
    marked = replace(row, timing=replace(row.timing, host_bound=True))
    assert "* the device waited for the host" in render([marked])
    assert "* the device" not in render([row])


def test_host_cost_is_shown_in_microseconds() -> None:
    text = render([timed(cases("host")[0], "attn4", 4.25), timed(cases("host")[0], "cudnn", 20.0)])
    line = next(line for line in text.splitlines() if line.startswith("host-d128"))
    assert line.split()[1:] == ["4.25", "20", "-", "cudnn", "4.706"]
