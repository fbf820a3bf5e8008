"""Where it runs: units, rates and memory sizes of one chip, each number with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One GPU, as plans and feeds-and-speeds see it. Rates are per SM and cycle, sizes in bytes.

    ``name`` is the architecture that kernels are compiled for, ``chip`` the product. ``tensor_flops`` are
    16-bit operations (a multiply-add is two), ``exponentials`` are 2^x of the special-function unit,
    ``shared_bytes`` is the bandwidth of shared memory and ``dsmem_bytes`` that of stores that arrive from
    another SM of the cluster (0: not modelled). One tensor-core instruction of one CTA covers up to
    ``mma_rows`` x ``mma_columns`` of the result. ``shared_memory`` is what one CTA may allocate,
    ``registers`` counts 32-bit registers, ``tensor_columns`` counts 32-bit columns of 128 lanes (0: the
    accumulators live in registers). ``sources`` names where each number comes from.
    """

    name: str
    chip: str
    sms: int
    clock_ghz: float
    tensor_flops: int
    exponentials: int
    shared_bytes: int
    dsmem_bytes: int
    mma_rows: int
    mma_columns: int
    shared_memory: int
    registers: int
    tensor_columns: int
    l2_bytes: int
    sources: tuple[tuple[str, str], ...]

    @property
    def cta_groups(self) -> tuple[int, ...]:
        """How many CTAs may work on one tensor-core instruction: pairs came with tensor memory."""
        return (1, 2) if self.tensor_columns else (1,)

    @property
    def peak_tflops(self) -> float:
        """16-bit tensor throughput of the whole chip at ``clock_ghz``, in TFLOP/s."""
        return self.sms * self.tensor_flops * self.clock_ghz / 1000
