"""PTX text becomes typed records, and what is not PTX an error with its line."""

import dataclasses
import time

import pytest

from attn4.artifact.key import toolchain
from attn4.emulator.ptx import PtxError, UnsupportedError, parse
from attn4.emulator.ptx.module import (
    Address,
    Guard,
    Immediate,
    Label,
    Launch,
    Negated,
    PairDestination,
    Param,
    Register,
    Sink,
    SpecialRegister,
    Symbol,
    Variable,
    Vector,
)
from host.ptx_text import MODULE, head, rendered

FORMS = parse(MODULE)
(KERNEL,) = FORMS.kernels
INSTRUCTIONS = list(KERNEL.instructions)


def r(number, declared="b32"):
    letter, kind = {"b32": ("r", "b32"), "pred": ("p", "pred"), "b64": ("rd", "b64"), "f32": ("f", "b32")}[
        declared
    ]
    return Register(f"%{letter}{number}", kind, declared)


def operands(name, index=0):
    """Of the ``index``-th instruction called ``name``."""
    return [i for i in INSTRUCTIONS if i.name == name][index].operands


def one(statement, registers=".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;"):
    """The record of a statement that stands alone."""
    (kernel,) = parse(head(f"{registers} {statement}")).kernels
    (instruction,) = kernel.instructions
    return instruction


def test_a_module_says_what_it_is_for():
    assert (FORMS.version, FORMS.target) == ((9, 4), "sm_100a")


def test_parameters_lie_at_their_alignment():
    assert KERNEL.params == (
        Param("forms_param_0", "b8", 64, 128, 0),
        Param("forms_param_1", "u32", 4, 4, 128),
        Param("forms_param_2", "u64", 8, 8, 136),
        Param("forms_param_3", "b8", 8, 12, 144),
        Param("forms_param_4", "f32", 4, 4, 156),
    )
    assert KERNEL.param_bytes == 160


def test_demands_on_the_launch_are_kept():
    assert KERNEL.launch == Launch(
        reqntid=(128, 2, 1), minnctapersm=1, explicitcluster=True, reqnctapercluster=(2, 1, 1)
    )


def test_variables_have_space_size_and_initial_bytes():
    assert KERNEL.shared == (
        Variable("__dynamic_shmem__0", "shared", "b8", 1024, 0, None, extern=True),
        Variable("staged", "shared", "b8", 16, 64),
    )
    assert KERNEL.local == (Variable("depot", "local", "b32", 4, 16),)
    text, table = FORMS.globals
    assert text == Variable("$str", "global", "b8", 4, 6, b"hello")
    assert (table.size, table.initial) == (16, bytes.fromhex("0000803f 00000040 000000bf 00000040"))


@pytest.mark.parametrize(
    ("name", "index", "expected"),
    [
        ("mov.b64", 0, [r(1, "b64"), Symbol("forms_param_0")]),
        ("mov.b64", 1, [r(2, "b64"), Symbol("table", 8)]),
        ("ld.param.v2.b32", 0, [Vector((r(1), r(2))), Address(Symbol("forms_param_3"), 4)]),
        ("mov.u32", 0, [r(3), SpecialRegister("%tid.x", "b32")]),
        ("mov.u64", 0, [r(3, "b64"), SpecialRegister("%globaltimer", "b64")]),
        ("st.shared.b32", 0, [Address(Symbol("staged"), 8), Immediate(32, "s64")]),
        ("ld.shared.b32", 0, [r(5), Address(r(4), -16)]),
        ("ld.shared.b32", 1, [r(5), Address(Immediate(1024, "s64"))]),
        (
            "ld.global.L1::no_allocate.v4.b32",
            0,
            [Vector((r(6), Sink(), r(7), r(8))), Address(r(1, "b64"), 16)],
        ),
        ("add.f32", 0, [r(1, "f32"), r(2, "f32"), Immediate(0xBF800000, "f32")]),
        ("add.s32", 0, [r(9), r(10), Immediate(2**64 - 1, "s64")]),
        ("and.b64", 0, [r(6, "b64"), r(7, "b64"), Immediate(2**64 - 1, "u64")]),
        ("or.b64", 0, [r(6, "b64"), r(7, "b64"), Immediate(4611686293305360384, "u64")]),
        (
            "setp.ne.and.b32",
            0,
            [
                PairDestination(r(1, "pred"), r(2, "pred")),
                r(1),
                Immediate(5, "s64"),
                Negated(r(3, "pred")),
            ],
        ),
        ("elect.sync", 0, [PairDestination(r(11), r(1, "pred")), Immediate(2**64 - 1, "s64")]),
        ("elect.sync", 1, [PairDestination(Sink(), r(4, "pred")), Immediate(2**64 - 1, "s64")]),
        (
            "cp.async.bulk.tensor.3d.im2col.global.shared::cta.bulk_group",
            0,
            [Address(r(1, "b64"), 0, (Vector((r(1), r(2), r(3))),)), Address(r(4))],
        ),
        ("mbarrier.arrive.expect_tx.shared.b64", 0, [Sink(), Address(r(4)), Immediate(0x4000, "s64")]),
        ("bra.uni", 0, [Label("$L__BB0_2")]),
        ("wgmma.fence.sync.aligned", 0, []),
    ],
)
def test_operands_are_typed(name, index, expected):
    assert operands(name, index) == tuple(expected)


