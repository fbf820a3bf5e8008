"""The short table of a run, and the ratios that decide: attn4 over the best peer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attn4.bench.rows import Row, by_device, latest

OWN = "attn4"
"""The backend that the others are peers of."""

YARDSTICK = "cudnn"
"""The peer that every machine with torch has: it makes figures of several machines comparable."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """attn4 against a peer on one case. A ``ratio`` over 1: attn4 takes less time than ``peer``."""

    case: str
    case_set: str
    peer: str
    ratio: float


def by_case(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Case name -> backend -> its newest row; the rows are of one device."""
    cells: dict[str, dict[str, Row]] = {}
    for row in latest(rows):
        cells.setdefault(row.case.name, {})[row.backend] = row
    return cells


def compare(cell: dict[str, Row], against: str | None = None) -> Comparison | None:
    """attn4 over the best peer of a cell, or over the one named; None unless both were timed."""
    times = {name: row.timing.p50_us for name, row in cell.items() if row.timing is not None}
    others = [name for name in times if name != OWN and not name.startswith(f"{OWN}-")]
    peers = [name for name in others if against in (None, name)]
    if OWN not in times or not peers:
        return None
    best = min(peers, key=times.__getitem__)
    case = cell[OWN].case
    return Comparison(case.name, case.set_name, best, times[best] / times[OWN])


def geometric_mean(values: Sequence[float]) -> float:
    """The n-th root of the product; NaN of nothing."""
    return math.exp(math.fsum(math.log(value) for value in values) / len(values)) if values else math.nan


def render(rows: Sequence[Row]) -> str:
    """The whole summary: for each device a line a case, the means of each set, and what was not timed."""
    parts = []
    for (device, origin), group in by_device(rows).items():
        cells = by_case(group)
        parts.append(f"{device}, {origin}")
        for host, unit in ((False, "TFLOP/s at the median"), (True, "microseconds of the host a call")):
            some = {name: cell for name, cell in cells.items() if _any_row(cell).case.host is host}
            parts += [_cell_table(some, unit)] if some else []
        parts += [_means(cells.values()), _reasons(cells.values())]
    return "\n\n".join(part for part in parts if part)


def _any_row(cell: dict[str, Row]) -> Row:
    return next(iter(cell.values()))


def _cell_table(cells: dict[str, dict[str, Row]], unit: str) -> str:
    backends = [
        name
        for name in dict.fromkeys(name for cell in cells.values() for name in cell)
        if any(cell[name].status != "missing" for cell in cells.values() if name in cell)
    ]
    compared = any(compare(cell) for cell in cells.values())
    lines = [[unit, *backends, *(["share", "best peer", "ratio"] if compared else [])]]
    for name, cell in cells.items():
        line = [name, *(_figure(cell.get(backend)) for backend in backends)]
        lines.append([*line, *(_comparison(cell) if compared else [])])
    return _aligned(lines)


def _figure(row: Row | None) -> str:
    if row is None or row.status in {"missing", "unsupported"}:
        return "-"
    if row.timing is None:
        return row.status
    value = row.timing.p50_us if row.case.host else row.tflops or 0.0
    mark = "*" if row.timing.host_bound else ""
    return f"{value:.0f}{mark}" if value >= 100 else f"{value:.3g}{mark}"


def _comparison(cell: dict[str, Row]) -> list[str]:
    own, comparison = cell.get(OWN), compare(cell)
    share = "-" if own is None or own.share is None else f"{own.share:.0%}"
    return [share, "-", "-"] if comparison is None else [share, comparison.peer, f"{comparison.ratio:.3f}"]


def _means(cells: Iterable[dict[str, Row]]) -> str:
    ratios: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        for label, against in (("the best peer", None), (YARDSTICK, YARDSTICK)):
            comparison = compare(cell, against)
            if comparison is not None:
                ratios.setdefault((comparison.case_set, label), []).append(comparison.ratio)
    lines = [["attn4 over", "set", "cells", "geometric mean", "least", "greatest"]]
    for (case_set, label), values in ratios.items():
        numbers = (f"{value:.3f}" for value in (geometric_mean(values), min(values), max(values)))
        lines.append([label, case_set, str(len(values)), *numbers])
    return _aligned(lines) if ratios else ""


def _reasons(cells: Iterable[dict[str, Row]]) -> str:
    """What was not timed, once for each backend and reason, with the number of cases."""
    counts: dict[tuple[str, str, str], int] = {}
    starred = False
    for row in (row for cell in cells for row in cell.values()):
        starred |= row.timing is not None and row.timing.host_bound
        if row.status != "timed":
            key = (row.backend, row.status, row.detail)
            counts[key] = counts.get(key, 0) + 1
    lines = [f"{name}: {status} in {n} cell(s): {detail}" for (name, status, detail), n in counts.items()]
    if starred:
        lines.append("* the device waited for the host: the figure holds the host's time too")
    return "\n".join(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left and the others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            word.ljust(width) if column == 0 else word.rjust(width)
            for column, (word, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
