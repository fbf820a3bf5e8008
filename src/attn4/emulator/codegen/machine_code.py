"""LLVM text to functions of this process, by llvmlite if it is installed; the object code is kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np

from attn4.emulator.codegen.cache import keep, kept
from attn4.emulator.vector.floating import FUNCTIONS

_OLDEST: Final = (0, 46)


@cache
def available() -> bool:
    """Whether vector functions can be compiled here: with an llvmlite of LLVM 20 or later."""
    try:
        major, minor = (int(part) for part in importlib.metadata.version("llvmlite").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    return (major, minor) >= _OLDEST


def compiled(
    text: str, names: dict[str, tuple[Any, int]], *, effort: int = 0
) -> dict[str, Callable[..., Any]]:
    """The functions of a module, which live as long as the result.

    ``names`` gives the ctypes result of each and how many arguments it takes, all of them 64-bit integers or
    addresses. A global ``@functions`` is filled with the loops of `FUNCTIONS`. ``effort``, 0 to 3, goes into
    optimisation: runs of instructions are no faster for it, but take twice as long to compile.
    """
    binding = _llvm()
    machine = _machine(effort)
    features = binding.get_host_cpu_features().flatten()
    target = f"{binding.llvm_version_info} {binding.get_host_cpu_name()} {features}"
    key = hashlib.sha256(f"{target}\0{effort}\0{text}".encode()).hexdigest()[:40]
    code = kept(f"{key}.o")
    if code is None:
        module = binding.parse_assembly(text)
        module.verify()
        code = machine.emit_object(module)
        keep(f"{key}.o", code)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(effort))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    place = engine.get_global_value_address("functions")
    if place:
        table = (ctypes.c_uint64 * 16).from_address(place)
        for n, name in enumerate(FUNCTIONS):
            table[2 * n], table[2 * n + 1] = _double_loop(getattr(np, name))
    found: dict[str, Callable[..., Any]] = {}
    for name, (result, arguments) in names.items():
        prototype = ctypes.CFUNCTYPE(result, *[ctypes.c_uint64] * arguments)
        function: Any = prototype(engine.get_function_address(name))
        function.engine = engine
        found[name] = function
    return found


@cache
def _llvm() -> Any:
    import llvmlite.binding as binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


def _machine(effort: int) -> Any:
    binding = _llvm()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=effort,
        jit=True,
    )


class _Ufunc(ctypes.Structure):
    """The beginning of numpy's public struct PyUFuncObject."""

    _fields_ = (
        ("references", ctypes.c_ssize_t),
        ("type", ctypes.c_void_p),
        ("nin", ctypes.c_int),
        ("nout", ctypes.c_int),
        ("nargs", ctypes.c_int),
        ("identity", ctypes.c_int),
        ("functions", ctypes.POINTER(ctypes.c_void_p)),
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("ntypes", ctypes.c_int),
    )


def _double_loop(ufunc: np.ufunc) -> tuple[int, int]:
    """Address and data of numpy's loop over float64 of a function of one argument."""
    inside = _Ufunc.from_address(id(ufunc))
    if (inside.nin, inside.nout, inside.ntypes) != (1, 1, ufunc.ntypes):
        raise RuntimeError(f"numpy {np.__version__} keeps the loops of {ufunc.__name__} elsewhere")
    place = ufunc.types.index("d->d")
    return inside.functions[place] or 0, (inside.data[place] or 0) if inside.data else 0
