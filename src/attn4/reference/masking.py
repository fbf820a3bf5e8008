"""Which keys a row sees, in torch and as ranges of indices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn4.mask import Mask


@dataclass(frozen=True, slots=True)
class Band:
    """A mask laid over one sequence of ``seqlen_q`` queries and ``seqlen_k`` keys, aligned bottom right."""

    mask: Mask
    seqlen_q: int
    seqlen_k: int

    def lower(self, row: int) -> int:
        """The first key that the query ``row`` sees; may lie outside the sequence."""
        left = self.mask.left
        return 0 if left is None else row + self.seqlen_k - self.seqlen_q - left

    def upper(self, row: int) -> int:
        """One past the last key that the query ``row`` sees; may lie outside the sequence."""
        right = self.mask.right
        return self.seqlen_k if right is None else row + self.seqlen_k - self.seqlen_q + right + 1

    def keys(self, rows: range) -> range:
        """The keys that at least one of ``rows`` sees, and maybe some that none sees."""
        return range(max(0, self.lower(rows[0])), min(self.seqlen_k, self.upper(rows[-1])))

    def hides(self, rows: range, keys: range) -> bool:
        """Whether some of ``rows`` does not see some of ``keys``."""
        return keys[0] < self.lower(rows[-1]) or keys[-1] >= self.upper(rows[0])

    def visible(self, rows: range, keys: range, device: torch.device) -> Tensor:
        """Bool tensor (len(rows), len(keys)): true where the query sees the key."""
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device)[None, :]
        distance = key - row - (self.seqlen_k - self.seqlen_q)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.mask.left is not None:
            seen &= distance >= -self.mask.left
        if self.mask.right is not None:
            seen &= distance <= self.mask.right
        return seen


def tiles(span: range, size: int) -> list[range]:
    """``span`` cut into ranges of ``size``, the last one maybe shorter."""
    return [range(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size)]
