"""A Plan becomes an artefact: compile without a GPU, export, link, describe."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attn4 import __version__
from attn4.artifact.artifact import LIBRARY, PTX, Description, file_sha256, write_description
from attn4.artifact.elf import kernel_resources
from attn4.artifact.errors import NO_COMPILER, CompileError
from attn4.artifact.key import (
    FORMAT,
    artifact_key,
    host,
    plan_to_json,
    source_digest,
    sources_changed,
    toolchain,
)
from attn4.plan.plan import Plan

KERNELS = "attn4.kernels:compile_plan"
"""Where the function lives that compiles a Plan, as ``module:function``."""

_OBJECT = "kernel.o"
_FUNCTION_DIGITS = 16
_LINKERS = ("gcc", "cc", "clang")
_compiling = threading.Lock()


def environment_is_clean() -> bool:
    """Whether no variable is set that CuTe DSL would read, and that might change a kernel."""
    return not any(name.startswith("CUTE_DSL_") for name in os.environ)


def build_here(plan: Plan, folder: Path, compiler: str = KERNELS) -> None:
    """Compile ``plan`` in this process, and write its artefact into the empty ``folder``.

    CuTe DSL reads its environment variables when it is imported: call this in a process whose
    environment is clean, or leave it to ``worker.CompilerProcess``. Raises CompileError.
    """
    tools = toolchain()
    if tools is None:
        raise CompileError(NO_COMPILER)
    if tools.unfit is not None:
        raise CompileError(tools.unfit)
    key = artifact_key(plan, tools)
    function = f"attn4_{key[:_FUNCTION_DIGITS]}"
    # CuTe DSL keeps the module that it builds in global state, so that two threads must not compile at once.
    with _compiling:
        started = time.perf_counter()
        compile_plan = _resolve(compiler)
        imported = time.perf_counter()
        if sources_changed():
            raise CompileError("attn4's sources were edited since this process began: start it again.")
        compiled = compile_plan(plan)
        ptx = _checked_ptx(compiled, plan.arch)
        compiled_at = time.perf_counter()
        compiled.export_to_c(str(folder / _OBJECT), function_name=function, export_only_tvm_ffi_symbols=True)
    exported = time.perf_counter()
    (folder / PTX).write_text(ptx, encoding="utf-8")
    _link(folder / _OBJECT, folder / LIBRARY)
    linked = time.perf_counter()
    description = Description(
        format=FORMAT,
        key=key,
        plan=plan_to_json(plan),
        arch=plan.arch,
        host=host(),
        function=function,
        attn4_version=__version__,
        source_digest=source_digest(),
        dsl_version=tools.dsl_version,
        toolkit=tools.toolkit,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        sha256={name: file_sha256(folder / name) for name in (LIBRARY, PTX)},
        kernels=kernel_resources((folder / LIBRARY).read_bytes()),
        seconds={
            "import": round(imported - started, 3),
            "compile": round(compiled_at - imported, 3),
            "export": round(exported - compiled_at, 3),
            "link": round(linked - exported, 3),
        },
    )
    write_description(folder, description)


def _resolve(compiler: str) -> Callable[[Plan], Any]:
    module, _, function = compiler.partition(":")
    found: Callable[[Plan], Any] = getattr(importlib.import_module(module), function)
    return found


def _checked_ptx(compiled: Any, arch: str) -> str:
    """The PTX of a compiled kernel. A kernel for another architecture would load, and then not launch."""
    ptx = compiled.__ptx__
    if not ptx:
        raise CompileError("The compiled kernel holds no PTX: compile it with the option --keep-ptx.")
    target = re.search(r"^\s*\.target\s+(\w+)", ptx, re.MULTILINE)
    if target is None or target[1] != arch:
        given = target[1] if target else "nothing"
        raise CompileError(f"The kernel was compiled for {given}, and the plan asks for {arch}.")
    text: str = ptx
    return text


def _link(object_file: Path, library: Path) -> None:
    """Link the exported object, its own symbols bound inside it, and remove it."""
    linker = next(filter(None, map(shutil.which, _LINKERS)), None)
    if linker is None:
        raise CompileError(
            f"No C compiler to link the kernel with ({', '.join(_LINKERS)} were looked for). "
            "Install gcc, or use a bundle that was built elsewhere."
        )
    command = [linker, "-shared", "-s", "-Wl,-Bsymbolic", "-o", str(library), str(object_file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CompileError(f"{' '.join(command)} failed ({result.returncode}): {result.stderr.strip()}")
    object_file.unlink()
