"""Sizes at which 32-bit indices and launch limits break, compared by value where an oracle can afford it."""

from dataclasses import replace

import pytest
import torch

from attn4.reference import dense
from cases import case
from judge import Answer, compare_lse, compare_out, eager, judge, oracle, rows_mask
from large import need_memory
from poison import poisoned_memory

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("free_memory")]


def _run(name):
    named = case(name)
    inputs = named.inputs("cuda")
    with poisoned_memory():
        out, lse = named.run(inputs)
    return named, inputs, out, lse


@pytest.mark.parametrize("name", ["long causal", "long bhsd 256", "batch 65537", "71280 heads"])
def test_whole_result(name):
    named, inputs, out, lse = _run(name)
    judge(out, lse, oracle(named, inputs), eager(named, inputs))


def test_80000_segments():
    """Equal segments are a padded batch in disguise, for which the oracle needs no loop."""
    named, inputs, out, lse = _run("80000 segments")
    count = len(named.lens_q)
    padded = replace(named, lens_q=None, lens_k=None, batch=count, seqlen_q=16, seqlen_k=16)
    tensors = [x.unflatten(0, (count, 16)) for x in (inputs.q, inputs.k, inputs.v)]
    folded = replace(inputs.with_tensors(*tensors), lengths={})
    judge(
        out.unflatten(0, (count, 16)),
        lse.unflatten(1, (count, 16)).transpose(0, 1),
        oracle(padded, folded),
        eager(padded, folded),
    )


def _judge_rows(named, inputs, out, lse, rows, batch=0):
    """Compare single query rows of one sequence of a padded batch."""
    used = inputs.k.shape[1] if named.used_k is None else named.used_k[batch]
    for row in rows:
        mask = rows_mask(named.mask, inputs.q.shape[1] - row - 1)
        at = slice(row, row + 1)
        q, k, v = (
            inputs.q[batch : batch + 1, at],
            inputs.k[batch : batch + 1, :used],
            inputs.v[batch : batch + 1, :used],
        )
        truth = Answer(*dense(q, k, v, softmax_scale=named.softmax_scale, mask=mask))
        in_dtype = dense(q, k, v, softmax_scale=named.softmax_scale, mask=mask, precision=named.torch_dtype)
        yardstick = Answer(*(x.float() for x in in_dtype))
        empty = truth.lse == -torch.inf
        compare_out(out[batch : batch + 1, at], empty, truth.out, yardstick.out)
        compare_lse(lse[batch : batch + 1, :, at], empty, truth.lse, yardstick.lse)


def test_4_million_keys():
    need_memory(80)
    named, inputs, out, lse = _run("4 million keys")
    _judge_rows(named, inputs, out, lse, (0, 1, 1000, 2047))


def test_more_than_2_to_31_elements_in_q():
    need_memory(40)
    named, inputs, out, lse = _run("more than 2**31 elements in q")
    assert inputs.q.numel() > 2**31
    _judge_rows(named, inputs, out, lse, (0, 32767, 32768, 65535, 65536, 65663))


def test_more_than_2_to_31_elements_in_k():
    need_memory(40)
    named, inputs, out, lse = _run("more than 2**31 elements in k")
    assert inputs.k.numel() > 2**31
    for batch in (0, 8, 15, 16):
        _judge_rows(named, inputs, out, lse, (0,), batch)
