"""Backward passes of a backend: what is timed of them, alone or after forward ones, and are they right?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn4.bench.cases import Case
from attn4.bench.check import attention, sequence_of, visible_keys
from attn4.bench.inputs import Inputs
from attn4.bench.rows import Accuracy

Gradients = tuple[Tensor, ...]
"""dQ, dK and dV, in the layouts of Q, K and V."""

ROWS = 2_048
"""Query rows whose scores are held at a time: in float64, 16,384 keys take 268 MB a matrix."""

PIECES = 8
"""Parts of a sequence that are judged apart: under a causal mask the first rows have far larger gradients."""


def kept_graphs(call: Callable[[Inputs], Tensor], sets: Sequence[Inputs]) -> Callable[[int], Gradients]:
    """Run the forward pass once on each input set, and return the backward pass by the number of the set.

    Graphs are kept, so that a backward pass can be repeated. ``NotImplementedError`` for a call that records
    none, ``ValueError`` for an output that is not shaped like the gradient given for it.
    """
    with torch.enable_grad():
        graphs = [_graph(call, inputs) for inputs in sets]
    return lambda index: graphs[index]()


def both_passes(call: Callable[[Inputs], Tensor], sets: Sequence[Inputs]) -> Callable[[int], Gradients]:
    """A forward pass and its backward pass, by the number of the input set. Raises as ``kept_graphs``."""

    def run(index: int) -> Gradients:
        with torch.enable_grad():
            return _graph(call, sets[index], kept=False)()

    return run


def _graph(call: Callable[[Inputs], Tensor], inputs: Inputs, kept: bool = True) -> Callable[[], Gradients]:
    leaves = tuple(tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    out = call(replace(inputs, q=leaves[0], k=leaves[1], v=leaves[2]))
    grad_out = inputs.grad_out
    if grad_out is None or out.shape != grad_out.shape:
        given = None if grad_out is None else tuple(grad_out.shape)
        raise ValueError(f"the result has shape {tuple(out.shape)}, the gradient given for it {given}")
    if not out.requires_grad:
        raise NotImplementedError("the forward pass records no graph, so that it has no gradients")
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=kept)


@dataclass(frozen=True, slots=True)
class _Place:
    """The query heads of a kv head in one sequence: their gradients, and the error allowed in each piece."""

    sequence: int
    kv_head: int
    expected: Gradients
    allowed: tuple[tuple[float, ...], ...]


class GradientOracle:
    """What the gradients of one set of inputs must be, for some heads.

    They are the first and the last kv head, each with the query heads that share it, of the first and the
    last sequence, judged in ``PIECES`` pieces of the sequence. Allowed in a piece is twice the error of the
    same arithmetic in the dtype of the inputs, plus one rounding of its largest value.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case = case
        self._shapes = [x.shape for x in (inputs.q, inputs.k, inputs.v)]
        self._places = [_place(case, inputs, sequence, kv_head) for sequence, kv_head in _heads(case)]

    def check(self, gradients: Gradients) -> Accuracy:
        """The worst piece of dQ, dK and dV; NaN is the error if any element is not finite."""
        shapes = [gradient.shape for gradient in gradients]
        if shapes != self._shapes:
            got, wanted = ([tuple(shape) for shape in some] for some in (shapes, self._shapes))
            raise ValueError(f"the gradients have shapes {got}, Q, K and V {wanted}")
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            return Accuracy(error=float("nan"), allowed=min(_all_allowed(self._places)))
        checks = [accuracy for place in self._places for accuracy in self._compare(gradients, place)]
        return max(checks, key=lambda accuracy: accuracy.error / accuracy.allowed)

    def _compare(self, gradients: Gradients, place: _Place) -> Iterator[Accuracy]:
        got = _of_heads(self._case, gradients, place.sequence, place.kv_head)
        for gradient, expected, allowed in zip(got, place.expected, place.allowed, strict=True):
            errors = _largest(gradient.double() - expected)
            yield from (Accuracy(*pair) for pair in zip(errors, allowed, strict=True))


def _all_allowed(places: Sequence[_Place]) -> Iterator[float]:
    return (allowed for place in places for pieces in place.allowed for allowed in pieces)


def _heads(case: Case) -> Iterator[tuple[int, int]]:
    for sequence in sorted({0, case.batch - 1}):
        for kv_head in sorted({0, case.kv_heads - 1}):
            yield sequence, kv_head


def _of_heads(case: Case, tensors: Gradients, sequence: int, kv_head: int) -> Gradients:
    """Of tensors like Q, K and V, and any further ones like Q, the heads that share ``kv_head``.

    Each is (heads, seqlen, head_dim); there is one head in those like K and V.
    """
    group = case.heads // case.kv_heads
    some = []
    for number, tensor in enumerate(tensors):
        first, heads = (kv_head, 1) if number in {1, 2} else (kv_head * group, group)
        some.append(sequence_of(case, tensor, sequence)[:, first : first + heads].transpose(0, 1))
    return tuple(some)


def _place(case: Case, inputs: Inputs, sequence: int, kv_head: int) -> _Place:
    assert inputs.grad_out is not None
    tensors = (inputs.q, inputs.k, inputs.v, inputs.grad_out)
    own = _of_heads(case, tensors, sequence, kv_head)
    expected = _differentiate(case, *(tensor.double() for tensor in own))
    same_dtype = _differentiate(case, *own)
    rounding = torch.finfo(inputs.q.dtype).eps / 2
    allowed = []
    for exact, rough in zip(expected, same_dtype, strict=True):
        errors = _largest(rough.to(inputs.q.dtype).double() - exact)
        pairs = zip(errors, _largest(exact), strict=True)
        allowed.append(tuple(2 * error + rounding * largest for error, largest in pairs))
    return _Place(sequence, kv_head, expected, tuple(allowed))


def _differentiate(case: Case, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> Gradients:
    """Gradients of (heads, seqlen, head_dim) queries and the one kv head that they share, in float64.

    Computed in the dtype of the inputs, ``ROWS`` rows of a head at a time; what the parts give dK and dV is
    summed in float64.
    """
    seqlen = q.shape[1]
    dq, dk, dv = (torch.zeros_like(tensor, dtype=torch.float64) for tensor in (q, k, v))
    for head in range(q.shape[0]):
        for start in range(0, seqlen, ROWS):
            rows = slice(start, start + ROWS)
            visible = visible_keys(torch.arange(seqlen, device=q.device)[rows], seqlen, case.mask)
            queries, keys, values = (x.detach().requires_grad_() for x in (q[head, rows], k[0], v[0]))
            with torch.enable_grad():
                out = attention(queries, keys, values, visible)
            part = torch.autograd.grad(out, (queries, keys, values), grad_out[head, rows])
            dq[head, rows] = part[0].double()
            dk[0] += part[1]
            dv[0] += part[2]
    return dq, dk, dv


def _largest(difference: Tensor) -> list[float]:
    """The largest magnitude in each piece of (heads, seqlen, head_dim)."""
    rows = difference.abs().amax(dim=(0, 2))
    return [float(piece.max()) for piece in rows.tensor_split(min(PIECES, len(rows)))]
