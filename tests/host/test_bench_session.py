"""A run on the CPU: what is right is timed, what is wrong, fails or is missing is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn4.bench import peers as known
from attn4.bench.cases import CASE_SETS, Case, cases
from attn4.bench.check import Oracle
from attn4.bench.inputs import Inputs, make_inputs
from attn4.bench.peers import Call, Peer, select
from attn4.bench.planned import describe, plan_summary
from attn4.bench.rows import Row, read
from attn4.bench.session import Session
from attn4.bench.telemetry import setting
from attn4.bench.timing import Budget
from attn4.cli import main
from attn4.machine import machine
from attn4.plan.choose import choose, unsupported

CPU = torch.device("cpu")
QUICK = cases("quick")


def right(case: Case, inputs: Inputs) -> Call:
    """The oracle's own arithmetic, all rows of it."""
    del inputs

    def call(x: Inputs) -> torch.Tensor:
        out = torch.empty_like(x.q)
        start = 0
        for number, seqlen in enumerate(case.seqlens):
            take: Any = slice(start, start + seqlen) if case.packed else number
            start += seqlen
            group = case.heads // case.kv_heads
            q, k, v = (t[take].double().transpose(0, 1) for t in (x.q, x.k, x.v))
            scores = q @ k.repeat_interleave(group, 0).mT * case.head_dim**-0.5
            distance = torch.arange(seqlen)[None, :] - torch.arange(seqlen)[:, None]
            if case.mask.right is not None:
                scores = scores.masked_fill(distance > case.mask.right, float("-inf"))
            if case.mask.left is not None:
                scores = scores.masked_fill(distance < -case.mask.left, float("-inf"))
            weights = scores.softmax(-1) @ v.repeat_interleave(group, 0)
            out[take] = weights.transpose(0, 1).to(out.dtype)
        return out

    return call


def spoiled(change: Any) -> Any:
    """A backend whose result ``change`` damages in place."""

    def prepare(case: Case, inputs: Inputs) -> Call:
        good = right(case, inputs)

        def call(x: Inputs) -> torch.Tensor:
            out = good(x)
            change(out)
            return out

        return call

    return prepare


def peer(name: str, prepare: Any) -> Peer:
    return Peer(name, lambda: "1.0", prepare, devices=("cpu",))


def run(case: Case, *backends: Peer) -> dict[str, Row]:
    session = Session.open(backends, setting(CPU, "a test"), CPU, Budget(seconds=0.01))
    (rows,) = session.run([case])
    return {row.backend: row for row in rows}


@pytest.mark.parametrize("case", QUICK, ids=[case.name for case in QUICK])
def test_a_right_result_is_timed(case: Case) -> None:
    row = run(case, peer("good", right))["good"]
    assert (row.status, row.detail) == ("timed", "")
    assert row.timing is not None
    assert 0 < row.timing.p20_us <= row.timing.p50_us <= row.timing.p80_us
    assert row.accuracy is not None
    assert row.accuracy.passed


def zero_last_row(out: torch.Tensor) -> None:
    out.view(-1, out.shape[-2], out.shape[-1])[-1] = 0


def scale(out: torch.Tensor) -> None:
    out *= 1.05


