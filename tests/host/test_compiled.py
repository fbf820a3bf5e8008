"""What is read from machine code: a small listing written by hand, and the kernels' own."""

from __future__ import annotations

import importlib.util
import json

import pytest

from attn4.cli import main
from attn4.compiled import DisassemblerMissingError, listing, read
from attn4.compiled.classes import CLASSES, OTHER, class_of
from attn4.compiled.code import LONG, role_codes
from attn4.compiled.flow import flow
from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.problem import Problem

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="CuTe DSL is not installed"
)

EXPONENTIALS = "\n".join(
    f"        /*{0x200 + 16 * n:04x}*/   MUFU.EX2 R{20 + n}, R{20 + n} ;" for n in range(8)
)

LISTING = f"""
	.section	.text.kernel_small,"ax",@progbits
.text.kernel_small:
        /*0000*/                   S2R R4, SR_TID.X ;
        /*0010*/                   BRA.U UP0, `(.L_x_2) ;
.L_x_0:
        /*0020*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xb0 ;
        /*0030*/                   BRA.U !UP0, `(.L_x_0) ;
        /*0040*/                   STL [R1], R9 ;
.L_x_1:
.L_x_99:
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0x38860], R5 ;
        /*0060*/              @!P0 BRA `(.L_x_8) ;
.L_x_7:
        /*0070*/                   LDTM.x32 R100, tmem[UR4] ;
        /*0080*/                   FMNMX3 R3, R100, R101, R173, !PT ;
{EXPONENTIALS}
        /*0300*/                   FFMA2.FTZ R146, R114.F32x2.HI_LO, R134.reuse.F32, R155.reuse.F32 ;
        /*0310*/                   F2FP.BF16.F32.PACK_AB R8, R97, R96 ;
        /*0320*/                   STTM.x16 tmem[UR4+0x40], R4 ;
        /*0330*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0340*/                   IMAD.MOV.U32 R3, RZ, RZ, -0xc ;
        /*0350*/                   BRX R2 -0x790   (*"BRANCH_TARGETS .L_x_3,.L_x_5,.L_x_6"*);
.L_x_3:
        /*0360*/                   USETMAXREG.DEALLOC.CTAPOOL 0x30 ;
.L_x_4:
        /*0370*/                   UTCHMMA gdesc[UR58], gdesc[UR4], tmem[UR30], tmem[UR62], !UPT ;
        /*0380*/                   BRA.U UP0, `(.L_x_4) ;
        /*0390*/                   BRA `(.L_x_6) ;
.L_x_5:
        /*03a0*/                   USETMAXREG.DEALLOC.CTAPOOL 0x48 ;
        /*03b0*/                   UTMALDG.4D [UR8], [UR4], desc[URZ] ;
        /*03c0*/                   LDL R9, [R1] ;
.L_x_6:
        /*03d0*/               @P0 EXIT ;
        /*03e0*/                   EXIT ;
.L_x_8:
        /*03f0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4+URZ+0x38860], R5 ;
        /*0400*/              @!P0 NANOSLEEP.SYNCS 0x989680 ;
        /*0410*/              @!P0 BRA `(.L_x_8) ;
        /*0420*/                   BRA `(.L_x_7) ;
"""  # fmt: skip


def small():
    (found,) = listing.parse(LISTING)
    return found


def test_an_instruction_is_guard_opcode_operands_and_targets():
    code = {i.address: i for i in small().code}
    assert small().kernel == "kernel_small"
    assert (code[0x60].guard, code[0x60].name, code[0x60].targets) == ("!P0", "BRA", (".L_x_8",))
    assert code[0x350].targets == (".L_x_3", ".L_x_5", ".L_x_6")
    assert code[0x300].registers == (146, 114, 134, 155)
    assert code[0x50].registers == (5,)


def test_a_failed_try_of_a_barrier_is_no_part_of_a_trip():
    graph = flow(small())
    starts = [
        [small().code[graph.blocks[n].first].address for n in sorted(graph.trip(loop))]
        for loop in graph.loops
    ]
    assert [[hex(start) for start in loop] for loop in starts] == [
        ["0x20"], ["0x50", "0x70"], ["0x370"], ["0x3f0"],
    ]  # fmt: skip
    softmax = graph.loops[1]
    assert len(softmax.blocks) == 4


