"""Hopper: H100 and H200."""

from __future__ import annotations

from dataclasses import replace

from attn4.machine.machine import Machine

H200 = Machine(
    name="sm_90a",
    chip="H200",
    sms=132,
    clock_ghz=1.98,
    tensor_flops=4096,
    exponentials=16,
    shared_bytes=128,
    dsmem_bytes=0,
    mma_rows=64,
    mma_columns=256,
    shared_memory=232_448,
    registers=65_536,
    tensor_columns=0,
    l2_bytes=50 * 2**20,
    sources=(
        ("sms", "NVIDIA H100 white paper, SXM5 product; the H200 carries the same die"),
        (
            "clock_ghz",
            "highest application clock that nvidia-smi lists; long kernels run at 1.6-1.8 under 700 W",
        ),
        ("tensor_flops", "wgmma m64n256k16 takes 128 cycles: 2*64*256*16/128"),
        ("exponentials", "ex2.approx.f32 measured at 16 lanes a cycle and SM on an H200"),
        ("shared_bytes", "32 banks of 4 bytes, CUDA programming guide"),
        ("dsmem_bytes", "no feeds and speeds count it on Hopper"),
        ("mma_rows", "PTX ISA, wgmma.mma_async: m64"),
        ("mma_columns", "PTX ISA, wgmma.mma_async: n up to 256"),
        ("shared_memory", "CUDA programming guide, compute capability 9.0: 227 KB a block"),
        ("registers", "CUDA programming guide, compute capability 9.0: 64 K a multiprocessor"),
        ("tensor_columns", "no tensor memory before compute capability 10.0"),
        ("l2_bytes", "NVIDIA H100 white paper: 50 MB"),
    ),
)

H100 = replace(H200, chip="H100")
"""The SXM5 product: on chip it is the H200; only the memory outside differs."""
