"""The way from the public functions to a backend; repeated calls take the short one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn4.ops import gpu
from attn4.ops.autograd import Attention, TransformedAttention
from attn4.ops.call import Options, Vectors
from attn4.ops.check import (
    check_options,
    check_out,
    check_out_kind,
    check_out_unrecorded,
    records_gradient,
)
from attn4.ops.operands import Operands
from attn4.ops.prepared import (
    Key,
    Launch,
    check_gradient,
    check_shapes,
    gradient_for,
    launch_for,
    remember,
    signature,
)
from attn4.ops.recent import Ready, Recent
from attn4.ops.watched import transformed, watched

_recent: dict[tuple[Any, ...], Recent] = {}
"""The last kernel's launch by its options and whether gradients are recorded: comparing tensors costs a tenth
of hashing their signature."""

_known: dict[Key, Recent] = {}
"""Launches by their signatures."""

_RETURN_LSE = Options._fields.index("return_lse")


def attend(
    q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: tuple[Any, ...], out: Tensor | None
) -> Any:
    """Out, or (out, lse) if asked for.

    ``options`` are the fields of ``Options`` in their order: a plain tuple, as it is part of the key by which
    a prepared launch is found.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced(q, k, v, vectors, Options(*options), out)
    try:
        recent = _recent.get((options, torch.is_grad_enabled()))
        if recent is None or not recent.fits(q, k, v, vectors):
            recent = _known_for(q, k, v, vectors, options)
    except (AttributeError, TypeError, RuntimeError):
        # Not dense tensors, or options that do not hash: the checks name the culprit, if it is one.
        recent = None
    if recent is None:
        return _attend_anew(q, k, v, vectors, options, out)
    ready = recent.ready
    if ready is not None:
        return _apply(q, k, v, vectors, ready, options, out)
    if out is not None:
        check_out(out, recent.launch.out_like, (q, k, v))
    return recent.run(q, k, v, vectors, out)


def _known_for(q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: tuple[Any, ...]) -> Recent | None:
    """The launch of such a call before the last one, which it becomes."""
    found = _known.get(_known_key(q, k, v, vectors, options))
    if found is None or not found.fits(q, k, v, vectors):
        return None
    _recent[options, torch.is_grad_enabled()] = found
    return found


def _known_key(q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: tuple[Any, ...]) -> Key:
    recorded = records_gradient(q, k, v)
    return (*signature(q, k, v, vectors, options), recorded)


def _attend_anew(
    q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: tuple[Any, ...], out: Tensor | None
) -> Any:
    if all(isinstance(x, Tensor) for x in (q, k, v)):
        q, k, v = _autocast(q, k, v)
        if watched(q, k, v) or transformed():
            return _watched(q, k, v, vectors, Options(*options), out)
        if records_gradient(q, k, v):
            ready = _make_ready(q, k, v, vectors, Options(*options))
            _remember(q, k, v, vectors, options, ready)
            return _public(_apply(q, k, v, vectors, ready, options, out))
    launch = launch_for(q, k, v, vectors, options)
    if out is not None:
        check_out(out, launch.out_like, (q, k, v))
    _remember(q, k, v, vectors, options, launch)
    return _public(launch(q, k, v, vectors, out))


def _make_ready(q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: Options) -> Ready:
    """Both passes of a call with a gradient; what cannot give one is refused before anything runs."""
    check_options(options)
    operands = Operands.of(q, k, v, vectors, options, return_lse=True)
    check_shapes(operands)
    gradient = gradient_for(operands)
    return Ready(operands.settings, launch_for(q, k, v, vectors, operands.options()), gradient)


def _remember(
    q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: tuple[Any, ...], made: Launch | Ready
) -> None:
    """Keep a kernel's launch for the next call like this one."""
    ready = made if isinstance(made, Ready) else None
    launch = made.launch if isinstance(made, Ready) else made
    if not isinstance(launch, gpu.Launch):
        return
    try:
        key = _known_key(q, k, v, vectors, options)
        hash(key)
    except (AttributeError, TypeError, RuntimeError):
        return
    recent = Recent.of(launch, ready, (q, k, v), vectors)
    if not remember(_known, key, recent):
        _recent.clear()
    _recent[options, torch.is_grad_enabled()] = recent


def _apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    vectors: Vectors,
    ready: Ready,
    options: tuple[Any, ...],
    out: Tensor | None,
) -> Any:
    """An eager call with a gradient."""
    if out is not None:
        check_out_unrecorded(q, k, v)
    result = Attention.apply(q, k, v, vectors, ready)  # type: ignore[no-untyped-call]
    return result if options[_RETURN_LSE] else result[0]


def _watched(q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: Options, out: Tensor | None) -> Any:
    """A call on tensors that are more than numbers: PyTorch says what becomes of it."""
    check_options(options)
    operands = _operands(q, k, v, vectors, options)
    if records_gradient(q, k, v):
        check_gradient(operands)
    else:
        check_shapes(operands)
    if watched(q, k, v):
        return _finish(torch.ops.attn4.forward(*operands), operands, options, out)
    operands = operands._replace(return_lse=True)
    result = TransformedAttention.apply(*operands)  # type: ignore[no-untyped-call]
    return _finish(result, operands, options, out)


def _traced(q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: Options, out: Tensor | None) -> Any:
    """A call inside torch.compile: one operator in the graph, whose shape function checks the tensors."""
    check_options(options)
    operands = _operands(*_autocast(q, k, v), vectors, options)
    return _finish(torch.ops.attn4.forward(*operands), operands, options, out)


def _operands(q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: Options) -> Operands:
    """With an LSE where a gradient will need it."""
    return_lse = bool(options.return_lse) or records_gradient(q, k, v)
    return Operands.of(q, k, v, vectors, options, return_lse)


def _finish(result: tuple[Tensor, Tensor], operands: Operands, options: Options, given: Tensor | None) -> Any:
    """The results that were asked for, out in the tensor that was given for it."""
    out, lse = result
    if given is not None:
        check_out_kind(given, out)
        check_out_unrecorded(given, *operands[:3])
        out = given.copy_(out)
    return _public((out, lse) if options.return_lse else out)


def _public(result: Any) -> Any:
    """With an LSE in float32: for float64 inputs it was float64 until here, for the sake of the gradient."""
    return (result[0], result[1].float()) if isinstance(result, tuple) else result


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the dtype of the autocast region, if any, as torch's own attention takes them; float64 stays."""
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return _lowered(q, dtype), _lowered(k, dtype), _lowered(v, dtype)


def _lowered(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
