"""Whose kernels lose their waits: launches of attn4 and of flash-attn-4, several tiles a CTA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from attn4.emulator.schedule import RoundRobin
from emulated.forward_kernel import Case, attend
from planted.replay import Recording, recorded
from reference_kernels.problem import PROBLEMS


@dataclass(frozen=True, slots=True)
class Target:
    """``launch`` runs kernels on the emulator, of which those called ``kernel`` matter; ``sms`` is how many
    multiprocessors they have.
    """

    launch: Callable[[], None]
    sms: int = 2
    kernel: str = "forward"


def recordings(target: Target) -> list[tuple[str, Recording]]:
    """The launches of a target that wait on mbarriers, with the kernels' short names."""
    with recorded() as found:
        target.launch()
    waiting = [recording for recording in found if "mbarrier.try_wait" in recording.launch.ptx]
    named = [(_short(recording.launch.kernel), recording) for recording in waiting]
    return [(name, recording) for name, recording in named if name == target.kernel]


def _short(kernel: str) -> str:
    for part, name in (("flash_fwd", "forward"), ("flash_bwd", "backward"), ("Forward", "forward")):
        if part in kernel:
            return name
    return kernel[:40]


def _own(case: Case) -> Target:
    def launch() -> None:
        attend(case, RoundRobin(), sms=case.ctas)

    return Target(launch, sms=case.ctas)


def _reference(name: str, **changes: object) -> Target:
    problem = replace(PROBLEMS[name], **changes)  # type: ignore[arg-type]

    def launch() -> None:
        from reference_kernels.attention import attend, inputs
        from reference_kernels.runtime import device

        with device(problem.arch, RoundRobin(), sms=problem.sms, seconds=240):
            attend(problem, inputs(problem))

    return Target(launch, sms=problem.sms, kernel="backward" if problem.backward else "forward")


TARGETS = {
    "attn4 sm_90a forward 64 full": _own(Case(64, "full", 400, 1100)),
    "attn4 sm_90a forward 128 causal": _own(Case(128, "causal", 600, 600, heads=2)),
    "sm_100a forward 64": _reference("sm_100a forward 64", seqlen_k=900),
    "sm_100a forward 128 causal": _reference("sm_100a forward 128 causal"),
    "sm_100a forward 128, a CTA pair": _reference(
        "sm_100a forward 128, a CTA pair", seqlen_q=600, seqlen_k=500, heads=2, kv_heads=1
    ),
    "sm_100a backward 64": _reference("sm_100a backward 64", seqlen_q=600, seqlen_k=400),
    "sm_100a backward 128, a CTA pair": _reference(
        "sm_100a backward 128, a CTA pair", seqlen_q=600, seqlen_k=400
    ),
    "sm_90a forward 128 causal": _reference("sm_90a forward 128 causal"),
}
"""By name; long enough that every ring comes round within a tile or from tile to tile."""
