"""What a call needs is made ready once for each signature: its launch, and the gradient's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn4.ops import gpu
from attn4.ops.call import NO_VECTORS, Call, Options, Vectors
from attn4.ops.check import checked
from attn4.ops.check_lengths import check_values
from attn4.ops.gradient import Gradient, prepare_gradient, refuse_without_gradient
from attn4.ops.operands import Operands
from attn4.ops.reference import ReferenceLaunch
from attn4.reference import Lengths

Key = tuple[Any, ...]
Launch = gpu.Launch | ReferenceLaunch

_MOST_SIGNATURES = 4096
_launches: dict[Key, gpu.Launch] = {}
_gradients: dict[Key, Gradient] = {}


def compute(operands: Operands) -> tuple[Tensor, Tensor]:
    """Out and LSE, without a word to autograd: what ``attn4::forward`` does.

    The LSE is float32, float64 for float64 inputs, and has no elements unless it is asked for.
    """
    q, k, v = operands[:3]
    vectors = operands.vectors
    launch = launch_for(q, k, v, vectors, operands.options())
    result = launch(q, k, v, vectors, None)
    return result if operands.return_lse else (result, no_lse(q))


def compute_gradient(
    grad_out: Tensor | None, grad_lse: Tensor | None, results: tuple[Tensor, Tensor], operands: Operands
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, K and V, contiguous and in their dtypes: what ``attn4::backward`` does."""
    gradient = gradient_for(operands)
    return gradient(grad_out, grad_lse, operands[:3], results, operands.vectors)


def no_lse(q: Tensor) -> Tensor:
    """What stands for an LSE that nobody asked for."""
    return q.new_empty(0, dtype=torch.float32)


def launch_for(q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: tuple[Any, ...]) -> Launch:
    """A kernel's launch, kept for the next call of this signature; or the reference, checked anew."""
    key: Key | None = None
    found = None
    try:
        key = signature(q, k, v, vectors, options)
        found = _launches.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not dense tensors, or options that do not hash: the checks name the culprit, if it is one.
        key = None
    if found is not None:
        return found
    call = check_call(q, k, v, vectors, options)
    if call.backend == "reference":
        return ReferenceLaunch(call)
    launch = gpu.prepare(call)
    if key is not None:
        remember(_launches, key, launch)
    return launch


def gradient_for(operands: Operands) -> Gradient:
    """What computes the gradients of a call.

    Raises NotImplementedError with the reasons where nothing does.
    """
    q, k, v = operands[:3]
    options = operands.options()
    key = signature(q, k, v, operands.vectors, options)
    found = _gradients.get(key)
    if found is None:
        call = check_call(q, k, v, operands.vectors, options)
        found = prepare_gradient(call)
        if call.backend != "reference":
            remember(_gradients, key, found)
    return found


def check_shapes(operands: Operands) -> Call:
    """The call, as far as it can be told without the contents of a tensor. Raises what ``checked`` raises."""
    return checked(operands.q, operands.k, operands.v, operands.lengths, operands.options())


def check_gradient(operands: Operands) -> None:
    """Raise NotImplementedError with the reasons where nothing computes the gradient of such a call."""
    call = check_shapes(operands)
    # Tensors that only claim to be on a GPU have shapes, and any GPU may be the one that is meant.
    if call.backend != "gpu" or torch.cuda.is_available():
        refuse_without_gradient(call)


def check_call(q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: tuple[Any, ...]) -> Call:
    """The legal call that the arguments mean, the contents of its length tensors read where they can be."""
    lengths = Lengths(
        cu_seqlens_q=vectors[0], cu_seqlens_k=vectors[1], seqused_q=vectors[2], seqused_k=vectors[3]
    )
    call = checked(q, k, v, lengths, Options(*options))
    check_values(q, k, lengths)
    return call


def signature(q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: tuple[Any, ...]) -> Key:
    """All that the checks and the choice of a plan depend on."""
    return (
        q.shape,
        q.stride(),
        q.dtype,
        q.get_device(),
        k.shape,
        k.stride(),
        k.dtype,
        k.get_device(),
        v.shape,
        v.stride(),
        v.dtype,
        v.get_device(),
        options,
        vectors if vectors is NO_VECTORS else kinds(vectors),
    )


def kinds(vectors: Vectors) -> Key:
    """The signature of the length tensors."""
    return tuple([x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in vectors])


def remember(table: dict[Key, Any], key: Key, value: Any) -> bool:
    """Keep ``value``; False if the table was full, so that all else in it was dropped first."""
    full = len(table) >= _MOST_SIGNATURES
    if full:
        table.clear()
    table[key] = value
    return not full
