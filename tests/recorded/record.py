"""Run the recorded programs on the GPU of this machine, and write what they give.

    python3 tests/recorded/record.py OUT [--exhaustive]

needs Python 3.11, numpy and a driver (libcuda.so.1) with a GPU of compute capability 9.0. It writes
OUT/h200.npz.xz (results) and OUT/h200.json (device, versions, what failed); with ``--exhaustive``
also the results of the special functions for every fraction, as distances from the correctly rounded ones,
OUT/exhaustive-*.npz. A program that fails is noted and skipped.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import io
import json
import lzma
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recorded import arithmetic, copies, exchange, products
from recorded.copies import DTYPES, Copy, Map
from recorded.program import Program, elementwise

PATIENCE = 10.0
"""Seconds after which a kernel hangs."""


class Driver:
    """The CUDA driver: memory, kernels of PTX text, tensor maps. RuntimeError names what failed."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()
        self.device = ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.fresh()

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: error {status}: {(text.value or b'').decode()}")

    def fresh(self) -> None:
        """A context without the errors of earlier kernels."""
        self.call("cuDevicePrimaryCtxReset_v2", self.device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.device)
        self.call("cuCtxSetCurrent", self.context)

    def name(self) -> str:
        text = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", text, 100, self.device)
        return text.value.decode()

    def version(self) -> int:
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return number.value

    def upload(self, array: np.ndarray) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 256)))
        self.call(
            "cuMemcpyHtoD_v2", address, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        )
        return address.value

    def download(self, address: int, array: np.ndarray) -> None:
        size = ctypes.c_size_t(array.nbytes)
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address), size)

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def launch(self, text: str, addresses: list[int], threads: tuple[int, int]) -> None:
        """Load a module, run its kernel ``k`` to the end. TimeoutError if there is none."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 8192)
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), text.encode() + b"\0", 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{log.value.decode(errors='replace')[:2000]}") from error
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        given = [ctypes.c_uint64(address) for address in addresses]
        pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(value) for value in given))
        grid, block = threads
        self.call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, None, pointers, None)
        deadline = time.monotonic() + PATIENCE
        while (status := self.cuda.cuStreamQuery(None)) == 600:  # CUDA_ERROR_NOT_READY
            if time.monotonic() > deadline:
                raise TimeoutError("the kernel does not end")
            time.sleep(0.0005)
        if status:
            self.call("cuStreamQuery", None)
        self.call("cuModuleUnload", module)

    def encode(self, map_: Map, address: int) -> np.ndarray:
        """The 128 bytes of a tensor map."""
        rank = len(map_.dims)
        room = np.zeros(256, np.uint8)
        start = -room.ctypes.data % 64
        strides = (ctypes.c_uint64 * max(rank - 1, 1))(*map_.strides)
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(room.ctypes.data + start),
            DTYPES[map_.dtype],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*map_.dims),
            strides,
            (ctypes.c_uint32 * rank)(*map_.box),
            (ctypes.c_uint32 * rank)(*map_.element_strides),
            map_.interleave,
            map_.swizzle,
            map_.promotion,
            map_.nan_fill,
        )
        return room[start : start + 128].copy()


def run(driver: Driver, program: Program, maps: dict[str, np.ndarray] | None = None) -> np.ndarray:
    """The output of a program; its tensor map is put into ``maps``, under its name."""
    output = np.zeros(program.shape, program.dtype)
    tensor = driver.upload(program.inputs[0])
    addresses = [tensor]
    for n, array in enumerate(program.inputs[1:], 1):
        if n == 1 and isinstance(program, Copy) and program.map is not None:
            array = driver.encode(program.map, tensor)
            if maps is not None:
                maps[f"map of {program.name}"] = array
        addresses.append(driver.upload(array))
    addresses.append(driver.upload(output))
    driver.launch(program.text, addresses, program.threads)
    in_place = isinstance(program, Copy) and program.in_place
    driver.download(tensor if in_place else addresses[-1], output)
    for address in addresses:
        driver.free(address)
    return output


def all_programs() -> list[Program]:
    """Every program, in the order of the chapters."""
    return [program for chapter in (arithmetic, exchange, products, copies) for program in chapter.programs()]


def work(first: int, results: Connection) -> None:
    """Run the programs from number ``first`` on, and send what each gives; stop after one that fails.

    An illegal instruction leaves a process without a usable context: each failure costs one process.
    """
    driver = Driver()
    for program in all_programs()[first:]:
        maps: dict[str, np.ndarray] = {}
        try:
            output = program.recorded(run(driver, program, maps))
        except Exception as error:  # noqa: BLE001
            results.send((program.name, str(error) or type(error).__name__, {}))
            os._exit(0)
        # Variants of an instruction side by side compress better.
        results.send((program.name, np.ascontiguousarray(output.T), maps))
    os._exit(0)


def record(out: Path, about: dict[str, object]) -> None:
    """Run all programs, and write what there is."""
    results: dict[str, np.ndarray] = {}
    kept: dict[str, np.ndarray] = {}
    failures: dict[str, str] = {}
    programs = all_programs()
    while len(results) + len(failures) < len(programs):
        first = len(results) + len(failures)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        worker = multiprocessing.get_context("fork").Process(target=work, args=(first, sender))
        worker.start()
        sender.close()
        before = first
        while True:
            try:
                name, given, maps = receiver.recv()
            except EOFError:
                break
            if isinstance(given, str):
                failures[name] = given
                print(f"{name}: {given}", flush=True)
            else:
                results[name] = given
                kept |= maps
            before += 1
        worker.join()
        if before == first:
            failures[programs[first].name] = "the process ended without a word"
    digests = {program.name: program.digest for program in programs if program.name in results}
    maps, where, failed = multiprocessing.get_context("fork").Pool(1).apply(encoded_maps)
    results |= kept | maps
    about |= where
    failures |= failed
    buffer = io.BytesIO()
    np.savez(buffer, **results)
    packed = lzma.compress(buffer.getvalue(), preset=9)
    (out / "h200.npz.xz").write_bytes(packed)
    about |= {"failures": failures, "digests": digests}
    (out / "h200.json").write_text(json.dumps(about, indent=1) + "\n")
    print(
        f"{len(results)} results, {len(packed)} bytes, {len(failures)} failures: {list(failures)}", flush=True
    )


def encoded_maps() -> tuple[dict[str, np.ndarray], dict[str, object], dict[str, str]]:
    """The tensor maps that the driver encodes, what it runs on, and what it refuses."""
    driver = Driver()
    maps: dict[str, np.ndarray] = {}
    failures: dict[str, str] = {}
    address = driver.upload(np.zeros(1 << 20, np.uint8))
    where = {"device": driver.name(), "driver": driver.version(), "map address": address}
    for name, map_ in copies.encodings().items():
        try:
            maps[f"map: {name}"] = driver.encode(map_, address)
        except RuntimeError as error:
            failures[f"map: {name}"] = str(error)
    return maps, where, failures


_RANGES = {
    "rcp": ("rcp.approx.ftz.f32 %x, %a;", [(1.0, 2.0)], lambda x: 1 / x),
    "rsqrt": ("rsqrt.approx.ftz.f32 %x, %a;", [(1.0, 2.0), (2.0, 4.0)], lambda x: 1 / np.sqrt(x)),
    "sqrt": ("sqrt.approx.ftz.f32 %x, %a;", [(1.0, 2.0), (2.0, 4.0)], np.sqrt),
    "lg2": ("lg2.approx.ftz.f32 %x, %a;", [(0.5, 1.0), (1.0, 2.0), (2.0, 4.0)], np.log2),
    "ex2": ("ex2.approx.ftz.f32 %x, %a;", [(1.0, 2.0), (0.5, 1.0), (-2.0, -1.0), (-32.0, -16.0)], np.exp2),
    "sin": ("sin.approx.ftz.f32 %x, %a;", [(0.5, 1.0), (1.0, 2.0), (2.0, 4.0)], np.sin),
    "cos": ("cos.approx.ftz.f32 %x, %a;", [(0.5, 1.0), (1.0, 2.0), (2.0, 4.0)], np.cos),
    "tanh": ("tanh.approx.f32 %x, %a;", [(0.125, 0.25), (0.5, 1.0), (1.0, 2.0), (4.0, 8.0)], np.tanh),
}


def exhaustive(driver: Driver, out: Path) -> None:
    """Every fraction of a few binades, as distances in units of the last place from the rounded result."""
    files: list[dict[str, np.ndarray]] = [{}, {}, {}, {}]
    for n, (name, (line, ranges, oracle)) in enumerate(_RANGES.items()):
        for low, high in ranges:
            first, last = sorted(int(np.float32(x).view(np.uint32)) for x in (low, high))
            bits = np.arange(first, last, dtype=np.uint32)
            if low < 0:
                bits = np.arange(
                    int(np.float32(high).view(np.uint32)),
                    int(np.float32(low).view(np.uint32)),
                    dtype=np.uint32,
                )
            got = run(driver, elementwise(name, "b32", "b32", [line], [bits]))[0].astype(np.int64)
            exact = (
                oracle(bits.view(np.float32).astype(np.float64))
                .astype(np.float32)
                .view(np.uint32)
                .astype(np.int64)
            )
            distance = got - exact
            small = np.abs(distance).max() < 128
            kept = distance.astype(np.int8) if small else got[::16].astype(np.uint32)
            files[n % 4][f"{name} {low}..{high}"] = kept
            print(f"{name} {low}..{high}: largest distance {np.abs(distance).max()}", flush=True)
    halves = np.arange(0, 1 << 16, dtype=np.uint16).view(np.uint32)
    lines = [
        "ex2.approx.f16x2 %x, %a;",
        "ex2.approx.ftz.bf16x2 %x, %a;",
        "tanh.approx.f16x2 %x, %a;",
        "tanh.approx.bf16x2 %x, %a;",
    ]
    files[3]["halves"] = run(driver, elementwise("halves", "b32", "b32", lines, [halves]))
    for n, arrays in enumerate(files):
        np.savez_compressed(out / f"exhaustive-{n}.npz", **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--exhaustive", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    about: dict[str, object] = {
        "numpy": np.__version__,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }
    record(options.out, about)
    if options.exhaustive:
        try:
            exhaustive(Driver(), options.out)
        except Exception:  # noqa: BLE001
            traceback.print_exc()


if __name__ == "__main__":
    main()
