"""Faults of arithmetic planted in the Blackwell forward: patches of its Python, compiled into a folder apart.

Each has a case of the list that must show it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

import attn4.emulator
from attn4.artifact.artifact import Artifact, read_artifact
from attn4.artifact.build import build_here
from attn4.artifact.key import artifact_key, toolchain
from attn4.ops import gpu
from attn4.ops.call import Options
from attn4.ops.check import checked
from attn4.plan.plan import Plan
from attn4.reference import Lengths
from case_inputs import Inputs
from problem_case import Case


@dataclass(frozen=True, slots=True)
class Fault:
    """``plant`` opens a block in which kernels are compiled with the fault; ``case`` shows it."""

    plant: Callable[[], AbstractContextManager[Any]]
    case: str


def attend(case: Case, inputs: Inputs, folder: Path) -> tuple[Tensor, Tensor | None]:
    """``case`` by a kernel that is compiled here into ``folder``, and forgotten."""

    def compiled(plan: Plan) -> Artifact:
        build_here(plan, folder)
        return read_artifact(folder, artifact_key(plan, toolchain()))

    options = Options(
        softmax_scale=case.scale,
        causal=case.causal,
        window_size=case.window,
        return_lse=case.lse,
        backend="emulator",
        arch="sm_100a",
    )
    tensors = inputs.q, inputs.k, inputs.v
    call = checked(*tensors, Lengths(**inputs.lengths), options)
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    vectors = (*(inputs.lengths.get(name) for name in names), None)
    with (
        patch("attn4.ops.emulated.artifact_for", compiled),
        patch("attn4.emulator.codegen.cache.cache_folder", lambda: folder),
        attn4.emulator.device("sm_100a", sms=2),
    ):
        result = gpu.prepare(call)(*tensors, vectors, None)
    return result if case.lse else (result, None)


def _wrapped(owner: Any, name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """``owner.name`` replaced by ``change(original, *arguments)``."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *arguments: change(original, *arguments))


def _bounds(name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    from attn4.kernels.shared.tiles import Bounds

    return _wrapped(Bounds, name, change)


def _softmax(name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    from attn4.kernels.sm100.forward.softmax import RowSoftmax

    return _wrapped(RowSoftmax, name, change)


def _correction(name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    from attn4.kernels.sm100.forward.correction import Corrector

    return _wrapped(Corrector, name, change)


def _sum_as_it_was(raise_max: Any, row: Any, *arguments: Any) -> Any:
    total = row.row_sum[0]
    factor = raise_max(row, *arguments)
    row.row_sum[0] = total
    return factor


def _late_left_out() -> AbstractContextManager[Any]:
    from attn4.kernels.sm100.forward.mma import Products

    def start(original: Any, products: Any, tile: int, slots: Any, steps: Any, accumulate: Any) -> None:
        if steps[0] == 0:
            original(products, tile, slots, steps, accumulate)

    return _wrapped(Products, "start_output", start)


def _in_math(name: str, value: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    from attn4.kernels.dsl import math

    return patch.object(math, name, value(getattr(math, name)))


def _in_softmax(name: str, function: Callable[..., Any]) -> AbstractContextManager[Any]:
    from attn4.kernels.sm100.forward import softmax

    return patch.object(softmax, name, function)


def _everything_exists() -> AbstractContextManager[Any]:
    import cutlass

    return _correction("exists", lambda original, *arguments: cutlass.Boolean(True))


FAULTS = {
    "a key too many on the diagonal": Fault(
        lambda: _bounds("end_key", lambda end, *a: end(*a) + 1), "causal 128 261x261"
    ),
    "a key too few on the diagonal": Fault(
        lambda: _bounds("end_key", lambda end, *a: end(*a) - 1), "causal 128 261x261"
    ),
    "a key past the last": Fault(lambda: _bounds("end_key", lambda end, *a: end(*a) + 1), "uniform full"),
    "a key too many in the window": Fault(
        lambda: _bounds("begin_key", lambda begin, *a: begin(*a) - 1), "window 128 261x261"
    ),
    "a key too few in the window": Fault(
        lambda: _bounds("begin_key", lambda begin, *a: begin(*a) + 1), "window 128 261x261"
    ),
    "the block on the diagonal not masked": Fault(
        lambda: _bounds("unmasked", lambda free, *a: (free(*a)[0], free(*a)[1] + 1)), "causal 128 261x261"
    ),
    "the last block not visited": Fault(
        lambda: _bounds("visited", lambda seen, *a: (seen(*a)[0], seen(*a)[1] - 1)), "full 128 261x261"
    ),
    "the output not rescaled": Fault(lambda: _correction("rescale", lambda *a: None), "descending full"),
    "the sum not rescaled": Fault(lambda: _softmax("raise_max", _sum_as_it_was), "descending full"),
    "a polynomial without its last coefficient": Fault(
        lambda: _in_math("EXP2_COEFFICIENTS", lambda given: given[:-1]), "full 128 40x300"
    ),
    "the last probabilities left out": Fault(_late_left_out, "full 128 40x300"),
    "LSE in log2 units": Fault(lambda: _in_math("LN_2", lambda given: 1.0), "full 128 40x300"),
    "a query past the used ones kept": Fault(_everything_exists, "used queries under no mask"),
    "the maximum of nothing taken for a number": Fault(
        lambda: _in_softmax("known", lambda row_max, masked: row_max), "causal 128 300x40"
    ),
    "huge scores multiplied as others are": Fault(
        lambda: _in_softmax("choose_scale", lambda row_max, scale: scale), "one huge key"
    ),
}
