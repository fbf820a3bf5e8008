"""A device block: what a program finds in it, what it runs, and that nothing of it is left."""

import gc
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")
if importlib.util.find_spec("cutlass") is None:
    pytest.skip("CuTe DSL is not installed", allow_module_level=True)

from attn4 import flash_attn_func
from attn4.emulator import device
from attn4.emulator.launch import LaunchError
from attn4.emulator.state.memory import MemoryFault
from attn4.ops import emulated

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device to fall back on"),
]


@pytest.fixture(scope="module")
def programs():
    from host import device_programs

    return device_programs


@pytest.fixture
def x():
    return torch.randn(256)


@pytest.fixture
def y():
    return torch.zeros(256)


def test_jit_functions_run_on_cpu_tensors(programs, x, y):
    from cutlass.cute.runtime import from_dlpack

    with device("sm_100a") as gpu:
        programs.double(x, y)
        assert torch.equal(y, 2 * x)
        programs.double(from_dlpack(y), from_dlpack(x))
        assert torch.equal(x, 2 * y)
    assert [grid.shape.grid for grid in gpu.grids] == [(2, 1, 1)] * 2


@pytest.mark.parametrize("ffi", [False, True], ids=["plain", "tvm-ffi"])
def test_compiled_functions_run_on_cpu_tensors_in_global_memory(programs, x, y, ffi):
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    def described(tensor):
        return from_dlpack(tensor, enable_tvm_ffi=ffi)

    with device("sm_90a"):
        options = "--enable-tvm-ffi" if ffi else ""
        compiled = cute.compile(programs.double, described(x), described(y), options=options)
        compiled(*((x, y) if ffi else (described(x), described(y))))
    assert torch.equal(y, 2 * x)
    assert "ld.global" in compiled.__ptx__
    assert ".target sm_90a" in compiled.__ptx__


