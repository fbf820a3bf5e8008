"""The rate that a machine could reach on a case: what its busiest unit allows, were it never idle."""

from __future__ import annotations

from attn4.bench.cases import Case, counted_pairs, flops
from attn4.machine import Machine


def attainable_tflops(case: Case, machine: Machine, sms: int, clock_mhz: float | None = None) -> float | None:
    """TFLOP/s with the tensor cores or the special functions of ``sms`` processors busy in every cycle.

    Each visible pair costs the operations that the case counts on the tensor cores, and one exponential in
    each pass. ``clock_mhz`` is the clock while the case ran; without it the machine's highest is
    taken. None for dtypes that the 16-bit tensor cores do not take.
    """
    if case.dtype not in {"bfloat16", "float16"}:
        return None
    clock_hz = machine.clock_ghz * 1e9 if clock_mhz is None else clock_mhz * 1e6
    tensor_cycles = flops(case) / machine.tensor_flops
    passes = 2 if case.direction == "both" else 1
    exponential_cycles = passes * counted_pairs(case) * case.heads / machine.exponentials
    seconds = max(tensor_cycles, exponential_cycles) / sms / clock_hz
    return flops(case) / seconds / 1e12