def test_modifiers_are_kept_in_order_across_lines():
    (copy,) = [i for i in INSTRUCTIONS if "multicast::cluster" in i.modifiers and i.opcode == "cp"]
    assert copy.modifiers[:4] == ("async", "bulk", "tensor", "4d")
    assert copy.modifiers[-3:] == ("multicast::cluster", "cta_group::2", "L2::cache_hint")
    assert len(copy.operands) == 5


def test_labels_and_registers_of_inline_assembly_do_not_meet():
    waits = [i for i in INSTRUCTIONS if i.opcode == "mbarrier" and "try_wait" in i.modifiers]
    first, second = (wait.operands[0] for wait in waits)
    assert {first.type, second.type} == {"pred"}
    assert first != second
    (inner,) = [i for i in INSTRUCTIONS if i.name == "exit"]
    assert inner.guard.register not in (first, second)
    loops = [i.operands[0].name for i in INSTRUCTIONS if i.operands and "LAB_WAIT" in str(i.operands[0])]
    assert [KERNEL.blocks[KERNEL.labels[name]].instructions[0] for name in loops] == waits


def test_an_inner_range_of_registers_hides_the_outer_one():
    (compare,) = [i for i in INSTRUCTIONS if i.name == "setp.eq.b32"]
    _, inner, outer = compare.operands
    assert inner not in (r(1), outer)
    assert outer == r(2)


def test_guards_are_registers_with_a_sign():
    (branch,) = [i for i in INSTRUCTIONS if i.name == "bra.uni" and i.guard and i.guard.negated]
    assert branch.guard == Guard(r(1, "pred"), negated=True)
    assert one("@ ! %p3 bra.uni L; L:").guard == Guard(r(3, "pred"), negated=True)


def test_lines_are_those_of_the_text():
    lines = MODULE.splitlines()
    for instruction in INSTRUCTIONS:
        line = lines[instruction.line - 1]
        assert instruction.opcode in line or "brx" in line


def test_source_locations_name_the_file_and_the_call():
    start = INSTRUCTIONS[0].source
    inlined = next(i for i in INSTRUCTIONS if i.name == "exit").source
    assert str(start) == "/home/someone//kernel.py:20"
    assert (str(inlined), str(inlined.inlined_at)) == ("lib.py:7", "/home/someone//kernel.py:30")


@pytest.mark.parametrize("module", [FORMS], ids=["forms"])
def test_an_instruction_prints_as_ptx_that_parses_to_an_equal_record(module):
    for kernel in module.kernels:
        assert_round_trip(module, kernel)


def assert_round_trip(module, kernel):
    (again,) = parse(rendered(module, kernel)).kernels
    assert again.blocks == kernel.blocks
    assert again.labels == kernel.labels
    assert set(again.registers) == set(kernel.registers)


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("0", 0, "s64"),
        ("-0", 0, "s64"),
        ("017", 15, "s64"),
        ("0b11U", 3, "u64"),
        ("-1", 2**64 - 1, "s64"),
        ("-9223372036854775808", 2**63, "s64"),
        ("0x8000000000000000", 2**63, "u64"),
        ("0F3f800000", 0x3F800000, "f32"),
        ("-0f3F800000", 0xBF800000, "f32"),
        ("0d3FF0000000000000", 0x3FF0000000000000, "f64"),
        ("1.0", 0x3FF0000000000000, "f64"),
        ("-.5e1", 0xC014000000000000, "f64"),
        ("1e999", 0x7FF0000000000000, "f64"),
    ],
)
def test_constants_are_raw_bits(text, value, kind):
    assert one(f"mov.b64 %rd1, {text};").operands[1] == Immediate(value, kind)


