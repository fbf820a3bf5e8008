"""A launch that was used, and the tensors that it may be used for again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn4.ops import gpu
from attn4.ops.call import NO_VECTORS, Vectors
from attn4.ops.gradient import Gradient
from attn4.ops.prepared import Launch
from attn4.ops.watched import transformed, watched

Likeness = Callable[..., bool]

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """What calls with a gradient share: operands that are not tensors, and both passes."""

    settings: tuple[Any, ...]
    launch: Launch
    gradient: Gradient


@dataclass(frozen=True, slots=True, eq=False)
class Recent:
    """A kernel's launch, with ``ready`` of a call with a gradient.

    ``run`` is the call of ``launch``, bound: a tenth of its cost is to find it. ``vectors`` are what
    the length tensors must be like; ``autocast`` is the dtype of the region around the call, None outside of
    one.
    """

    launch: gpu.Launch
    run: Callable[..., Any]
    ready: Ready | None
    alike: Likeness
    vectors: tuple[Likeness | None, ...] | None
    autocast: torch.dtype | None
    device_type: str

    @classmethod
    def of(
        cls,
        launch: gpu.Launch,
        ready: Ready | None,
        tensors: tuple[Tensor, Tensor, Tensor],
        vectors: Vectors,
    ) -> Recent:
        """The launch of these checked tensors."""
        kind = tensors[0].device.type
        return cls(
            launch=launch,
            run=launch.__call__,
            ready=ready,
            alike=likeness(*tensors),
            vectors=None
            if vectors is NO_VECTORS
            else tuple([None if x is None else likeness(x) for x in vectors]),
            autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            device_type=kind,
        )

    def fits(self, q: Tensor, k: Tensor, v: Tensor, vectors: Vectors) -> bool:
        """Whether a call with these tensors takes the same launch."""
        return (
            self.alike(q, k, v)
            and forward_ad._current_level < 0
            and (vectors is NO_VECTORS if self.vectors is None else self._fit(self.vectors, vectors))
            and (self.autocast is None or self.autocast is torch.get_autocast_dtype(self.device_type))
        )

    @staticmethod
    def _fit(wanted: tuple[Likeness | None, ...], vectors: Vectors) -> bool:
        for alike, x in zip(wanted, vectors, strict=True):
            if x is not None if alike is None else x is None or not alike(x):
                return False
        return True


def likeness(*tensors: Tensor) -> Likeness:
    """Whether other tensors have the type, dtype, device, sizes and strides of these, and need gradients as
    they do, with no transform, mode or autocast region around them that is not there now.

    torch.compile's own check takes 0.2 us for all of that, Python 2 us; but it wants different tensors.
    """
    if _guards is not None and len({id(x) for x in tensors}) == len(tensors):
        check: Likeness = _guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        ).check
        return check
    expected = _layout(*tensors)
    autocast = torch._C._is_any_autocast_enabled()

    def alike(*given: Tensor) -> bool:
        return (
            _layout(*given) == expected
            and not watched(*given)
            and not transformed()
            and torch._C._is_any_autocast_enabled() == autocast
        )

    return alike


def _layout(*tensors: Tensor) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad) for x in tensors]
