"""Cluster launch control: resident clusters take over the work of those that have not started."""

import pytest

from attn4.emulator.faults import Deadlock
from attn4.emulator.isa.registry import UnsupportedInstruction
from emulated.tiny import kernel_text, run, words
from isa_lines import bound

TAKING_OVER = """
.reg .b128 %q;
mov.u32 %r0, %tid.x;
mov.u32 %r10, memory;
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r10+16], {arrivals};
@%p0 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r4, %ctaid.x;
mov.u32 %r6, %ctaid.y;
mov.u32 %r5, 0;
ld.param.u64 %d0, [p1];
@%p0 red.global.add.u32 [%d0], 1;
work:
// A mark at [ctaid.y][ctaid.x], by one thread of each CTA.
ld.param.u64 %d0, [p0];
mad.lo.u32 %r7, %r6, 40, %r4;
mul.wide.u32 %d1, %r7, 4;
add.u64 %d2, %d0, %d1;
@%p0 red.global.add.u32 [%d2], 1;
{announce}
{ask}
waiting:
mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r10+16], %r5;
@!%p1 bra waiting;
xor.b32 %r5, %r5, 1;
ld.shared.v2.b64 {{%d3, %d4}}, [%r10];
mov.b128 %q, {{%d3, %d4}};
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q;
// Everyone must have read the response before the next one is written.
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@!%p2 bra done;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r8, %q;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r11, %r6, %r12, _}}, %q;
mov.u32 %r9, %cluster_ctaid.x;
add.u32 %r4, %r8, %r9;
bra work;
done:
ret;
"""
ANNOUNCE = "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r10+16], 16;"
CANCEL = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
ONE = f"@%p0 {CANCEL}.b128 [%r10], [%r10+16];"
ALL = (
    "mov.u32 %r9, %cluster_ctaid.x; setp.eq.u32 %p3, %r9, 0; and.pred %p3, %p3, %p0;\n"
    f"@%p3 {CANCEL}.multicast::cluster::all.b128 [%r10], [%r10+16];"
)


CTAS = 40


def take_over(announce=ANNOUNCE, ask=ONE, **launch):
    """How often each CTA's work was done, and how many CTAs were started."""
    text = kernel_text(TAKING_OVER.format(announce=announce, ask=ask, arrivals=1), parameters=2, shared=32)
    marks, started = words(CTAS), words(1)
    run(text, [marks, started], sms=1, **({"grid": CTAS, "block": 64} | launch))
    return marks, int(started[0])


def test_every_block_is_done_once_whoever_takes_it(schedule):
    marks, started = take_over(schedule=schedule)
    assert (marks == 1).all()
    assert started < CTAS


def test_a_cluster_takes_over_a_cluster(schedule):
    marks, started = take_over(ask=ALL, cluster=2, schedule=schedule)
    assert (marks == 1).all()
    assert started < CTAS
    assert started % 2 == 0


def test_a_response_that_nobody_announced_is_no_completion():
    """The phase takes the arrival alone: it ends early, or the 16 bytes come too late for a phase."""
    with pytest.raises(Exception, match=r"16 bytes|no thread can proceed|which no one wrote"):
        take_over(announce="")


def test_a_request_that_is_left_out_is_a_deadlock():
    with pytest.raises(Deadlock):
        take_over(ask="")


@pytest.mark.parametrize(
    "line",
    [
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p0, %d1",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.b32.b128 %r0, %q1",
        f"{CANCEL}.multicast::cluster.b128 [%r0], [%r1]",
    ],
)
def test_other_forms_are_refused_by_name(line):
    with pytest.raises(UnsupportedInstruction, match=r"line \d+: clusterlaunchcontrol"):
        bound(line)


def test_a_failed_request_is_told_from_cta_zero():
    marks, started = take_over(grid=1)
    assert marks.tolist() == [1] + [0] * (CTAS - 1)
    assert started == 1


def test_a_response_written_while_others_read_the_last_one_is_a_race():
    ordered = TAKING_OVER.format(announce=ANNOUNCE, ask=ONE, arrivals=1)
    barrier = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    first, second, third = ordered.split(barrier)
    for body, kinds in ((ordered, set()), (first + barrier + second + third, {"race"})):
        text = kernel_text(body, parameters=2, shared=32)
        grid = run(text, [words(CTAS), words(1)], grid=CTAS, block=64, sms=1, hazards=True)
        assert {hazard.kind for hazard in grid.findings} == kinds
