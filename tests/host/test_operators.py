"""The operators of torch.library: schema, shapes, gradients, and the same bits as the eager way past them."""

from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from attn4 import flash_attn_func, flash_attn_varlen_func
from attn4.ops import autograd, library, operands
from attn4.ops import gradient as backward_pass
from cases import CASES

CU = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
USED = torch.tensor([2, 0, 5], dtype=torch.int32)


class Watch(TorchDispatchMode):
    """A mode that sees every operation, as tracers and counters do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        self.seen.append(str(operation))
        return operation(*arguments, **(keywords or {}))


def _qkv(*shape, dtype=torch.float32, grad=False, kv_heads=None):
    shapes = [shape, *[(*shape[:-2], kv_heads or shape[-2], shape[-1])] * 2]
    return [torch.randn(*s, dtype=dtype).requires_grad_(grad) for s in shapes]


def _arguments(kind, grad):
    """Arguments of ``attn4::forward``, one of each kind of call."""
    packed = _qkv(9, 4, 8, grad=grad, kv_heads=2)
    padded = _qkv(3, 7, 2, 16, grad=grad)
    return {
        "dense": (*_qkv(2, 5, 4, 8, grad=grad, kv_heads=2), None, None, None, None, None, 0.3, 2, 0),
        "float64": _qkv(2, 5, 2, 8, grad=grad, dtype=torch.float64),
        "bfloat16": _qkv(2, 5, 2, 8, grad=grad, dtype=torch.bfloat16),
        "strided": [x.transpose(1, 2) for x in _qkv(2, 4, 5, 8, grad=grad)],
        "packed": (*packed, CU, CU, None, None, None, None, None, 0, True, True, None, None, 6, 6),
        "used": (*padded, None, None, None, USED),
        "no keys": [x[:, :rows] for x, rows in zip(_qkv(2, 5, 2, 8, grad=grad), (5, 0, 0), strict=True)],
    }[kind]


KINDS = [
    "dense",
    "packed",
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("float64", "bfloat16", "strided", "used", "no keys")),
]


@pytest.mark.fault("G7")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [False, True], ids=["values", "gradients"])
def test_forward_passes_torchs_own_check(kind, grad):
    opcheck(torch.ops.attn4.forward.default, _arguments(kind, grad))


def test_forward_without_lse_passes_torchs_own_check():
    arguments = operands.Operands(*_qkv(2, 5, 2, 8), return_lse=False)
    opcheck(torch.ops.attn4.forward.default, tuple(arguments))
    assert torch.ops.attn4.forward(*arguments)[1].numel() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "given", [(True, True), (True, False), pytest.param((False, True), marks=pytest.mark.slow)], ids=str
)
def test_backward_passes_torchs_own_check(kind, given):
    arguments = _arguments(kind, False)
    results = torch.ops.attn4.forward(*arguments)
    gradients = [torch.randn_like(x) if wanted else None for x, wanted in zip(results, given, strict=True)]
    opcheck(torch.ops.attn4.backward.default, (*gradients, *results, *arguments))


def test_operands_travel_in_the_order_of_the_schema():
    names = tuple(x.name for x in torch.ops.attn4.forward.default._schema.arguments)
    assert names == operands.Operands._fields
    backward = tuple(x.name for x in torch.ops.attn4.backward.default._schema.arguments)
    assert backward == ("grad_out", "grad_lse", "out", "lse", *names)
    defaults = {x.name: x.default_value for x in torch.ops.attn4.forward.default._schema.arguments[3:]}
    assert defaults == operands.Operands._field_defaults


SMALL = [
    c
    for c in CASES
    if c.values == "gaussian"
    and (c.fault[:1] in ("C", "D") or c.name.startswith(("packed", "used", "padded", "no ")))
    and 64 in (c.head_dim, c.head_dim - 64)
]


@pytest.mark.parametrize("named", SMALL, ids=lambda named: named.name)
def test_an_operator_gives_the_bits_of_the_eager_call(named):
    named = replace(named, head_dim=16, head_dim_v=None, dtype="bfloat16")
    inputs = named.inputs("cpu")

    def gradients():
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out, lse = named.run(inputs.with_tensors(*leaves), return_lse=True)
        loss = out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
        return (out, lse, *torch.autograd.grad(loss, leaves))

    eager = gradients()
    with Watch() as watch:
        operator = gradients()
    assert [name for name in watch.seen if "attn4" in name] == [
        "attn4.forward.default",
        "attn4.backward.default",
    ]
    for found, expected in zip(operator, eager, strict=True):
        assert torch.equal(found, expected)


def test_eager_calls_go_past_the_operator(monkeypatch):
    q, k, v = _qkv(1, 5, 2, 8, grad=True)
    monkeypatch.setattr(torch.ops, "attn4", None)
    flash_attn_func(q, k, v, causal=True).sum().backward()
    assert q.grad.isfinite().all()
    assert torch.ops.attn4 is None


@pytest.mark.parametrize("inputs", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_only_what_requires_a_gradient_gets_one(inputs):
    q, k, v = _qkv(2, 9, 4, 8, kv_heads=2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    flash_attn_func(*leaves, causal=True).square().sum().backward()
    given = [x.clone().requires_grad_(i in inputs) for i, x in enumerate((q, k, v))]
    flash_attn_func(*given, causal=True).square().sum().backward()
    for index, (some, full) in enumerate(zip(given, leaves, strict=True)):
        assert (some.grad is None) == (index not in inputs)
        assert some.grad is None or torch.equal(some.grad, full.grad)


def test_a_gradient_of_an_unused_result_costs_no_graph_and_no_error():
    q, k, v = _qkv(1, 5, 2, 8, grad=True)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    (only_lse,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
    both = torch.autograd.grad(lse.sum() + 0 * out.sum(), q)[0]
    torch.testing.assert_close(only_lse, both)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced"])
def test_strides_of_an_arriving_gradient_change_nothing(layout):
    q, k, v = _qkv(2, 9, 4, 8, grad=True)
    out = flash_attn_func(q, k, v, causal=True)
    arriving = {
        "expanded": torch.ones(()).expand(out.shape),
        "transposed": torch.randn(2, 4, 9, 8).transpose(1, 2),
        "sliced": torch.randn(2, 9, 4, 16)[..., ::2],
    }[layout]
    found = torch.autograd.grad(out, (q, k, v), arriving, retain_graph=True)
    expected = torch.autograd.grad(out, (q, k, v), arriving.contiguous())
    for gradient, wanted in zip(found, expected, strict=True):
        assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_to_the_same_gradients(reentrant):
    q, k, v = _qkv(2, 9, 4, 8, grad=True)

    def loss(q, k, v):
        return flash_attn_func(q, k, v, causal=True).square().sum()

    torch.utils.checkpoint.checkpoint(loss, q, k, v, use_reentrant=reentrant).backward()
    for x, wanted in zip((q, k, v), torch.autograd.grad(loss(q, k, v), (q, k, v)), strict=True):
        assert torch.equal(x.grad, wanted)


def test_a_checkpoint_may_keep_the_results_of_attention_by_the_operators_name():
    q, k, v = _qkv(2, 9, 4, 8, grad=True)
    runs = []

    def keep(_context, operation, *_arguments, **_keywords):
        runs.append(str(operation))
        kept = operation == torch.ops.attn4.forward.default
        policy = torch.utils.checkpoint.CheckpointPolicy
        return policy.MUST_SAVE if kept else policy.PREFER_RECOMPUTE

    def contexts():
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(keep)

    out = torch.utils.checkpoint.checkpoint(
        lambda q, k, v: flash_attn_func(2 * q, k, v).square(),
        q,
        k,
        v,
        use_reentrant=False,
        context_fn=contexts,
    )
    found = torch.autograd.grad(out.sum(), (q, k, v))
    expected = torch.autograd.grad(flash_attn_func(2 * q, k, v).square().sum(), (q, k, v))
    assert "attn4.forward.default" in runs
    for gradient, wanted in zip(found, expected, strict=True):
        assert torch.equal(gradient, wanted)


def test_meta_tensors_give_the_shapes_and_no_work():
    q, k, v = (x.to("meta") for x in _qkv(2, 9, 4, 8, kv_heads=2))
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (out.device.type, out.shape, lse.shape, lse.dtype) == ("meta", q.shape, (2, 4, 9), torch.float32)
    packed = [x.to("meta") for x in _qkv(9, 4, 8)]
    cu_seqlens = CU.to("meta")
    out = flash_attn_varlen_func(*packed, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    assert out.shape == (9, 4, 8)


def test_meta_tensors_have_gradients_of_their_shapes():
    q, k, v = (x.to("meta").requires_grad_() for x in _qkv(2, 9, 4, 8, kv_heads=2))
    flash_attn_func(q, k, v).sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [q.shape, k.shape, v.shape]


@pytest.mark.fault("G7")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_give_fake_results_of_their_device(device):
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 9, 4, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
        out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert (out.device.type, lse.device.type) == (device, device)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
        q.shape,
        torch.bfloat16,
        (2, 4, 9),
        torch.float32,
    )


def test_fake_tensors_are_checked_like_real_ones():
    with FakeTensorMode():
        q = torch.empty(2, 9, 4, 64, dtype=torch.float32, device="cuda")
        short = torch.empty(2, 3, 4, 64, dtype=torch.float32, device="cuda")
        with pytest.raises(NotImplementedError, match="bfloat16, float16"):
            flash_attn_func(q, q, q)
        with pytest.raises(ValueError, match="length"):
            flash_attn_func(q, q, short)


@pytest.mark.parametrize("function", [flash_attn_func, None], ids=["attn4", "torch"])
def test_autocast_takes_the_dtype_of_the_region_as_torch_does(function):
    q, k, v = _qkv(2, 9, 4, 8, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if function is None:
            out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        else:
            out = function(q, k, v)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {x.grad.dtype for x in (q, k, v)} == {torch.float32}


def test_autocast_gives_the_bits_of_cast_inputs_backward_inside_the_region_or_not():
    q, k, v = _qkv(2, 9, 4, 8, kv_heads=2)
    leaves = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    expected = flash_attn_func(*leaves, causal=True)
    expected_grads = torch.autograd.grad(expected.float().square().sum(), leaves)
    for inside in (True, False):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = flash_attn_func(*given, causal=True)
            loss = out.float().square().sum()
            grads = torch.autograd.grad(loss, given) if inside else None
        grads = grads or torch.autograd.grad(loss, given)
        assert torch.equal(out, expected)
        for found, wanted in zip(grads, expected_grads, strict=True):
            assert torch.equal(found, wanted.float())


def test_autocast_leaves_float64_alone():
    q, k, v = _qkv(2, 9, 4, 8, dtype=torch.float64)
    expected = flash_attn_func(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flash_attn_func(q, k, v), expected)


def test_reverse_mode_of_functorch_is_that_of_autograd():
    q, k, v = _qkv(2, 9, 4, 8)
    found = torch.func.grad(lambda *x: flash_attn_func(*x, causal=True).square().sum(), argnums=(0, 1, 2))(
        q, k, v
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(flash_attn_func(*leaves, causal=True).square().sum(), leaves)
    for gradient, wanted in zip(found, expected, strict=True):
        assert torch.equal(gradient, wanted)


def test_vmap_is_refused_with_the_way_out():
    with pytest.raises(NotImplementedError, match=r"vmap.*batch axis"):
        torch.vmap(flash_attn_func)(*_qkv(3, 2, 9, 4, 8))
    with pytest.raises(NotImplementedError, match=r"vmap.*batch axis"):
        torch.vmap(torch.ops.attn4.forward)(*_qkv(3, 2, 9, 4, 8))


def test_tangents_are_refused_not_dropped():
    q, k, v = _qkv(2, 9, 4, 8)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        flash_attn_func(q, forward_ad.make_dual(k, k), v)
    with forward_ad.dual_level():
        assert torch.equal(flash_attn_func(q, k, v), flash_attn_func(q.clone(), k, v))


@pytest.mark.parametrize("way", ["eager", "operator", "functorch"])
def test_second_derivatives_are_refused_not_zero(way):
    q, k, v = _qkv(1, 4, 1, 8, grad=True)
    if way == "functorch":
        gradient = torch.func.grad(lambda q: flash_attn_func(q, k.detach(), v.detach()).square().sum())
        with pytest.raises(NotImplementedError, match="once differentiable"):
            torch.func.grad(lambda q: gradient(q).square().sum())(q.detach())
        return
    out = flash_attn_func(q, k, v) if way == "eager" else torch.ops.attn4.forward(q, k, v)[0]
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="once differentiable"):
        first.square().sum().backward()


def test_a_gradient_needs_the_lse_that_was_left_out():
    arguments = operands.Operands(*_qkv(1, 4, 1, 8, grad=True), return_lse=False)
    with pytest.raises(ValueError, match="return_lse=False"):
        torch.ops.attn4.forward(*arguments)


def test_a_gradient_that_no_kernel_gives_is_refused_by_the_operator_too(monkeypatch):
    missing = "A machine without a backward kernel; there is the reference."
    monkeypatch.setattr(backward_pass, "runnable", lambda *_: (missing,))
    q, k, v = _qkv(1, 16, 1, 192, dtype=torch.bfloat16, grad=True)
    where = {"backend": "emulator", "arch": "sm_90a"}
    with pytest.raises(NotImplementedError, match=r"requires a gradient.*reference"):
        library.check_gradient(operands.Operands(q, k, v, **where))
    with Watch(), pytest.raises(NotImplementedError, match=r"requires a gradient.*reference"):
        flash_attn_func(q, k, v, **where)


def test_no_grad_and_inference_record_nothing(monkeypatch):
    monkeypatch.setattr(autograd.Attention, "apply", None)
    q, k, v = _qkv(1, 4, 1, 8, grad=True)
    with torch.no_grad():
        assert flash_attn_func(q, k, v).grad_fn is None
    with torch.inference_mode():
        assert flash_attn_func(q, k, v).is_inference()


def test_out_is_filled_under_a_mode_and_checked():
    q, k, v = _qkv(2, 5, 2, 8)
    out = torch.full_like(q, torch.nan)
    with Watch():
        assert flash_attn_func(q, k, v, out=out) is out
        with pytest.raises(ValueError, match="out has shape"):
            flash_attn_func(q, k, v, out=out[:1])
        with pytest.raises(ValueError, match="gradients are recorded"):
            flash_attn_func(q.clone().requires_grad_(), k, v, out=out)
    assert torch.equal(out, flash_attn_func(q, k, v))
