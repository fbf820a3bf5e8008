"""The backends that can be timed, and how each is called.

A peer that does not import, or cannot do a case, says so in a sentence; that is a row like any other.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn4.bench.cases import Case
from attn4.bench.inputs import Inputs
from attn4.bench.table import OWN

Call = Callable[[Inputs], Tensor]
"""One forward pass: the output in the layout of Q."""


def _no_scope() -> AbstractContextManager[Any]:
    return nullcontext()


def _takes_all(case: Case) -> str | None:
    del case
    return None


@dataclass(frozen=True, slots=True)
class Peer:
    """A backend. ``version`` raises when this machine cannot use it; ``refuses`` says why it cannot do a
    case.

    ``prepare(case, inputs)`` does once what need not be done at each call. Calls run inside ``scope()``,
    which is entered once for many calls. One that is not ``usual`` takes part only when it is named.
    """

    name: str
    version: Callable[[], str]
    prepare: Callable[[Case, Inputs], Call]
    refuses: Callable[[Case], str | None] = _takes_all
    scope: Callable[[], AbstractContextManager[Any]] = field(default=_no_scope)
    devices: tuple[str, ...] = ("cuda",)
    usual: bool = True


def distribution_version(module: str) -> str:
    """The version of the distribution that holds an importable top-level module, and its name."""
    owners = dict.fromkeys(importlib.metadata.packages_distributions().get(module, []))
    return " ".join(f"{owner} {importlib.metadata.version(owner)}" for owner in owners) or "unknown"


def _bounds(case: Case, unbounded: int | None) -> tuple[int | None, int | None]:
    """The mask as the ``window_size`` of flash-attn packages; ``causal`` is a flag of its own there."""
    if case.mask.kind != "window":
        return (unbounded, unbounded)
    left, right = (unbounded if bound is None else bound for bound in (case.mask.left, case.mask.right))
    return (left, right)


def _first(result: Any) -> Tensor:
    """The output, of a function that may also return the log-sum-exp."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _flash_attn_style(dense: Any, packed: Any, case: Case, unbounded: int | None, **extra: Any) -> Call:
    """A call of the two functions that all flash-attn packages have."""
    options = {"causal": case.mask.kind == "causal", "window_size": _bounds(case, unbounded), **extra}
    if not case.packed:
        return lambda x: _first(dense(x.q, x.k, x.v, **options))
    options |= {"max_seqlen_q": case.seqlen, "max_seqlen_k": case.seqlen}

    def call(x: Inputs) -> Tensor:
        return _first(packed(x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens, cu_seqlens_k=x.cu_seqlens, **options))

    return call


def _own(**options: Any) -> Callable[[Case, Inputs], Call]:
    """attn4's public functions with further ``options``."""

    def prepare(case: Case, inputs: Inputs) -> Call:
        del inputs
        package = importlib.import_module("attn4")
        dense, packed = package.flash_attn_func, package.flash_attn_varlen_func
        return _flash_attn_style(dense, packed, case, None, **options)

    return prepare


def _scheduled(schedule: str, *, presorted: bool = True) -> Callable[[Case, Inputs], Call]:
    """attn4 under another schedule; not ``presorted``: the pre-pass is part of each call."""

    def prepare(case: Case, inputs: Inputs) -> Call:
        scheduled = importlib.import_module("attn4.bench.scheduled")
        call: Call = scheduled.under(schedule, case, inputs)
        if presorted:
            return call

        def sort_and_call(x: Inputs) -> Tensor:
            scheduled.metadata(case, x)
            return call(x)

        return sort_and_call

    return prepare


def _scheduled_refuses(case: Case) -> str | None:
    return (
        None if case.direction == "forward" else "other schedules are launched without autograd, forward only"
    )


def _sorted_refuses(case: Case) -> str | None:
    return _scheduled_refuses(case) or (None if case.packed else "sequences of one length have no order")


def _own_version() -> str:
    package = importlib.import_module("attn4")
    _ = package.flash_attn_func
    return str(package.__version__)


def _fa3_version() -> str:
    _ = importlib.import_module("flash_attn_interface").flash_attn_func
    return distribution_version("flash_attn_interface")


def _fa3(case: Case, inputs: Inputs) -> Call:
    del inputs
    package = importlib.import_module("flash_attn_interface")
    return _flash_attn_style(package.flash_attn_func, package.flash_attn_varlen_func, case, -1)


def _fa4_version() -> str:
    _ = importlib.import_module("flash_attn.cute").flash_attn_func
    return f"flash-attn-4 {importlib.metadata.version('flash-attn-4')}"


def _fa4(case: Case, inputs: Inputs) -> Call:
    del inputs
    package = importlib.import_module("flash_attn.cute")
    return _flash_attn_style(package.flash_attn_func, package.flash_attn_varlen_func, case, None)


def _sdpa(case: Case) -> Call:
    """``scaled_dot_product_attention``, on transposed views: its layout is (batch, heads, seqlen, head_dim).

    Its causal mask is aligned top left, which is the same when queries and keys are of one length.
    """
    causal, grouped = case.mask.kind == "causal", case.heads != case.kv_heads

    def call(x: Inputs) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


def _cudnn_version() -> str:
    cudnn: Any = torch.backends.cudnn
    if not cudnn.is_available():
        raise ImportError("this torch is built without cuDNN")
    return f"cuDNN {cudnn.version()}"


def _cudnn_refuses(case: Case) -> str | None:
    if case.mask.kind == "window":
        return "torch offers no window through cuDNN"
    if case.packed and case.heads != case.kv_heads:
        return "torch offers no grouped heads through cuDNN for packed sequences"
    return None


