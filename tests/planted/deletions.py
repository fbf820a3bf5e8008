"""Every mbarrier wait of a kernel deleted, one at a time: which deletions are reported, and as what.

``python -m planted.deletions "sm_100a forward 64"`` prints a Markdown section about the kernels of one
target; without one, the page about all of them, each in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from attn4.emulator.schedule import Adversarial, Schedule
from planted.replay import Recording, Replay
from planted.targets import TARGETS, recordings
from planted.waits import Site, executed, without

ORDERS: dict[str, Callable[[], Schedule]] = {
    "copies late": lambda: Adversarial(1, late=True),
    "copies early": lambda: Adversarial(1, late=False),
}


@dataclass(slots=True)
class Verdict:
    """What became of a kernel without one of its waits.

    ``found`` is what was reported under the first of ``ORDERS`` that reported anything, ``order`` its name,
    both empty if none did; ``message`` its first sentence. ``differs``: nothing was, but the results differ.
    """

    wait: Site
    found: list[str] = field(default_factory=list)
    order: str = ""
    message: str = ""
    differs: bool = False

    @property
    def words(self) -> str:
        """One cell of the table."""
        if self.found:
            return f"found, {self.order}: {', '.join(self.found)}: {self.message}"
        if self.differs:
            return "MISSED: other results, and nothing reported"
        if self.wait.is_vacuous:
            return "redundant here: it never waits, as its barrier has completed no phase"
        return "redundant here: whatever it orders, another wait orders too"


def judged(recording: Recording, wait: Site, sms: int, whole: dict[str, Replay]) -> Verdict:
    """Run a kernel without ``wait`` under each of ``ORDERS``, until something is reported.

    ``whole`` is how the kernel went as it is, by the name of the order: what it was told then does not count.
    """
    verdict = Verdict(wait)
    ptx = without(recording.launch.ptx, wait.line)
    for name, order in ORDERS.items():
        done = recording.replay(order(), ptx=ptx, sms=sms, beyond=whole[name].keys)
        if done.kinds:
            verdict.found, verdict.order, verdict.message = done.kinds, name, _sentence(done)
            break
        pairs = zip(done.memory, whole[name].memory, strict=True)
        verdict.differs |= not all(np.array_equal(*pair) for pair in pairs)
    return verdict


def _sentence(done: Replay) -> str:
    """What was reported first, without what is the same everywhere."""
    text = str(done.hazards[0].message) if done.hazards else str(done.fault).splitlines()[0]
    text = text.replace("__dynamic_shmem__0", "").replace(".mbarrier::complete_tx::bytes", "")
    return text.replace(".L2::cache_hint", "").replace("|", "or")


def section(title: str, recording: Recording, sms: int) -> Iterator[str]:
    """Lines of Markdown about one kernel. Raises the fault that ends the kernel as it is, if one does."""
    whole = {name: recording.replay(order(), sms=sms) for name, order in ORDERS.items()}
    for done in whole.values():
        if done.fault is not None:
            raise done.fault
    waits = [site for site in executed(recording, sms) if site.kind == "wait"]
    verdicts = []
    for wait in waits:
        verdicts.append(judged(recording, wait, sms, whole))
        print(f"line {wait.line}: {verdicts[-1].words}", file=sys.stderr, flush=True)
    found = sum(bool(verdict.found) for verdict in verdicts)
    vacuous = sum(not verdict.found and verdict.wait.is_vacuous for verdict in verdicts)
    launch = recording.launch
    yield f"## {title}"
    yield ""
    yield (
        f"Grid {launch.grid}, cluster {launch.cluster}, {len(waits)} waits executed: {found} deletions "
        f"found, {len(waits) - found - vacuous} redundant here, {vacuous} that never wait."
    )
    yield ""
    for sentence in dict.fromkeys(_sentence(done) for done in whole.values() if done.hazards):
        yield f"As it is, with all its waits: {sentence}."
        yield ""
    yield "| PTX line | barriers at | warps | passed | first lap | without it |"
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


PAGE = """\
# Waits deleted

What happens to a kernel that waits once too little? For each kernel below, every mbarrier wait (`try_wait`)
that it executes was deleted, one at a time: the PTX was changed so that the wait succeeds at once. The
changed kernel ran on the emulator with hazards looked for, over the same memory, first with every
asynchronous copy and product completed as late as the rules allow, then as early. In `tests/`,
`python -m planted.deletions` makes this page; it takes the kernels of attn4 and those of flash-attn-4
4.0.0b36, which are right on silicon. As they are, nothing is reported of them in either order, but for what
is said below the heading.

- **found**: something was reported; the first sentence of the first report is given.
- **redundant here**: nothing was. The vector clocks hold whatever the order of execution was, so another
  wait orders all that this one orders, on this problem. Of those, a wait that *never waits* met only
  barriers without a completed phase: the first lap of a producer that waits for empty slots, of a ring that
  does not come round.

"passed" counts warps that got past the wait, "first lap" those of them whose barrier had not completed a
phase. Offsets are those in shared memory, which begins at 0x400.
"""


def page() -> Iterator[str]:
    """The page about all targets."""
    yield PAGE
    for target in TARGETS:
        command = [sys.executable, "-W", "ignore", "-m", "planted.deletions", target]
        yield subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m planted.deletions", description=__doc__)
    parser.add_argument("target", nargs="?", metavar="TARGET", help="one of targets.py; without: all")
    given = parser.parse_args(arguments)
    if given.target is None:
        print("\n".join(page()))
        return 0
    if given.target not in TARGETS:
        parser.error(f"no target is called {given.target!r}; there are: {', '.join(TARGETS)}")
    target = TARGETS[given.target]
    for name, recording in recordings(target):
        print(f"{given.target}: {name}", file=sys.stderr)
        for line in section(f"{given.target}: {name}", recording, target.sms):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
