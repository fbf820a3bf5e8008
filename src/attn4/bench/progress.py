"""How far a run is: a bar on a terminal, a line a cell elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from attn4.bench.cases import Case
from attn4.bench.rows import Row
from attn4.bench.table import compare

Cells = Iterable[list[Row]]


def follow(cells: Cells, cases: Sequence[Case], stream: TextIO | None = None) -> Iterator[list[Row]]:
    """Pass the cells through and show on ``stream`` (default stderr) how many of ``cases`` are done."""
    out = sys.stderr if stream is None else stream
    bar = out.isatty() and importlib.util.find_spec("rich") is not None
    return (_bar if bar else _lines)(cells, cases, out)


def summary(cell: Sequence[Row]) -> str:
    """A cell in a line: the median of each backend in microseconds, and attn4 over the best peer."""
    figures = [
        f"{row.backend} {row.timing.p50_us:.1f}" if row.timing else f"{row.backend} {row.status}"
        for row in cell
        if row.status != "missing"
    ]
    comparison = compare({row.backend: row for row in cell})
    ratio = "" if comparison is None else f" | {comparison.ratio:.3f} of {comparison.peer}"
    return f"{cell[0].case.name}: {', '.join(figures) or 'no backend'} us{ratio}"


def _lines(cells: Cells, cases: Sequence[Case], out: TextIO) -> Iterator[list[Row]]:
    started = time.monotonic()
    for done, cell in enumerate(cells, 1):
        left = (time.monotonic() - started) / done * (len(cases) - done)
        print(f"[{done}/{len(cases)}, {left:.0f} s left] {summary(cell)}", file=out, flush=True)
        yield cell


def _bar(cells: Cells, cases: Sequence[Case], out: TextIO) -> Iterator[list[Row]]:
    console: Any = importlib.import_module("rich.console").Console(file=out)
    # Drawn between cells only: a thread that refreshes the bar would disturb the host while it is timed.
    make: Any = importlib.import_module("rich.progress").Progress
    with make(console=console, auto_refresh=False) as progress:
        for cell in progress.track(cells, total=len(cases), description="timing"):
            progress.console.print(summary(cell), highlight=False, markup=False)
            yield cell