def test_roles_are_told_apart_and_counted():
    found = {role.name: role for role in role_codes(small())}
    assert list(found) == ["softmax", "mma", "load", "the rest"]
    softmax = found["softmax"]
    assert (softmax.registers, softmax.named, softmax.stack) == (0xB0, 174, 1)
    assert softmax.steady.counts == {
        "MUFU.EX2": 8, "FFMA2": 1, "FMNMX3": 1, "F2FP": 1, "LDTM": 1, "STTM": 1, "SYNCS (mbarrier)": 1,
        "branches": 2,
    }  # fmt: skip
    assert softmax.steady.slots == 16
    assert (found["mma"].registers, found["mma"].steady.slots) == (0x30, 2)
    assert (found["load"].registers, found["load"].stack, found["load"].steady) == (0x48, 1, None)
    assert sum(role.instructions for role in found.values()) == len(small().code)


MASK = "\n".join(
    f"        /*{0x1000 + 16 * n:04x}*/   SEL R{20 + n}, R{20 + n}, 0xff800000, !P0 ;" for n in range(LONG)
)


@pytest.mark.parametrize("length", [LONG - 1, LONG])
def test_a_step_is_counted_with_and_without_what_a_long_branch_jumps_over(length):
    """Of each step one lane announces something, which is no part that the warp could do without."""
    masked = LISTING.replace(
        "        /*0300*/",
        "        /*0ff0*/              @!P1 BRA `(.L_x_44) ;\n"
        + "\n".join(MASK.splitlines()[:length])
        + "\n.L_x_44:\n        /*2000*/              @P3 BRA `(.L_x_45) ;"
        "\n        /*2010*/                   SYNCS.ARRIVE.TRANS64 RZ, [UR7+0x38840], R4 ;"
        "\n.L_x_45:\n        /*0300*/",
    )
    (parsed,) = listing.parse(masked)
    (loop,) = next(role for role in role_codes(parsed) if role.name == "softmax").loops
    assert loop.counts["SEL, FSEL"] == length
    assert loop.slots == 16 + 1 + length + 2
    assert loop.least_slots == loop.slots - (length if length == LONG else 0)


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("MUFU.EX2", "MUFU.EX2"),
        ("MUFU.RCP", "MUFU, other"),
        ("FMNMX3", "FMNMX3"),
        ("FMNMX.FTZ", "FMNMX"),
        ("FADD2.FTZ.RM", "FADD2, FMUL2"),
        ("FADD", "FFMA, FADD, FMUL"),
        ("LDTM.", "LDTM"),
        ("LDL.64", "LDL, STL"),
        ("LDS.128", "LDS, STS"),
        ("IADD3", "integer"),
        ("UIADD3.X", "integer"),
        ("LEA.HI.SX32", "LEA"),
        ("ELEPHANT", OTHER),
    ],
)
def test_an_opcode_is_of_one_class(opcode, expected):
    assert class_of(opcode) == expected


def test_text_of_something_else_is_refused():
    with pytest.raises(ValueError, match="nvdisasm -c"):
        listing.parse("\n\t.target sm_100a\n")


def test_without_a_disassembler_one_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(listing.sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DisassemblerMissingError, match="nvidia-cuda-nvdisasm"):
        listing.disassembler()


def test_what_has_no_kernel_has_no_report(capsys):
    assert main(["explain", "--compiled", "--arch", "B200", "--head-dim", "300"]) == 2
    assert "there is no kernel to read" in capsys.readouterr().err


def plan(head_dim, mask, arch="sm_100a", head_dim_v=None, direction="forward", cta_group=1):
    problem = Problem(
        batch=1, seqlen_q=4096, seqlen_k=4096, heads=8, kv_heads=8, head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim, mask=mask, direction=direction,
    )  # fmt: skip
    return choose(problem, machine(arch), cta_group=cta_group)


def report(*given, **named):
    from attn4.artifact import artifact_for

    try:
        listing.disassembler()
    except DisassemblerMissingError as error:
        pytest.skip(str(error))
    wanted = plan(*given, **named)
    return read(wanted, artifact_for(wanted))


FULL, CAUSAL, WINDOW = Mask(), Mask.of(True), Mask(1000, 10)

