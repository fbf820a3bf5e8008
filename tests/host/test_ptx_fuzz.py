"""Whatever is done to PTX, the parser answers with a module or with an error that has a line of the text."""

import random

import pytest

from attn4.emulator.ptx import Module, PtxError, parse
from host.ptx_text import MODULE

PIECES = [*'{}[]();:,.@!|"%$_-+01\n\\ \t/*<>=~^é²\0', ".reg .b32 p;", "/*", "LAB:", "@%p1 ", "0f", "9" * 30]
PIECES += [
    ".loc 1 1 1\n",
    ".section x {",
    ".entry f",
    ".param ",
    ".func",
    "bra X;",
    '.file 1 "a"',
    "0x",
    "{ {",
]
BODY = MODULE.index(".reg .pred")


def mutated(choose, text):
    """``text`` after one to four edits, most of them in the body of its entry."""
    for _ in range(choose.choice([1, 1, 2, 4])):
        at = choose.randrange(BODY if choose.random() < 0.8 else 0, len(text) + 1) if len(text) > BODY else 0
        match choose.randrange(6):
            case 0:
                text = text[:at] + text[at + choose.choice([1, 1, 2, 9, 90]) :]
            case 1:
                text = text[:at] + choose.choice(PIECES) + text[at:]
            case 2:
                text = text[:at] + choose.choice(PIECES) + text[at + 1 :]
            case 3:
                start = choose.randrange(len(text) + 1)
                text = text[:at] + text[start : start + choose.randrange(60)] + text[at:]
            case 4:
                lines = text.split("\n")
                one, other = choose.randrange(len(lines)), choose.randrange(len(lines))
                lines[one], lines[other] = lines[other], lines[one]
                text = "\n".join(lines)
            case 5 if choose.random() < 0.3:
                text = text[:at]
    return text


def assert_answers(text):
    """The kind of answer to ``text``, which is a module or an error on one of its lines."""
    try:
        answer = parse(text)
    except PtxError as error:
        answer = error
    assert isinstance(answer, Module) or 1 <= answer.line <= text.count("\n") + 1
    return type(answer).__name__


@pytest.mark.parametrize("seed", range(4))
def test_mutated_ptx_is_parsed_or_refused_with_a_line(seed):
    choose = random.Random(seed)
    answers = [assert_answers(mutated(choose, MODULE)) for _ in range(400)]
    assert {"Module", "PtxError"} <= set(answers)


def test_truncated_ptx_is_parsed_or_refused_with_a_line():
    for end in range(0, len(MODULE), 7):
        assert_answers(MODULE[:end])


@pytest.mark.parametrize(
    "piece", ["{", "[", "(", "}", "_|", "@", "L:", ".reg", "/ ", '"', "7", "a,", "-", "+ -"]
)
def test_long_runs_of_one_thing_take_neither_stack_nor_time(piece):
    place = MODULE.index("\tadd.f64")
    for filler in (piece * 20_000, f"mov.b32 %r1, {piece * 20_000};", f"mov.b32 %r1, [%r1{piece * 20_000};"):
        assert assert_answers(MODULE[:place] + filler + MODULE[place:]) == "PtxError"
