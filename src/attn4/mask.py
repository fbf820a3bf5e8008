"""The masks that attention knows: full, causal and a window, aligned bottom right.

Query ``i`` of ``seqlen_q`` and key ``j`` of ``seqlen_k`` meet when
``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right``, both bounds inclusive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MaskKind = Literal["full", "causal", "window"]

UNBOUNDED = -1
"""The integer that flash-attn packages use for a side without a limit; ``None`` means the same."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Inclusive bounds around the diagonal; ``None`` is no bound on that side.

    Negative bounds other than -1 are meant as written: ``(7, -8)`` selects no key at all.
    """

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, causal: bool, window_size: tuple[int | None, int | None] = (None, None)) -> Mask:
        """The one place where ``causal`` and ``window_size`` become bounds.

        ``causal`` closes the right side at the diagonal: the right bound becomes at most 0.
        """
        left, right = (None if bound in (None, UNBOUNDED) else int(bound) for bound in window_size)
        if causal:
            right = 0 if right is None else min(right, 0)
        return cls(left, right)

    @property
    def kind(self) -> MaskKind:
        """Which masking code a kernel needs."""
        if self.left is None:
            if self.right is None:
                return "full"
            if self.right == 0:
                return "causal"
        return "window"
