"""The row: all that is known about one backend on one case, kept as JSON lines or as CSV."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from attn4.bench.cases import Case, flops
from attn4.mask import Mask

Origin = Literal["measured", "emulated", "modelled"]
Status = Literal["timed", "wrong", "unsupported", "failed", "missing"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: the 20th, 50th and 80th percentile over ``samples``.

    Each sample is the mean of ``launches`` consecutive calls. ``host_bound``: the device waited for the
    host in so many samples that they could not be left out, so that the figure holds host time too.
    """

    p20_us: float
    p50_us: float
    p80_us: float
    samples: int
    launches: int
    host_bound: bool = False


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The worst slice of a result: its largest error against float64, and the error allowed there."""

    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """False for a NaN too."""
        return self.error <= self.allowed


@dataclass(frozen=True, slots=True)
class Condition:
    """What the device did while a cell was timed, over all backends of the cell; ``None`` is not known.

    ``clock_mhz`` is the median clock of its processors, ``power_w`` energy over time, ``power_limited``
    whether the driver ever lowered the clock to keep within the power limit.
    """

    clock_mhz: float | None = None
    power_w: float | None = None
    power_limited: bool | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """Where, when and with what a run was made."""

    device: str
    origin: Origin
    date: str
    command: str
    attn4: str
    python: str
    torch: str
    cuda: str | None = None
    driver: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One backend on one case. What was not timed says why in ``detail`` and has no ``timing``.

    ``attainable_tflops`` is the bound of ``attn4.bench.attainable`` at the clock of the row.
    """

    case: Case
    backend: str
    backend_version: str
    status: Status
    setting: Setting
    detail: str = ""
    timing: Timing | None = None
    accuracy: Accuracy | None = None
    condition: Condition = Condition()
    attainable_tflops: float | None = None
    plan: str | None = None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s at the median, by the operations that the case counts; ``None`` for host cost."""
        if self.timing is None or self.case.host:
            return None
        return flops(self.case) / self.timing.p50_us / 1e6

    @property
    def share(self) -> float | None:
        """The rate reached over the rate attainable."""
        if self.tflops is None or self.attainable_tflops is None:
            return None
        return self.tflops / self.attainable_tflops


def to_json(row: Row) -> str:
    """One line of JSON, the derived figures included so that other programs need no formula."""
    record = asdict(row)
    record["case"]["name"] = row.case.name
    record["tflops"], record["share"] = row.tflops, row.share
    return json.dumps(record, allow_nan=True)


def from_json(line: str) -> Row:
    """The row that ``to_json`` wrote; ``ValueError`` for a line that is not one."""
    try:
        record = json.loads(line)
        case = _without(record["case"], "name")
        case["mask"], case["seqlens"] = Mask(**case["mask"]), tuple(case["seqlens"])
        optional = {"timing": Timing, "accuracy": Accuracy, "condition": Condition}
        parts = {name: kind(**record[name]) for name, kind in optional.items() if record[name] is not None}
        plain = _without(record, "tflops", "share", "case", "setting", *optional)
        return Row(case=Case(**case), setting=Setting(**record["setting"]), **parts, **plain)
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a row of a benchmark ({error!r}): {line[:80].strip()}") from error


def _without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in names}


def append(rows: Iterable[Row], path: Path) -> None:
    """Add rows to a file of JSON lines, which is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(to_json(row) + "\n")


def read(path: Path) -> list[Row]:
    """The rows of a file of JSON lines, in its order."""
    with path.open(encoding="utf-8") as file:
        return [from_json(line) for line in file if line.strip()]


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The same rows as a table for a spreadsheet, one column a value (``timing.p50_us``)."""
    records = [dict(_flatten(json.loads(to_json(row)))) for row in rows]
    columns = list(dict.fromkeys(name for record in records for name in record))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(records)


def _flatten(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield prefix + name, " ".join(str(item) for item in value)
        elif value is not None:
            yield prefix + name, value


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of rows with the same case, backend, device and origin only the last, in the place of the first."""
    newest: dict[tuple[object, ...], Row] = {}
    for row in rows:
        newest[row.case, row.backend, row.setting.device, row.setting.origin] = row
    return list(newest.values())


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile with linear interpolation between the two nearest ranks; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def by_device(rows: Iterable[Row]) -> dict[tuple[str, Origin], list[Row]]:
    """Rows that may share a table or an axis: of one device, and of one origin."""
    groups: dict[tuple[str, Origin], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.setting.device, row.setting.origin), []).append(row)
    return groups