SLOTS = {
    "full 64": ((64, FULL), 497, 621, 0),
    "full 128": ((128, FULL), 497, 621, 0),
    "causal 128": ((128, CAUSAL), 496, 620, 0),
    "window 128": ((128, WINDOW), 498, 634, 0),
    "full (192, 128)": ((192, FULL, "sm_100a", 128), 434, 621, 0),
    "causal (192, 128)": ((192, CAUSAL, "sm_100a", 128), 433, 620, 0),
    # Two slots of scores: their addresses are computed in each step.
    "full 256": ((256, FULL), 451, 638, 0),
    "causal 256": ((256, CAUSAL), 449, 638, 0),
}
"""Case -> at most: issue slots of a step of softmax without and with a mask, accesses of the stack."""


@needs_dsl
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOTS)
def test_softmax_issues_no_more_than_is_known_and_registers_keep_to_the_plan(name):
    given, steady, masked, stack = SLOTS[name]
    found = report(*given)
    assert found.problems() == ()
    softmax = found.compiled.role("softmax")
    slots = [loop.slots for loop in softmax.loops]
    assert (min(slots) <= steady, max(slots) <= masked) == (True, True), slots
    assert found.compiled.stack <= stack
    every = found.plan.softmax.fma_exp_every
    # A factor of the sum beside the row; the last of every few pairs is a polynomial.
    polynomials = 128 // every if every else 0
    assert softmax.steady.counts["MUFU.EX2"] == 128 - polynomials + 1
    assert softmax.steady.counts.get("LEA", 0) >= polynomials


GRADIENT_SLOTS = {
    "full 64": (64, FULL, {"compute": (335, 400), "reduce": (60, 60), "mma": (153, 153), "load": (63, 63)}),
    "causal 64": (
        64,
        CAUSAL,
        {"compute": (343, 434), "reduce": (60, 60), "mma": (154, 154), "load": (63, 63)},
    ),
    "full 128": (
        128,
        FULL,
        {"compute": (330, 395), "reduce": (106, 106), "mma": (219, 219), "load": (78, 78)},
    ),
    "causal 128": (
        128,
        CAUSAL,
        {"compute": (341, 432), "reduce": (106, 106), "mma": (219, 219), "load": (78, 78)},
    ),
}
"""Case -> at most, by role: issue slots of a step without what long branches jump over, and with it."""


@needs_dsl
@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENT_SLOTS)
def test_a_step_of_gradients_issues_no_more_than_is_known_and_nothing_is_spilled(name):
    head_dim, mask, known = GRADIENT_SLOTS[name]
    found = report(head_dim, mask, direction="backward")
    assert found.problems() == ()
    assert found.compiled.stack == 0
    for role, (least, slots) in known.items():
        (loop,) = found.compiled.role(role).loops
        assert (loop.least_slots <= least, loop.slots <= slots) == (True, True), (role, loop)


@needs_dsl
@pytest.mark.slow
def test_the_report_of_a_hopper_kernel_knows_its_roles(capsys):
    found = report(128, CAUSAL, arch="sm_90a")
    assert found.problems() == ()
    assert {"attend", "load", "schedule"} <= {role.name for role in found.compiled.roles}
    assert found.scores_of_a_thread == 64
    assert found.compiled.role("attend").steady.counts["MUFU.EX2"] == 64 + 2
    assert main(["explain", "--compiled", "--json", "--causal"]) == 0
    data = json.loads(capsys.readouterr().out)["compiled"]
    assert data["problems"] == []
    assert data["resources"]["stack_bytes"] == 0


@needs_dsl
@pytest.mark.slow
def test_the_report_of_a_backward_kernel_goes_by_its_plans_names():
    """An artefact has several kernels: the longest is meant."""
    found = report(128, FULL, direction="backward")
    assert found.problems() == ()
    names = [role.name for role in found.compiled.roles]
    assert {"reduce", "compute", "mma", "load"} <= set(names)
    assert found.compiled.role("compute").steady.counts["MUFU.EX2"] == 64
    assert found.compiled.stack == 0


@needs_dsl
@pytest.mark.slow
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=lambda mask: mask.kind)
def test_the_backward_by_pairs_spills_nothing_and_a_whole_warp_issues_products(mask):
    """A spill in any role makes ptxas elect a lane for each product: some 1,000 issue slots."""
    found = report(128, mask, direction="backward", cta_group=2)
    assert found.problems() == ()
    assert found.compiled.stack == 0
    assert found.compiled.role("mma").steady.slots <= 230


def test_every_class_is_named_once():
    names = [name for name, _ in CLASSES]
    assert len(set(names)) == len(names)
