"""CuTe-DSL, made to compile for the emulated device and to call the emulator.

Three things change while a device block is open. What the DSL takes the machine for, and which runtime its
host code is linked to, come from the block; both are part of its cache's key, so that nothing compiled for a
device is used for another. The names of the runtime's functions are private ones while host code is linked,
whatever else the process has loaded, and the module itself keeps the names it has. And CPU tensors are
described as lying in the device's memory, so that they compile to global addresses.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.util
import math
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from attn4.emulator.launch.driver import (
    IN_PROCESS,
    Call,
    Emulation,
    calling,
    driver_of,
    emulated_chip,
    emulated_device,
)
from attn4.emulator.launch.errors import LaunchError
from attn4.emulator.launch.patches import Patch
from attn4.emulator.launch.record import Allocation
from attn4.emulator.launch.relink import RUNTIME_PREFIXES, private_name
from attn4.emulator.launch.shim import SYMBOLS, private_shim
from attn4.emulator.launch.tensors import is_tensor, on_device, relabelled

PACKAGE = "cutlass"
PROVIDER = "cutlass.cutlass_dsl.tvm_ffi_provider"


def patches() -> Iterable[Patch]:
    """What is patched of the DSL, once a program has imported it. Raises LaunchError for a DSL that is laid
    out in another way.
    """
    package = _loaded(PACKAGE)
    if package is None:
        return ()
    try:
        found = tuple(_patches())
        for patch in found:
            getattr(patch.owner, patch.name)
    except (KeyError, AttributeError) as error:
        version = getattr(package, "__version__", "of an unknown version")
        raise LaunchError(
            f"CuTe DSL {version} is not laid out as the emulator, written for 4.8, expects it: {error}."
        ) from error
    return found


def _patches() -> Iterator[Patch]:
    environment = sys.modules["cutlass.base_dsl.env_manager"].EnvironmentVarManager
    compiler = sys.modules["cutlass.base_dsl.compiler"]
    executors = sys.modules["cutlass.base_dsl.jit_executor"]
    yield Patch(environment, "arch", _arch)
    yield Patch(environment, "shared_libs", lambda _: _setting("shared_libs", _runtime))
    yield Patch(environment, "disable_file_caching", lambda _: _setting("disable_file_caching", _always))
    yield Patch(compiler.CompileOptions, "apply_envar_settings", _keep_ptx)
    yield Patch(compiler.Compiler, "jit", _link)
    yield Patch(sys.modules["cutlass.base_dsl.dsl"].BaseDSL, "_build_jit_function", _make_known)
    yield Patch(executors.JitExecutor, "run_compiled_program", _run)
    yield Patch(executors.JitCompiledFunction, "run_compiled_program", _run)
    yield Patch(sys.modules["cutlass.cute.runtime"]._Tensor, "__init__", _describe)
    yield Patch(sys.modules["cutlass.utils.hardware_info"].HardwareInfo, "get_max_active_clusters", _clusters)
    for name in ("cutlass.testing", "cutlass.cute.testing"):
        if _loaded(name) is not None:
            yield Patch(sys.modules[name], "benchmark", _no_time)
    provider = _loaded(PROVIDER)
    if provider is not None:
        yield Patch(provider.TVMFFIJitCompiledFunctionBase, "_create_tvm_ffi_function", _link_own)
        for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
            yield Patch(getattr(provider, name), "__call__", _call)


_executed: set[str] = set()


def _loaded(name: str) -> Any:
    """A module that has been imported to its end, None if it has not."""
    module = sys.modules.get(name)
    if module is None or name in _executed:
        return module
    return None if getattr(module.__spec__, "_initializing", False) else module


class Watcher(importlib.abc.MetaPathFinder):
    """Calls ``then`` when one of ``names`` has been imported. Stands in ``sys.meta_path``."""

    def __init__(self, names: Iterable[str], then: Callable[[], None]) -> None:
        self._names = frozenset(names)
        self._then = then
        self._looking: set[str] = set()

    def find_spec(self, name: str, *_: Any) -> Any:
        """The module's own specification, its execution followed by ``then``."""
        if name not in self._names or name in self._looking:
            return None
        self._looking.add(name)
        try:
            found = importlib.util.find_spec(name)
        finally:
            self._looking.discard(name)
        if found is None or found.loader is None:
            return found
        execute = found.loader.exec_module

        def execute_and_tell(module: Any) -> None:
            execute(module)
            _executed.add(name)
            self._then()

        found.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return found


