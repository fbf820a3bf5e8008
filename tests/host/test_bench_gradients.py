"""A run of backward cases on the CPU: gradients are checked against float64, and only they are timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn4.bench import gradients
from attn4.bench.cases import CAUSAL, Case, cases, directed, tensor_bytes
from attn4.bench.gradients import GradientOracle, both_passes, kept_graphs
from attn4.bench.inputs import Inputs, input_sets, make_inputs
from attn4.bench.peers import PEERS, Call, Peer, select
from attn4.bench.rows import Row, from_json, read, to_json
from attn4.bench.session import Session
from attn4.bench.table import render
from attn4.bench.telemetry import setting
from attn4.bench.timing import Budget
from attn4.cli import main
from attn4.mask import Mask
from attn4.reference import Lengths, dense

CPU = torch.device("cpu")
QUICK = tuple(directed(case, "backward") for case in cases("quick"))
FULL, CAUSAL_192, GROUPED, PACKED, WINDOW = QUICK
ALL = [backend.name for backend in PEERS]


def run(case: Case, *backends: Peer) -> dict[str, Row]:
    session = Session.open(backends, setting(CPU, "a test"), CPU, Budget(seconds=0.01))
    (rows,) = session.run([case])
    return {row.backend: row for row in rows}


def reference(case: Case, inputs: Inputs) -> Call:
    (backend,) = select(("reference",))
    return backend.prepare(case, inputs)


class Spoiled(torch.autograd.Function):
    """Its argument, whose gradient is damaged on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, damage: Any) -> torch.Tensor:
        ctx.damage = damage
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.damage(gradients[0].clone()), None


def spoiled(name: str, damage: Any) -> Peer:
    """A backend whose output is right and whose gradient of ``name`` is not."""

    def prepare(case: Case, inputs: Inputs) -> Call:
        good = reference(case, inputs)
        return lambda x: good(replace(x, **{name: Spoiled.apply(getattr(x, name), damage)}))

    return Peer("bad", lambda: "1.0", prepare, devices=("cpu",))


@pytest.mark.parametrize("case", QUICK, ids=[case.name for case in QUICK])
def test_right_gradients_are_timed(case: Case) -> None:
    row = run(case, *select(("reference",)))["reference"]
    assert (row.status, row.detail) == ("timed", "")
    assert row.timing is not None
    assert 0 < row.timing.p20_us <= row.timing.p50_us
    assert row.accuracy is not None
    assert row.accuracy.passed


@pytest.mark.parametrize("case", [FULL, CAUSAL_192, GROUPED], ids=["full", "causal", "grouped"])
def test_gradients_of_eager_torch_are_right(case: Case) -> None:
    assert run(case, *select(("eager",)))["eager"].status == "timed"


def zero_last_row(gradient: torch.Tensor) -> torch.Tensor:
    gradient.view(-1, *gradient.shape[-2:])[-1] = 0
    return gradient


