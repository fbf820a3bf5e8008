"""Host code of a compiled kernel runs without a GPU, over CPU memory, and nothing else changes."""

import gc
import os
import shutil
import struct
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.artifact import DamagedArtifactError, gpu
from attn4.artifact.emulated import emulated, load_emulated
from attn4.artifact.runtime import load_runtime
from attn4.emulator.launch import Launch, LaunchError, tensors
from host.emulator_kernel import CTAS, Inputs, forward_artifact
from needs import COMPILES

pytestmark = COMPILES


@pytest.fixture(scope="session")
def artifact():
    return forward_artifact()


@pytest.fixture
def inputs(artifact):
    return Inputs(artifact)


def launched(artifact, arguments):
    """The one launch of a call."""
    found = []
    with emulated(found.append):
        load_emulated(artifact)(*arguments)
    (launch,) = found
    return launch


def map_address(launch, parameter):
    return struct.unpack_from("<Q", launch.parameters[parameter])[0]


def test_a_launch_says_what_the_plan_says(artifact, inputs):
    launch = launched(artifact, inputs)
    plan, (resources,) = artifact.description.plan, artifact.description.kernels
    assert launch.kernel == resources.name
    assert launch.ptx == artifact.ptx()
    assert launch.block == (384, 1, 1)
    assert launch.grid == (CTAS, 1, 1)
    assert launch.cluster == (1, 1, 1)
    assert launch.stream == 0
    used = max(b["offset"] + b["size"] for b in plan["buffers"] if b["space"] == "shared")
    assert used <= launch.shared_bytes <= used + 1024
    assert f"_param_{len(launch.parameters) - 1}" in launch.ptx
    assert [len(value) for value in launch.parameters[:6]] == [128, 16] * 3


def test_tensor_maps_and_scalars_reach_the_launch(artifact, inputs):
    launch = launched(artifact, inputs)
    addresses = [map_address(launch, parameter) for parameter in (0, 2, 4)]
    assert addresses == [inputs.q.data_ptr(), inputs.k.data_ptr(), inputs.v.data_ptr()]
    out, lse = struct.pack("<Q", inputs.out.data_ptr()), struct.pack("<Q", inputs.lse.data_ptr())
    assert launch.parameters[6].startswith(out)
    assert launch.parameters[7].startswith(lse)


def test_every_tensor_of_the_call_is_an_allocation_of_its_own_memory(artifact, inputs):
    launch = launched(artifact, inputs)
    given = list(inputs)
    tensors_given = {i: x for i, x in enumerate(given) if isinstance(x, torch.Tensor)}
    assert {a.argument: (a.base, a.nbytes) for a in launch.allocations} == {
        i: (x.data_ptr(), x.numel() * x.element_size()) for i, x in tensors_given.items()
    }
    out = next(a for a in launch.allocations if a.base == inputs.out.data_ptr())
    out.bytes()[:2] = (0x80, 0x3F)
    assert inputs.out.flatten()[0] == 1.0


def test_run_is_called_before_the_kernel_returns_and_sees_a_call_at_a_time(artifact, inputs):
    order = []
    with emulated(lambda launch: order.append("run")):
        kernel = load_emulated(artifact)
        for _ in range(3):
            order.append("call")
            kernel(*inputs)
    assert order == ["call", "run"] * 3


def test_an_error_in_run_reaches_the_caller_and_the_next_call_works(artifact, inputs):
    class Mine(Exception):
        pass

    def run(launch):
        if failing:
            raise failing[0]

    with emulated(run):
        kernel = load_emulated(artifact)
        for error in (Mine("on purpose"), KeyboardInterrupt()):
            failing = [error]
            with pytest.raises(type(error)) as caught:
                kernel(*inputs)
            assert caught.value is error
        failing = []
        kernel(*inputs)


def test_views_are_spanned_from_first_to_last_element():
    whole = torch.zeros(4, 6, 8, dtype=torch.bfloat16)
    view = whole[1:3, :, 2:4]
    _, span = tensors.on_device(view, 7)
    assert (span.base, span.argument) == (view.data_ptr(), 7)
    assert span.nbytes == ((1 * 48) + (5 * 8) + 1 + 1) * 2
    _, expanded = tensors.on_device(torch.zeros(1, 8).expand(1000, 8), 0)
    assert expanded.nbytes == 32
    assert tensors.on_device(torch.zeros(0, 8), 0)[1] is None


