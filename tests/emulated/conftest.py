"""Schedules that every engine test runs under."""

import pytest

from emulated.tiny import SCHEDULES


@pytest.fixture(params=SCHEDULES, ids=lambda name: name.replace(" ", "_").replace(",", ""))
def schedule(request):
    return SCHEDULES[request.param]()
