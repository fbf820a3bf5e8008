"""Attention in plain torch: the oracle, the tiled algorithm, and what runs where there is no GPU."""

from __future__ import annotations

from attn4.reference.backward import backward
from attn4.reference.dense import dense
from attn4.reference.exp2 import exp2_polynomial
from attn4.reference.forward import forward
from attn4.reference.online import Online, Rescales, Tiling, online
from attn4.reference.sequences import Lengths

__all__ = [
    "Lengths",
    "Online",
    "Rescales",
    "Tiling",
    "backward",
    "dense",
    "exp2_polynomial",
    "forward",
    "online",
]
