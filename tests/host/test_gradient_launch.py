"""The way to a backward kernel, with a kernel that does in torch what its call promises."""

import gc
import weakref

import pytest
import torch

from attn4 import flash_attn_func, flash_attn_varlen_func
from attn4.machine import machine
from attn4.mask import Mask
from attn4.ops import check, dispatch, gpu, prepared, workspace
from attn4.plan.workspace import workspace as layout
from attn4.reference import Lengths, backward, forward
from attn4.reference.backward import Saved
from cases import CASES, case
from poison import poisoned_memory

NAMES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


class ContractKernel:
    """Checks what it is called with, and computes it by the reference."""

    def __init__(self, plan):
        self.plan = plan
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        (self.forward if self.plan.direction == "forward" else self.backward)(*arguments)

    def forward(self, q, k, v, out, lse, scale, left, right, *rest):
        found, found_lse = forward(
            q, k, v, softmax_scale=scale, mask=self.mask(left, right), lengths=self.lengths(rest[:4])
        )
        out.copy_(found)
        if lse is not None:
            lse.copy_(found_lse)

    def backward(self, q, k, v, out, dout, lse, dlse, dq, dk, dv, *rest):
        minus_lse, minus_delta, dq_sum, scale, left, right, *vectors, counter, ctas = rest
        assert (counter is not None) == self.plan.schedule.counted
        assert ctas > 0
        for x in (q, k, v, out, dout, dq, dk, dv):
            assert x.stride(-1) == 1
            assert x.data_ptr() % 16 == 0
            assert all(stride % 8 == 0 for stride in x.stride()[:-1])
        for x in (minus_lse, minus_delta, dq_sum):
            assert x.is_contiguous()
            assert x.data_ptr() % 128 == 0
            x.fill_(torch.nan)
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()
        assert (dlse is not None) == self.plan.lse
        assert dlse is None or dlse.is_contiguous()
        lengths = self.lengths(vectors)
        batch = q.shape[0] if lengths.cu_seqlens_q is None else len(lengths.cu_seqlens_q) - 1
        room = layout(self.plan, batch, q.shape[-2], q.shape[-3])
        assert (minus_lse.shape, minus_delta.shape, dq_sum.shape) == (
            room.row_stats,
            room.row_stats,
            room.dq_sum,
        )
        saved = Saved(
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            lengths=lengths,
            softmax_scale=scale,
            mask=self.mask(left, right),
        )
        for target, gradient in zip((dq, dk, dv), backward(saved, dout, dlse), strict=True):
            target.copy_(gradient)

    def mask(self, left, right):
        return {"full": Mask(), "causal": Mask(None, 0), "window": Mask(left, right)}[self.plan.mask]

    def lengths(self, vectors):
        assert [x is not None for x in vectors] == [getattr(self.plan, name) for name in NAMES]
        return Lengths(**dict(zip(NAMES, vectors, strict=True)))


