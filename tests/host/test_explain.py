"""What `attn4 explain` and `attn4.plan.explain.explain` tell, without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attn4.cli import main
from attn4.machine import MACHINES, machine
from attn4.mask import Mask
from attn4.plan.choose import runnable, unsupported
from attn4.plan.explain import Call, explain
from attn4.plan.support import CASES, page
from attn4.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
PLAIN = Problem(batch=2, seqlen_q=4096, seqlen_k=4096, heads=8, kv_heads=8, head_dim=128, head_dim_v=128)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "cycles"),
    [
        ([], ["1024, exponential 1024, shared memory 768", "1024, exponential 1024, shared memory 512"]),
        (["--causal"], ["1024, exponential 1024, shared memory 768"]),
        (["--backward", "--cta-group", "1"], ["2560, exponential 1024, shared memory 3328"]),
        (["--backward", "--two-cta"], ["2560, exponential 1024, shared memory 2688"]),
        (
            ["--backward"],
            ["2560, exponential 1024, shared memory 3328", "2560, exponential 1024, shared memory 2688"],
        ),
    ],
)
def test_explain_prints_the_published_cycles_of_a_b200_tile(
    capsys: pytest.CaptureFixture[str], words: list[str], cycles: list[str]
) -> None:
    text = told(capsys, "--arch", "sm_100a", "--head-dim", "128", *words)
    for line in cycles:
        assert f"  cycles a CTA: tensor core {line}\n" in text


def test_explain_says_which_unit_binds_and_the_share_of_peak(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--arch", "B200", "--backward")
    assert "binds: shared memory, at 3328 cycles; at most 76.9% of tensor peak, 1833 TFLOP/s" in text
    assert "binds: shared memory, at 2688 cycles; at most 95.2% of tensor peak, 2269 TFLOP/s" in text
    assert "binds: tensor core and exponential, at 1024 cycles; at most 100.0%" in told(
        capsys, "--arch", "B200"
    )


@pytest.mark.parametrize("where", MACHINES, ids=lambda m: m.name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_everything_in_a_plan_is_in_its_text(where: object, direction: str) -> None:
    told = explain(replace(PLAIN, direction=direction, mask=Mask.of(True)), where)  # type: ignore[arg-type]
    text = str(told)
    assert "Feeds and speeds" in text
    if told.plan is None:
        assert direction == "backward"
        assert all(reason in text for reason in told.reasons)
        return
    for role in told.plan.roles:
        assert re.search(
            rf"^  {role.name} +{role.first_warp}\b.* {role.registers} +{re.escape(role.job)}",
            text,
            re.MULTILINE,
        )
    for buffer in told.plan.buffers:
        end = buffer.offset + buffer.size
        owner = f"borrows {buffer.borrows}" if buffer.borrows else "own"
        assert re.search(rf"^  {buffer.offset} +{end} +{buffer.name} .* {owner}$", text, re.MULTILINE)
    for channel in told.plan.channels:
        ends = f"{channel.producer} -> {', '.join(channel.consumers)}"
        empty, size = channel.empty_arrivals or "-", channel.transaction_bytes or "-"
        line = rf"^  {channel.name} .*{re.escape(ends)} +{channel.full_arrivals} +{empty} +{size} "
        assert re.search(line, text, re.MULTILINE)


def test_the_schedule_tells_order_tiles_and_waves(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--arch", "B200", "--causal", "--batch", "2", "--heads", "37", "--seqlen-q", "1024")
    assert "persistent CTAs, longest first order, taken from a counter, in sections of 50 MiB" in text
    assert "296 tiles on 148 SMs: 2.00 waves" in text
    assert "at most" in told(capsys, "--arch", "B200", "--varlen").split("waves")[0]


def test_the_whole_call_lasts_at_least_its_share_of_steps_and_its_longest_tile() -> None:
    # 1024 tiles of 32 steps of 2048 cycles on 148 SMs; one tile alone still takes its 32 steps.
    many = str(explain(replace(PLAIN, batch=4, heads=16, kv_heads=16), "B200"))
    one = str(explain(replace(PLAIN, batch=1, seqlen_q=256, heads=1, kv_heads=1), "B200"))
    assert f"at least {1024 * 32 / 148 * 2048 / 1965:.1f} us, 221.4 steps in a row" in many
    assert f"at least {32 * 2048 / 1965:.1f} us, 32.0 steps in a row" in one


def test_the_words_of_the_command_reach_the_problem(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--json --arch B300 --backward --deterministic --head-dim 96 --head-dim-v 72 --heads 6 --kv-heads 2 "
        "--batch 3 --seqlen-q 100 --seqlen-k 200 --window -1 7 --varlen --dtype float16"
    )
    data = json.loads(told(capsys, *words.split()))
    assert data["machine"]["name"] == "sm_103a"
    assert data["problem"] == {
        "batch": 3, "seqlen_q": 100, "seqlen_k": 200, "heads": 6, "kv_heads": 2, "head_dim": 96,
        "head_dim_v": 72, "dtype": "float16", "mask": {"left": None, "right": 7}, "cu_seqlens_q": True,
        "cu_seqlens_k": True, "seqused_q": False, "seqused_k": False, "lse": True, "direction": "backward",
        "deterministic": True,
    }  # fmt: skip


def test_json_and_text_agree(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(told(capsys, "--json", "--arch", "B200"))
    tile = data["feeds"][0]
    assert tile["cycles"] == {"tensor core": 1024, "exponential": 1024, "shared memory": 768}
    assert sum(term["cycles"] for term in tile["terms"]) == 1024 + 1024 + 768
    assert data["supported"] is True
    assert data["runnable"] is True
    assert [role["name"] for role in data["plan"]["roles"]][:3] == ["softmax0", "softmax1", "correction"]
    assert data["plan"]["cta_group"] == 2
    assert data["tiles"]["slots"] == 74


def test_a_problem_without_a_plan_gets_reasons_and_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--arch", "sm_90a", "--backward", "--head-dim", "192", "--head-dim-v", "64")
    assert "head_dim is 192 and head_dim_v is 64; they must round up" in text
    assert "cycles a CTA: tensor core 5632, exponential 1024" in text
    assert "Roles" not in text
    assert "head_dim is 300" in told(capsys, "--head-dim", "300", "--arch", "B200")


@pytest.mark.parametrize("words", [["--arch", "sm_80"], ["--arch", "sm_90a", "--two-cta"]])
def test_a_request_that_makes_no_sense_is_a_user_error(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["explain", *words]) == 2
    assert capsys.readouterr().err.startswith("attn4 explain: ")


def test_explain_takes_a_problem_or_its_keywords() -> None:
    by_keywords = explain(machine="B200", head_dim=64, causal=True, heads=8, seqlen_q=4096, batch=2)
    problem = replace(PLAIN, head_dim=64, head_dim_v=64, mask=Mask.of(True))
    assert by_keywords == explain(problem, machine("B200"))
    assert Call(window_size=(-1, 0)).problem().mask == Mask.of(True)
    with pytest.raises(TypeError, match="not both"):
        explain(problem, "B200", head_dim=64)
    with pytest.raises(TypeError, match="nonsense"):
        explain(machine="B200", nonsense=1)


def test_zero_sizes_are_explained() -> None:
    for where in MACHINES:
        for fields in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}):
            assert "0 steps" in str(explain(replace(PLAIN, **fields), where))


def test_explaining_loads_neither_torch_nor_cutlass() -> None:
    code = (
        "import sys; from attn4.cli import main; main(['explain', '--arch', 'B200']); "
        "print(sorted({'torch', 'cutlass', 'numpy', 'tvm_ffi'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_support_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m attn4.plan.support > docs/support.md"


def test_the_support_page_says_what_the_predicates_say() -> None:
    rows = {
        line.split(" | ")[0].removeprefix("| "): line for line in page().splitlines() if line.startswith("| ")
    }
    for name, problem in CASES:
        cells = [cell.strip() for cell in rows[name].strip("|").split("|")][1:]
        for cell, where in zip(cells, MACHINES, strict=True):
            assert cell.startswith("no") == bool(unsupported(problem, where))
            assert (cell == "**runs**") == (not runnable(problem, where))
