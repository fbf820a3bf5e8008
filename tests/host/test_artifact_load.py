"""A real kernel, compiled for Hopper without a GPU, exported, linked, and loaded without its compiler."""

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attn4.artifact import (
    CompileError,
    KernelUnavailableError,
    artifact_for,
    build_bundle,
    gpu,
    kernel_for,
    runtime,
    store,
)
from attn4.artifact.key import toolchain
from host.artifact_kernel import FAKE, PLAN, REAL

pytestmark = pytest.mark.skipif(toolchain() is None, reason="CuTe DSL is not installed")

BUILD_SECONDS = 8.0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_DSL_ARCH", "sm_80")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        report = build_bundle([PLAN], folder, compiler=REAL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (folder / "processor_seconds").write_text(str(spent))
    assert not report.failed, report.failed
    return folder


def run(code: str, *arguments: str, **environment: str) -> str:
    """Run ``code`` in a process where importing CuTe DSL fails, and return what it prints."""
    block = "import sys; sys.modules['cutlass'] = None\n"
    inherited = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, "-c", block + code, *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_artefact_of_a_real_kernel_describes_it(bundle):
    artifact = artifact_for(PLAN, bundle=bundle)
    description = artifact.description
    assert ".target sm_90a" in artifact.ptx()
    assert 10_000 < artifact.library.stat().st_size < 60_000
    (kernel,) = description.kernels
    assert kernel.name in artifact.ptx()
    assert 8 <= kernel.registers <= 32
    assert kernel.stack_bytes == 0
    assert 256 <= kernel.code_bytes <= 4096
    assert description.dsl_version == toolchain().dsl_version
    assert description.created.endswith("+00:00")


def test_small_kernel_costs_few_seconds_of_processor_time(bundle):
    """Of the whole compiling process, from its start to the artefact on disk."""
    artifact = artifact_for(PLAN, bundle=bundle)
    assert artifact.description.seconds.keys() == {"import", "compile", "export", "link"}
    assert 0 < float((bundle / "processor_seconds").read_text()) < BUILD_SECONDS


LOAD = """
from attn4.artifact import kernel_for
from host.artifact_kernel import PLAN
kernel = kernel_for(PLAN, bundle=sys.argv[1])
assert kernel is kernel_for(PLAN)
"""


def test_kernel_loads_where_its_compiler_cannot_be_imported(bundle):
    code = (
        LOAD + "print(type(kernel).__name__, [name for name in sys.modules if name.startswith('cutlass.')])"
    )
    assert run(code, str(bundle)) == "Function []"


def test_kernel_that_is_called_wrongly_says_so(bundle):
    code = (
        LOAD
        + """
import torch
x = torch.ones(8)
for arguments in ((x, x, 2.0), (x, x)):
    try:
        kernel(*arguments)
    except (ValueError, TypeError) as error:
        print(error)
"""
    )
    device, count = run(code, str(bundle)).splitlines()
    assert "expected device_type=cuda" in device
    assert "Expects 3 parameters" in count


ON_A_GPU = """
import torch
x, y = torch.arange(1000.0, device="cuda"), torch.full((1000,), float("nan"), device="cuda")
kernel(x, y, 3.0)
print(torch.equal(y, 3 * x))
"""

WITHOUT_A_DRIVER = """
import ctypes, torch, tvm_ffi

class OnGpu:
    def __init__(self):
        self.tensor = torch.ones(8)

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **_):
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2
        return capsule

x = tvm_ffi.from_dlpack(OnGpu())
try:
    kernel(x, x, 2.0)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(runtime.driver_major() is not None, reason="this machine has a CUDA driver")
def test_launch_without_a_driver_is_an_error_of_cuda(bundle):
    assert "cudaErrorInsufficientDriver" in run(LOAD + WITHOUT_A_DRIVER, str(bundle))


@pytest.mark.skipif(runtime.driver_major() is None, reason="this machine has no CUDA driver")
def test_kernel_from_a_bundle_computes(bundle):
    assert run(LOAD + ON_A_GPU, str(bundle)) == "True"


def test_two_kernels_in_one_process_keep_their_own_code(bundle, tmp_path):
    """Their inner symbols have equal names, and must not be taken for each other's."""
    other = replace(PLAN, head_dim=64)
    report = build_bundle([other], tmp_path / "b", compiler=REAL)
    first, second = artifact_for(PLAN, bundle=bundle), report.built[0]
    assert first.description.function != second.description.function
    assert gpu.load(first) is not gpu.load(second)
    table = subprocess.run(
        ["nm", "-D", "--defined-only", str(first.library)], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[-1] for line in table.splitlines()] == [f"__tvm_ffi_{first.description.function}"]


