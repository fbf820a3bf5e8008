"""``attn4 emulate``: what it prints, and how it ends."""

import json

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4 import reference
from attn4.cli import main
from attn4.ops import emulated
from needs import COMPILES

pytestmark = COMPILES

SMALL = ["emulate", "--seqlen-q", "70", "--heads", "1", "--head-dim", "64", "--causal"]


def told(capsys, words):
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_right_kernel_ends_with_status_0_and_its_figures(capsys):
    status, data = told(capsys, [*SMALL, "--schedule", "random", "--seed", "7"])
    assert status == 0
    assert data["hazards"] == []
    assert data["wrong"] == []
    assert set(data["relative_l2"]) == {"out", "lse"}
    assert 0 < data["relative_l2"]["out"] < 2.0**-8
    assert data["seconds"] > 0
    (kernel,) = data["counts"]
    assert {"schedule", "load", "attend"} <= kernel["roles"].keys()
    attend, load = kernel["roles"]["attend"], kernel["roles"]["load"]
    assert attend["mufu.ex2"] > 0
    assert "mufu.ex2" not in load
    assert load["bulk load bytes"] > 0
    assert kernel["total"]["flop"] == attend["flop"] > 0
    total = sum(role["instructions"] for role in kernel["roles"].values())
    assert kernel["total"]["instructions"] == total


def test_the_text_has_the_table_and_the_verdict(capsys):
    assert main([*SMALL, "--no-hazards"]) == 0
    text = capsys.readouterr().out
    assert "mufu.ex2" in text
    assert "attend" in text
    assert "out: relative L2 error" in text
    assert "no hazards" in text


@pytest.mark.slow
def test_packed_sequences_with_grouped_heads(capsys):
    words = ["--batch", "3", "--varlen", "--kv-heads", "1", "--window", "20", "none", "--dtype", "float16"]
    words = ["emulate", "--seqlen-q", "60", "--heads", "2", "--head-dim", "64", *words]
    status, data = told(capsys, words)
    assert status == 0
    assert data["relative_l2"]["out"] < 2.0**-11


def test_a_wrong_result_ends_with_status_1(capsys, monkeypatch):
    dense = reference.dense
    monkeypatch.setattr(
        reference, "dense", lambda *given, **options: (dense(*given, **options)[0] * 1.01, dense(*given)[1])
    )
    status, data = told(capsys, ["emulate", "--seqlen-q", "40", "--heads", "1", "--head-dim", "64"])
    assert status == 1
    assert data["wrong"] == ["out"]


def test_a_fault_of_the_kernel_is_a_hazard_and_ends_with_status_1(capsys, monkeypatch):
    load = emulated.load_emulated

    def with_less_room(artifact):
        kernel = load(artifact)

        def call(q, k, v, out, *rest):
            kernel(q, k, v, out[:, :-1].contiguous(), *rest)

        return call

    monkeypatch.setattr(emulated, "load_emulated", with_less_room)
    status, data = told(capsys, SMALL)
    assert status == 1
    assert data["relative_l2"] == {}
    (hazard,) = data["hazards"]
    assert hazard["kind"] == "out of bounds"
    assert hazard["line"] > 0
    assert "Forward" in hazard["kernel"]


@pytest.mark.slow
def test_gradients_are_compared_with_the_oracle(capsys):
    words = ["--arch", "sm_100a", "--head-dim", "32", "--backward", "--varlen", "--batch", "2"]
    status, data = told(capsys, [*SMALL, *words])
    assert (status, data["wrong"], data["hazards"]) == (0, [], [])
    assert set(data["relative_l2"]) == {"dq", "dk", "dv"}
    assert all(0 < error < 2.0**-8 for error in data["relative_l2"].values())
    assert {"compute", "reduce", "mma", "load"} <= set(data["counts"][2]["roles"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--backward", "--head-dim", "264"], "head_dim is 264"),
        (["--arch", "sm_80"], "'sm_80' is not emulated"),
        (["--head-dim", "100"], "head_dim is 100"),
        (["--heads", "3", "--kv-heads", "2"], "3 query heads"),
        (["--sms", "0"], "sms=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run_ends_with_status_2_and_the_reason(capsys, words, reason):
    assert main(["emulate", *words]) == 2
    assert reason in capsys.readouterr().err


def test_an_unknown_schedule_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["emulate", "--schedule", "fast"])
    assert caught.value.code == 2
    assert "round_robin" in capsys.readouterr().err
