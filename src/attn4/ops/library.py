"""The operators ``attn4::forward`` and ``attn4::backward`` of torch.library, for all that looks into a graph.

torch.compile, torch.export, FakeTensor, meta tensors and dispatch modes see one operator with a schema;
eager calls go past it (``dispatch``), to the same code. Packed and padded sequences differ in whether length
tensors are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn4.ops.autograd import differentiate, refuse_second, refuse_vmap, save
from attn4.ops.operands import Operands
from attn4.ops.prepared import check_gradient, check_shapes, compute, compute_gradient, no_lse
from attn4.reference.dense import accumulation_dtype

_OPERANDS = """\
Tensor q, Tensor k, Tensor v, \
Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, \
Tensor? batch_order=None, \
float? softmax_scale=None, SymInt? window_left=None, SymInt? window_right=None, \
bool deterministic=False, bool return_lse=True, str? backend=None, str? arch=None, \
SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, str? schedule=None"""

FORWARD = f"({_OPERANDS}) -> (Tensor, Tensor)"
"""Out and LSE; see ``Operands`` and ``compute``."""

BACKWARD = (
    f"(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_OPERANDS}) -> (Tensor, Tensor, Tensor)"
)
"""Gradients of Q, K and V."""


def _forward(*operands: Any) -> tuple[Tensor, Tensor]:
    return compute(Operands(*operands))


def _backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *operands: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return compute_gradient(grad_out, grad_lse, (out, lse), Operands(*operands))


def _forward_shapes(*operands: Any) -> tuple[Tensor, Tensor]:
    given = Operands(*operands)
    call = check_shapes(given)
    out = given.q.new_empty(call.out_shape)
    if not given.return_lse:
        return out, no_lse(given.q)
    return out, given.q.new_empty(call.lse_shape, dtype=accumulation_dtype(given.q.dtype))


def _backward_shapes(
    _grad_out: Tensor | None, _grad_lse: Tensor | None, _out: Tensor, _lse: Tensor, *operands: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = operands[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    check_gradient(Operands(*inputs))
    save(ctx, inputs, output)


_library: Any = torch.library.Library("attn4", "FRAGMENT")  # type: ignore[no-untyped-call]
"""What is registered stays as long as this does."""


def _register() -> None:
    """Make both operators known. Nothing of torch changes.

    ``torch.library.custom_op`` would also compare the memory of results with that of arguments in each call,
    a sixth of its cost; here results are always new.
    """
    tags = (torch.Tag.pt2_compliant_tag,)
    for name, schema, function in (("forward", FORWARD, _forward), ("backward", BACKWARD, _backward)):
        _library.define(name + schema, tags=tags)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_vmap(f"attn4::{name}", refuse_vmap, lib=_library)
    torch.library.register_fake("attn4::forward", _forward_shapes, lib=_library)
    torch.library.register_fake("attn4::backward", _backward_shapes, lib=_library)
    torch.library.register_autograd("attn4::forward", differentiate, setup_context=_save, lib=_library)
    torch.library.register_autograd("attn4::backward", refuse_second, lib=_library)


_register()
