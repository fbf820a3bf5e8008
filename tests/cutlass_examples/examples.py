"""Which examples of NVIDIA/cutlass are run, and on what problem: small, so that a CTA or two do the work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("examples/python/CuTeDSL/cute")
"""Where the examples lie in a checkout."""


@dataclass(frozen=True, slots=True)
class Example:
    """A program and its command line."""

    arch: str
    path: str
    arguments: tuple[str, ...] = ()


def _tutorial(name: str, mnk: str = "512,512,256") -> Example:
    return Example("sm_100a", f"blackwell/tutorial/tutorial_gemm/fp16_gemm_{name}.py", ("--mnk", mnk))


def _dense(arch: str, name: str, arguments: str) -> Example:
    folder = "hopper" if arch == "sm_90a" else "blackwell"
    return Example(arch, f"{folder}/kernel/dense_gemm/{name}.py", tuple(arguments.split()))


EXAMPLES = {
    "tutorial 0": _tutorial("0", "256,512,128"),
    "tutorial 1": _tutorial("1"),
    "tutorial 2": _tutorial("2"),
    "tutorial 3": _tutorial("3"),
    "tutorial 3.1": _tutorial("3_1"),
    "tutorial 4": _tutorial("4"),
    "tutorial 5": _tutorial("5"),
    "tutorial 6": _tutorial("6"),
    "blackwell dense_gemm": _dense("sm_100a", "dense_gemm", "--mnkl 256,256,128,1 --ab_dtype Float16"),
    "blackwell dense_gemm, tf32": _dense("sm_100a", "dense_gemm", "--mnkl 256,256,128,1 --ab_dtype TFloat32"),
    "blackwell dense_gemm, CTA pairs": _dense(
        "sm_100a",
        "dense_gemm",
        "--mnkl 512,256,128,1 --ab_dtype BFloat16 --use_2cta_instrs --mma_tiler_mn 256,128 "
        "--cluster_shape_mn 2,1 --use_tma_store",
    ),
    "blackwell dense_gemm, float8": _dense(
        "sm_100a", "dense_gemm", "--mnkl 256,256,256,1 --ab_dtype Float8E4M3FN --c_dtype Float16"
    ),
    "blackwell dense_gemm_persistent": _dense(
        "sm_100a",
        "dense_gemm_persistent",
        "--mnkl 1024,512,128,1 --ab_dtype Float16 --use_2cta_instrs --mma_tiler_mn 256,128 "
        "--cluster_shape_mn 2,1",
    ),
    "blackwell dense_gemm_persistent_dynamic": _dense(
        "sm_100a", "dense_gemm_persistent_dynamic", "--mnkl 512,512,128,1 --ab_dtype Float16"
    ),
    "blackwell dense_gemm_software_pipeline": _dense(
        "sm_100a", "dense_gemm_software_pipeline", "--mnkl 256,256,256,1 --ab_dtype Float16"
    ),
    "hopper dense_gemm": _dense("sm_90a", "dense_gemm", "--mnkl 256,256,128,1"),
    "hopper dense_gemm, float8, clusters": _dense(
        "sm_90a",
        "dense_gemm",
        "--mnkl 256,512,256,1 --tile_shape_mn 128,256 --cluster_shape_mn 2,1 --a_dtype Float8E4M3FN "
        "--b_dtype Float8E4M3FN --c_dtype Float16",
    ),
    "hopper dense_gemm_persistent": _dense(
        "sm_90a", "dense_gemm_persistent", "--mnkl 1024,512,128,1 --cluster_shape_mn 2,1"
    ),
}
