"""What stands in for the CUDA runtime: which module is which, what a device would refuse, how copies bind."""

import ctypes
from dataclasses import replace

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tvm_ffi")

from attn4.emulator.launch import LaunchError, ShimError, driver, image, relink, shim
from attn4.emulator.launch.device import Chip
from attn4.emulator.launch.elf import sections
from host.emulator_kernel import forward_artifact
from needs import COMPILES

pytestmark = COMPILES


@pytest.fixture(scope="session")
def artifact():
    return forward_artifact()


def test_ptx_that_is_not_the_cubins_is_refused(artifact, tmp_path):
    (cubin,) = image.cubins_in(artifact.library.read_bytes())
    (resources,) = artifact.description.kernels
    first = f"{resources.name}_param_0[128]"
    assert first in artifact.ptx()
    for changed, problem in (
        (
            artifact.ptx().replace(first, first.replace("128", "64"), 1),
            f"parameters of kernel {resources.name}",
        ),
        (artifact.ptx().replace(resources.name, "other"), f"no kernel {resources.name}"),
    ):
        with pytest.raises(LaunchError, match=problem):
            image.image(cubin, changed)


def test_the_digest_of_a_cubin_ignores_padding_and_nothing_else(artifact):
    (cubin,) = image.cubins_in(artifact.library.read_bytes())
    assert image.digest(cubin + b"\0" * 8) == image.digest(cubin)
    text = next(s for name, s in sections(cubin).items() if name.startswith(".text."))
    other = bytearray(cubin)
    other[text.offset] ^= 1
    assert image.digest(bytes(other)) != image.digest(cubin)


PTX = """
.visible .entry first(.param .u64 .ptr .global .align 16 first_param_0, .param .f32 first_param_1)
.visible .entry second()
.entry third(
	.param .align 64 .b8 third_param_0[128],
	.param .u16 third_param_1
)
"""


def test_parameter_bytes_are_read_off_the_ptx():
    assert image.ptx_parameters(PTX) == {"first": (8, 4), "second": (), "third": (128, 2)}
    with pytest.raises(LaunchError, match=r"first.*not understood"):
        image.ptx_parameters(PTX.replace(".u64", ".wide", 1))


class Shimmed:
    """The private shim called as host code calls it, in a call that may load ``cubin``."""

    def __init__(self, modules):
        self.shim = shim.private_shim()
        driver.driver_of(self.shim)
        self.library = ctypes.CDLL(str(self.shim.path))
        self.modules = modules

    def __call__(self, name, *arguments):
        """Call one function; returns nothing, raises what went wrong in it."""
        with driver.emulation(lambda launch: None) as opened:
            call = driver.Call(opened, self.modules, {}, ())
            with driver.calling(call):
                getattr(self.library, relink.private_name(name))(*arguments)


@pytest.fixture
def host(artifact):
    modules = driver.Modules()
    (cubin,) = image.cubins_in(artifact.library.read_bytes())
    modules.add(cubin, artifact.ptx())
    return Shimmed(modules)


def loaded_kernel(host, artifact):
    code = artifact.library.read_bytes()
    fatbin = ctypes.create_string_buffer(code[code.index(image.FATBIN_MAGIC) :])
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    host("_cudaLibraryLoadData", ctypes.byref(library), fatbin, *[None] * 3, None, None, 0)
    name = artifact.description.kernels[0].name.encode()
    host("_cudaLibraryGetKernel", ctypes.byref(kernel), library, name)
    return kernel


def configuration(grid=(1, 1, 1), block=(128, 1, 1), shared=0, attributes=()):
    config = driver._Configuration(grid, block, shared)
    config.attribute_count = len(attributes)
    config.attributes = (driver._Attribute * len(attributes))(
        *(driver._Attribute(number, 0, value) for number, value in attributes)
    )
    return config


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (configuration(grid=(0, 1, 1)), "at least 1"),
        (configuration(block=(1025, 1, 1)), "1024 threads"),
        (configuration(shared=49153), "49152 bytes of dynamic shared memory are allowed"),
        (configuration(grid=(3, 1, 1), attributes=[(4, (2, 1, 1))]), "multiple of the cluster"),
        (configuration(grid=(16, 1, 1), attributes=[(4, (16, 1, 1))]), "16 blocks"),
        (configuration(attributes=[(12, (1,))]), "attribute 12: not emulated"),
    ],
)
def test_a_launch_that_a_device_refuses_is_refused(host, artifact, config, problem):
    kernel = loaded_kernel(host, artifact)
    sizes = host.modules.kernels[kernel.value].image.kernels[artifact.description.kernels[0].name]
    values = [ctypes.create_string_buffer(size) for size in sizes.parameter_bytes]
    arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    host("_cudaLaunchKernelEx", ctypes.byref(configuration()), kernel, arguments)
    with pytest.raises(LaunchError, match=problem):
        host("_cudaLaunchKernelEx", ctypes.byref(config), kernel, arguments)
    arguments[3] = None
    with pytest.raises(LaunchError, match=r"Parameter 3 of kernel .* \(16 bytes\) has no value"):
        host("_cudaLaunchKernelEx", ctypes.byref(configuration()), kernel, arguments)


def test_clusters_have_the_preferred_size_where_the_grid_is_made_of_such(host, artifact):
    kernel = loaded_kernel(host, artifact)
    sizes = host.modules.kernels[kernel.value].image.kernels[artifact.description.kernels[0].name]
    values = [ctypes.create_string_buffer(size) for size in sizes.parameter_bytes]
    arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    found = []
    with driver.emulation(found.append) as opened:
        for blocks in (8, 6):
            config = configuration((blocks, 1, 1), attributes=[(4, (2, 1, 1)), (11, (4, 1, 1))])
            with driver.calling(driver.Call(opened, host.modules, {}, ())):
                host.library.a4_daLaunchKernelEx(ctypes.byref(config), kernel, arguments)
    assert [launch.cluster for launch in found] == [(4, 1, 1), (2, 1, 1)]


