"""``python -m attn4.emulator``: a program, its arguments, its report and how it ends."""

import importlib.util
import json
import shutil
import sys

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")
if importlib.util.find_spec("cutlass") is None:
    pytest.skip("CuTe DSL is not installed", allow_module_level=True)

from attn4.emulator.__main__ import main
from attn4.emulator.state.memory import MemoryFault

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device to fall back on"),
]

PROGRAM = """
import sys
import torch
from host.device_programs import double, write_past_the_end

if __name__ == "__main__":
    capability = torch.cuda.get_device_capability()
    print("arguments", sys.argv[1:], capability)
    x = torch.randn(256, device="cuda")
    y = torch.zeros(256, device="cuda")
    double(x, y)
    assert torch.equal(y, 2 * x)
    if "fault" in sys.argv:
        write_past_the_end(y[:128].clone())
    if "fail" in sys.argv:
        sys.exit("the program found a fault of its own")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_a_program_finds_its_arguments_and_a_device_and_is_reported(script, capsys):
    before = (list(sys.argv), list(sys.path))
    assert main(["--arch", "sm_90a", script, "first", "--second"]) == 0
    out = capsys.readouterr().out
    assert "arguments ['first', '--second'] (9, 0)" in out
    assert "grid 2 x 1 x 1, block 128 x 1 x 1" in out
    assert (sys.argv, sys.path) == before


def test_the_report_as_data_is_the_last_line(script, capsys):
    assert main(["--json", "--schedule", "random", "--seed", "5", script]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert data["hazards"] == []
    assert data["counts"][0]["total"]["global store bytes"] == 1024


def test_the_status_of_the_program_is_kept_and_its_errors_are_its_own(script):
    assert main([script, "fail"]) == 1
    with pytest.raises(MemoryFault, match="belong to no allocation"):
        main([script, "fault"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["--arch", "sm_80", "x.py"], "'sm_80' is not emulated"), (["nothing.py"], "no file")],
)
def test_what_cannot_be_run_ends_with_status_2(words, reason, capsys):
    assert main(words) == 2
    assert reason in capsys.readouterr().err