@pytest.mark.parametrize(
    ("text", "width", "floating", "bits"),
    [
        ("-1", 32, False, 0xFFFFFFFF),
        ("0xFFFFFFFF", 32, False, 0xFFFFFFFF),
        ("1.0", 32, True, 0x3F800000),
        ("1e300", 32, True, 0x7F800000),
        ("-1e300", 32, True, 0xFF800000),
        ("16777217.0", 32, True, 0x4B800000),
        ("0f3F800000", 32, False, 0x3F800000),
        ("1.0", 64, True, 0x3FF0000000000000),
    ],
)
def test_a_constant_takes_the_width_of_its_operand(text, width, floating, bits):
    assert one(f"mov.b64 %rd1, {text};").operands[1].bits(width, floating=floating) == bits


@pytest.mark.parametrize(
    ("text", "width", "floating"),
    [("1", 32, True), ("0f3F800000", 64, True), ("0f3F800000", 16, False), ("1.0", 32, False)],
)
def test_a_constant_that_does_not_fit_its_operand_is_an_error(text, width, floating):
    with pytest.raises(ValueError, match=r"constant|belongs"):
        one(f"mov.b64 %rd1, {text};").operands[1].bits(width, floating=floating)


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("\n add.s32 %r1, %r1, 1;", 6, "%r1 is not declared"),
        (".reg .b32 %r<4>;\nadd.s32 %r4, %r1, 1;", 6, "%r4 is not declared"),
        (".reg .b32 %r<4>;\nadd.s32 %r01, %r1, 1;", 6, "%r01 is not declared"),
        ("{ .reg .b32 t; }\n mov.b32 t, 0;", 6, "t is not declared"),
        ("{ L: }\n bra L;", 6, "L is not declared"),
        (".reg .b32 t;\n.reg .b32 t;", 6, "declared twice"),
        (".reg .b32 %r<4>;\n.reg .b64 %r<4>;", 6, "declared twice"),
        ("L:\n\nL: ret;", 7, "declared twice"),
        (".reg .b256 t;", 5, "cannot be of type .b256"),
        (".reg .b32 t;\n@t ret;", 6, "predicate"),
        (".reg .b32 t;\nmov.b32 t, !t;", 6, "predicate"),
        (".reg .b32 t;\nmov.b32 t, 0x1FFFFFFFFFFFFFFFF;", 6, "64 bits"),
        (".reg .b32 t;\nmov.b32 t, " + "9" * 10000 + ";", 6, "64 bits"),
        (".reg .b32 t;\nmov.b32 t, 09;", 6, "no number"),
        (".reg .b32 t;\nmov.b32 t, 0f3F8;", 6, "no number"),
        (".reg .b32 t;\nmov.b32 t,, 1;", 6, "missing beside a comma"),
        (".reg .b32 t;\nmov.b32 {t, 1;", 6, "missing"),
        (".reg .b32 t;\nmov.b32 t, [t};", 6, "closes nothing"),
        (".reg .b32 t;\nmov.b32 {{t}, t}, 1;", 6, "element of a vector"),
        (".reg .b32 t;\nld.b32 t, [t+t];", 6, "no number"),
        (".reg .b32 t;\nld.b32 t, [];", 6, "no address"),
        (".reg .b32 t;\nmov.b32 t, 1\nmov.b32 t, 2;", 6, "no number"),
        ("\n4dd.s32;", 6, "no instruction"),
        ("bra;", 5, "goes nowhere"),
        (".reg .b32 t;\nbra t;", 6, "goes nowhere"),
        ("\n.loc 9 1 1\nret;", 7, "source file 9"),
        (".loc one\nret;", 5, "no source location"),
        (".branchtargets L;", 5, "without a name"),
        (".shared .b8 x;\n.shared .align 3 .b8 y[4];", 6, "power of two"),
        (".shared .b8 x[];", 5, "no size"),
        (".shared .b8 x[99999999999999999999];", 5, "64 bits"),
        (".wrong .b8 x;", 5, "directive .wrong"),
        ("ret", 6, "does not end"),
        ("/* ret; }", 5, "comment does not end"),
        ("\ncall.uni helper, ();", 6, "helper is not declared"),
    ],
)
def test_bad_ptx_is_an_error_with_its_line(body, line, message):
    with pytest.raises(PtxError, match=message.replace(".", r"\.").replace("[", r"\[")) as caught:
        parse(head(body))
    assert caught.value.line == line
    assert f"line {line}: " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (head("\ncall.uni helper, ();") + ".extern .func helper();", 6),
        (head("\ncall again;\nret;") + ".func again() { call again; ret; }", 9),
        (head(".reg .b64 f;\ncall f, (), prototype;") + ".func f() { ret; }", 6),
        (head(".reg .b32 t; \nmov.b32 t, (1+2);"), 6),
        (head(".reg .b32 t; \nmov.b16 t.h, t;"), 6),
        (head(".reg .v2 .b32 t;"), 5),
        (head("ret;", directives=".maxnctapersm 2"), 3),
        (head("ret;") + ".alias f, g;", 7),
        (head("ret;") + "\n.global .u64 p = a;", 8),
        (head("ret;") + ".address_size 32", 7),
    ],
)
def test_what_the_records_cannot_say_is_named_with_its_line(text, line):
    with pytest.raises(UnsupportedError) as caught:
        parse(text)
    assert caught.value.line == line