def test_equal_plans_give_the_same_kernel_object(bundle, monkeypatch):
    monkeypatch.setattr(store, "_loaded", {})
    kernel = kernel_for(PLAN, bundle=bundle)
    assert kernel_for(replace(PLAN)) is kernel


def test_missing_runtime_is_named_with_its_package(bundle, monkeypatch):
    artifact = artifact_for(PLAN, bundle=bundle)
    runtime.load_runtime.cache_clear()
    runtime.toolkit_major.cache_clear()
    monkeypatch.setattr(runtime, "runtime_libraries", dict)
    with pytest.raises(KernelUnavailableError, match=r"libcute_dsl_runtime.so.*nvidia-cutlass-dsl-libs-cu13"):
        gpu.load(artifact)
    runtime.toolkit_major.cache_clear()


def test_driver_that_is_too_old_is_named(monkeypatch):
    runtime.load_runtime.cache_clear()
    runtime.toolkit_major.cache_clear()
    monkeypatch.setattr(runtime, "runtime_libraries", lambda: {13: Path("x.so")})
    monkeypatch.setattr(runtime, "driver_major", lambda: 12)
    with pytest.raises(KernelUnavailableError, match="supports CUDA 12 at most"):
        runtime.load_runtime()
    runtime.toolkit_major.cache_clear()


def test_newest_runtime_that_the_driver_supports_is_taken(monkeypatch):
    monkeypatch.setattr(runtime, "runtime_libraries", lambda: {12: Path("12"), 13: Path("13")})
    chosen = []
    for driver in (None, 12, 13, 14):
        runtime.toolkit_major.cache_clear()
        monkeypatch.setattr(runtime, "driver_major", lambda driver=driver: driver)
        chosen.append(runtime.toolkit_major())
    runtime.toolkit_major.cache_clear()
    assert chosen == [13, 12, 13, 13]


def test_runtime_is_found_in_a_bare_folder_on_the_path(tmp_path):
    library = tmp_path / "nvidia_cutlass_dsl" / "cu13" / "lib" / "libcute_dsl_runtime.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    code = "from attn4.artifact.runtime import runtime_libraries; print(runtime_libraries()[13])"
    first = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    assert run(code, PYTHONPATH=first) == str(library)


def test_missing_tvm_ffi_is_named(bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(KernelUnavailableError, match="Install apache-tvm-ffi"):
        gpu.load(artifact_for(PLAN, bundle=bundle))


def test_library_without_the_kernel_does_not_load(tmp_path):
    build_bundle([PLAN], tmp_path, compiler=FAKE)
    with pytest.raises(KernelUnavailableError, match="does not load"):
        gpu.load(artifact_for(PLAN, bundle=tmp_path))


def test_missing_linker_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    report = build_bundle([PLAN], tmp_path / "b", compiler=REAL)
    assert "No C compiler to link the kernel with" in report.failed[0][1]


def test_import_of_the_layer_loads_no_torch_and_no_compiler():
    code = "import attn4.artifact; print(sorted({'torch', 'numpy', 'tvm_ffi'} & sys.modules.keys()))"
    assert run(code) == "[]"


def test_compiler_that_is_not_there_is_told(tmp_path):
    report = build_bundle([PLAN], tmp_path, compiler="attn4.no_such_module:compile_plan")
    assert "No module named 'attn4.no_such_module'" in report.failed[0][1]
    with pytest.raises((CompileError, ModuleNotFoundError)):
        artifact_for(PLAN, compiler="attn4.no_such_module:compile_plan")
