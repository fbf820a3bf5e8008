"""Exact attention for PyTorch on NVIDIA Hopper and Blackwell.

Importing the package loads neither torch nor a compiler: a name is fetched when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn4 import reference as reference
    from attn4.api import flash_attn_func as flash_attn_func
    from attn4.api import flash_attn_varlen_func as flash_attn_varlen_func
    from attn4.api import get_scheduler_metadata as get_scheduler_metadata
    from attn4.plan.explain import explain as explain

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "reference",
]

_HOMES = {
    "explain": "attn4.plan.explain",
    "flash_attn_func": "attn4.api",
    "flash_attn_varlen_func": "attn4.api",
    "get_scheduler_metadata": "attn4.api",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "reference":
        return import_module("attn4.reference")
    raise AttributeError(f"module 'attn4' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