def one_nan(out: torch.Tensor) -> None:
    out.view(-1)[out.numel() // 3] = float("nan")


def zero_head(head: int) -> Any:
    def damage(out: torch.Tensor) -> None:
        out.select(-2, head).zero_()

    return damage


def swap_heads(out: torch.Tensor) -> None:
    out.copy_(out.flip(-2).clone())


@pytest.mark.parametrize("case", QUICK, ids=[case.name for case in QUICK])
@pytest.mark.parametrize(
    "damage", [zero_last_row, scale, one_nan, swap_heads, zero_head(0), zero_head(2), zero_head(3)]
)
def test_a_wrong_result_is_reported_and_not_timed(case: Case, damage: Any) -> None:
    rows = run(case, peer("good", right), peer("bad", spoiled(damage)))
    assert rows["bad"].status == "wrong"
    assert rows["bad"].timing is None
    assert "is allowed" in rows["bad"].detail
    assert rows["good"].status == "timed"


def test_a_result_without_its_mask_is_wrong() -> None:
    def unmasked(case: Case, inputs: Inputs) -> Call:
        return right(replace(case, mask=cases("forward")[0].mask), inputs)

    assert run(QUICK[1], peer("bad", unmasked))["bad"].status == "wrong"


def test_a_result_with_kv_heads_in_another_order_is_wrong() -> None:
    def taken_in_turns(case: Case, inputs: Inputs) -> Call:
        good = right(case, inputs)
        return lambda x: good(replace(x, k=x.k.flip(-2), v=x.v.flip(-2)))

    def interleaved(case: Case, inputs: Inputs) -> Call:
        good = right(case, inputs)
        order = torch.tensor([0, 2, 1, 3])
        return lambda x: good(replace(x, q=x.q[:, :, order]))[:, :, order]

    for prepare in (taken_in_turns, interleaved):
        assert run(QUICK[2], peer("bad", prepare))["bad"].status == "wrong"


def test_a_result_of_another_shape_is_a_failure() -> None:
    def flat(case: Case, inputs: Inputs) -> Call:
        return lambda x: right(case, inputs)(x).flatten(-2)

    row = run(QUICK[0], peer("bad", flat))["bad"]
    assert row.status == "failed"
    assert "has shape (2, 128, 256), and not (2, 128, 4, 64)" in row.detail


def test_a_backend_that_raises_does_not_end_the_run() -> None:
    def raises(error: Exception) -> Any:
        def prepare(case: Case, inputs: Inputs) -> Call:
            raise error

        return prepare

    rows = run(
        QUICK[0],
        peer("broken", raises(RuntimeError("no kernel\n image"))),
        peer("unbuilt", raises(NotImplementedError("not for CPUs"))),
        peer("good", right),
    )
    assert (rows["broken"].status, rows["broken"].detail) == ("failed", "no kernel image")
    assert (rows["unbuilt"].status, rows["unbuilt"].detail) == ("unsupported", "not for CPUs")
    assert rows["good"].timing is not None


def test_a_peer_that_does_not_import_is_reported() -> None:
    def absent() -> str:
        raise ImportError("No module named 'flash_attn_interface'")

    rows = run(QUICK[0], Peer("fa3", absent, right, devices=("cpu",)), peer("good", right))
    assert rows["fa3"].status == "missing"
    assert rows["fa3"].detail == "cannot be imported: No module named 'flash_attn_interface'"
    assert rows["good"].timing is not None


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_packages_that_are_not_installed_say_so(name: str) -> None:
    (backend,) = select((name,))
    on_cpu = replace(backend, devices=("cpu",))
    row = run(QUICK[0], on_cpu)[name]
    assert row.status == "missing"
    assert "flash_attn" in row.detail


def test_a_cpu_is_not_asked_for_a_full_size_case() -> None:
    with pytest.raises(ValueError, match="choose the case set quick"):
        run(cases("forward")[0], peer("good", right))


def test_inputs_are_normal_and_differ_between_sets() -> None:
    case = replace(QUICK[0], dtype="float32")
    one, two = make_inputs(case, CPU, 0), make_inputs(case, CPU, 1)
    assert abs(float(one.q.mean())) < 0.02
    assert float(one.q.std()) == pytest.approx(1, abs=0.02)
    assert not torch.equal(one.q, two.q)
    packed = make_inputs(QUICK[3], CPU, 0)
    assert packed.cu_seqlens is not None
    assert packed.cu_seqlens.tolist() == [0, 17, 20, 150]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.q.shape == (150, 4, 64)


def test_oracle_allows_what_the_dtype_itself_errs() -> None:
    inputs = make_inputs(QUICK[0], CPU, 0)
    allowed = Oracle(QUICK[0], inputs).check(right(QUICK[0], inputs)(inputs)).allowed
    assert 1e-3 < allowed < 2e-2
    fine = replace(QUICK[0], dtype="float32")
    inputs = make_inputs(fine, CPU, 0)
    assert Oracle(fine, inputs).check(right(fine, inputs)(inputs)).allowed < 1e-5


def recorded(case: Case, unbounded: int | None) -> dict[str, Any]:
    """What a flash-attn style package is called with."""
    seen: dict[str, Any] = {}

    def function(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.update(options)
        return q, None

    inputs = make_inputs(case, CPU, 0)
    call = known._flash_attn_style(function, function, case, unbounded)
    assert call(inputs) is inputs.q
    return seen


def test_flash_attn_packages_get_windows_in_their_own_words() -> None:
    assert recorded(QUICK[1], -1) == {"causal": True, "window_size": (-1, -1)}
    window = recorded(QUICK[4], None)
    assert window == {"causal": False, "window_size": (64, 0)}
    packed = recorded(QUICK[3], -1)
    assert (packed["max_seqlen_q"], packed["max_seqlen_k"]) == (130, 130)
    assert packed["cu_seqlens_q"].tolist() == [0, 17, 20, 150]


@pytest.mark.parametrize("case", [QUICK[3], QUICK[4]], ids=["packed", "window"])
def test_fa2_arguments_fit_the_operator_of_this_torch(case: Case) -> None:
    with FakeTensorMode():
        lead = (case.tokens,) if case.packed else (case.batch, case.seqlen)
        q = torch.empty(*lead, case.heads, case.head_dim, dtype=torch.bfloat16, device="cuda")
        cu_seqlens = torch.empty(case.batch + 1, dtype=torch.int32, device="cuda") if case.packed else None
        inputs = Inputs(q, q.clone(), q.clone(), cu_seqlens)
        assert known._fa2(case, inputs)(inputs).shape == q.shape


@pytest.mark.parametrize("case", QUICK, ids=[case.name for case in QUICK])
def test_flex_mask_lets_meet_what_the_case_says(case: Case) -> None:
    rule = known._flex_rule(case, make_inputs(case, CPU, 0))
    if rule is None:
        assert case.mask_name == "full"
        return
    length = case.tokens if case.packed else case.seqlen
    query, key = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    starts = [sum(case.seqlens[:number]) for number in range(case.batch)] if case.packed else [0]
    lengths = case.seqlens if case.packed else case.seqlens[:1]
    expected = torch.zeros(length, length, dtype=torch.bool)
    for start, seqlen in zip(starts, lengths, strict=True):
        part = torch.ones(seqlen, seqlen, dtype=torch.bool).tril(case.mask.right or 0)
        if case.mask.left is not None:
            part = part.triu(-case.mask.left)
        expected[start : start + seqlen, start : start + seqlen] = part
    assert torch.equal(rule(0, 0, query, key), expected)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_quick_run_on_the_cpu_writes_rows_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "quick", "--backends", "reference,eager,fa3", "--seconds-per-cell", "0.01"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "rows.jsonl")
    assert len(rows) == len(QUICK) * 3
    assert {row.status for row in rows if row.backend == "reference"} == {"timed"}
    assert {row.setting.command for row in rows} == {
        "attn4 bench quick --backends reference,eager,fa3 --seconds-per-cell 0.01 --turn-us 500"
    }
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == len(rows) + 1
    printed = capsys.readouterr()
    assert "quick-d64-full-128" in printed.out
    assert "fa3: missing in 5 cell(s): needs a device of type cuda" in printed.out
    assert "[5/5, 0 s left]" in printed.err


@pytest.mark.usefixtures("no_gpu")
def test_plots_are_drawn_from_the_file_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    command = ["bench", "quick", "--backends", "eager", "--seconds-per-cell", "0.01"]
    assert main([*command, "--only", "d64-full", "--out", str(tmp_path)]) == 0
    assert main(["bench", "--plot", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "plots")]) == 0
    drawn = list((tmp_path / "plots").glob("quick-cpu-*-measured.png"))
    assert len(drawn) == 1
    assert str(drawn[0]) in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    error = capsys.readouterr().err
    assert "needs an NVIDIA GPU" in error
    assert "attn4 bench quick --backends reference,eager" in error


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "no case set 'nothing'"),
        (["quick", "--backends", "fa9"], "no backend 'fa9'"),
        (["quick", "--only", "d512"], "no case is called like 'd512'"),
        (["quick", "--only", "("], "not a regular expression"),
        (["quick", "--backends", "eager", "--seconds-per-cell", "0"], "greater than 0"),
        (["--plot", "/nowhere/rows.jsonl"], "needs a file of rows"),
        (["forward", "--backends", "eager"], "choose the case set quick"),
    ],
)
def test_a_request_that_cannot_be_met_is_told_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("no_gpu")
def test_exit_status_tells_that_attn4_was_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = peer("attn4", spoiled(scale))
    monkeypatch.setattr(known, "PEERS", (bad,))
    command = ["bench", "quick", "--backends", "attn4", "--seconds-per-cell", "0.01"]
    assert main([*command, "--only", "d64-full", "--out", str(tmp_path)]) == 1


def test_listing_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "forward", "--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 19
    others = "attn4-deterministic, attn4-dealt, attn4-linear, attn4-takeover, attn4-sorted, attn4-sorting"
    assert printed[-1] == f"backends: attn4, cudnn, fa2, fa3, fa4, flex, reference, eager, {others}"


def test_plan_of_a_row_names_its_tile_and_roles() -> None:
    plan = choose(QUICK[1].problem(), machine("H200"))
    text = describe(plan)
    assert text.startswith(f"{plan.tile_m}x{plan.tile_n}, ")
    assert all(f"{role.name} {role.warps}w {role.registers}r" in text for role in plan.roles)
    assert plan_summary(QUICK[1], CPU) is None


@pytest.mark.parametrize("case_set", CASE_SETS)
def test_every_case_has_a_plan_on_an_h200(case_set: str) -> None:
    for case in cases(case_set):
        assert unsupported(case.problem(), machine("H200")) == (), case.name
