"""Plots, drawn from rows alone: one figure for each case set and device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn4.bench.cases import short_length
from attn4.bench.rows import Row, by_device, latest

COLORS = {
    "attn4": "#c1272d",
    "cudnn": "#6aa84f",
    "fa2": "#b7b7b7",
    "fa3": "#3d6fb6",
    "fa4": "#8e63b0",
    "flex": "#e69138",
    "reference": "#e8a0a3",
    "eager": "#666666",
}
"""One colour a backend, the same in every figure."""


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every case set of every device that has timed rows; returns the PNG files.

    Measured, emulated and modelled rows and rows of different devices never share a figure. Raises
    ``ModuleNotFoundError`` without matplotlib and ``ValueError`` when no row has a time.
    """
    timed = [row for row in latest(rows) if row.timing is not None]
    if not timed:
        raise ValueError("there is nothing to draw: no row has a time")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for group in by_device(timed).values():
        for set_name in dict.fromkeys(row.case.set_name for row in group):
            some = [row for row in group if row.case.set_name == set_name]
            files.append(folder / f"{_slug(some[0])}.png")
            figure(some).savefig(files[-1], dpi=150)
    return files


def figure(rows: Sequence[Row]) -> Any:
    """A panel for each head dimension (down) and mask (across) of rows of one device and case set.

    A bar is the median, its whisker the 20th to the 80th percentile.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    head_dims = sorted({(row.case.head_dim, row.case.dim_v, row.case.dims) for row in rows})
    masks = list(dict.fromkeys(row.case.mask_name for row in rows))
    result = Figure(figsize=(1.5 + 4.5 * len(masks), 1.0 + 2.8 * len(head_dims)), layout="constrained")
    FigureCanvasAgg(result)
    panels = result.subplots(len(head_dims), len(masks), squeeze=False)
    for line, (_, _, head_dim) in zip(panels, head_dims, strict=True):
        for panel, mask in zip(line, masks, strict=True):
            some = [row for row in rows if row.case.dims == head_dim and row.case.mask_name == mask]
            panel.set_visible(bool(some))
            _bars(panel, some)
            panel.set_title(f"head dimension {head_dim}, {mask}", fontsize=10)
        next(panel for panel in line if panel.get_visible()).set_ylabel(_unit(rows[0]))
    _legend(result, panels)
    result.suptitle(_caption(rows), fontsize=9)
    return result


def _bars(panel: Any, rows: Sequence[Row]) -> None:
    """Groups of bars, one group a case and one bar a backend."""
    cases = sorted({row.case for row in rows}, key=lambda case: (case.seqlen, case.kv_heads, case.packed))
    backends = [name for name in COLORS if any(row.backend == name for row in rows)]
    backends += sorted({row.backend for row in rows} - set(backends))
    width = 0.8 / max(len(backends), 1)
    for number, backend in enumerate(backends):
        own = [row for row in rows if row.backend == backend]
        at = [cases.index(row.case) + (number - (len(backends) - 1) / 2) * width for row in own]
        ranges = [_range(row) for row in own]
        middle = [median for _, median, _ in ranges]
        below, above = ([abs(triple[side] - triple[1]) for triple in ranges] for side in (0, 2))
        look: dict[str, Any] = {"color": COLORS.get(backend), "ecolor": "#333333"}
        panel.bar(at, middle, width, yerr=[below, above], label=backend, **look)
    panel.set_xticks(range(len(cases)), [_tick(case) for case in cases])
    panel.set_xlabel("longest sequence")
    panel.grid(axis="y", linewidth=0.4)
    panel.set_axisbelow(True)


def _tick(case: Any) -> str:
    group = "" if case.heads == case.kv_heads else f"\n{case.heads}:{case.kv_heads} heads"
    return f"{short_length(case.seqlen)}{', packed' if case.packed else ''}{group}"


def _range(row: Row) -> tuple[float, float, float]:
    """Least, median and greatest of what a row's bar shows: TFLOP/s, or microseconds of the host."""
    timing = row.timing
    assert timing is not None
    if row.case.host:
        return timing.p20_us, timing.p50_us, timing.p80_us
    rate = row.tflops or 0.0
    return rate * timing.p50_us / timing.p80_us, rate, rate * timing.p50_us / timing.p20_us


def _unit(row: Row) -> str:
    quantity = "host cost of a call (us)" if row.case.host else "TFLOP/s"
    return f"{quantity}, {row.setting.origin} on\n{row.setting.device}"


def _legend(result: Any, panels: Any) -> None:
    entries: dict[str, Any] = {}
    for panel in panels.flat:
        handles, labels = panel.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": len(entries), "fontsize": 9}
    result.legend(entries.values(), entries.keys(), **place)


def _caption(rows: Sequence[Row]) -> str:
    setting = rows[-1].setting
    clocks = [row.condition.clock_mhz for row in rows if row.condition.clock_mhz is not None]
    clock = f", clock {min(clocks) / 1e3:.2f} to {max(clocks) / 1e3:.2f} GHz" if clocks else ""
    cuda = f", CUDA {setting.cuda}" if setting.cuda else ""
    case = rows[0].case
    timed = "forward and backward pass" if case.direction == "both" else f"{case.direction} pass"
    first = f"case set {case.case_set}, {timed}, {case.dtype}, {setting.date[:10]}{clock}"
    return f"{first}\nattn4 {setting.attn4}, torch {setting.torch}{cuda}"


def _slug(row: Row) -> str:
    text = f"{row.case.set_name}-{row.setting.device}-{row.setting.origin}"
    return "-".join("".join(letter if letter.isalnum() else " " for letter in text).lower().split())
