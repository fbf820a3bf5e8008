"""What every suite shares: threads, property tests, and skipping what needs a GPU."""

import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; torch would start as many threads in each as there are cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from hypothesis import settings
except ImportError:  # the device machine has pytest at most
    pass
else:
    settings.register_profile("attn4", deadline=None, derandomize=True, max_examples=50)
    settings.load_profile("attn4")

# Tests that start an interpreter of their own find the same attn4 in it, installed or not.
SOURCES = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])

DEVICE_TESTS = Path(__file__).parent / "device"


def pytest_addoption(parser):
    parser.addoption(
        "--bundle",
        default=None,
        metavar="FOLDER",
        help="compiled kernels for the device tests (attn4 compile)",
    )


def missing_gpu():
    """Why the device tests cannot run here, None if they can."""
    import torch

    if not torch.cuda.is_available():
        return "needs a GPU, and torch sees none"
    capability = torch.cuda.get_device_capability()
    return (
        None
        if capability == (9, 0)
        else f"needs an sm_90 GPU, and this one is sm_{capability[0]}{capability[1]}"
    )


def pytest_collection_modifyitems(items):
    on_device = [item for item in items if item.path.is_relative_to(DEVICE_TESTS)]
    if on_device and (reason := missing_gpu()):
        for item in on_device:
            item.add_marker(pytest.mark.skip(reason=reason))
