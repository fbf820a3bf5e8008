"""Each kernel that is right passes clean under every schedule, and each of its mutants is reported."""

import re

import pytest

from litmus import cases
from litmus.pair import SCHEDULES, run

FIRST = ("round robin", "adversarial")
REST = tuple(name for name in SCHEDULES if name not in FIRST)


@pytest.mark.parametrize("litmus", cases.LITMUS, ids=lambda litmus: litmus.name)
def test_what_is_right_passes_clean_under_every_schedule(litmus):
    for name, schedule in SCHEDULES.items():
        outcome = run(litmus, "", schedule())
        assert not outcome.found, f"{name}: {outcome.words}"


def reported(litmus, mutant, schedules):
    expected = litmus.mutants[mutant]
    for name in schedules:
        outcome = run(litmus, mutant, SCHEDULES[name]())
        assert outcome.tells(expected), f"{name}: {expected} expected, found {outcome.words or 'nothing'}"


@pytest.mark.parametrize(("litmus", "mutant"), cases.MUTANTS, ids=cases.title)
def test_what_is_missing_is_reported(litmus, mutant):
    reported(litmus, mutant, FIRST)


@pytest.mark.slow
@pytest.mark.parametrize(("litmus", "mutant"), cases.MUTANTS, ids=cases.title)
def test_what_is_missing_is_reported_under_every_other_schedule(litmus, mutant):
    reported(litmus, mutant, REST)


@pytest.mark.parametrize("litmus", cases.LITMUS, ids=lambda litmus: litmus.name)
def test_marks_name_mutants_and_each_mutant_differs_from_what_is_right(litmus):
    marks = re.findall(r"//[-+]([^:\n]*)", litmus.body)
    assert {name.strip() for mark in marks for name in mark.split(",")} == set(litmus.mutants)
    texts = [litmus.text(mutant) for mutant in ("", *litmus.mutants)]
    assert len(set(texts)) == len(texts)


def test_there_are_sixty_pairs_and_each_has_a_name_of_its_own():
    titles = [cases.title(litmus, mutant) for litmus, mutant in cases.MUTANTS]
    assert len(titles) >= 60
    assert len(set(titles)) == len(titles)
