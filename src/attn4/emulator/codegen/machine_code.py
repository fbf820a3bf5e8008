"""LLVM text to functions of this process, by llvmlite if it is installed; the object code is kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from attn4.emulator.codegen.cache import keep, kept
from attn4.emulator.vector.floating import FUNCTIONS


@cache
def available() -> bool:
    """Whether vector functions can be compiled here."""
    return importlib.util.find_spec("llvmlite") is not None


def compiled(text: str, names: list[str]) -> dict[str, Callable[[int], None]]:
    """The functions of a module, called with the address of a context. They live as long as the result."""
    binding = _llvm()
    machine = _machine()
    features = binding.get_host_cpu_features().flatten()
    target = f"{binding.llvm_version_info} {binding.get_host_cpu_name()} {features}"
    key = hashlib.sha256(f"{target}\0{text}".encode()).hexdigest()[:40]
    code = kept(f"{key}.o")
    if code is None:
        module = binding.parse_assembly(text)
        module.verify()
        code = machine.emit_object(module)
        keep(f"{key}.o", code)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(fresh=True))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    table = (ctypes.c_uint64 * 16).from_address(engine.get_global_value_address("functions"))
    for n, name in enumerate(FUNCTIONS):
        table[2 * n], table[2 * n + 1] = _double_loop(getattr(np, name))
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    found: dict[str, Callable[[int], None]] = {}
    for name in names:
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


_made: list[Any] = []


def _machine(*, fresh: bool = False) -> Any:
    if fresh or not _made:
        binding = _llvm()
        target = binding.Target.from_default_triple()
        machine = target.create_target_machine(
            cpu=binding.get_host_cpu_name(),
            features=binding.get_host_cpu_features().flatten(),
            opt=1,
            jit=True,
        )
        if fresh:
            return machine
        _made.append(machine)
    return _made[0]


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
