"""Device functions: calls, parameters in registers and in memory, and the driver's printf and assert."""

import numpy as np
import pytest

from attn4.emulator.faults import Trap
from attn4.emulator.ptx.errors import PtxError
from emulated.tiny import THREAD, kernel_text, run, words

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"


def module(functions, body):
    """Functions before a kernel."""
    text = kernel_text(body)
    return HEAD + functions + text[text.index(".visible .entry") :]


SQUARE = """
.func (.param .b32 result) square (.param .b32 x)
{
.reg .b32 %r<3>; .reg .pred %p<2>;
ld.param.u32 %r1, [x];
setp.gt.u32 %p1, %r1, 9;
mov.u32 %r2, 7;
@%p1 bra give;
mul.lo.u32 %r2, %r1, %r1;
give:
st.param.b32 [result+0], %r2;
ret;
}
.func (.reg .u32 y) twice (.reg .u32 x, .reg .u32 step)
{
.reg .pred %p<2>;
setp.eq.u32 %p1, x, 5;
mov.u32 y, 1000;
@%p1 ret;
add.u32 y, x, x;
add.u32 x, x, step;
add.u32 y, y, step;
ret;
}
"""
CALL = """{
.param .b32 passed; .param .b32 back;
st.param.b32 [passed+0], %r0;
call.uni (back), square, (passed);
ld.param.b32 %r4, [back];
}
"""


def test_a_function_takes_and_gives_parameters_in_memory(schedule):
    out = words(96)
    run(module(SQUARE, THREAD + CALL + "st.global.b32 [%d2], %r4;\nret;"), [out], block=96, schedule=schedule)
    assert out.tolist() == [n * n if n <= 9 else 7 for n in range(96)]


def test_parameters_in_registers_are_copies_and_a_return_may_be_early():
    body = THREAD + "mov.u32 %r5, %r0;\ncall (%r4), twice, (%r5, 3);\nmad.lo.u32 %r4, %r5, 10000, %r4;\n"
    out = words(32)
    run(module(SQUARE, body + "st.global.b32 [%d2], %r4;\nret;"), [out], block=32)
    assert out.tolist() == [10000 * n + (1000 if n == 5 else 2 * n + 3) for n in range(32)]


@pytest.mark.parametrize("guard", ["@%p1", "@!%p1"])
def test_a_guarded_call_is_made_by_some_lanes(guard):
    body = THREAD + f"setp.lt.u32 %p1, %r0, 11;\nmov.u32 %r4, 5;\n{guard} call (%r4), twice, (%r0, 1);\n"
    out = words(32)
    run(module(SQUARE, body + "st.global.b32 [%d2], %r4;\nret;"), [out], block=32)
    called = [(n < 11) == (guard == "@%p1") for n in range(32)]
    twice = [1000 if n == 5 else 2 * n + 1 for n in range(32)]
    assert out.tolist() == [t if c else 5 for t, c in zip(twice, called, strict=True)]


def test_functions_call_functions_declared_before_they_are_defined():
    functions = """
.func (.reg .u32 y) outer (.reg .u32 x);
.func (.reg .u32 y) inner (.reg .u32 x) { .reg .b32 %r<9>; mov.u32 %r1, 3; mul.lo.u32 y, x, %r1; ret; }
"""
    body = THREAD + "mov.u32 %r1, 50;\ncall (%r4), outer, (%r0);\nadd.u32 %r4, %r4, %r1;\n"
    text = module(functions, body + "st.global.b32 [%d2], %r4;\nret;")
    text += ".func (.reg .u32 y) outer (.reg .u32 x) { .reg .b32 %r<9>; mov.u32 %r1, 1;\n"
    text += "call (%r2), inner, (x); call (%r3), inner, (%r2); add.u32 y, %r3, %r1; ret; }\n"
    out = words(32)
    run(text, [out], block=32)
    assert out.tolist() == [9 * n + 51 for n in range(32)]


