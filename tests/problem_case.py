"""One problem of the list in ``cases.py``: its shape, its inputs, and how it is run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn4.mask import Mask

if TYPE_CHECKING:
    import torch

    from attn4.problem import Problem
    from case_inputs import Inputs

Window = tuple[int | None, int | None]
Lens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem. ``lens_*`` packs that side, with ``tail`` rows after the last sequence.

    ``values`` and ``layout`` name entries of ``case_inputs``. ``fault`` has the kinds in the list of
    public faults (`host/test_fault_list.py`) that the case shows, a word each.
    """

    name: str
    batch: int = 2
    seqlen_q: int = 128
    seqlen_k: int = 128
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    window: Window = (None, None)
    lens_q: Lens | None = None
    lens_k: Lens | None = None
    used_q: Lens | None = None
    used_k: Lens | None = None
    tail: int = 0
    scale: float | None = None
    values: str = "gaussian"
    layout: str = "contiguous"
    lse: bool = True
    fault: str = ""

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def mask(self) -> Mask:
        return Mask.of(self.causal, self.window)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    @property
    def q_shape(self) -> tuple[int, ...]:
        return (*self._rows(self.lens_q, self.seqlen_q), self.heads, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        return (*self._rows(self.lens_k, self.seqlen_k), self.kv_heads, self.head_dim)

    @property
    def launches(self) -> bool:
        """Whether there is anything for a kernel to do."""
        return 0 not in self.q_shape and 0 not in self.k_shape and () not in (self.lens_q, self.lens_k)

    @property
    def v_shape(self) -> tuple[int, ...]:
        return (*self.k_shape[:-1], self.dim_v)

    def _rows(self, lens: Lens | None, seqlen: int) -> tuple[int, ...]:
        return (self.batch, seqlen) if lens is None else (sum(lens) + self.tail,)

    @property
    def varlen(self) -> bool:
        return bool(self.lengths())

    def lengths(self) -> dict[str, Lens]:
        """Keyword arguments of ``flash_attn_varlen_func`` as tuples."""
        packed = {"cu_seqlens_q": self.lens_q, "cu_seqlens_k": self.lens_k}
        found = {name: (0, *itertools.accumulate(lens)) for name, lens in packed.items() if lens is not None}
        used = {"seqused_q": self.used_q, "seqused_k": self.used_k}
        return found | {name: lens for name, lens in used.items() if lens is not None}

    def inputs(self, device: str, seed: int = 0) -> Inputs:
        from case_inputs import make_inputs

        return make_inputs(self, device, seed)

    def keywords(self) -> dict[str, Any]:
        """Options of the call, without tensors."""
        return {"softmax_scale": self.scale, "causal": self.causal, "window_size": self.window}

    def run(self, inputs: Inputs, **extra: Any) -> Any:
        """The public function on ``inputs``; (out, lse), or out alone where the case has no LSE."""
        from attn4 import flash_attn_func, flash_attn_varlen_func

        function = flash_attn_varlen_func if self.varlen else flash_attn_func
        keywords = self.keywords() | {"return_lse": self.lse} | inputs.lengths | extra
        return function(inputs.q, inputs.k, inputs.v, **keywords)

    @property
    def hints(self) -> dict[str, int]:
        """The longest sequences, as ``max_seqlen_*``."""
        longest_q = self.seqlen_q if self.lens_q is None else max(self.lens_q, default=0)
        longest_k = self.seqlen_k if self.lens_k is None else max(self.lens_k, default=0)
        return {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}

    def metadata(self, inputs: Inputs, **extra: Any) -> dict[str, Any]:
        """Keywords of ``run`` that sort the sequences; the hints, which decide the tile, are among them."""
        from attn4 import get_scheduler_metadata

        made = get_scheduler_metadata(
            num_heads_q=self.heads,
            num_heads_kv=self.kv_heads,
            headdim=self.head_dim,
            headdim_v=self.dim_v,
            qkv_dtype=self.torch_dtype,
            causal=self.causal,
            window_size=self.window,
            **self.hints,
            **inputs.lengths,
            **extra,
        )
        return self.hints | {"scheduler_metadata": made}

    def problem(self) -> Problem:
        """What ``run`` makes of the case, from tensors without memory."""
        import torch

        from attn4.ops.call import Options
        from attn4.ops.check import checked
        from attn4.reference import Lengths

        shapes = (self.q_shape, self.k_shape, self.v_shape)
        q, k, v = (torch.empty(shape, dtype=self.torch_dtype, device="meta") for shape in shapes)
        lengths = Lengths(
            **{
                name: torch.empty(len(x), dtype=torch.int32, device="meta")
                for name, x in self.lengths().items()
            }
        )
        options = Options(
            softmax_scale=self.scale,
            causal=self.causal,
            window_size=self.window,
            return_lse=self.lse,
            backend="reference",
        )
        return checked(q, k, v, lengths, options).problem()
