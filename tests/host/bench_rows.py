"""Rows for the tests of tables, files and plots."""

from __future__ import annotations

from dataclasses import replace

from attn4.bench.cases import Case, cases
from attn4.bench.rows import Accuracy, Condition, Row, Setting, Timing

SETTING = Setting(
    device="NVIDIA H200",
    origin="measured",
    date="2026-11-29T12:00:00+00:00",
    command="attn4 bench forward",
    attn4="0.1.0",
    python="3.12.0",
    torch="2.11.0",
    cuda="13.0",
    driver="580.1",
)


def timed(case: Case, backend: str, microseconds: float, setting: Setting = SETTING) -> Row:
    return Row(
        case=case,
        backend=backend,
        backend_version="1",
        status="timed",
        setting=setting,
        timing=Timing(microseconds * 0.9, microseconds, microseconds * 1.2, samples=40, launches=3),
        accuracy=Accuracy(0.001, 0.004),
        condition=Condition(1650.0, 690.5, True),
        attainable_tflops=892.0,
        plan="128x128 key 0123" if backend == "attn4" else None,
    )


def untimed(case: Case, backend: str, status: str, detail: str) -> Row:
    row = timed(case, backend, 1.0)
    return replace(row, status=status, detail=detail, timing=None, accuracy=None, attainable_tflops=None)


def forward_rows() -> list[Row]:
    """attn4 is twice as fast as cudnn and level with fa3, then four times as fast and half as fast."""
    first, second = cases("forward")[:2]
    return [
        timed(first, "attn4", 100.0),
        timed(first, "cudnn", 200.0),
        timed(first, "fa3", 100.0),
        timed(second, "attn4", 100.0),
        timed(second, "cudnn", 400.0),
        timed(second, "fa3", 50.0),
        untimed(second, "fa2", "failed", "no kernel image"),
        untimed(second, "fa4", "missing", "cannot be imported: No module named 'flash_attn'"),
    ]