PRINT = """
.global .align 1 .b8 format[] = {"%d of %5.2f: %lld %x %s%% %c|", 10, 0};
.global .align 1 .b8 name[] = {"name", 0};
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 vprintf_param_0, .param .b64 vprintf_param_1);
"""
PRINTING = """
.local .align 8 .b8 depot[48];
.reg .b64 %sp, %spl; .reg .b64 %x<9>;
mov.b64 %spl, depot;
cvta.local.u64 %sp, %spl;
setp.gt.u32 %p1, %r0, 1;
@%p1 bra done;
st.local.b32 [%spl], %r0;
mov.f64 %x1, 0d400921FB54442D18;
st.local.f64 [%spl+8], %x1;
mov.u64 %x2, -5;
st.local.b64 [%spl+16], %x2;
mov.u32 %r4, 0xabc;
st.local.b32 [%spl+24], %r4;
mov.u64 %x3, name;
cvta.global.u64 %x4, %x3;
st.local.b64 [%spl+32], %x4;
mov.u32 %r4, 65;
st.local.b32 [%spl+40], %r4;
mov.u64 %x5, format;
cvta.global.u64 %x6, %x5;
{ // callseq 0, 0
.param .b64 param0;
st.param.b64 [param0], %x6;
.param .b64 param1;
st.param.b64 [param1], %sp;
.param .b32 retval0;
call.uni (retval0), vprintf, (param0, param1);
ld.param.b32 %r5, [retval0];
} // callseq 0
st.global.b32 [%d2], %r5;
done:
ret;
"""


def quoted(text):
    """PTX has no strings: their characters as numbers."""
    for written in ("%d of %5.2f: %lld %x %s%% %c|", "name"):
        text = text.replace(f'"{written}"', ", ".join(str(ord(letter)) for letter in written))
    return text


def test_printf_prints_for_each_lane(capsys):
    out = words(32)
    run(module(quoted(PRINT), THREAD + PRINTING), [out], block=32)
    lines = [f"{n} of  3.14: -5 abc name% A|\n" for n in (0, 1)]
    assert capsys.readouterr().out == "".join(lines)
    assert out.tolist() == [6, 6] + [0] * 30


def test_a_failed_assertion_ends_the_launch_and_says_which():
    functions = quoted(
        """
.global .align 1 .b8 message[] = {"name", 0};
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
"""
    )
    body = (
        THREAD
        + """
.reg .b64 %x<9>;
mov.u64 %x5, message;
{
.param .b64 p0; .param .b64 p1; .param .b32 p2; .param .b64 p3; .param .b64 p4;
st.param.b64 [p0], %x5; st.param.b64 [p1], %x5; st.param.b32 [p2], 42; st.param.b64 [p3], %x5;
st.param.b64 [p4], 1;
setp.eq.u32 %p1, %r0, 3;
@%p1 call.uni __assertfail, (p0, p1, p2, p3, p4);
}
ret;
"""
    )
    with pytest.raises(Trap, match="name:42: name: assertion `name` failed"):
        run(module(functions, body), [words(32)], block=32)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("call (%r4), twice, (%r0);", "1 results and arguments|with"),
        ("call (%r4), square, (%r0);", "where a .param variable belongs"),
        ("call (%r4), nobody, (%r0);", "nobody is not declared"),
    ],
)
def test_a_wrong_call_is_an_error_with_its_line(statement, message):
    with pytest.raises(PtxError, match=message):
        run(module(SQUARE, THREAD + statement + "\nret;"), [words(32)], block=32)


def test_shared_variables_of_a_function_are_those_of_the_block():
    functions = """
.func put (.reg .u32 x)
{
.shared .align 4 .b8 room[128];
.reg .b32 %a<3>;
mov.u32 %a1, room; mad.lo.u32 %a2, x, 4, %a1; st.shared.b32 [%a2], x; ret;
}
"""
    out = words(32)
    run(module(functions, THREAD + "call put, (%r0);\nst.global.b32 [%d2], %r0;\nret;"), [out], block=32)
    np.testing.assert_array_equal(out, np.arange(32))