def one_nan(gradient: torch.Tensor) -> torch.Tensor:
    gradient.view(-1)[gradient.numel() // 3] = float("nan")
    return gradient


def zero_last_head(gradient: torch.Tensor) -> torch.Tensor:
    gradient[..., -1, :] = 0
    return gradient


DAMAGES = {
    "scaled": lambda gradient: gradient * 1.05,
    "last row 0": zero_last_row,
    "a NaN": one_nan,
    "last head 0": zero_last_head,
    "heads swapped": lambda gradient: gradient.flip(-2),
    "sign": lambda gradient: -gradient,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("case", [GROUPED, PACKED], ids=["grouped", "packed"])
def test_a_wrong_gradient_is_reported_and_not_timed(case: Case, name: str, damage: str) -> None:
    row = run(case, spoiled(name, DAMAGES[damage]))["bad"]
    assert (row.status, row.timing) == ("wrong", None)
    assert "is allowed" in row.detail


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_the_small_gradients_at_the_end_of_a_causal_sequence_are_seen(name: str) -> None:
    case = replace(CAUSAL_192, seqlens=(768,), heads=1, kv_heads=1, head_dim=64)
    assert run(case, spoiled(name, lambda gradient: gradient))["bad"].status == "timed"

    def last_rows_less(gradient: torch.Tensor) -> torch.Tensor:
        gradient[:, -96:] *= 0.8
        return gradient

    assert run(case, spoiled(name, last_rows_less))["bad"].status == "wrong"


def test_gradients_without_the_mask_are_wrong() -> None:
    def unmasked(case: Case, inputs: Inputs) -> Call:
        return reference(replace(case, mask=Mask()), inputs)

    for case in (CAUSAL_192, WINDOW):
        assert run(case, Peer("bad", lambda: "1.0", unmasked, devices=("cpu",)))["bad"].status == "wrong"


@pytest.mark.parametrize("case", QUICK, ids=[case.name for case in QUICK])
def test_the_oracle_is_the_derivative_of_attention_in_float64(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "ROWS", 50)
    inputs = make_inputs(case, CPU, 0)
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    cu = inputs.cu_seqlens
    out, _ = dense(*leaves, mask=case.mask, lengths=Lengths(cu_seqlens_q=cu, cu_seqlens_k=cu))
    assert inputs.grad_out is not None
    exact = torch.autograd.grad(out, leaves, inputs.grad_out.double())
    accuracy = GradientOracle(case, inputs).check(exact)
    assert accuracy.error < 1e-12
    assert 1e-4 < accuracy.allowed < 0.1


def counting(call: Call) -> tuple[Call, list[Inputs]]:
    """The same call, and what it was made with."""
    runs: list[Inputs] = []

    def counted(x: Inputs) -> torch.Tensor:
        runs.append(x)
        return call(x)

    return counted, runs


def test_the_forward_pass_runs_once_for_each_set_of_inputs() -> None:
    sets = [make_inputs(FULL, CPU, seed) for seed in range(2)]
    good = reference(FULL, sets[0])
    counted, runs = counting(good)
    backward = kept_graphs(counted, sets)
    first, second, again = backward(0), backward(1), backward(0)
    assert len(runs) == 2
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert not any(x.q.requires_grad for x in sets)


def test_both_passes_run_anew_each_time() -> None:
    case = directed(FULL, "both")
    sets = [make_inputs(case, CPU, seed) for seed in range(2)]
    good = reference(case, sets[0])
    counted, runs = counting(good)
    both, backward = both_passes(counted, sets), kept_graphs(good, sets)
    with torch.no_grad():
        for index in (0, 1, 0):
            pairs = zip(both(index), backward(index), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
    assert len(runs) == 3


@pytest.mark.parametrize("case", [FULL, GROUPED, PACKED], ids=["full", "grouped", "packed"])
def test_both_passes_are_checked_by_their_gradients_and_timed(case: Case) -> None:
    both = directed(case, "both")
    row = run(both, *select(("reference",)))["reference"]
    assert (row.status, row.detail) == ("timed", "")
    assert "both" in row.case.name
    assert run(both, spoiled("k", DAMAGES["scaled"]))["bad"].status == "wrong"
    assert from_json(to_json(row)) == row


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_values_of_another_head_dim_are_checked_and_timed(direction: str) -> None:
    case = directed(replace(GROUPED, head_dim=24, head_dim_v=16), direction)
    row = run(case, *select(("reference",)))["reference"]
    assert (row.status, row.detail) == ("timed", "")


def test_inputs_of_both_directions_are_the_same() -> None:
    forward, backward = (make_inputs(case, CPU, 0) for case in (cases("quick")[0], FULL))
    assert forward.grad_out is None
    assert torch.equal(forward.v, backward.v)
    assert backward.grad_out is not None
    assert backward.grad_out.shape == backward.q.shape
    assert float(backward.grad_out.float().std()) == pytest.approx(1, abs=0.02)


def test_gradients_count_among_the_bytes_of_an_input_set() -> None:
    forward, backward = cases("forward")[0], cases("backward")[0]
    assert tensor_bytes(backward) == 2 * tensor_bytes(forward)
    assert input_sets(backward, tensor_bytes(forward)) == 2 < input_sets(forward, tensor_bytes(forward))


SCHEDULED = [name for name in ALL if name.startswith("attn4-") and name != "attn4-deterministic"]


@pytest.mark.parametrize("name", SCHEDULED)
def test_peers_without_gradients_refuse_backward_cases_alone(name: str) -> None:
    (backend,) = select((name,))
    assert backend.refuses(PACKED) == "other schedules are launched without autograd, forward only"
    assert backend.refuses(directed(PACKED, "forward")) is None


def test_packed_cudnn_keeps_the_log_sum_exp_for_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = torch.ops.aten._cudnn_attention_forward.default._schema.arguments
    names = [argument.name for argument in signature]
    asked = []

    def recorded(*arguments: Any) -> tuple[torch.Tensor, ...]:
        asked.append(arguments[names.index("compute_log_sumexp")])
        return arguments[:1]

    monkeypatch.setattr(torch.ops.aten, "_cudnn_attention_forward", recorded)
    for case in (PACKED, directed(PACKED, "forward")):
        (backend,) = select(("cudnn",))
        inputs = make_inputs(case, CPU, 0)
        backend.prepare(case, inputs)(inputs)
    assert asked == [True, False]


def test_a_call_that_records_no_graph_is_unsupported() -> None:
    def detached(case: Case, inputs: Inputs) -> Call:
        good = reference(case, inputs)
        return lambda x: good(x).detach()

    row = run(FULL, Peer("raw", lambda: "1.0", detached, devices=("cpu",)))["raw"]
    assert (row.status, row.timing) == ("unsupported", None)
    assert "records no graph" in row.detail


def test_gradients_or_results_of_another_shape_are_errors() -> None:
    inputs = make_inputs(FULL, CPU, 0)
    with pytest.raises(ValueError, match="the gradient given for it"):
        kept_graphs(lambda x: x.q.flatten(-2), [inputs])
    with pytest.raises(ValueError, match="the gradients have shapes"):
        GradientOracle(FULL, inputs).check((inputs.q, inputs.k, inputs.v.flatten(-2)))


def test_backward_set_holds_the_cells_of_the_forward_set() -> None:
    assert [case.name.replace("forward", "backward") for case in cases("forward")] == [
        case.name for case in cases("backward")
    ]
    assert {case.direction for case in cases("backward")} == {"backward"}
    assert tuple(directed(case, "backward") for case in cases("forward")) == cases("backward")
    assert tuple(directed(case, "forward") for case in cases("backward")) == cases("forward")
    assert {case.mask for case in cases("backward")} == {Mask(), CAUSAL}
    assert FULL.name == "quick-backward-d64-full-128"


def test_rows_of_both_directions_stay_apart(tmp_path: Path) -> None:
    rows = [*run(cases("quick")[0], *select(("eager",))).values(), *run(FULL, *select(("eager",))).values()]
    assert [from_json(to_json(row)) for row in rows] == rows
    table = render(rows)
    assert "quick-d64-full-128" in table
    assert "quick-backward-d64-full-128" in table
    pytest.importorskip("matplotlib")
    from attn4.bench.plots import draw

    names = [file.name for file in draw(rows, tmp_path)]
    assert [name.split("-cpu-")[0] for name in names] == ["quick", "quick-backward"]


def test_command_times_the_backward_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = ["bench", "quick", "--direction", "backward", "--only", "d64-full", "--backends", "eager"]
    assert main([*command, "--seconds-per-cell", "0.01", "--out", str(tmp_path)]) == 0
    (row,) = read(tmp_path / "rows.jsonl")
    assert (row.case.direction, row.status) == ("backward", "timed")
    assert "--direction backward" in row.setting.command
    assert "quick-backward-d64-full-128" in capsys.readouterr().out
    for direction in ("backward", "both"):
        assert main(["bench", "forward", "backward", "both", "--direction", direction, "--list"]) == 0
        assert capsys.readouterr().out.count(f"{direction}-d") == 18
