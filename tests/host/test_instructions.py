"""The table of instructions is current, and what the emulator refuses is named."""

from pathlib import Path

import pytest

from attn4.emulator.instructions import REFUSED, page
from attn4.emulator.isa.registry import DEFINITIONS, UnsupportedInstruction, bind, load
from attn4.emulator.ptx.parser import parse
from isa_lines import DECLARATIONS, bound

ROOT = Path(__file__).parents[2]


def test_the_page_of_instructions_is_up_to_date():
    written = (ROOT / "docs" / "instructions.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m attn4.emulator.instructions > docs/instructions.md"


def test_every_definition_stands_on_the_page_and_says_what_it_does():
    load()
    text = page()
    for opcode, definitions in DEFINITIONS.items():
        for definition in definitions:
            name = f"{opcode}.{definition.form}" if definition.form else opcode
            assert f"`{name}`" in text
            assert (definition.build.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line.split(" ")[0])
def test_what_is_refused_is_named_with_its_line(line):
    with pytest.raises(UnsupportedInstruction) as caught:
        bound(line)
    assert f"line 9: {line.split(' ')[0]}" in str(caught.value)
    assert caught.value.instruction.opcode == line.split(".")[0].split(" ")[0]


def test_an_unknown_instruction_is_named_with_its_source_line():
    text = (
        '.version 8.6\n.target sm_100a\n.address_size 64\n.file 1 "kernel.py"\n'
        f".visible .entry k() {{\n{DECLARATIONS}\n.loc 1 42 7\nfrobnicate.u32 %r1, %r2;\nret;\n}}\n"
    )
    instruction = next(iter(parse(text).kernels[0].instructions))
    with pytest.raises(
        UnsupportedInstruction, match=r"line 11: frobnicate\.u32 \(kernel\.py:42\): opcode frobnicate"
    ):
        bind(instruction)
