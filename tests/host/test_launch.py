"""The way to a kernel, with a kernel that only records: what it is called with, and what is done once."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from attn4 import flash_attn_func, flash_attn_varlen_func
from attn4.machine import machine
from attn4.mask import Mask
from attn4.ops import check, dispatch, gpu, gradient, prepared, workspace
from attn4.ops.call import NO_VECTORS
from attn4.plan.choose import choose
from attn4.reference import Lengths, forward
from cases import BY_NAME, CASES, case, required_plans
from fault_checks import CHECKS
from judge import eager, judge, oracle
from poison import poisoned_memory

COUNTER = torch.zeros(2, dtype=torch.int32)


class Kernel:
    def __init__(self, plan):
        self.plan = plan
        self.calls = []
        self.refusal = None

    def __call__(self, *arguments):
        if self.refusal:
            raise self.refusal
        if any(x.data_ptr() % 16 for x in arguments[:4]):
            raise ValueError("Misaligned Tensor data")
        self.calls.append(arguments)
        arguments[3].fill_(1)

    @property
    def last(self):
        names = ("q", "k", "v", "out", "lse", "softmax_scale", "window_left", "window_right")
        names += ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "batch_order", "counter", "ctas")
        return dict(zip(names, self.calls[-1], strict=True))


@pytest.fixture
def kernels(monkeypatch):
    """Kernels by plan; the machine is an H200 that lives in host memory."""
    loaded = {}
    monkeypatch.setattr(gpu, "kernel_for", lambda plan: loaded.setdefault(plan, Kernel(plan)))
    monkeypatch.setattr(gpu, "machine_of", lambda device: machine("sm_90a"))
    monkeypatch.setattr(gpu, "sm_count", lambda device: 132)
    monkeypatch.setattr(gpu, "_current_device", lambda: -1)
    monkeypatch.setattr(workspace, "counter", lambda device: COUNTER)
    monkeypatch.setattr(check, "backend_of", lambda name, device: "gpu")
    for module, table in ((prepared, "_launches"), (dispatch, "_known"), (dispatch, "_recent")):
        monkeypatch.setattr(module, table, {})
    return loaded


@pytest.fixture
def contract(kernels, monkeypatch):
    """Kernels that do in torch what the call of a kernel promises."""
    monkeypatch.setattr(gpu, "kernel_for", lambda plan: kernels.setdefault(plan, ContractKernel(plan)))
    return kernels


class ContractKernel:
    def __init__(self, plan):
        self.plan = plan

    def __call__(self, q, k, v, out, lse, scale, left, right, *rest):
        *vectors, order, counter, _ctas = rest
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        assert [x is not None for x in vectors] == [getattr(self.plan, name) for name in names]
        assert (lse is not None) == self.plan.lse
        assert (order is not None) == self.plan.schedule.sorted_batches
        assert (counter is COUNTER) == self.plan.schedule.dynamic
        assert max(abs(left), abs(right)) <= 2**30
        mask = {"full": Mask(), "causal": Mask(None, 0), "window": Mask(left, right)}[self.plan.mask]
        lengths = Lengths(**dict(zip(names, vectors, strict=True)))
        found, found_lse = forward(q, k, v, softmax_scale=scale, mask=mask, lengths=lengths)
        out.copy_(found)
        if lse is not None:
            lse.copy_(found_lse)


def _only(kernels):
    (kernel,) = kernels.values()
    return kernel


def _qkv(*shape, dtype=torch.bfloat16):
    return [torch.randn(*shape, dtype=dtype) for _ in range(3)]


def test_second_call_of_a_signature_neither_checks_nor_plans(kernels, monkeypatch):
    q, k, v = _qkv(2, 64, 4, 64)
    flash_attn_func(q, k, v)
    monkeypatch.setattr(prepared, "checked", None)
    monkeypatch.setattr(gpu, "prepare", None)
    out = flash_attn_func(q, k, v)
    assert out.shape == q.shape
    assert len(_only(kernels).calls) == 2


def _variants(q, k, v):
    """Calls that a launch for plain (q, k, v) must not serve, and the plain one between them."""
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    return {
        "shape": [x[:, :32] for x in (q, k, v)],
        "key shape": [q, k[:, :32], v[:, :32]],
        "strides": transposed,
        "dtype": [x.half() for x in (q, k, v)],
    }


@pytest.mark.parametrize("kind", ["shape", "key shape", "strides", "dtype"])
def test_the_last_launch_serves_only_its_own_signature(contract, kind):
    plain = _qkv(2, 64, 4, 64)
    other = _variants(*plain)[kind]
    for tensors in (plain, plain, other, other, plain, other):
        truth = forward(*tensors, softmax_scale=64**-0.5, mask=Mask(), lengths=Lengths())[0]
        assert torch.equal(flash_attn_func(*tensors), truth)
    assert len(prepared._launches) == 2


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        return operation(*arguments, **(keywords or {}))


@pytest.mark.parametrize("aliased", [False, True], ids=["three tensors", "one tensor"])
def test_the_last_launch_is_taken_by_plain_tensors_outside_of_everything_alone(kernels, aliased):
    tensors = _qkv(2, 64, 4, 64)[:1] * 3 if aliased else _qkv(2, 64, 4, 64)
    flash_attn_func(*tensors)
    (recent,) = dispatch._recent.values()

    def fits(*given):
        return recent.fits(*given, NO_VECTORS)

    assert fits(*tensors)
    assert not fits(tensors[0].clone().requires_grad_(), *tensors[1:])
    assert not fits(torch.nn.Parameter(tensors[0]), *tensors[1:])
    assert not fits(tensors[0].to("meta"), *tensors[1:])
    assert not recent.fits(*tensors, (None, None, None, torch.ones(2, dtype=torch.int32), None))
    with Watch():
        assert not fits(*tensors)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not fits(*tensors)
    with forward_ad.dual_level():
        assert not fits(*tensors)
    seen = []
    torch.vmap(lambda x: seen.append(fits(*tensors)) or x)(tensors[0])
    assert seen == [False]
    assert fits(*tensors)


def test_autocast_casts_to_the_dtype_of_its_region_call_after_call(contract):
    tensors = _qkv(2, 64, 4, 64, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        cast = [x.to(dtype) for x in tensors]
        with torch.autocast("cpu", dtype=dtype):
            # In the region like the kernel's stand-in, whose products it lowers too.
            truth = forward(*cast, softmax_scale=64**-0.5, mask=Mask(), lengths=Lengths())[0]
            for given in (tensors, cast, cast, tensors):
                assert torch.equal(flash_attn_func(*given), truth)
    with torch.autocast("cpu", dtype=torch.float16):
        assert flash_attn_func(*(x.bfloat16() for x in tensors)).dtype == torch.float16


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True},
        {"window_size": (4, 4)},
        {"softmax_scale": 0.5},
        {"return_lse": True},
        {"deterministic": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_option_is_another_signature_in_both_orders(kernels, change):
    q, k, v = _qkv(2, 64, 4, 64)
    for keywords in ({}, change, {}, change):
        flash_attn_func(q, k, v, **keywords)
    assert len(prepared._launches) == 2


def test_bad_calls_are_refused_after_good_ones_of_the_same_shapes(kernels):
    q, k, v = _qkv(2, 64, 4, 64)
    flash_attn_func(q, k, v)
    with pytest.raises(ValueError, match="dtypes"):
        flash_attn_func(q, k.half(), v)
    with pytest.raises(ValueError, match="length"):
        flash_attn_func(q, k, v[:, :63])
    with pytest.raises(ValueError, match="last one must be 1"):
        flash_attn_func(q, torch.randn(2, 64, 64, 4).bfloat16().transpose(2, 3), v)
    with pytest.raises(NotImplementedError, match="softcap"):
        flash_attn_func(q, k, v, softcap=1.0)
    with pytest.raises(TypeError, match="left, right"):
        flash_attn_func(q, k, v, window_size=[1, 2, 3])


def test_gradients_without_a_kernel_are_refused_with_the_way_out_and_no_grad_is_not(kernels, monkeypatch):
    monkeypatch.setattr(gradient, "runnable", lambda *_: ("A machine without a backward kernel.",))
    q, k, v = _qkv(2, 64, 4, 256)
    flash_attn_func(q, k, v)
    v.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"torch\.no_grad"):
        flash_attn_func(q, k, v)
    with torch.no_grad():
        flash_attn_func(q, k, v)


@pytest.mark.fault("E4", "E5")
@pytest.mark.parametrize(
    ("dim", "dim_v", "kind", "word"),
    [
        (36, 36, ValueError, "36"),
        (264, 264, ValueError, "264"),
        (64, 128, NotImplementedError, "128"),
    ],
)
def test_head_dims_without_a_kernel_are_refused(kernels, dim, dim_v, kind, word):
    q, k = _qkv(1, 16, 1, dim)[:2]
    v = _qkv(1, 16, 1, dim_v)[0]
    with pytest.raises(kind, match=word):
        flash_attn_func(q, k, v)
    assert not kernels


def test_float32_is_refused_with_the_dtypes_of_gpus(kernels):
    with pytest.raises(NotImplementedError, match="bfloat16, float16"):
        flash_attn_func(*_qkv(1, 16, 1, 64, dtype=torch.float32))


def test_what_a_gpu_has_no_kernel_for_is_refused_with_the_reason(kernels, monkeypatch):
    monkeypatch.setattr(
        gpu, "runnable", lambda problem, where: (f"no kernel for {where.name}: use reference",)
    )
    monkeypatch.setattr(gpu, "machine_of", lambda device: machine("sm_100a"))
    with pytest.raises(NotImplementedError, match="sm_100a: use reference"):
        flash_attn_func(*_qkv(1, 16, 1, 64))
    assert not kernels


def test_unknown_gpus_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(NotImplementedError, match=r"NVIDIA A100 is sm_80.*sm_90a.*reference"):
        gpu.machine_of(0)


@pytest.mark.fault("E11")
@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")]
)
def test_known_gpus_are_found_by_their_capability(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert gpu.machine_of(0).name == name


def test_dense_arguments(kernels):
    q, k, v = _qkv(2, 64, 4, 64)
    out = flash_attn_func(q, k, v, softmax_scale=0.3)
    last = _only(kernels).last
    assert all(last[name] is x for name, x in zip("qkv", (q, k, v), strict=True))
    assert last["out"] is out
    assert last["lse"] is None
    assert last["softmax_scale"] == 0.3
    assert (last["window_left"], last["window_right"]) == (2**30, 2**30)
    assert last["ctas"] == 132
    assert (last["counter"] is COUNTER) == _only(kernels).plan.schedule.dynamic
    assert all(last[n] is None for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"))


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((3, 5), (3, 5)),
        ((-1, 5), (2**30, 5)),
        ((10**12, 2**31 - 1), (2**30, 2**30)),
        ((7, -8), (7, -8)),
        ((-(10**12), 4), (-(2**30), 4)),
    ],
)
def test_window_bounds_fit_int32(kernels, window, expected):
    flash_attn_func(*_qkv(1, 16, 1, 64), window_size=window)
    last = _only(kernels).last
    assert (last["window_left"], last["window_right"]) == expected


def test_packed_arguments(kernels):
    q, k, v = _qkv(9, 4, 64)
    cu_seqlens = torch.tensor([0, 3, 9], dtype=torch.int32)
    used = torch.tensor([3, 2], dtype=torch.int32)
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, seqused_k=used, return_lse=True
    )
    last = _only(kernels).last
    assert last["cu_seqlens_q"] is cu_seqlens
    assert last["seqused_q"] is None
    assert last["seqused_k"] is used
    assert last["counter"] is COUNTER
    assert (out.shape, lse.shape, lse.dtype) == ((9, 4, 64), (4, 9), torch.float32)
    assert last["lse"] is lse


@pytest.mark.parametrize("name", ["layout offset 64 full", "layout odd_rows 64 full"])
def test_what_the_copy_engine_cannot_take_is_copied(kernels, name):
    inputs = BY_NAME[name].inputs("cpu")
    for _ in range(2):
        flash_attn_func(inputs.q, inputs.k, inputs.v)
        last = _only(kernels).last
        for side in "qkv":
            x = last[side]
            assert x.data_ptr() % 16 == 0
            assert all(stride % 8 == 0 for stride in x.stride()[:-1])
            assert torch.equal(x, getattr(inputs, side))


@pytest.mark.parametrize("layout", ["bhsd", "sbhd", "heads_expanded", "batch_expanded", "fused"])
def test_what_it_can_take_is_not_copied(kernels, layout):
    inputs = BY_NAME[f"layout {layout} 64 full"].inputs("cpu")
    q, k, v = inputs.q, inputs.k, inputs.v
    out = flash_attn_func(q, k, v)
    last = _only(kernels).last
    assert (last["q"] is q, last["k"] is k, last["v"] is v) == (True, True, True)
    assert out.is_contiguous()


def test_strided_lengths_alone_are_copied(kernels):
    q, k, v = _qkv(9, 1, 64)
    storage = torch.tensor([7, 0, 3, 9, 0, 8, 3, 8, 9], dtype=torch.int32)
    for cu_seqlens, copied in ((storage[1:4], False), (storage[4::2], True)):
        flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        given = _only(kernels).last["cu_seqlens_q"]
        assert given.tolist() == [0, 3, 9]
        assert given.is_contiguous()
        assert (given is not cu_seqlens) == copied


def test_what_a_kernel_refuses_for_another_reason_is_told(kernels):
    q, k, v = _qkv(2, 64, 4, 64)
    flash_attn_func(q, k, v)
    _only(kernels).refusal = ValueError("Mismatched Tensor")
    with pytest.raises(ValueError, match="Mismatched"):
        flash_attn_func(q, k, v)


def test_a_misaligned_call_after_an_aligned_one_of_equal_shape_is_copied(kernels):
    q, k, v = _qkv(2, 65, 4, 64)
    flash_attn_func(q, k, v)
    storage = torch.randn(q.numel() + 1, dtype=torch.bfloat16)
    moved = storage[1:].view(q.shape)
    flash_attn_func(moved, k, v)
    last = _only(kernels).last
    assert len(prepared._launches) == 1
    assert torch.equal(last["q"], moved)
    assert last["q"].data_ptr() % 16 == 0
    assert last["k"] is k


@pytest.mark.parametrize("name", [c.name for c in BY_NAME.values() if 0 in c.q_shape or 0 in c.k_shape])
def test_without_a_query_or_a_key_nothing_is_launched(kernels, name):
    named = case(name)
    inputs = named.inputs("cpu")
    out, lse = named.run(inputs, return_lse=True)
    assert not kernels
    assert out.shape == (*named.q_shape[:-1], named.dim_v)
    assert out.count_nonzero() == 0
    assert (lse == -torch.inf).all()


def test_given_out_is_written_and_checked_on_every_call(kernels):
    q, k, v = _qkv(2, 64, 4, 64)
    for _ in range(2):
        out = torch.full(q.shape, torch.nan, dtype=q.dtype)
        assert flash_attn_func(q, k, v, out=out) is out
        assert _only(kernels).last["out"] is out
        with pytest.raises(ValueError, match="out has shape"):
            flash_attn_func(q, k, v, out=out[:1])


@pytest.mark.fault("C14")
def test_hint_of_a_length_does_not_reach_the_kernel(kernels):
    q, k, v = _qkv(9, 4, 64)
    cu_seqlens = torch.tensor([0, 3, 9], dtype=torch.int32)
    for hint in (0, 6, 9, None):
        flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=hint, max_seqlen_k=hint
        )
    seen = [
        [id(x) if isinstance(x, torch.Tensor) else x for x in c[5:]]
        for k in kernels.values()
        for c in k.calls
    ]
    assert len(seen) == 4
    assert all(arguments == seen[0] for arguments in seen)


def test_signatures_do_not_pile_up_without_end(kernels, monkeypatch):
    monkeypatch.setattr(prepared, "_MOST_SIGNATURES", 3)
    for rows in range(1, 9):
        flash_attn_func(*_qkv(1, rows, 1, 64))
        assert len(prepared._launches) <= 3


@pytest.mark.parametrize("name", [c.name for c in CASES if c.fault] + ["no lse 64 window", "packed offset"])
def test_a_kernel_that_keeps_the_contract_gives_the_right_result(contract, name):
    named = BY_NAME[name]
    inputs = named.inputs("cpu")
    with poisoned_memory():
        result = named.run(inputs)
    out, lse = result if named.lse else (result, None)
    judge(out, lse, oracle(named, inputs), eager(named, inputs))


@pytest.mark.parametrize("name", CHECKS)
def test_faults_are_tried_with_listed_kernels_alone(contract, name):
    CHECKS[name]("cpu")
    assert set(contract) <= set(required_plans())


def test_every_case_asks_for_the_kernel_of_its_problem(kernels):
    """The list of plans made without a GPU is the list of kernels that calls load."""
    for named in CASES:
        kernels.clear()
        for table in (prepared._launches, dispatch._known, dispatch._recent):
            table.clear()
        named.run(named.inputs("cpu"))
        if not named.launches:
            assert not kernels
        else:
            assert list(kernels) == [choose(named.problem(), machine("sm_90a"))], named.name
            assert set(kernels) <= set(required_plans())


def test_a_batch_of_no_sequences_launches_nothing(kernels):
    """A kernel would read the first sequence's lengths, of which there are none."""
    q, k, v = _qkv(3, 2, 64)
    cu_seqlens = torch.zeros(1, dtype=torch.int32)
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, return_lse=True
    )
    assert not kernels
    assert not out.any()
    assert (lse == -torch.inf).all()
