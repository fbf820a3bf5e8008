"""Where the kernels of the device tests come from, and how long one may take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # A hang is the commonest failure of a kernel.
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels from the folder given by ``--bundle``, where the machine cannot compile them itself."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    folder = request.config.getoption("--bundle")
    if folder is None or not torch.cuda.is_available():
        yield
        return
    from attn4.artifact import use_bundle

    with use_bundle(folder):
        yield


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    """An asynchronous error belongs to the test that caused it."""
    yield
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.fixture
def free_memory() -> Iterator[None]:
    """What earlier tests have left in the caching allocator is given back."""
    import torch

    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def dynamo() -> Iterator[None]:
    """No compiled graphs of earlier tests, and none for later ones."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
