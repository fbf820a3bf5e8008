"""NVIDIA's own GEMMs in CuTe-DSL check their results on the emulator: make test-cutlass CUTLASS=folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_examples.examples import EXAMPLES, FOLDER

CUTLASS = os.environ.get("CUTLASS", "")
TESTS = Path(__file__).parents[1]
SECONDS = 240

pytestmark = [
    pytest.mark.reference,
    pytest.mark.slow,
    pytest.mark.skipif(
        not CUTLASS, reason="needs a checkout of NVIDIA/cutlass: make test-cutlass CUTLASS=folder"
    ),
]


def run(name, *options):
    paths = [str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "cutlass_examples", CUTLASS, name, *options]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )


def test_the_folder_is_a_checkout_with_the_examples():
    missing = [
        example.path for example in EXAMPLES.values() if not (Path(CUTLASS) / FOLDER / example.path).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_cutlass_finds_its_result_right(name):
    done = run(name)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "PASS" in done.stdout.splitlines()


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
@pytest.mark.parametrize("name", ["tutorial 3", "hopper dense_gemm_persistent"])
def test_an_example_of_cutlass_finds_its_result_right_in_any_order(name, schedule):
    done = run(name, "--schedule", schedule, "--seed", "1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "PASS" in done.stdout.splitlines()