# What the DSL asks of its environment


def _setting(name: str, answer: Callable[[], Any]) -> property:
    """An attribute of instances that the block overrules."""

    def read(environment: Any) -> Any:
        return vars(environment).get(name) if emulated_device() is None else answer()

    def write(environment: Any, value: Any) -> None:
        vars(environment)[name] = value

    return property(read, write)


def _arch(original: property) -> property:
    def read(environment: Any) -> Any:
        device = emulated_device()
        assert original.fget is not None
        return original.fget(environment) if device is None else emulated_chip().arch

    return property(read, original.fset, original.fdel)


def _runtime() -> str:
    shim = private_shim()
    driver_of(shim)
    return str(shim.path)


def _always() -> bool:
    return True


@functools.cache
def _dumps() -> tempfile.TemporaryDirectory[str]:
    """Where the DSL leaves PTX and cubins; one name for the whole process, as it is part of a cache's key."""
    return tempfile.TemporaryDirectory(prefix="attn4-emulator-dsl-")


def _keep_ptx(original: Callable[..., None]) -> Callable[..., None]:
    def apply(options: Any, *arguments: Any, **named: Any) -> None:
        if emulated_device() is not None:
            compiler = sys.modules["cutlass.base_dsl.compiler"]
            options.options[compiler.KeepPTX].value = True
            options.options[compiler.KeepCUBIN].value = True
            folder = options.options[compiler.DumpDir]
            if not folder.value:
                folder.value = _dumps().name
        original(options, *arguments, **named)

    return apply


def _make_known(original: Callable[..., Any]) -> Callable[..., Any]:
    """What has been compiled may be loaded: its cubin is told apart from others, its PTX is what runs."""

    def build(*arguments: Any, **named: Any) -> Any:
        function = original(*arguments, **named)
        # Of a function without kernels the DSL has the name of a file that it did not write.
        if emulated_device() is not None and isinstance(function.__cubin__, bytes):
            IN_PROCESS.add(function.__cubin__, function.__ptx__)
        return function

    return build


# Linking


def _link(original: Callable[..., Any]) -> Callable[..., Any]:
    def jit(compiler: Any, module: Any, *arguments: Any, **named: Any) -> Any:
        if emulated_device() is None:
            return original(compiler, module, *arguments, **named)
        with _private_names(module):
            return original(compiler, module, *arguments, **named)

    return jit


