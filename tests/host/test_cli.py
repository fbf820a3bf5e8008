"""The front door of the command line, and the commands that any machine can run."""

import subprocess
import sys

import pytest

import attn4
from attn4.cli import COMMANDS, KERNEL_ERROR, USER_ERROR, demo, demo_b200, doctor, main


def test_the_version_is_the_package_s(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"attn4 {attn4.__version__}\n"


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert name in text
        assert summary in " ".join(text.split())


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_of_its_own(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: attn4 {command}")


@pytest.mark.parametrize("words", [[], ["dream"], ["demo", "--device", "tpu"]])
def test_wrong_words_are_told_and_end_with_status_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == USER_ERROR
    assert "usage: attn4" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError, NotImplementedError])
def test_what_cannot_be_met_is_one_line_and_status_2(error, capsys, monkeypatch):
    def fail(_args):
        raise error("head_dim 7 is not\n  a multiple of 8")

    monkeypatch.setattr(doctor, "run", fail)
    assert main(["doctor"]) == USER_ERROR
    assert capsys.readouterr().err == "attn4 doctor: head_dim 7 is not a multiple of 8\n"


def test_a_kernel_that_cannot_be_had_is_told_without_a_traceback(capsys, monkeypatch):
    from attn4.artifact import KernelUnavailableError

    def fail(_args):
        raise KernelUnavailableError("no compiler here")

    monkeypatch.setattr(doctor, "run", fail)
    assert main(["doctor"]) == KERNEL_ERROR
    assert capsys.readouterr().err == "attn4 doctor: no compiler here\n"


def test_a_fault_of_attn4_itself_is_not_hidden(monkeypatch):
    def fail(_args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(doctor, "run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["doctor"])


def test_a_reader_that_leaves_early_gets_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "attn4.cli", "explain", "--arch", "sm_100a", "--head-dim", "128"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_doctor_reports_every_part_and_always_succeeds(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (
        "python",
        "torch",
        "driver",
        "CuTe DSL",
        "apache-tvm-ffi",
        "cache",
        "bundle",
        "transformers",
    ):
        assert any(line[10:].startswith(name) for line in lines), name
    assert "so this machine can" in lines


def test_doctor_says_how_to_get_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "missing apache-tvm-ffi" in text
    assert "pip install 'attn4[gpu]'" in text
    assert "no      demo" in text
    assert "no      emulate kernels       no numpy, no apache-tvm-ffi" in text


def test_doctor_lives_through_a_torch_that_does_not_load(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "torch_error", lambda: "OSError: libtorch.so")
    assert main(["doctor"]) == 0
    assert "missing torch                 OSError: libtorch.so" in capsys.readouterr().out


def test_doctor_counts_the_kernels_in_the_cache(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "attn4" / "1" / "some-key"
    folder.mkdir(parents=True)
    (folder / "artifact.json").write_text("{}")
    (folder / "kernel.so").write_bytes(bytes(3 * 2**20))
    main(["doctor"])
    assert f"{tmp_path / 'attn4'}: 1 kernels, 3.0 MiB" in capsys.readouterr().out


def test_the_demo_names_what_it_lacks(capsys, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "transformers" else object())
    assert main(["demo"]) == USER_ERROR
    assert "not installed: transformers; run `make demo`" in capsys.readouterr().err


@pytest.fixture
def demo_packages():
    for name in demo.PACKAGES:
        pytest.importorskip(name)


@pytest.mark.usefixtures("demo_packages")
def test_the_demo_s_model_speaks_alike_on_both_attentions(capsys):
    assert main(["demo", "--device", "cpu", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    assert "the two agree" in text
    assert "attn4's reference in torch" in text
    assert "THE KERNEL IS WRONG" not in text


@pytest.mark.usefixtures("demo_packages")
def test_the_demo_without_the_compiler_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(demo_b200, "find_spec", lambda name: None if name == "cutlass" else object())
    assert demo_b200.show(None) == 0
    assert "not run: install nvidia-cutlass-dsl[cu13] for it" in capsys.readouterr().out


@pytest.mark.usefixtures("demo_packages")
def test_the_demo_fails_when_attention_is_wrong(capsys, monkeypatch):
    from attn4.integrations import transformers as integration

    right = integration.flash_attn_varlen_func
    monkeypatch.setattr(
        integration,
        "flash_attn_varlen_func",
        lambda *qkv, softmax_scale, **rest: right(*qkv, softmax_scale=1.05 * softmax_scale, **rest),
    )
    monkeypatch.setattr(demo_b200, "show", lambda model: 0)
    assert main(["demo", "--device", "cpu", "--repeats", "1"]) == 1
    assert "THE TWO DIFFER" in capsys.readouterr().out


@pytest.mark.usefixtures("demo_packages")
def test_the_demo_asked_for_a_gpu_that_is_not_there_says_so(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == USER_ERROR
    assert "torch sees no GPU" in capsys.readouterr().err
