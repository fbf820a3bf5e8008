"""What is refused, before anything is launched: each message names the value, the limit and the way out."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn4 import flash_attn_func, flash_attn_varlen_func


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def elsewhere(*shape):
    """A tensor that only claims to be on a device of another kind."""
    with FakeTensorMode():
        return torch.empty(*shape, device="xpu")


def dense(q=None, k=None, v=None, **keywords):
    q, k, v = (rand(2, 6, 4, 8) if x is None else x for x in (q, k, v))
    return flash_attn_func(q, k, v, **keywords)


def packed(q=None, k=None, v=None, **keywords):
    q, k, v = (rand(9, 4, 8) if x is None else x for x in (q, k, v))
    keywords = {"cu_seqlens_q": ints(0, 3, 9), "cu_seqlens_k": ints(0, 3, 9)} | keywords
    return flash_attn_varlen_func(q, k, v, **keywords)


BAD = {
    "an array of numpy": (
        dense,
        {"q": np.zeros((2, 6, 4, 8))},
        TypeError,
        ["q", "ndarray", "torch.as_tensor"],
    ),
    "a list": (dense, {"v": [1.0]}, TypeError, ["v", "list"]),
    "a sparse tensor": (dense, {"k": rand(2, 6, 4, 8).to_sparse()}, ValueError, ["k", "sparse", "strided"]),
    "integers": (dense, {"q": torch.ones(2, 6, 4, 8).int()}, ValueError, ["q", "int32", "bfloat16"]),
    "mixed dtypes": (dense, {"k": rand(2, 6, 4, 8).half()}, ValueError, ["float32", "float16", "equal"]),
    "mixed devices": (dense, {"v": rand(2, 6, 4, 8).to("meta")}, ValueError, ["cpu", "meta", "one device"]),
    "a device that is neither GPU nor CPU": (
        dense,
        {name: elsewhere(2, 6, 4, 8) for name in "qkv"},
        NotImplementedError,
        ["xpu", "reference"],
    ),
    "three axes": (dense, {"q": rand(6, 4, 8)}, ValueError, ["(6, 4, 8)", "flash_attn_varlen_func"]),
    "five axes": (dense, {"q": rand(1, 2, 6, 4, 8)}, ValueError, ["(1, 2, 6, 4, 8)", "(batch, seqlen"]),
    "other head dims": (dense, {"q": rand(2, 6, 4, 16)}, ValueError, ["16", "8", "equal"]),
    "empty head dims": (
        dense,
        {name: rand(2, 6, 4, 0) for name in "qkv"},
        ValueError,
        ["at least 1"],
    ),
    "heads that do not divide": (dense, {"q": rand(2, 6, 6, 8)}, ValueError, ["6", "4", "multiple"]),
    "fewer heads than k": (dense, {"q": rand(2, 6, 2, 8)}, ValueError, ["2 heads", "4", "multiple"]),
    "no heads": (dense, {name: rand(2, 6, 0, 8) for name in "qkv"}, ValueError, ["0 heads", "positive"]),
    "K and V of different length": (
        dense,
        {"v": rand(2, 5, 4, 8)},
        ValueError,
        ["(2, 6,", "(2, 5,", "length"],
    ),
    "K and V of different heads": (dense, {"v": rand(2, 6, 2, 8)}, ValueError, ["heads"]),
    "K and V of different batch": (dense, {"v": rand(1, 6, 4, 8)}, ValueError, ["batch"]),
    "Q and K of different batch": (dense, {"q": rand(3, 6, 4, 8)}, ValueError, ["3", "2", "equally many"]),
    "a last stride that is not 1": (
        dense,
        {"k": rand(2, 6, 8, 4).transpose(2, 3)},
        ValueError,
        ["k has strides", "must be 1", "contiguous"],
    ),
    "a scale of 0": (dense, {"softmax_scale": 0.0}, ValueError, ["softmax_scale=0.0", "greater than 0"]),
    "a negative scale": (dense, {"softmax_scale": -1.0}, ValueError, ["-1.0", "scale q"]),
    "a scale that is not a number": (dense, {"softmax_scale": float("nan")}, ValueError, ["nan", "finite"]),
    "an infinite scale": (dense, {"softmax_scale": float("inf")}, ValueError, ["inf", "finite"]),
    "a tensor as scale": (dense, {"softmax_scale": torch.tensor(1.0)}, TypeError, ["Tensor", "float"]),
    "a tensor as causal": (dense, {"causal": torch.tensor(True)}, TypeError, ["causal", "bool"]),
    "a string as causal": (dense, {"causal": "yes"}, TypeError, ["causal", "bool", "str"]),
    "one window bound": (dense, {"window_size": (3,)}, TypeError, ["(left, right)", "(3,)"]),
    "an int as window": (dense, {"window_size": 3}, TypeError, ["(left, right)", "3"]),
    "no window tuple": (dense, {"window_size": None}, TypeError, ["(left, right)", "None"]),
    "a float bound": (dense, {"window_size": (3.0, 1)}, TypeError, ["3.0", "int"]),
    "an unknown backend": (dense, {"backend": "cuda"}, ValueError, ["'cuda'", "'gpu'", "'reference'"]),
    "the GPU for CPU tensors": (dense, {"backend": "gpu"}, ValueError, ["cpu", "CUDA"]),
    "float32 on the emulator": (dense, {"backend": "emulator"}, NotImplementedError, ["float32", "bfloat16"]),
    "softcap": (dense, {"softcap": 30.0}, NotImplementedError, ["softcap=30.0", "0.0"]),
    "dropout": (dense, {"dropout_p": 0.1}, NotImplementedError, ["dropout_p", "0.0"]),
    "a sink": (dense, {"learnable_sink": rand(4)}, NotImplementedError, ["learnable_sink", "None"]),
    "split KV": (dense, {"num_splits": 4}, NotImplementedError, ["num_splits", "1"]),
    "paging": (packed, {"page_table": ints(1)}, NotImplementedError, ["page_table", "None"]),
    "ALiBi": (dense, {"alibi_slopes": rand(4)}, NotImplementedError, ["alibi_slopes"]),
    "a score modifier": (dense, {"score_mod": max}, NotImplementedError, ["score_mod"]),
    "an unknown keyword": (
        dense,
        {"casual": True},
        TypeError,
        ["casual", "unexpected keyword", "flash_attn_func"],
    ),
    "an unknown keyword, packed": (packed, {"x": 1}, TypeError, ["'x'", "flash_attn_varlen_func"]),
    "out of another shape": (
        dense,
        {"out": rand(2, 6, 4, 9)},
        ValueError,
        ["out", "(2, 6, 4, 9)", "(2, 6, 4, 8)"],
    ),
    "out of another dtype": (
        dense,
        {"out": rand(2, 6, 4, 8).half()},
        ValueError,
        ["out", "float16", "float32"],
    ),
    "out that is strided": (
        dense,
        {"out": rand(2, 4, 6, 8).transpose(1, 2)},
        ValueError,
        ["out must be contiguous", "out=None"],
    ),
    "out that is misaligned": (
        dense,
        {"out": rand(2 * 6 * 4 * 8 + 1)[1:].view(2, 6, 4, 8)},
        ValueError,
        ["16 bytes", "out=None"],
    ),
    "out that is no tensor": (dense, {"out": 3}, TypeError, ["out", "int"]),
    "int64 cu_seqlens": (
        packed,
        {"cu_seqlens_q": ints(0, 3, 9, dtype=torch.int64)},
        ValueError,
        ["int64", ".int()"],
    ),
    "a list as cu_seqlens": (packed, {"cu_seqlens_k": [0, 3, 9]}, ValueError, ["cu_seqlens_k", "list"]),
    "cu_seqlens elsewhere": (
        packed,
        {"cu_seqlens_q": ints(0, 3, 9).to("meta")},
        ValueError,
        ["meta", "cpu", ".to("],
    ),
    "cu_seqlens of two axes": (
        packed,
        {"cu_seqlens_q": ints(0, 3, 9)[None]},
        ValueError,
        ["(1, 3)", "(batch + 1,)"],
    ),
    "no cu_seqlens entries": (packed, {"cu_seqlens_q": ints()}, ValueError, ["empty", "batch + 1"]),
    "decreasing cu_seqlens": (
        packed,
        {"cu_seqlens_q": ints(0, 5, 3)},
        ValueError,
        ["decreases from 5 to 3", "entry 2"],
    ),
    "cu_seqlens from 1": (
        packed,
        {"cu_seqlens_k": ints(1, 3, 9)},
        ValueError,
        ["cu_seqlens_k[0] is 1", "row 0"],
    ),
    "cu_seqlens past the end": (packed, {"cu_seqlens_k": ints(0, 3, 10)}, ValueError, ["10", "9 rows"]),
    "unequal numbers of sequences": (packed, {"cu_seqlens_k": ints(0, 9)}, ValueError, ["2 sequences", "1"]),
    "padded Q with cu_seqlens": (packed, {"q": rand(2, 6, 4, 8)}, ValueError, ["(2, 6, 4, 8)", "flatten"]),
    "packed K without cu_seqlens": (
        packed,
        {"cu_seqlens_k": None},
        ValueError,
        ["(9, 4, 8)", "cu_seqlens_k"],
    ),
    "a tensor as max_seqlen": (
        packed,
        {"max_seqlen_q": torch.tensor(6)},
        ValueError,
        ["max_seqlen_q is a tensor", "int", "None", "hint"],
    ),
    "a float as max_seqlen": (packed, {"max_seqlen_k": 6.0}, TypeError, ["max_seqlen_k", "float"]),
    "a negative max_seqlen": (packed, {"max_seqlen_k": -1}, ValueError, ["max_seqlen_k=-1", "None"]),
    "seqused of another batch": (packed, {"seqused_k": ints(1)}, ValueError, ["seqused_k", "(1,)", "(2,)"]),
    "int64 seqused": (
        packed,
        {"seqused_k": ints(1, 1, dtype=torch.int64)},
        ValueError,
        ["seqused_k", "int64"],
    ),
    "a list as seqused": (packed, {"seqused_q": [1, 1]}, TypeError, ["seqused_q", "list"]),
    "seqused past its sequence": (
        packed,
        {"seqused_k": ints(1, 7)},
        ValueError,
        ["seqused_k[1] is 7", "0 to 6"],
    ),
    "negative seqused": (packed, {"seqused_q": ints(-1, 7)}, ValueError, ["seqused_q[0] is -1", "0 to 3"]),
}


@pytest.mark.fault("B11", "B12", "D16", "F6", "E9")
@pytest.mark.parametrize("name", BAD)
def test_refused_with_the_value_and_the_way_out(name):
    function, keywords, kind, words = BAD[name]
    with pytest.raises(kind) as caught:
        function(**keywords)
    message = str(caught.value)
    assert type(caught.value) is kind
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        return operation(*arguments, **(keywords or {}))


def recorded(function):
    """The helper, with a gradient required of what it passes for q."""

    def call(q=None, **keywords):
        q = rand(2, 6, 4, 8) if q is None and function is dense else rand(9, 4, 8) if q is None else q
        if isinstance(q, torch.Tensor) and q.is_floating_point():
            q = q.requires_grad_()
        return function(q=q, **keywords)

    return call


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("mode", [False, True], ids=["eager", "watched"])
def test_refused_in_the_same_words_where_a_gradient_is_recorded(name, mode):
    function, keywords, kind, words = BAD[name]
    if name.startswith("out "):
        kind, words = (TypeError, ValueError), ["out"]
    with Watch() if mode else nullcontext(), pytest.raises(kind) as caught:
        recorded(function)(**keywords)
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"


def test_good_input_of_the_same_helpers_passes():
    assert dense().shape == (2, 6, 4, 8)
    assert packed().shape == (9, 4, 8)


def test_out_among_the_inputs_is_refused():
    q = rand(2, 6, 4, 8)
    with pytest.raises(ValueError, match="shares its memory"):
        dense(q=q, out=q)


def test_out_while_gradients_are_recorded_is_refused():
    q = rand(2, 6, 4, 8).requires_grad_()
    with pytest.raises(ValueError, match="gradients are recorded"):
        dense(q=q, out=torch.empty(2, 6, 4, 8))
    with torch.no_grad():
        dense(q=q, out=torch.empty(2, 6, 4, 8))


def test_more_rows_than_int32_can_mask_are_refused():
    q = torch.empty(1, 1, 1, 8).expand(1, 2**30, 1, 8)
    with pytest.raises(ValueError, match=str(2**30)):
        dense(q=q, k=q, v=q)
