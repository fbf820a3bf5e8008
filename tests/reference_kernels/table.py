"""Problems run in a process of their own, and what came out of all of them as a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference_kernels.problem import SUITES

TESTS = Path(__file__).parents[1]
SECONDS = 280


class Failed(AssertionError):
    """The process that ran a problem ended with an error; the text is the end of what it printed."""


def outcome(
    name: str, schedule: str = "round_robin", seed: int = 0, *, hazards: bool = False
) -> dict[str, Any]:
    """What ``python -m reference_kernels`` prints about one problem. Raises Failed."""
    environment = dict(os.environ)
    paths = [str(TESTS.parent / "src"), str(TESTS), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "reference_kernels", name]
    command += ["--schedule", schedule, "--seed", str(seed), *(["--hazards"] if hazards else [])]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{name}: not done in {SECONDS} s") from error
    if done.returncode != 0:
        raise Failed(f"{name}: exit status {done.returncode}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(schedule: str, seed: int) -> Iterator[str]:
    """Lines of a Markdown table with a row for each problem."""
    yield "| problem | out | dq | dk | dv | LSE | instructions |"
    yield "|---|---|---|---|---|---|---|"
    for suite, problems in SUITES.items():
        for name in problems:
            try:
                found = outcome(f"{suite} {name}", schedule, seed)
            except Failed as failure:
                yield f"| {suite} {name} | {str(failure).strip().splitlines()[-1]} | | | | | |"
                continue
            errors = found["relative_l2"]
            cells = [f"{errors[key]:.2e}" if key in errors else "" for key in ("out", "dq", "dk", "dv")]
            instructions = sum(count for _, count in found["kernels"])
            cells += [f"{found['lse_error']:.0e}", f"{instructions // 1000} k"]
            yield f"| {suite} {name} | {' | '.join(cells)} |"