@pytest.mark.parametrize("text", ["", ".version 9.0", "\0", "// nothing", ".target sm_90a\n"])
def test_a_module_without_version_or_target_is_refused(text):
    with pytest.raises(PtxError, match="needs"):
        parse(text)


def test_a_kernel_is_found_by_its_name():
    assert FORMS.kernel("forms") is KERNEL
    with pytest.raises(KeyError, match="the module has forms"):
        FORMS.kernel("other")


def test_a_kernel_has_the_shared_variables_that_it_names():
    header = ".version 9.0\n.target sm_90a\n.shared .b32 x;\n.shared .b64 y;\n"
    body = "{ .reg .b32 t; ld.shared.b32 t, [%s]; }\n"
    first, second = parse(header + ".entry a()" + body % "x" + ".entry b" + body % "y").kernels
    assert [v.name for v in first.shared + second.shared] == ["x", "y"]


@pytest.mark.parametrize("text", [".entry k() { ret; }", ".global .b32 k;"])
def test_a_name_of_the_module_is_declared_once(text):
    with pytest.raises(PtxError, match="k is declared twice") as caught:
        parse(head("ret;") + "\n" + text)
    assert caught.value.line == 8


def test_records_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        KERNEL.name = "x"


def test_280_kilobytes_parse_in_well_under_a_second():
    body = MODULE[MODULE.index("\tmov.b64") : MODULE.index("\t@!%p1 bra.uni")]
    start, end = MODULE.split(body)
    text = start + body * (280_000 // len(body)) + end
    best = min(measured(text) for _ in range(3))
    assert best < 0.7, f"{len(text)} bytes in {best:.2f} s"


def measured(text):
    before = time.process_time()
    parse(text)
    return time.process_time() - before


@pytest.mark.skipif(toolchain() is None, reason="CuTe DSL is not installed")
def test_a_compiled_kernel_parses_and_prints_back(tmp_path):
    from attn4.artifact import artifact_for, build_bundle
    from attn4.machine import machine
    from attn4.mask import Mask
    from attn4.plan.choose import choose
    from attn4.problem import Problem

    lengths = {"batch": 1, "seqlen_q": 512, "seqlen_k": 512, "heads": 2, "kv_heads": 2}
    problem = Problem(**lengths, head_dim=64, head_dim_v=64, mask=Mask.of(True))
    plan = choose(problem, machine("sm_90a"))
    build_bundle([plan], tmp_path)
    module = parse(artifact_for(plan, bundle=tmp_path).ptx())
    (kernel,) = module.kernels
    assert module.target == "sm_90a"
    assert {"wgmma", "cp", "mbarrier", "setmaxnreg"} <= {i.opcode for i in kernel.instructions}
    assert kernel.launch.reqntid is not None
    assert all(block.dominator is not None for block in kernel.blocks[1:])
    assert_round_trip(module, kernel)
