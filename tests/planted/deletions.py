"""Every mbarrier wait of a kernel deleted, one at a time: which deletions are reported, and as what.

``python -m planted.deletions "sm_100a forward 64"`` prints a Markdown section about the kernels of one
target, ``--write FILE`` runs all targets, each in a process of its own, and writes the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from attn4.emulator.schedule import Adversarial, Random, RoundRobin, Schedule
from planted.replay import Recording, Replay
from planted.targets import TARGETS, recordings
from planted.waits import Site, executed, without

ORDERS: dict[str, Callable[[], Schedule]] = {
    "copies late": lambda: Adversarial(1, late=True),
    "copies early": lambda: Adversarial(1, late=False),
    "random": lambda: Random(1),
    "in turn": RoundRobin,
}


@dataclass(slots=True)
class Verdict:
    """What became of a kernel without one of its waits.

    ``found`` is what was reported under the first of ``ORDERS`` that reported anything, ``order`` its name,
    both empty if none did; ``message`` its first sentence.
    """

    wait: Site
    found: list[str] = field(default_factory=list)
    order: str = ""
    message: str = ""

    @property
    def words(self) -> str:
        """One cell of the table."""
        if self.found:
            return f"found: {', '.join(self.found)} ({self.order})"
        if self.wait.is_vacuous:
            return "redundant here: it never waits, as its barrier has completed no phase"
        return "redundant: another wait orders all that it orders"


def judged(recording: Recording, wait: Site, sms: int) -> Verdict:
    """Run a kernel without ``wait`` under each of ``ORDERS``, until something is reported."""
    verdict = Verdict(wait)
    ptx = without(recording.launch.ptx, wait.line)
    for name, order in ORDERS.items():
        done = recording.replay(order(), ptx=ptx, sms=sms)
        if done.kinds:
            verdict.found, verdict.order, verdict.message = done.kinds, name, _sentence(done)
            break
    return verdict


def _sentence(done: Replay) -> str:
    if done.hazards:
        return str(done.hazards[0].message)
    return str(done.fault).splitlines()[0]


def section(title: str, recording: Recording, sms: int) -> Iterator[str]:
    """Lines of Markdown about one kernel. Raises AssertionError if the kernel itself is not clean."""
    for name, order in ORDERS.items():
        done = recording.replay(order(), sms=sms)
        if done.kinds:
            raise AssertionError(f"{title} as it is, {name}: {', '.join(done.kinds)}: {_sentence(done)}")
    waits = [site for site in executed(recording, sms) if site.kind == "wait"]
    verdicts = [judged(recording, wait, sms) for wait in waits]
    found = sum(bool(verdict.found) for verdict in verdicts)
    vacuous = sum(not verdict.found and verdict.wait.is_vacuous for verdict in verdicts)
    launch = recording.launch
    yield f"## {title}"
    yield ""
    yield (
        f"Grid {launch.grid}, cluster {launch.cluster}, {len(waits)} waits executed: {found} deletions "
        f"found, {len(waits) - found - vacuous} redundant, {vacuous} that never wait."
    )
    yield ""
    yield "| PTX line | barriers at | warps | passed | of these before any phase | without it |"
    yield "|---|---|---|---|---|---|"
    for verdict in verdicts:
        wait = verdict.wait
        where = " ".join(f"{offset:#x}" for offset in sorted(wait.offsets))
        yield (
            f"| {wait.line} | {where} | {_spans(wait.warps)} | {wait.passes} | {wait.vacuous} "
            f"| {verdict.words} |"
        )
    yield ""


def _spans(numbers: set[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}-{last}" if first != last else f"{first}" for first, last in spans)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m planted.deletions", description=__doc__)
    parser.add_argument("target", choices=TARGETS, help="whose kernels")
    parser.add_argument("--line", type=int, help="only the wait at this PTX line, with all that is reported")
    given = parser.parse_args(arguments)
    target = TARGETS[given.target]
    for name, recording in recordings(target):
        print(f"{given.target}: {name}", file=sys.stderr)
        for line in section(f"{given.target}: {name}", recording, target.sms):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
