"""The table of rules in the documentation names the litmus kernels, and each kernel has a rule."""

import re
from pathlib import Path

from litmus import cases

PAGE = Path(__file__).parents[2] / "docs" / "memory-model.md"
PAIRS = {cases.title(litmus, mutant): litmus.mutants[mutant] for litmus, mutant in cases.MUTANTS}


def rules():
    """(section, kinds, names of pairs) of each row of the tables of rules."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and cells[0] != "rule":
            yield cells[1], cells[2].split(", "), re.findall(r"`([^`]+)`", cells[3])


def test_every_rule_names_litmus_kernels_and_every_mutant_has_one_rule():
    named = [name for _, _, names in rules() for name in names]
    assert sorted(named) == sorted(PAIRS)
    assert all(names for _, _, names in rules())


def test_a_rule_gives_the_section_and_the_kinds_of_its_mutants():
    for section, kinds, names in rules():
        mutants = [PAIRS[name] for name in names]
        assert {mutant.section for mutant in mutants} == {section}, names
        assert {kind for mutant in mutants for kind in mutant.kinds} == set(kinds), names


def test_every_kind_of_hazard_is_explained():
    page = PAGE.read_text()
    explained = set(re.findall(r"^\| ([a-z, ]+) \| [a-z]", page, re.MULTILINE))
    words = {kind.strip() for cell in explained for kind in cell.split(",")}
    assert {kind for mutant in PAIRS.values() for kind in mutant.kinds} <= words
