"""Blackwell for data centres: B200 (sm_100a) and B300 (sm_103a)."""

from __future__ import annotations

from dataclasses import replace

from attn4.machine.machine import Machine

B200 = Machine(
    name="sm_100a",
    chip="B200",
    sms=148,
    clock_ghz=1.965,
    tensor_flops=8192,
    exponentials=16,
    shared_bytes=128,
    dsmem_bytes=64,
    mma_rows=128,
    mma_columns=256,
    shared_memory=232_448,
    registers=65_536,
    tensor_columns=512,
    l2_bytes=126 * 2**20,
    sources=(
        ("sms", "FlashAttention-4 post; 74 of 80 a die, two dies"),
        ("clock_ghz", "highest clock seen on boxes sold as B200, which run at 1.71-1.965"),
        ("tensor_flops", "FlashAttention-4 post, feeds of the B200 in bf16"),
        ("exponentials", "FlashAttention-4 post, feeds of the B200: unchanged from Hopper"),
        ("shared_bytes", "FlashAttention-4 post, feeds of the B200: unchanged from Hopper"),
        (
            "dsmem_bytes",
            "not measured: the rate at which the 384 cycles that arXiv 2603.05451 gives for exchanging half "
            "of a 128 x 128 dS tile come out, 16 KB read locally and 16 KB received",
        ),
        ("mma_rows", "PTX ISA, tcgen05.mma: M 128 a CTA, 256 a pair"),
        ("mma_columns", "PTX ISA, tcgen05.mma: N up to 256"),
        ("shared_memory", "CUDA programming guide, compute capability 10.0: 227 KB a block"),
        ("registers", "CUDA programming guide, compute capability 10.0: 64 K a multiprocessor"),
        ("tensor_columns", "PTX ISA, tensor memory: 512 columns x 128 lanes x 4 bytes"),
        ("l2_bytes", "126 MB as CUDA reports it (Chips and Cheese, B200, 2025)"),
    ),
)


def _b300_sources() -> tuple[tuple[str, str], ...]:
    changed = {
        "sms": "taken to be the B200's: no B300 has been at hand",
        "clock_ghz": "taken to be the B200's: no B300 has been at hand",
        "exponentials": "NVIDIA on Blackwell Ultra: twice the special-function throughput of the B200",
        "l2_bytes": "taken to be the B200's: no B300 has been at hand",
    }
    return tuple((field, changed.get(field, source)) for field, source in B200.sources)


B300 = replace(B200, name="sm_103a", chip="B300", exponentials=32, sources=_b300_sources())
