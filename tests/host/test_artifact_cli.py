"""``attn4 compile``: from options to the plans of a bundle."""

import argparse
import functools
import io
import json

import pytest

from attn4 import artifact
from attn4.artifact import artifact_for, plan_from_json, plan_to_json, store
from attn4.artifact.key import toolchain
from attn4.cli import compile as command
from attn4.cli import main
from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.problem import Problem
from host.artifact_kernel import FAKE, PLAN, with_head_dim


def plans(*options: str):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return list(command.plans_of(parser.parse_args(["--out", "x", *options])))


def test_every_combination_is_planned():
    found = plans(
        *(
            "--head-dim",
            "64",
            "192,128",
            "--mask",
            "full",
            "causal",
            "window",
            "--dtype",
            "bfloat16",
            "float16",
        ),
        *("--varlen", "both", "--seqused", "--lse", "both", "--arch", "H200"),
    )
    assert len(set(found)) == 2 * 3 * 2 * 2 * 1 * 2
    assert {plan.arch for plan in found} == {"sm_90a"}
    assert {(plan.head_dim, plan.head_dim_v) for plan in found} == {(64, 64), (192, 128)}
    assert {plan.mask for plan in found} == {"full", "causal", "window"}
    assert {(plan.cu_seqlens_q, plan.cu_seqlens_k) for plan in found} == {(False, False), (True, True)}
    assert all(plan.seqused_k and not plan.seqused_q for plan in found)
    assert {plan.lse for plan in found} == {False, True}


def test_flags_without_a_value_and_defaults():
    (plan,) = plans("--head-dim", "128", "--mask", "causal", "--varlen", "--no-lse")
    assert plan.cu_seqlens_q
    assert not plan.seqused_k
    assert not plan.lse
    assert plan.dtype == "bfloat16"


def test_sorted_batches_come_with_the_kernel_that_sorts_them():
    options = ("--head-dim", "64", "128", "--mask", "causal", "--varlen", "both", "--seqlen-q", "512")
    found = dict.fromkeys(plans(*options, "--sorted", "both"))
    assert set(plans(*options)) < set(found)
    (sorting,) = (plan for plan in found if plan.kernel == "sort_batches")
    assert sum(plan.schedule.sorted_batches for plan in found) == 2
    assert command.describe(sorting).startswith("sm_90a sorts batches for tiles of 128 x 128 causal")
    assert all(plan_from_json(plan_to_json(plan)) == plan for plan in found)


@pytest.mark.parametrize("mask", command.MASKS)
def test_plan_is_the_one_that_a_call_gets(mask):
    """Whatever the batch, the number of heads and the bounds of a window are."""
    bounds = {"full": Mask(), "causal": Mask.of(True), "window": Mask(77, 5)}[mask]
    call = Problem(
        batch=3, seqlen_q=4096, seqlen_k=999, heads=6, kv_heads=6, head_dim=128, head_dim_v=128, mask=bounds
    )
    assert plans("--head-dim", "128", "--mask", mask) == [choose(call, machine("sm_90a"))]


def test_combination_without_a_kernel_is_refused_with_the_reasons(tmp_path, capsys):
    out = tmp_path / "b"
    assert main(["compile", "--out", str(out), "--head-dim", "64", "100", "264"]) == 2
    message = capsys.readouterr().err
    assert "head_dim is 100" in message
    assert "head_dim is 264" in message
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "reason"), [("{}", "must hold a list"), ("[", "cannot be read"), ("[{}]", "Plan")]
)
def test_file_without_plans_is_refused(tmp_path, capsys, text, reason):
    file = tmp_path / "plans.json"
    file.write_text(text)
    assert main(["compile", "--out", str(tmp_path / "b"), "--plans", str(file)]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.skipif(toolchain() is None, reason="CuTe DSL is not installed")
def test_bundle_is_built_then_skipped_and_serves_its_plans(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "build_bundle", functools.partial(artifact.build_bundle, compiler=FAKE))
    file = tmp_path / "plans.json"
    file.write_text(json.dumps([plan_to_json(PLAN), plan_to_json(with_head_dim(64))]))
    words = ["compile", "--out", str(tmp_path / "b"), "--plans", str(file), "--jobs", "2"]
    assert main(words) == 0
    first = capsys.readouterr()
    assert "2 built, 0 there already, 0 failed" in first.out
    assert "[2/2]" in first.err
    assert main(words) == 0
    assert "0 built, 2 there already" in capsys.readouterr().out
    monkeypatch.setattr(store, "toolchain", lambda: None)
    assert artifact_for(PLAN, bundle=tmp_path / "b").description.plan == plan_to_json(PLAN)


@pytest.mark.skipif(toolchain() is None, reason="CuTe DSL is not installed")
def test_failure_is_told_and_sets_the_status(tmp_path, monkeypatch, capsys):
    failing = functools.partial(artifact.build_bundle, compiler="host.artifact_kernel:compile_or_fail")
    monkeypatch.setattr(command, "build_bundle", failing)
    file = tmp_path / "plans.json"
    file.write_text(json.dumps([plan_to_json(PLAN), plan_to_json(with_head_dim(64))]))
    assert main(["compile", "--out", str(tmp_path / "b"), "--plans", str(file)]) == 1
    told = capsys.readouterr()
    assert "1 built, 0 there already, 1 failed" in told.out
    assert "64 is not to be compiled" in told.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_a_bar():
    pytest.importorskip("rich")
    out = Terminal()
    with command._display(out) as show:
        show(command.Progress(done=1, total=2, plan=PLAN, artifact=None, built=False, error="broken"))
    assert "failed   sm_90a forward bfloat16 head_dim 128 full" in out.getvalue()
    assert "compiling" in out.getvalue()