def test_a_lent_tensor_stays_on_the_cpu_and_keeps_its_memory():
    tensor = torch.arange(6.0, requires_grad=True)
    lent, _ = tensors.on_device(tensor, 0)
    assert lent.__dlpack_device__() == (2, 0)
    assert tensor.device.type == "cpu"
    assert tensor.__dlpack_device__()[0] == 1
    del tensor
    gc.collect()
    assert lent.shape == (6,)


def test_a_tensor_that_is_not_on_the_cpu_is_refused_by_position(artifact, inputs):
    class OnDevice:
        device = "cuda:0"

        def __dlpack__(self, **_):
            raise AssertionError("must not be exported")

        def __dlpack_device__(self):
            return 2, 0

    given = list(inputs)
    given[1] = OnDevice()
    with emulated(lambda launch: None):
        kernel = load_emulated(artifact)
        with pytest.raises(ValueError, match=r"Argument 1 is a tensor on cuda:0.*CPU"):
            kernel(*given)


def test_arguments_that_do_not_fit_are_refused_by_the_host_code(artifact, inputs):
    given = list(inputs)
    given[0] = given[0].float()
    with emulated(lambda launch: pytest.fail("launched")):
        kernel = load_emulated(artifact)
        with pytest.raises((TypeError, ValueError), match="q"):
            kernel(*given)


def test_outside_of_its_block_a_kernel_does_not_run(artifact, inputs):
    with pytest.raises(LaunchError, match="No emulation is open"):
        load_emulated(artifact)
    with emulated(lambda launch: pytest.fail("launched")):
        kernel = load_emulated(artifact)
    with pytest.raises(LaunchError, match="has been left"):
        kernel(*inputs)


def test_blocks_nest_and_each_kernel_keeps_its_own(artifact, inputs):
    outer, inner = [], []
    with emulated(outer.append):
        first = load_emulated(artifact)
        with emulated(inner.append):
            second = load_emulated(artifact)
            first(*inputs)
            second(*inputs)
        load_emulated(artifact)(*inputs)
    assert (len(outer), len(inner)) == (2, 1)


def test_calls_from_several_threads_take_turns(artifact):
    seen, running, overlaps = [], [], []

    def run(launch):
        overlaps.extend(running)
        running.append(launch)
        time.sleep(0.05)
        running.pop()
        seen.append(map_address(launch, 0))

    with emulated(run):
        kernel = load_emulated(artifact)
        calls = [Inputs(artifact, seed) for seed in range(4)]
        threads = [threading.Thread(target=kernel, args=tuple(call)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(seen) == sorted(call.q.data_ptr() for call in calls)
    assert overlaps == []


def test_a_folder_that_is_no_artefact_is_refused(tmp_path, artifact):
    with emulated(lambda launch: None):
        with pytest.raises(FileNotFoundError):
            load_emulated(tmp_path / "nothing")
        damaged = shutil.copytree(artifact.folder, tmp_path / artifact.folder.name)
        (damaged / "kernel.ptx").write_text("")
        with pytest.raises(DamagedArtifactError, match="sha256"):
            load_emulated(damaged)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real kernel would launch")
def test_the_kernel_for_a_gpu_still_calls_the_real_runtime(artifact, inputs):
    """One kernel, loaded for both at once: the real one fails for want of a driver and never comes here."""
    load_runtime()
    launches = []
    with emulated(launches.append):
        before = gpu.load(artifact)
        kernel = load_emulated(artifact)
        after = gpu.load(artifact)
        on_device = [tensors.on_device(x, 0)[0] if isinstance(x, torch.Tensor) else x for x in inputs]
        for real in (before, after):
            with pytest.raises(RuntimeError, match=r"(?i)cuda|driver") as caught:
                real(*on_device)
            assert "LaunchError" not in str(caught.value)
        assert launches == []
        kernel(*inputs)
    assert len(launches) == 1
    assert isinstance(launches[0], Launch)


def test_what_was_loaded_is_unloaded_and_no_file_is_left(artifact, inputs, tmp_path, monkeypatch):
    def mapped():
        return Path("/proc/self/maps").read_text().count("attn4-emulator-")

    gc.collect()
    before = mapped()
    environment = dict(os.environ)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with emulated(lambda launch: None):
        kernel = load_emulated(artifact)
        kernel(*inputs)
        assert mapped() > before
    del kernel
    gc.collect()
    assert mapped() == before
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == environment