def test_what_was_never_loaded_is_named(host, artifact):
    nothing = (ctypes.c_void_p * 1)()
    with pytest.raises(LaunchError, match=r"unknown kernel.*0x3039"):
        host("_cudaLaunchKernelEx", ctypes.byref(configuration()), ctypes.c_void_p(12345), nothing)
    with pytest.raises(LaunchError, match="no kernel elsewhere"):
        loaded_kernel(host, replace_kernel_name(artifact, "elsewhere"))
    host.modules.images.clear()
    with pytest.raises(LaunchError, match="no known PTX was assembled"):
        loaded_kernel(host, artifact)
    out = ctypes.c_void_p()
    with pytest.raises(LaunchError, match="unknown format"):
        host("_cudaLibraryLoadData", ctypes.byref(out), ctypes.create_string_buffer(64), *[None] * 5, 0)


def replace_kernel_name(artifact, name):
    (resources,) = artifact.description.kernels
    return replace(
        artifact, description=replace(artifact.description, kernels=(replace(resources, name=name),))
    )


def test_memory_of_host_code_is_an_allocation_until_it_is_freed(host):
    with driver.emulation(lambda launch: None) as opened:
        call = driver.Call(opened, host.modules, {}, ())
        memory = ctypes.c_void_p()
        with driver.calling(call):
            host.library.a4_daMalloc(ctypes.byref(memory), ctypes.c_size_t(1000))
            (allocation,) = opened.memory.values()
            assert (allocation.base, allocation.nbytes) == (memory.value, 1000)
            assert memory.value % 256 == 0
            host.library.a4_daMemset(memory, 7, ctypes.c_size_t(1000))
            assert (allocation.bytes() == 7).all()
            host.library.a4_daMemcpy(memory, bytes(16), ctypes.c_size_t(16), 1)
            assert not allocation.bytes()[:16].any()
            host.library.a4_daFree(memory)
            assert not opened.memory
        with pytest.raises(LaunchError, match="was freed"), driver.calling(call):
            host.library.a4_daFree(memory)
        for write in (
            lambda: host.library.a4_daMemset(memory, 7, ctypes.c_size_t(8)),
            lambda: host.library.a4_daMemcpy(memory, bytes(16), ctypes.c_size_t(8), 1),
            lambda: host.library.a4_daMemcpy(bytes(16), memory, ctypes.c_size_t(8), 2),
        ):
            again = driver.calling(driver.Call(opened, host.modules, {}, ()))
            with pytest.raises(LaunchError, match=f"8 bytes at {memory.value:#x}"), again:
                write()


def test_the_older_launch_and_the_occupancy_of_a_kernel(host, artifact):
    kernel = loaded_kernel(host, artifact)
    sizes = host.modules.kernels[kernel.value].image.kernels[artifact.description.kernels[0].name]
    values = [ctypes.create_string_buffer(size) for size in sizes.parameter_bytes]
    arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

    class Extent(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_uint) for name in "xyz")

    found = []
    launch = host.library.a4_daLaunchKernel
    launch.argtypes = (ctypes.c_void_p, Extent, Extent, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    with driver.emulation(found.append, Chip.of("sm_90a").attributes()) as opened:
        call = driver.Call(opened, host.modules, opened.attributes, ())
        with driver.calling(call):
            launch(kernel, Extent(3, 2, 1), Extent(128, 1, 1), arguments, 4096, None)
            blocks = ctypes.c_int()
            occupancy = host.library.a4_daOccupancyMaxActiveBlocksPerMultiprocessor
            occupancy(ctypes.byref(blocks), kernel, 128, ctypes.c_size_t(100_000))
    assert [(launched.grid, launched.block, launched.shared_bytes) for launched in found] == [
        ((3, 2, 1), (128, 1, 1), 4096)
    ]
    assert blocks.value == 2


def test_the_shim_defines_all_it_offers_under_private_names_and_no_more(tmp_path):
    names = {relink.private_name(name) for name in shim.SYMBOLS}
    assert len(names) == len(shim.SYMBOLS)
    assert not names & shim.SYMBOLS
    built = shim.build(tmp_path)
    found = {s.name for s in relink._symbols(built.read_bytes()) if s.defined}
    assert found == {*names, "attn4_shim_install", "attn4_shim_explain"}
    assert shim.build(tmp_path) == built


def test_a_shim_without_a_compiler_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ShimError, match="Install gcc"):
        shim.build(tmp_path)


def test_relinking_changes_three_letters_of_each_name_and_nothing_else(artifact):
    before = artifact.library.read_bytes()
    after = relink.relinked(before, shim.SYMBOLS)
    changed = {s.name for s in relink._symbols(before)} - {s.name for s in relink._symbols(after)}
    assert "_cudaLaunchKernelEx" in changed
    assert changed <= shim.SYMBOLS
    different = sum(a != b for a, b in zip(before, after, strict=True))
    assert len(changed) <= different <= 3 * len(changed)
    with pytest.raises(LaunchError, match="not emulated: _cudaLaunchKernelEx"):
        relink.relinked(before, shim.SYMBOLS - {"_cudaLaunchKernelEx"})
    with pytest.raises(ValueError, match="no 64-bit"):
        relink.relinked(b"text", shim.SYMBOLS)