def _cudnn(case: Case, inputs: Inputs) -> Call:
    del inputs
    if not case.packed:
        return _sdpa(case)
    forward = torch.ops.aten._cudnn_attention_forward
    causal, longest, lse = case.mask.kind == "causal", case.seqlen, case.direction != "forward"

    def call(x: Inputs) -> Tensor:
        cu = x.cu_seqlens
        return _first(forward(x.q, x.k, x.v, None, cu, cu, longest, longest, lse, 0.0, causal, False))

    return call


def _fa2_version() -> str:
    if not torch.backends.cuda.is_flash_attention_available():
        raise ImportError("this torch is built without FlashAttention-2")
    return f"in torch {torch.__version__}"


def _fa2(case: Case, inputs: Inputs) -> Call:
    del inputs
    if not case.packed and case.mask.kind != "window":
        return _sdpa(case)
    forward = torch.ops.aten._flash_attention_forward
    causal, longest = case.mask.kind == "causal", case.seqlen
    left, right = _bounds(case, -1)

    def call(x: Inputs) -> Tensor:
        lengths = (x.cu_seqlens, x.cu_seqlens, longest, longest)
        window = {"window_size_left": left, "window_size_right": right}
        return _first(forward(x.q, x.k, x.v, *lengths, 0.0, causal, False, **window))

    return call


def _flex_version() -> str:
    importlib.import_module("triton")
    return f"in torch {torch.__version__}, {distribution_version('triton')}"


def _flex(case: Case, inputs: Inputs) -> Call:
    """FlexAttention, compiled for the shapes of this case alone.

    A packed batch is one sequence with a mask that keeps its documents apart.
    """
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    # Beyond 8 shapes torch.compile falls back to eager code without a word: each case starts afresh.
    torch.compiler.reset()
    # Compiled backward passes otherwise reuse the memory of what the forward pass saved, and run only once.
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False)
    rule, block_mask = _flex_rule(case, inputs), None
    if rule is not None:
        length = case.tokens if case.packed else case.seqlen
        block_mask = flex.create_block_mask(rule, None, None, length, length, device=inputs.q.device)
    grouped = case.heads != case.kv_heads

    def call(x: Inputs) -> Tensor:
        q, k, v = ((tensor[None] if case.packed else tensor).transpose(1, 2) for tensor in (x.q, x.k, x.v))
        out: Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped).transpose(1, 2)
        return out[0] if case.packed else out

    return call


def _flex_rule(case: Case, inputs: Inputs) -> Any:
    """The ``mask_mod`` of a case, or None when every query sees every key."""
    if not case.packed and case.mask.kind == "full":
        return None
    left = case.tokens if case.mask.left is None else case.mask.left
    right = case.tokens if case.mask.right is None else case.mask.right
    lengths = torch.tensor(case.seqlens, device=inputs.q.device)
    document = torch.repeat_interleave(torch.arange(case.batch, device=inputs.q.device), lengths)

    def rule(batch: Any, head: Any, query: Any, key: Any) -> Any:
        del batch, head
        near = (key - query <= right) & (query - key <= left)
        return near & (document[query] == document[key]) if case.packed else near

    return rule


def _eager(case: Case, inputs: Inputs) -> Call:
    """Plain arithmetic, which keeps all scores: for small cases on any device."""
    del inputs
    return _sdpa(case)


def _eager_refuses(case: Case) -> str | None:
    if case.packed or case.mask.kind == "window":
        return "torch's plain attention takes neither packed sequences nor windows"
    return None


def _only(backend: SDPBackend) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: sdpa_kernel(backend)


ANY_DEVICE = ("cpu", "cuda")

PEERS = (
    Peer(OWN, _own_version, _own()),
    Peer("cudnn", _cudnn_version, _cudnn, _cudnn_refuses, _only(SDPBackend.CUDNN_ATTENTION)),
    Peer("fa2", _fa2_version, _fa2, scope=_only(SDPBackend.FLASH_ATTENTION)),
    Peer("fa3", _fa3_version, _fa3),
    Peer("fa4", _fa4_version, _fa4),
    Peer("flex", _flex_version, _flex),
    Peer("reference", _own_version, _own(backend="reference"), devices=ANY_DEVICE),
    Peer(
        "eager",
        lambda: f"in torch {torch.__version__}",
        _eager,
        _eager_refuses,
        _only(SDPBackend.MATH),
        devices=ANY_DEVICE,
    ),
    Peer("attn4-deterministic", _own_version, _own(deterministic=True), usual=False),
    Peer("attn4-dealt", _own_version, _scheduled("dealt"), _scheduled_refuses, usual=False),
    Peer("attn4-linear", _own_version, _scheduled("linear"), _scheduled_refuses, usual=False),
    Peer("attn4-takeover", _own_version, _scheduled("taken over"), _scheduled_refuses, usual=False),
    Peer("attn4-sorted", _own_version, _scheduled("sorted"), _sorted_refuses, usual=False),
    Peer(
        "attn4-sorting",
        _own_version,
        _scheduled("sorted", presorted=False),
        _sorted_refuses,
        usual=False,
    ),
)
"""Every backend; those for any device, and attn4 under other schedules, take part only when they are named.

``attn4-deterministic`` asks for equal bits, which is another backward pass. ``attn4-dealt`` and
``attn4-linear`` take tiles in linear order, dealt in advance and from a counter; ``attn4-takeover``
has cluster launch control (Blackwell, not packed), ``attn4-sorted`` is a call with scheduler metadata,
``attn4-sorting`` one that makes it each time.
"""


def select(names: tuple[str, ...] | None) -> tuple[Peer, ...]:
    """The backends of those names, or all that need a GPU; ``ValueError`` names one that does not exist."""
    if names is None:
        return tuple(peer for peer in PEERS if peer.usual and "cpu" not in peer.devices)
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in known:
            raise ValueError(f"no backend {name!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))