@pytest.fixture
def kernels(monkeypatch):
    """Kernels by plan; the machine is a B200 that lives in host memory."""
    loaded = {}
    monkeypatch.setattr(gpu, "kernel_for", lambda plan: loaded.setdefault(plan, ContractKernel(plan)))
    monkeypatch.setattr(gpu, "machine_of", lambda device: machine("sm_100a"))
    monkeypatch.setattr(gpu, "sm_count", lambda device: 148)
    monkeypatch.setattr(gpu, "_current_device", lambda: -1)
    monkeypatch.setattr(workspace, "counter", lambda device: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(check, "backend_of", lambda name, device: "reference" if name else "gpu")
    for table in ("_launches", "_gradients"):
        monkeypatch.setattr(prepared, table, {})
    for table in ("_known", "_recent"):
        monkeypatch.setattr(dispatch, table, {})
    return loaded


def launched(kernels, direction="backward"):
    return [call for plan, kernel in kernels.items() if plan.direction == direction for call in kernel.calls]


def _qkv(*shape, kv_heads=None, grad=True):
    shapes = [shape, *[(*shape[:-2], kv_heads or shape[-2], shape[-1])] * 2]
    return [torch.randn(*s, dtype=torch.bfloat16).requires_grad_(grad) for s in shapes]


def gradients(named, inputs, **keywords):
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = named.run(inputs.with_tensors(*leaves), return_lse=True, **keywords)
    loss = out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
    return (out, lse, *torch.autograd.grad(loss, leaves))


LISTED = [
    c.name
    for c in CASES
    if c.values == "gaussian"
    and max(c.head_dim, c.dim_v) <= 128
    and (c.fault[:1] in ("A", "C", "D") or c.name.startswith(("packed", "padded", "used", "no ", "layout")))
]


@pytest.mark.parametrize("name", LISTED)
def test_a_kernel_that_keeps_the_contract_gives_the_gradients_of_the_reference(kernels, name):
    named = case(name)
    inputs = named.inputs("cpu")
    with poisoned_memory():
        found = gradients(named, inputs)
    expected = gradients(named, inputs, backend="reference")
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    assert bool(launched(kernels)) == named.launches


def test_the_gradient_of_a_sum_has_no_strides_and_is_copied(kernels):
    leaves = _qkv(2, 64, 4, 64)
    flash_attn_func(*leaves).sum().backward()
    dout = launched(kernels)[0][4]
    assert dout.is_contiguous()
    assert (dout == 1).all()


def test_a_gradient_that_a_kernel_can_read_is_not_copied(kernels):
    out = flash_attn_func(*_qkv(2, 64, 4, 64))
    arriving = torch.randn(2, 4, 64, 64, dtype=torch.bfloat16).transpose(1, 2)
    out.backward(arriving)
    assert launched(kernels)[0][4].data_ptr() == arriving.data_ptr()


def test_what_arrives_for_a_row_without_a_key_is_zero_before_a_kernel_reads_it(kernels):
    """A kernel would multiply it by 0, and NaN would be in dK and dV."""
    q, k, v = (x.detach() for x in _qkv(2, 60, 2, 64))
    leaves = [x.requires_grad_() for x in (q, k[:, :40], v[:, :40])]
    out, lse = flash_attn_func(*leaves, causal=True, return_lse=True)
    arriving = torch.randn_like(out)
    arriving[:, :20] = torch.nan
    torch.autograd.grad((out, lse), leaves, (arriving, torch.ones_like(lse)))
    dout = launched(kernels)[0][4]
    assert torch.equal(dout, arriving.nan_to_num(0.0))
    assert arriving[:, :20].isnan().all()


def test_what_arrives_is_not_copied_where_every_row_has_a_key(kernels):
    cu_seqlens = torch.tensor([0, 20, 64], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    arriving = torch.randn(2, 64, 4, 64, dtype=torch.bfloat16)
    flash_attn_func(*_qkv(2, 64, 4, 64), causal=True).backward(arriving)
    flash_attn_varlen_func(*_qkv(64, 4, 64), window_size=(9, 0), **lengths).backward(arriving[0])
    assert [call[4].data_ptr() for call in launched(kernels)] == [arriving.data_ptr()] * 2


def test_a_kernel_without_a_gradient_of_the_lse_is_one_of_its_own(kernels):
    leaves = _qkv(2, 64, 4, 64)
    out, lse = flash_attn_func(*leaves, return_lse=True)
    torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    torch.autograd.grad(lse.sum(), leaves[:2], retain_graph=True)
    (plain,), (with_lse,) = (
        [k.calls for p, k in kernels.items() if p.direction == "backward" and p.lse == given]
        for given in (False, True)
    )
    assert plain[0][6] is None
    assert with_lse[0][4].count_nonzero() == 0
    assert (with_lse[0][6] == 1).all()


def test_the_forward_kernel_writes_an_lse_only_for_gradients(kernels):
    q, k, v = _qkv(2, 64, 4, 64)
    flash_attn_func(q, k, v)
    with torch.no_grad():
        flash_attn_func(q, k, v)
    assert [plan.lse for plan in kernels] == [True, False]


def test_calls_of_one_shape_differ_in_what_needs_a_gradient(kernels):
    tensors = _qkv(2, 64, 4, 64, grad=False)
    given = [
        [x.clone().requires_grad_(needed) for x, needed in zip(tensors, needs, strict=True)]
        for needs in ((True, True, True), (False, True, False), (False, False, False), (True, False, True))
    ]
    for _ in range(2):
        for leaves in (*given, *reversed(given)):
            out = flash_attn_func(*leaves)
            assert out.requires_grad == any(x.requires_grad for x in leaves)
            with torch.no_grad():
                assert torch.equal(flash_attn_func(*leaves), out)
            if out.requires_grad:
                out.sum().backward()
            assert [x.grad is not None for x in leaves] == [x.requires_grad for x in leaves]


def test_out_is_refused_call_after_call_while_gradients_are_recorded(kernels):
    leaves = _qkv(2, 64, 4, 64)
    flash_attn_func(*leaves)
    for _ in range(2):
        with pytest.raises(ValueError, match="while gradients are recorded"):
            flash_attn_func(*leaves, out=torch.empty(2, 64, 4, 64, dtype=torch.bfloat16))


def test_what_is_prepared_once_serves_all_calls_of_a_signature(kernels, monkeypatch):
    leaves = _qkv(2, 64, 4, 64)
    flash_attn_func(*leaves).sum().backward()
    monkeypatch.setattr(prepared, "checked", None)
    monkeypatch.setattr(gpu, "prepare", None)
    monkeypatch.setattr(prepared, "prepare_gradient", None)
    flash_attn_func(*leaves).sum().backward()
    assert len(launched(kernels)) == 2


def test_a_call_like_the_last_one_is_found_without_its_signature(kernels, monkeypatch):
    def forbidden(*_):
        raise AssertionError("a signature is hashed")

    leaves = _qkv(2, 64, 4, 64)
    flash_attn_func(*leaves)
    monkeypatch.setattr(dispatch, "signature", forbidden)
    flash_attn_func(*leaves)
    flash_attn_func(*(x.detach().clone().requires_grad_() for x in leaves))
    with pytest.raises(AssertionError, match="hashed"):
        flash_attn_func(*(x[:, :32] for x in leaves))


@pytest.mark.fault("G11")
@pytest.mark.parametrize(
    "change",
    [{"causal": True}, {"window_size": (4, 4)}, {"softmax_scale": 0.5}, {"return_lse": True}],
    ids=lambda change: next(iter(change)),
)
def test_another_option_is_another_gradient_in_both_orders(kernels, change):
    """The fault of a key that misses an option, so that the second gradient is the first one's."""
    tensors = _qkv(2, 64, 4, 64, grad=False)
    for keywords in ({}, change, {}, change):
        found, expected = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
        for leaves, backend in ((found, None), (expected, "reference")):
            out = flash_attn_func(*leaves, backend=backend, **keywords)
            (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x.grad, y.grad)


@pytest.mark.fault("G1", "G2")
@pytest.mark.parametrize(
    "feature",
    [{"score_mod": max}, {"mask_mod": max}, {"learnable_sink": torch.zeros(4, requires_grad=True)}],
    ids=lambda feature: next(iter(feature)),
)
def test_a_feature_that_is_not_built_is_refused_not_left_out_of_the_gradient(kernels, feature):
    with pytest.raises(NotImplementedError, match=next(iter(feature))):
        flash_attn_func(*_qkv(1, 64, 4, 64), **feature)
    assert not kernels


@pytest.mark.fault("G8")
def test_lengths_of_any_value_take_the_same_kernels(kernels):
    """The fault of compiling anew in each backward pass, for a hint that changes."""
    for total, longest in ((60, 40), (90, 41), (130, 42)):
        leaves = _qkv(total, 2, 64)
        cu_seqlens = torch.tensor([0, 20, total], dtype=torch.int32)
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        out = flash_attn_varlen_func(*leaves, max_seqlen_q=longest, max_seqlen_k=longest, **lengths)
        out.sum().backward()
    assert [plan.direction for plan in kernels] == ["forward", "backward"]


@pytest.mark.fault("D4")
def test_stride_zero_of_a_batch_of_one_is_no_stride_of_a_later_batch(kernels):
    single = [x.as_strided((1, *x.shape[1:]), (0, *x.stride()[1:])) for x in _qkv(1, 64, 2, 64, grad=False)]
    for tensors in (single, _qkv(3, 64, 2, 64, grad=False), single):
        found, expected = ([x.detach().requires_grad_() for x in tensors] for _ in range(2))
        flash_attn_func(*found, causal=True).square().sum().backward()
        flash_attn_func(*expected, causal=True, backend="reference").square().sum().backward()
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x.grad, y.grad)


@pytest.mark.fault("C13")
def test_only_empty_segments_launch_nothing_and_give_zeros(kernels):
    leaves = _qkv(4, 2, 64)
    cu_seqlens = torch.zeros(1, dtype=torch.int32)
    out = flash_attn_varlen_func(
        *leaves, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=0, max_seqlen_k=0
    )
    out.sum().backward()
    assert not kernels
    assert all(x.grad.count_nonzero() == 0 for x in leaves)


def test_deterministic_is_asked_of_the_backward_kernel(kernels):
    for deterministic in (False, True):
        flash_attn_func(*_qkv(1, 64, 2, 64), deterministic=deterministic).sum().backward()
    asked = [plan.deterministic for plan in kernels if plan.direction == "backward"]
    assert asked == [False, True]


@pytest.mark.parametrize("backend", [None, "reference"])
def test_what_is_kept_for_later_calls_holds_no_tensor(kernels, backend):
    q, k, v = _qkv(1, 64, 2, 64)
    out, lse = flash_attn_func(q, k, v, return_lse=True, backend=backend)
    held = [weakref.ref(x) for x in (q, k, v, out, lse)]
    out.sum().backward()
    for kernel in kernels.values():
        kernel.calls.clear()
    del q, k, v, out, lse
    gc.collect()
    assert [x() is None for x in held] == [True] * 5


@pytest.mark.parametrize("backend", [None, "reference"])
def test_hooks_see_all_that_is_saved(kernels, backend):
    leaves = _qkv(1, 64, 2, 64)
    packed = []

    def pack(x):
        packed.append(tuple(x.shape))
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = flash_attn_func(*leaves, backend=backend)
    assert packed == [(1, 64, 2, 64), (1, 2, 64), *[(1, 64, 2, 64)] * 3]
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_double_backward_through_a_kernel_is_refused(kernels):
    leaves = _qkv(1, 64, 2, 64)
    (first,) = torch.autograd.grad(flash_attn_func(*leaves).sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="once differentiable"):
        first.float().square().sum().backward()


def test_memory_of_a_pass_is_cut_at_128_bytes():
    pieces = workspace.uninitialised([torch.empty(x) for x in [(3, 5), (2, 1, 7), (128,), (1,)]])
    assert [tuple(x.shape) for x in pieces] == [(3, 5), (2, 1, 7), (128,), (1,)]
    assert all(x.data_ptr() % 128 == 0 and x.dtype == torch.float32 for x in pieces)
    for value, x in enumerate(pieces):
        x.fill_(value)
    assert all((x == value).all() for value, x in enumerate(pieces))
