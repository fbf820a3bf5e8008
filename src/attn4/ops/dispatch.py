"""The way from the public functions to a backend; repeated calls take the short one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn4.ops import gpu
from attn4.ops.autograd import attend_reference
from attn4.ops.call import Call, Options
from attn4.ops.check import check_out, checked
from attn4.reference import Lengths

_MOST_LAUNCHES = 4096
_launches: dict[tuple[Any, ...], gpu.Launch] = {}


def attend(
    q: Tensor, k: Tensor, v: Tensor, vectors: gpu.Vectors, options: tuple[Any, ...], out: Tensor | None
) -> Any:
    """Out, or (out, lse) if asked for.

    ``options`` are the fields of ``Options`` in their order: a plain tuple, as it is part of the key by which
    a prepared launch is found. The key holds all that the checks and the choice of a plan depend on.
    """
    try:
        key = (
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
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
            vectors if vectors is gpu.NO_VECTORS else _kinds(vectors),
        )
        launch = _launches.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not dense tensors, or options that do not hash: the checks name the culprit, if it is one.
        return _attend_anew(q, k, v, vectors, options, out)[1]
    if launch is None:
        launch, result = _attend_anew(q, k, v, vectors, options, out)
        if launch is not None:
            _remember(key, launch)
        return result
    if out is not None:
        check_out(out, launch.out_like, (q, k, v))
    return launch(q, k, v, vectors, out)


def _kinds(vectors: gpu.Vectors) -> tuple[Any, ...]:
    return tuple([x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in vectors])


def _remember(key: tuple[Any, ...], launch: gpu.Launch) -> None:
    if len(_launches) >= _MOST_LAUNCHES:
        _launches.clear()
    _launches[key] = launch


def _attend_anew(
    q: Tensor, k: Tensor, v: Tensor, vectors: gpu.Vectors, options: tuple[Any, ...], out: Tensor | None
) -> tuple[gpu.Launch | None, Any]:
    """The result, and on a GPU the launch that gave it."""
    lengths = Lengths(
        cu_seqlens_q=vectors[0], cu_seqlens_k=vectors[1], seqused_q=vectors[2], seqused_k=vectors[3]
    )
    call = checked(q, k, v, lengths, Options(*options))
    if out is not None:
        check_out(out, q.new_empty(1).expand(call.out_shape), (q, k, v))
    if call.backend == "reference":
        return None, _reference(call, out)
    launch = gpu.prepare(call)
    return launch, launch(q, k, v, vectors, out)


def _reference(call: Call, out: Tensor | None) -> Any:
    result, lse = attend_reference(call)
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if call.return_lse else result
