"""Plans and compilers that the artefact tests share: a small real kernel, and stand-ins that cost nothing.

A compiler appends a line to the file that ``$ARTIFACT_TEST_LOG`` names, so that compiles can be counted
across processes. Python sees this module as ``host.artifact_kernel``.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from attn4.plan.plan import Buffer, Channel, Plan, Role, Schedule, SoftmaxPlan

REAL = "host.artifact_kernel:compile_scale"
FAKE = "host.artifact_kernel:compile_nothing"

PLAN = Plan(
    arch="sm_90a",
    direction="forward",
    dtype="bfloat16",
    head_dim=128,
    head_dim_v=128,
    mask="full",
    tile_m=128,
    tile_n=128,
    roles=(Role("load", 0, 4, 24, "loads"), Role("attend", 4, 8, 240, "attends")),
    buffers=(Buffer("key", "shared", (128, 128), "bfloat16", 2, 0, 65536, None),),
    channels=(Channel("key", "tma", "key", 2, "load", ("attend",), 1, 2, 32768),),
    schedule=Schedule(),
    softmax=SoftmaxPlan(rescale_threshold=8.0, fma_exp_every=4),
)


def log(text: str) -> None:
    """Count one compile."""
    if path := os.environ.get("ARTIFACT_TEST_LOG"):
        with Path(path).open("a") as file:  # one short write in append mode is atomic
            file.write(text + "\n")


class Nothing:
    """What a compile returns, without a kernel in it."""

    def __init__(self, arch: str) -> None:
        self.__ptx__ = f".version 9.0\n.target {arch}\n// a kernel"

    def export_to_c(self, path: str, function_name: str, **_: Any) -> None:
        source = f"int {function_name}(void) {{ return 4; }}"
        command = ["gcc", "-x", "c", "-c", "-fPIC", "-o", path, "-"]
        subprocess.run(command, input=source, text=True, check=True)


def compile_nothing(plan: Plan) -> Nothing:
    log(
        f"{plan.head_dim} {'cutlass' in sys.modules} {sorted(n for n in os.environ if n.startswith('CUTE_'))}"
    )
    time.sleep(0.3)
    return Nothing(plan.arch)


def compile_for_another_arch(plan: Plan) -> Nothing:
    return Nothing("sm_80")


def compile_or_fail(plan: Plan) -> Nothing:
    """Head dim 64 does not compile, 96 takes the process with it."""
    if plan.head_dim == 64:
        raise ValueError("64 is not to be compiled")
    if plan.head_dim == 96:
        print("about to die", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return Nothing(plan.arch)


def compile_scale(plan: Plan) -> Any:
    """y = a*x over float32 vectors, in CuTe-DSL."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from host.artifact_scale import scale

    def vector() -> Any:
        return make_fake_tensor(cutlass.Float32, (cute.sym_int64(),), stride=(1,))

    log(str(plan.head_dim))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as dump:
        options = f"--enable-tvm-ffi --gpu-arch {plan.arch} --keep-ptx --dump-dir {dump}"
        return cute.compile(scale, vector(), vector(), cutlass.Float32(1), stream, options=options)


def with_head_dim(head_dim: int) -> Plan:
    return replace(PLAN, head_dim=head_dim)
