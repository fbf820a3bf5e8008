"""The report of a launch: counts known beforehand, by class and by role."""

import numpy as np
import pytest

from attn4.emulator.report.classes import CLASSES, amounts
from attn4.emulator.report.report import report
from emulated.tiny import THREAD, kernel_text, run, words

# Warps 0 and 1 take 100 steps of arithmetic, warps 2 and 3 move 8 words to shared memory and back.
TWO_ROLES = """
setp.lt.u32 %p0, %r0, 64;
mov.u32 %r4, 0;
@%p0 bra COMPUTE;
mov.u32 %r5, memory;
and.b32 %r6, %r0, 31;
shl.b32 %r6, %r6, 4;
add.u32 %r5, %r5, %r6;
MOVE:
st.shared.v4.b32 [%r5], {%r0, %r1, %r2, %r3};
ld.shared.v2.b32 {%r7, %r8}, [%r5];
add.u32 %r4, %r4, 1;
setp.lt.u32 %p1, %r4, 8;
@%p1 bra MOVE;
bra.uni END;
COMPUTE:
ex2.approx.ftz.f32 %f1, %f0;
fma.rn.f32 %f0, %f1, %f1, %f1;
fma.rn.f32x2 %d4, %d3, %d3, %d3;
cvt.rn.bf16x2.f32 %r9, %f0, %f1;
shfl.sync.bfly.b32 %r10, %r9, 1, 31, -1;
add.u32 %r4, %r4, 1;
setp.lt.u32 %p1, %r4, 100;
@%p1 bra COMPUTE;
END:
red.global.add.u32 [%d2], 1;
ret;
"""


@pytest.fixture
def kernel(schedule):
    text = kernel_text("mov.f32 %f0, 0f3F800000; mov.b64 %d3, 0;" + THREAD + TWO_ROLES, shared=512)
    array = words(256)
    grid = run(text, [array], grid=2, schedule=schedule)
    assert (array == 1).all()
    return report([grid]).kernels[0]


def test_roles_are_found_by_the_code_that_warps_run(kernel):
    assert kernel.warps == {"warps 0-1": (0, 1), "warps 2-3": (2, 3)}


def test_counts_are_those_of_both_ctas(kernel):
    compute, move = kernel.roles["warps 0-1"], kernel.roles["warps 2-3"]
    for name in ("mufu.ex2", "fma", "fma.x2", "conversions", "shuffles"):
        assert compute[name] == 2 * 2 * 100, name
        assert name not in move
    assert move["shared store bytes"] == 2 * 2 * 8 * 16 * 32
    assert move["shared load bytes"] == 2 * 2 * 8 * 8 * 32
    assert compute["atomics"] == move["atomics"] == 2 * 2
    assert kernel.counts["branches"] == sum(role["branches"] for role in kernel.roles.values())


def test_the_classes_of_a_warp_add_up_to_its_instructions(kernel):
    whole = {name for name in CLASSES if name != "instructions" and "bytes" not in name}
    move = kernel.roles["warps 2-3"]
    # Loads and stores count as bytes alone: 16 of them a warp, and the load of the parameter among the moves.
    assert move["instructions"] == sum(move.get(name, 0) for name in whole) + 2 * 2 * 16


def test_named_roles_come_first_and_the_rest_is_grouped(schedule):
    text = kernel_text("mov.f32 %f0, 0f3F800000; mov.b64 %d3, 0;" + THREAD + TWO_ROLES, shared=512)
    grid = run(text, [words(256)], grid=2, schedule=schedule)
    (named,) = report([grid], {"first": [0], "absent": [9]}).kernels
    assert named.warps == {"first": (0,), "warp 1": (1,), "warps 2-3": (2, 3)}
    assert "first" in str(named)
    assert named.to_dict()["roles"]["first"]["warps"] == [0]


def test_an_empty_report_says_so():
    assert str(report([])) == "nothing was launched"
    assert report([]).to_dict() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
            {"products": 0.25, "flop": 2 * 16 * 128 * 16},
        ),
        ("ld.global.nc.v4.b32", {"global load bytes": 512}),
        ("st.local.b64", {"local bytes": 256}),
        ("ld.b32", {"generic bytes": 128}),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16", {"shared store bytes": 512}),
        ("div.full.f32", {"mufu.rcp": 1, "fmul": 1}),
        ("div.s32", {"integer": 1}),
        ("add.f64", {"double": 1}),
        ("fma.rn.bf16x2", {"half": 1}),
        ("max.f32", {"minmax": 1}),
        ("max.s32", {"integer": 1}),
        ("cvt.u32.u64", {"moves": 1}),
        ("cvt.rn.satfinite.e4m3x2.f32", {"conversions": 1}),
        ("mbarrier.try_wait.parity.shared.b64", {"barrier waits": 1}),
        ("mbarrier.arrive.expect_tx.shared.b64", {"barrier arrivals": 1}),
        ("tcgen05.cp.cta_group::1.128x256b", {"tensor copy bytes": 4096}),
        ("wgmma.wait_group.sync.aligned", {"group waits": 1}),
        ("cp.async.bulk.wait_group.read", {"group waits": 1}),
        ("tcgen05.wait::ld.sync.aligned", {"group waits": 1}),
        ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64", {"commits": 1}),
        ("tcgen05.fence::after_thread_sync", {"fences": 1}),
        ("nanosleep.u32", {"other": 1}),
    ],
)
def test_an_instruction_counts_in_the_class_it_belongs_to(text, expected):
    opcode, *modifiers = text.split(".")

    class Instruction:
        operands = ()

    Instruction.opcode, Instruction.modifiers = opcode, tuple(modifiers)
    assert dict(amounts(Instruction)) == {"instructions": 1, **expected}
    assert expected.keys() <= CLASSES.keys()


def test_counts_do_not_depend_on_the_order_of_warps():
    text = kernel_text("mov.f32 %f0, 0f3F800000; mov.b64 %d3, 0;" + THREAD + TWO_ROLES, shared=512)
    totals = []
    for together in (1, 2, 4):
        from attn4.emulator.schedule import Random

        totals.append(report([run(text, [words(256)], grid=2, schedule=Random(3, together))]).total)
    assert totals[0] == totals[1] == totals[2]
    assert np.sum(list(totals[0].values())) > 0
