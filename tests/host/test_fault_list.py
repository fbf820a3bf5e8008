"""Every kind of fault in the list of public faults has a test that names it, or a reason why it has none.

A test names kinds by ``@pytest.mark.fault``, a case by its ``fault``, a function of ``fault_checks`` by its
name.
"""

import ast
from pathlib import Path

from cases import BY_NAME
from fault_checks import CHECKS

TESTS = Path(__file__).parent.parent

LIST = {
    "A": (1, 2, 3, 5, 6, 8, 9, 10, 11, 12),
    "B": (1, 2, 7, 8, 9, 10, 11, 12, 13),
    "C": (1, 2, 3, 5, 6, 7, 8, 10, 13, 14),
    "D": (1, 3, 4, 5, 7, 10, 11, 13, 14, 16),
    "E": (1, 3, 4, 5, 7, 8, 9, 11),
    "F": tuple(range(1, 12)),
    "G": (1, 2, 6, 7, 8, 9, 10, 11),
}
"""Masks; numbers; lengths; strides and sizes; heads and machines; races; PyTorch and caches."""

KINDS = {f"{group}{number}" for group, numbers in LIST.items() for number in numbers}

WITHOUT_A_TEST = {"B9": "8-bit numbers are no dtype of attn4"}


def marked(source: str) -> set[str]:
    """The kinds that the marks of a file name."""
    return {
        argument.value
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.fault"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def named() -> set[str]:
    """The kinds that any test names."""
    found = {kind for case in BY_NAME.values() for kind in case.fault.split()}
    found |= {name.partition("_")[0].upper() for name in CHECKS}
    return found.union(*(marked(file.read_text()) for file in TESTS.rglob("test_*.py")))


def test_a_mark_is_found():
    source = "@pytest.mark.fault('A1', 'B2')\n@pytest.mark.slow\ndef test_x(): pass"
    assert marked(source) == {"A1", "B2"}


def test_every_kind_of_public_fault_is_tried():
    assert sorted(KINDS - named()) == sorted(WITHOUT_A_TEST)


def test_no_test_names_a_kind_that_is_not_listed():
    assert named() <= KINDS
