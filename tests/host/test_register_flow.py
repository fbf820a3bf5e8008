"""Which registers the text of a kernel makes suspect: none where every path is right."""

import pytest

from attn4.emulator.codegen.segments import cut, numbered
from attn4.emulator.hazards.flow import Flow, registers_in
from attn4.emulator.hazards.registers import watched
from attn4.emulator.ptx.parser import parse

FORM = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"


def product(first, scale="0"):
    registers = ", ".join(f"%r{first + n}" for n in range(4))
    return f"{FORM} {{{registers}}}, %d1, %d2, {scale}, 1, 1, 0, 0;"


def waited(pending):
    return f"wgmma.wait_group.sync.aligned {pending};"


def parsed(body):
    text = f"""
.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p)
{{
.reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %d<9>;
ld.param.u64 %d1, [p]; ld.param.u64 %d2, [p]; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0;
{body}
ret;
}}
"""
    return parse(text).kernels[0]


def suspects(body):
    kernel = parsed(body)
    operations = {number: operation for segment in cut(kernel) for number, operation in segment.operations}
    places = numbered(kernel)
    names = {place: register.name for register, place in places.items()}
    found = Flow(kernel, operations, places).suspects()
    return {
        kind: {names.get(place, "fence") for bits in places.values() for place in registers_in(bits)}
        for kind in ("pending", "unfenced", "unwritten")
        if (places := getattr(found, kind))
    } | ({"unfinished": True} if found.unfinished else {})


PIPELINED = f"""
{FENCE} {product(10)} {COMMIT}
LOOP:
{product(20)} {COMMIT}
{waited(1)}
add.u32 %r2, %r10, %r11;
{FENCE} {product(10)} {COMMIT}
{waited(1)}
add.u32 %r2, %r20, %r21;
{FENCE}
setp.lt.u32 %p2, %r2, 100;
@%p2 bra LOOP;
{waited(0)}
add.u32 %r2, %r2, %r13;
"""


def test_products_that_are_waited_for_by_turns_make_nothing_suspect():
    assert suspects(PIPELINED) == {}


def test_nothing_is_put_into_a_kernel_that_is_right_on_every_path():
    segments = cut(parsed(PIPELINED))
    assert watched(parsed(PIPELINED), segments).segments == segments
    wrong = parsed(PIPELINED.replace(waited(1), waited(2), 1))
    assert watched(wrong, cut(wrong)).segments != cut(wrong)


def test_a_wait_that_leaves_one_group_too_many_makes_its_registers_suspect():
    body = PIPELINED.replace(waited(1), waited(2), 1)
    assert suspects(body) == {"pending": {"%r10", "%r11"}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{FENCE} {product(10)} {COMMIT} add.u32 %r2, %r10, 1; {waited(0)}", {"pending": {"%r10"}}),
        (f"{FENCE} {product(10)} {COMMIT} mov.u32 %r12, 1; {waited(0)}", {"pending": {"%r12"}}),
        (f"{FENCE} {product(10)} {waited(0)}", {"unfinished": True}),
        (f"{FENCE} {product(10)} {COMMIT} {waited(1)}", {"unfinished": True}),
        (f"{FENCE} {product(10)} {product(10, '1')} {COMMIT} {waited(0)}", {}),
    ],
)
def test_registers_of_a_product_belong_to_it_until_it_is_waited_for(body, expected):
    assert suspects(body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{product(10)} {COMMIT} {waited(0)}", {"unfenced": {"fence"}}),
        (f"@%p1 bra OVER; {FENCE} OVER: {product(10)} {COMMIT} {waited(0)}", {"unfenced": {"fence"}}),
        (f"{FENCE} mov.b32 %r11, 0; {product(10)} {COMMIT} {waited(0)}", {"unfenced": {"%r11"}}),
        (f"mov.b32 %r11, 0; {FENCE} {product(10)} {COMMIT} {waited(0)}", {}),
    ],
)
def test_a_fence_stands_on_every_path_between_an_access_and_the_product(body, expected):
    assert suspects(body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("@%p1 bra OTHER; mov.u32 %r3, 1; bra JOIN; OTHER: mov.u32 %r3, 2; JOIN: add.u32 %r4, %r3, 1;", {}),
        ("@%p1 bra JOIN; mov.u32 %r3, 1; JOIN: add.u32 %r4, %r3, 1;", {"unwritten": {"%r3"}}),
        ("@%p1 mov.u32 %r3, 1; @!%p1 mov.u32 %r3, 2; add.u32 %r4, %r3, 1;", {"unwritten": {"%r3"}}),
        (f"{FENCE} {product(10, '1')} {COMMIT} {waited(0)}", {"unwritten": {f"%r1{n}" for n in range(4)}}),
        ("@%p2 bra OVER; OVER:", {"unwritten": {"%p2"}}),
    ],
)
def test_a_register_is_written_on_every_path_to_its_use(body, expected):
    assert suspects(body) == expected