def _link_own(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(function: Any) -> Any:
        if emulated_device() is None or function.engine is None:
            return original(function)
        with _private_names(function.ir_module):
            return original(function)

    return create


@contextmanager
def _private_names(module: Any) -> Iterator[None]:
    """The module's calls to the CUDA runtime under the names that only the emulator defines, in this block.

    Raises LaunchError that names a function which is called and not emulated.
    """
    table = sys.modules["cutlass._mlir.ir"].SymbolTable
    declared, used = _runtime_symbols(module)
    missing = sorted(used & declared.keys() - SYMBOLS)
    if missing:
        raise LaunchError(f"The program's host code calls what is not emulated: {', '.join(missing)}.")
    renamed = [(name, private_name(name), declared[name]) for name in declared if name in SYMBOLS]

    def rename(operation: Any, before: str, after: str) -> None:
        table.replace_all_symbol_uses(before, after, module.operation)
        table.set_symbol_name(operation, after)

    with module.context:
        for public, private, operation in renamed:
            rename(operation, public, private)
    try:
        yield
    finally:
        with module.context:
            for public, private, operation in renamed:
                rename(operation, private, public)


def _runtime_symbols(module: Any) -> tuple[dict[str, Any], set[str]]:
    """Functions of the CUDA runtime that a module declares, and the names that are called or taken."""
    ir = sys.modules["cutlass._mlir.ir"]
    declared: dict[str, Any] = {}
    used: set[str] = set()

    def visit(operation: Any) -> Any:
        attributes = operation.attributes
        if operation.name == "llvm.func":
            name = attributes["sym_name"].value
            if name.startswith(RUNTIME_PREFIXES) and not len(operation.regions[0].blocks):
                declared[name] = operation
        for attribute in ("callee", "global_name"):
            if attribute in attributes:
                used.add(attributes[attribute].value)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return declared, used


# Calls


def _run(original: Callable[..., Any]) -> Callable[..., Any]:
    """A call of host code without tvm-ffi: what went wrong in it reaches the caller as it was raised."""

    def run(function: Any, *arguments: Any, **named: Any) -> Any:
        device = emulated_device()
        if device is None:
            return original(function, *arguments, **named)
        _require_code(function)
        with calling(Call(device, IN_PROCESS, device.attributes, device.allocations())):
            return original(function, *arguments, **named)

    return run


def _require_code(function: Any) -> None:
    """Raise LaunchError for a function that has no host code, as the DSL makes it for the machine's own
    architecture only.
    """
    if getattr(function, "engine", function) is None:
        raise LaunchError(
            f"{function.function_name} was not compiled for {emulated_chip().arch}, emulated here: compile "
            "it for that, or open a device of its own."
        )


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    """A call through tvm-ffi: CPU tensors, wherever they stand in the arguments, go as the device's."""

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        device = emulated_device()
        if device is None:
            return original(function, *arguments, **named)
        _require_code(function)
        lent = Lent()
        given = [lent.replace(argument, n) for n, argument in enumerate(arguments)]
        options = {name: lent.replace(value, len(given)) for name, value in named.items()}
        spans = tuple(lent.allocations)
        with calling(Call(device, IN_PROCESS, device.attributes, spans + device.allocations())):
            return original(function, *given, **options)

    return call


class Lent:
    """Arguments of a call with CPU tensors replaced; ``allocations`` are the memory that those span."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []

    def replace(self, value: Any, argument: int) -> Any:
        """``value``, its tensors on the device: those in tuples, lists, dicts and data classes, too."""
        if _is_dsl_value(value):
            return value
        if is_tensor(value):
            tensor, allocation = on_device(value, argument)
            if allocation is not None:
                self.allocations.append(allocation)
            return tensor
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.replace(item, argument) for item in value))
        if isinstance(value, (tuple, list)):
            return type(value)(self.replace(item, argument) for item in value)
        if isinstance(value, dict):
            return {name: self.replace(item, argument) for name, item in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            changed = {name: self.replace(item, argument) for name, item in fields.items()}
            if any(changed[name] is not fields[name] for name in fields):
                return dataclasses.replace(value, **changed)
        return value


def _is_dsl_value(value: Any) -> bool:
    return hasattr(value, "__tvm_ffi_object__") or hasattr(value, "__c_pointers__")


def _describe(original: Callable[..., None]) -> Callable[..., None]:
    """cute.runtime.from_dlpack: a CPU tensor is described as lying on the device, and lent to it."""

    def initialise(described: Any, tensor: Any, *arguments: Any, **named: Any) -> None:
        device = emulated_device()
        if device is None or not is_tensor(tensor) or tensor.__dlpack_device__()[0] != 1:
            return original(described, tensor, *arguments, **named)
        offer, allocation = relabelled(tensor)
        original(described, offer, *arguments, **named)
        if allocation is not None:
            _lend(device, described, allocation)
        return None

    return initialise


def _lend(device: Emulation, owner: Any, allocation: Allocation) -> None:
    reference = weakref.ref(owner)
    device.lend(allocation, lambda: reference() is not None, id(owner))


def _no_time(original: Callable[..., float]) -> Callable[..., float]:
    """cute.testing.benchmark: launches take no time that would mean anything, so that none are made."""

    def benchmark(*arguments: Any, **named: Any) -> float:
        return original(*arguments, **named) if emulated_device() is None else math.nan

    return benchmark


def _clusters(original: Callable[..., int]) -> Callable[..., int]:
    def count(information: Any, cluster_size: int, *arguments: Any, **named: Any) -> int:
        if emulated_device() is None:
            return original(information, cluster_size, *arguments, **named)
        return max(1, emulated_chip().sms // cluster_size)

    return count
