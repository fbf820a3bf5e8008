"""What the operators of torch.library take: tensors, then plain settings, in the order of their schema."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attn4.mask import Mask
from attn4.ops.call import NO_VECTORS, Options, Vectors
from attn4.ops.check import window_of
from attn4.ops.emulated import architecture
from attn4.ops.schedule import MadeFor
from attn4.reference import Lengths


class Operands(NamedTuple):
    """The arguments of ``attn4::forward``, unchecked; names and meaning as in ``flash_attn_varlen_func``.

    ``causal`` has gone into the window bounds, of which None is no limit. ``return_lse``: whether the second
    result holds the LSE, or no elements. ``batch_order`` and ``schedule`` are scheduler metadata: its tensor,
    and the ``text`` of what it was made for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    batch_order: Tensor | None = None
    softmax_scale: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    deterministic: bool = False
    return_lse: bool = True
    backend: str | None = None
    arch: str | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    schedule: str | None = None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, options: Options, return_lse: bool
    ) -> Operands:
        """Those of a call whose options have been checked (``check_options``)."""
        mask = Mask.of(bool(options.causal), window_of(options.window_size))
        return cls(
            q,
            k,
            v,
            *vectors,
            options.softmax_scale,
            mask.left,
            mask.right,
            bool(options.deterministic),
            return_lse,
            options.backend,
            options.arch,
            options.max_seqlen_q,
            options.max_seqlen_k,
            None if options.schedule is None else options.schedule.text,
        )

    @property
    def vectors(self) -> Vectors:
        """The length tensors and the order."""
        found = self[3:8]
        return NO_VECTORS if all(x is None for x in found) else found

    @property
    def lengths(self) -> Lengths:
        """The length tensors by name."""
        return Lengths(
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
            seqused_q=self.seqused_q,
            seqused_k=self.seqused_k,
        )

    @property
    def settings(self) -> tuple[float | int | str | None, ...]:
        """All that is not a tensor, in order."""
        return self[8:]

    def options(self) -> Options:
        """The keywords of the public functions that mean the same."""
        return Options(
            softmax_scale=self.softmax_scale,
            window_size=(self.window_left, self.window_right),
            deterministic=self.deterministic,
            return_lse=self.return_lse,
            backend=self.backend,
            arch=architecture(self.backend, self.arch),
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            schedule=None if self.schedule is None else MadeFor.of(self.schedule),
        )