def test_a_function_of_fake_tensors_and_the_current_stream_runs_on_cpu_tensors(y):
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from host.artifact_scale import scale

    x = torch.randn(256)
    vectors = [make_fake_tensor(cutlass.Float32, (cute.sym_int64(),), stride=(1,)) for _ in range(2)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with device("sm_90a"):
        compiled = cute.compile(scale, *vectors, cutlass.Float32(1), stream, options="--enable-tvm-ffi")
        compiled(x, y, 3.0)
    assert torch.equal(y, 3 * x)


def test_the_module_that_is_exported_calls_the_real_runtime(programs, x, y):
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    with device("sm_90a"):
        compiled = cute.compile(programs.double, from_dlpack(x), from_dlpack(y))
    text = str(compiled.ir_module)
    assert "_cudaLaunchKernelEx" in text
    assert "a4_daLaunchKernelEx" not in text


def test_pointers_that_tensors_gave_away_are_theirs_while_they_live(programs, y):
    import cutlass
    from cutlass.cute.runtime import AddressSpace, make_ptr

    def pointer(address):
        return make_ptr(cutlass.Float32, address, AddressSpace.gmem, assumed_align=4)

    x = torch.randn(256)
    with device("sm_100a"):
        programs.double_at(pointer(x.data_ptr()), pointer(y.data_ptr()), 256)
        assert torch.equal(y, 2 * x)
        address = x.data_ptr()
        kept = x.clone()
        del x
        gc.collect()
        with pytest.raises(MemoryFault, match=f"{address:#x}, which belong to no allocation"):
            programs.double_at(pointer(address), pointer(kept.data_ptr()), 256)


def test_an_access_past_the_end_of_a_tensor_is_found(programs):
    y = torch.zeros(128)
    with device("sm_100a"), pytest.raises(MemoryFault, match="lane 127 accesses 4 bytes") as caught:
        programs.write_past_the_end(y)
    assert "PTX line" in "".join(caught.value.__notes__)


def test_a_program_finds_one_device():
    from cuda.bindings import driver, runtime
    from cutlass.utils import HardwareInfo

    with device("sm_103a", sms=6):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.get_device_capability() == (10, 3)
        properties = torch.cuda.get_device_properties(0)
        assert (properties.major, properties.minor, properties.multi_processor_count) == (10, 3, 6)
        assert torch.zeros(1).is_cuda
        assert HardwareInfo().get_device_multiprocessor_count() == 6
        assert HardwareInfo().get_max_active_clusters(2) == 3
        assert runtime.cudaGetDeviceCount() == (runtime.cudaError_t.cudaSuccess, 1)
        assert driver.cuDeviceGet(1)[0] == driver.CUresult.CUDA_ERROR_INVALID_DEVICE


def test_tensors_made_for_the_device_are_made_on_the_cpu(programs):
    with device("sm_100a"):
        x = torch.arange(256.0, device="cuda")
        y = torch.zeros(256).cuda()
        programs.double(x, y.to("cuda:0"))
        with torch.device("cuda"):
            assert torch.zeros(1).device.type == "cpu"
        torch.set_default_device("cuda")
        assert torch.zeros(1).device.type == "cpu"
        torch.set_default_device(None)
        assert torch.nn.Linear(2, 2).to("cuda").weight.is_cuda
        with torch.random.fork_rng():
            torch.manual_seed(1)
        with pytest.raises(LaunchError, match="cuda:1: one device is emulated"):
            torch.zeros(1, device="cuda:1")
    assert torch.equal(y, 2 * torch.arange(256.0))
    assert y.device.type == "cpu"


def test_a_graph_runs_its_launches_when_it_is_replayed(programs, x, y):
    with device("sm_100a") as gpu:
        programs.double(x, y)
        y.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            programs.double(x, y.view(256))
        assert not y.any()
        for launches in (2, 3):
            graph.replay()
            assert len(gpu.grids) == launches
        assert torch.equal(y, 2 * x)
        with pytest.raises(LaunchError, match="add_ was called while a graph is"), torch.cuda.graph(graph):
            y += 1
        programs.double(x, y)
        assert len(gpu.grids) == 4


def test_a_benchmark_launches_nothing_and_takes_no_time(programs, x, y):
    from cutlass.cute import testing

    with device("sm_100a") as gpu:
        assert math.isnan(testing.benchmark(programs.double, kernel_arguments=(x, y)))
        assert math.isnan(torch.cuda.Event().elapsed_time(torch.cuda.Event()))
    assert gpu.grids == []


def test_streams_events_and_memory_of_the_driver(programs, x, y):
    from cuda.bindings import driver

    def checked(result):
        assert result[0] == driver.CUresult.CUDA_SUCCESS
        return result[1] if len(result) == 2 else None

    with device("sm_100a"):
        stream, event = checked(driver.cuStreamCreate(0)), checked(driver.cuEventCreate(0))
        programs.double_on(x, y, stream)
        checked(driver.cuEventRecord(event, stream))
        assert math.isnan(checked(driver.cuEventElapsedTime(event, event)))
        checked(driver.cuStreamWaitEvent(stream, event, 0))
        checked(driver.cuStreamSynchronize(stream))
        assert torch.equal(y, 2 * x)
        memory = checked(driver.cuMemAlloc(1024))
        checked(driver.cuMemsetD32(memory, 0x3F800000, 256))
        checked(driver.cuMemcpyDtoH(x.data_ptr(), memory, 1024))
        assert torch.equal(x, torch.ones(256))
        with pytest.raises(LaunchError, match=f"2048 bytes at {int(memory):#x} belong to no tensor"):
            driver.cuMemsetD8(memory, 0, 2048)
        checked(driver.cuMemFree(memory))
        assert driver.cuMemFree(memory)[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE
        with pytest.raises(LaunchError, match="cuGraphCreate, which is not emulated"):
            driver.cuGraphCreate(0)


def visible():
    """What a block replaces, by identity."""
    from cuda.bindings import driver, runtime

    classes = [torch.Tensor]
    for name in ("env_manager", "compiler", "jit_executor", "dsl"):
        module = sys.modules[f"cutlass.base_dsl.{name}"]
        classes += [value for value in vars(module).values() if isinstance(value, type)]
    classes += [sys.modules["cutlass.cute.runtime"]._Tensor, sys.modules["cutlass.utils"].HardwareInfo]
    provider = sys.modules["cutlass.cutlass_dsl.tvm_ffi_provider"]
    classes += [provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionBase]
    found = {}
    for owner in (torch.cuda, driver, runtime, *classes):
        found |= {
            (id(owner), name): value for name, value in vars(owner).items() if name != "__warningregistry__"
        }
    return found, list(sys.meta_path), dict(os.environ)


def test_leaving_the_block_restores_everything_also_after_an_error(programs, x, y):
    import cutlass.cutlass_dsl.tvm_ffi_provider  # noqa: F401

    with device("sm_100a"):
        programs.double(x, y)
        during = visible()
    before = visible()
    assert {key for key in before[0] if before[0][key] is not during[0][key]}
    with pytest.raises(MemoryFault), device("sm_90a"), device("sm_100a"):
        programs.double(x, y[:100])
    after = visible()
    assert {key for key in before[0] if before[0][key] is not after[0].get(key)} == set()
    assert after[0].keys() == before[0].keys()
    assert after[1:] == before[1:]


def test_of_nested_blocks_the_innermost_counts(programs, x, y):
    with device("sm_90a") as outer:
        with device("sm_100a") as inner:
            assert torch.cuda.get_device_capability() == (10, 0)
            programs.double(x, y)
        assert torch.cuda.get_device_capability() == (9, 0)
        programs.double(x, y)
        programs.double(x, y)
    assert (len(outer.grids), len(inner.grids)) == (2, 1)
    assert "sm_90a" not in {grid.program.kernel.name for grid in inner.grids}


def test_ctas_may_be_spread_over_processes(programs):
    x, y = torch.randn(1024), torch.zeros(1024)
    with device("sm_100a", processes=3) as gpu:
        programs.double(x, y)
    assert torch.equal(y, 2 * x)
    assert gpu.report.total["global store bytes"] == 4096


def test_other_threads_find_what_they_always_found():
    from cuda.bindings import driver

    seen = {}

    def look():
        seen["available"] = torch.cuda.is_available()
        seen["is_cuda"] = torch.zeros(1).is_cuda
        try:
            seen["driver"] = driver.cuInit(0)
        except RuntimeError as error:
            seen["driver"] = error

    with device("sm_100a"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(60)
        assert driver.cuInit(0) == (driver.CUresult.CUDA_SUCCESS,)
    assert seen["available"] is False
    assert seen["is_cuda"] is False
    assert seen["driver"] != (driver.CUresult.CUDA_SUCCESS,)


def test_what_was_compiled_in_a_block_is_not_used_outside(programs, x, y):
    with device("sm_100a"):
        programs.double(x, y)
    y.zero_()
    with pytest.raises(Exception, match=r"(?i)cuda|driver"):
        programs.double(x, y)
    assert not y.any()


def test_an_architecture_that_is_not_emulated_is_named():
    with pytest.raises(ValueError, match="'sm_80' is not emulated; sm_90a, sm_100a, sm_103a are"):
        device("sm_80").__enter__()
    with pytest.raises(ValueError, match="schedule 'fast'"):
        device("sm_90a", schedule="fast").__enter__()
    with pytest.raises(ValueError, match="hazards='some'"):
        device("sm_90a", hazards="some").__enter__()
    with pytest.raises(ValueError, match="sms=0"):
        device("sm_90a", sms=0).__enter__()
    assert not torch.cuda.is_available()


def test_a_dsl_that_is_laid_out_in_another_way_is_refused(programs, monkeypatch):
    from cutlass.base_dsl.compiler import Compiler

    monkeypatch.delattr(Compiler, "jit")
    before = list(sys.meta_path)
    with pytest.raises(LaunchError, match=r"CuTe DSL 4\..*written for 4.8, expects it: .*jit"):
        device("sm_100a").__enter__()
    assert not torch.cuda.is_available()
    assert sys.meta_path == before


def test_a_kernel_for_another_architecture_is_refused():
    q, k, v = (torch.randn(1, 64, 1, 64).bfloat16() for _ in range(3))
    with (
        device("sm_100a") as gpu,
        pytest.raises(LaunchError, match="compiled for sm_90a, and sm_100a is emul"),
    ):
        flash_attn_func(q, k, v, backend="emulator", arch="sm_90a")
    assert gpu.grids == []


def test_a_tensor_of_a_real_device_is_refused_by_position(programs, x):
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    class OnDevice:
        device = "cuda:0"

        def __dlpack__(self, **_):
            raise AssertionError("must not be exported")

        def __dlpack_device__(self):
            return 2, 0

    with device("sm_100a"):
        given = [from_dlpack(x, enable_tvm_ffi=True)] * 2
        compiled = cute.compile(programs.double, *given, options="--enable-tvm-ffi")
        with pytest.raises(ValueError, match=r"Argument 1 is a tensor on cuda:0.*CPU"):
            compiled(x, OnDevice())


LATE = """
import ctypes, sys
import torch
from attn4.emulator import device
if "first" in sys.argv:
    import cutlass
    from cutlass.cute.runtime import find_runtime_libraries
    for library in find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
x, y = torch.randn(256), torch.zeros(256)
with device("sm_100a", schedule="random", seed=3):
    from host.device_programs import double
    double(x, y)
assert torch.equal(y, 2 * x)
print("launched")
"""


@pytest.mark.parametrize("order", ["late", pytest.param("first", marks=pytest.mark.slow)])
def test_the_dsl_may_be_imported_in_the_block_or_before_with_its_runtime_loaded(order):
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-c", LATE, order],
        env=dict(os.environ) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "launched"


@pytest.mark.parametrize("ffi", [False, True], ids=["plain", "tvm-ffi"])
def test_a_compiled_function_runs_in_a_later_block_and_not_between(programs, x, y, ffi):
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    def given():
        return (x, y) if ffi else (from_dlpack(x), from_dlpack(y))

    with device("sm_100a"):
        described = [from_dlpack(tensor, enable_tvm_ffi=ffi) for tensor in (x, y)]
        compiled = cute.compile(programs.double, *described, options="--enable-tvm-ffi" if ffi else "")
        compiled(*given())
    y.zero_()
    with pytest.raises(Exception, match=r"cuda|719"):
        compiled(*given())
    assert not y.any()
    with device("sm_100a", schedule="random", sms=1) as gpu:
        compiled(*given())
    assert torch.equal(y, 2 * x)
    assert len(gpu.grids) == 1
    with device("sm_90a"), pytest.raises(LaunchError, match="for sm_100a, and sm_90a is emulated"):
        compiled(*given())


WITHOUT_DSL = """
import sys
from pathlib import Path
for name in ("cutlass", "nvidia_cutlass_dsl"):
    sys.modules[name] = None
from attn4.artifact.emulated import load_emulated
from attn4.emulator import device
from attn4.artifact.artifact import read_artifact
from host.emulator_kernel import Inputs
from attn4.reference import dense
from attn4.mask import Mask
artifact = read_artifact(Path(sys.argv[1]))
inputs = Inputs(artifact)
with device("sm_90a", sms=2) as gpu:
    load_emulated(artifact)(*inputs)
out, _ = dense(inputs.q, inputs.k, inputs.v, softmax_scale=0.125, mask=Mask(None, 0))
assert (inputs.out.float() - out).norm() / out.norm() < 2.5e-3
assert len(gpu.grids) == 1
print("launched")
"""


@pytest.mark.slow
def test_an_artefact_of_attn4_runs_where_the_dsl_is_not_installed():
    from host.emulator_kernel import forward_artifact

    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_DSL, str(forward_artifact().folder)],
        env=dict(os.environ) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "launched"


@pytest.mark.parametrize("ffi", [False, True], ids=["plain", "tvm-ffi"])
def test_a_function_compiled_for_another_architecture_says_so(programs, x, y, ffi):
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    with device("sm_100a"):
        given = [from_dlpack(tensor, enable_tvm_ffi=ffi) for tensor in (x, y)]
        options = "--gpu-arch sm_90a" + (" --enable-tvm-ffi" if ffi else "")
        compiled = cute.compile(programs.double, *given, options=options)
        with pytest.raises(LaunchError, match="was not compiled for sm_100a, emulated here"):
            compiled(*((x, y) if ffi else given))


def test_outputs_of_a_call_are_poison_when_its_kernel_begins(monkeypatch):
    seen = []

    def load(artifact):
        return lambda *arguments: seen.extend(x.clone() for x in arguments[3:5])

    monkeypatch.setattr(emulated, "load_emulated", load)
    q, k, v = (torch.randn(1, 16, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    with device("sm_90a"):
        flash_attn_func(q, k, v, backend="emulator", return_lse=True)
    assert [bool((x.reshape(-1).view(torch.uint8) == 0xCB).all()) for x in seen] == [True, True]


def test_a_tensor_that_is_not_contiguous_is_not_poisoned():
    with device("sm_90a") as gpu, pytest.raises(ValueError, match=r"strides \(1, 4\)"):
        gpu.poison(torch.zeros(4, 4).t())
