"""Warpgroup products of sm_90a (PTX 9.7.15): issued into registers, computed when waited for or before.

The registers of D are new arrays when the instruction has been issued: they hold poison until the product,
which knows them, fills them in place. So a program that reads D too early computes with poison.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.control import require_aligned, uniform
from attn4.emulator.isa.registry import (
    Function,
    Modifiers,
    UnsupportedInstruction,
    effect,
    immediate,
    operand_count,
)
from attn4.emulator.ptx.module import Instruction, Vector
from attn4.emulator.state.asynchronous import Products
from attn4.emulator.units.wgmma import THREADS, Product, fragment_of, matrix_of

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]

_POISON = 0xCBCBCBCB
_REMEMBERED = 16
_TYPES = ("f32", "f16", "s32", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8")


def _products(warp: Warp) -> Products:
    found: Products | None = warp.state.get("wgmma")
    if found is None:
        found = warp.state["wgmma"] = Products()
    return found


def _destinations(i: Instruction) -> int:
    return 1 if i.modifiers[0] == "mma_async" else 0


def _types(i: Instruction) -> tuple[str, ...]:
    if i.modifiers[0] != "mma_async":
        return ("u32",)
    a = i.operands[1]
    return (*(["b32"] * len(a.items) if isinstance(a, Vector) else ["b64"]), "b64", "pred", "s32")


@effect("wgmma", destinations=_destinations, types=_types)
def wgmma(i: Instruction) -> Function:
    """PTX 9.7.15.5.2 wgmma.mma_async, 9.7.15.7 .fence, .commit_group and .wait_group."""
    kind = i.modifiers[0]
    if kind == "mma_async":
        return MultiplyAccumulate(i)
    modifiers = Modifiers(i)
    modifiers.one_of("fence", "commit_group", "wait_group")
    modifiers.one_of("sync")
    modifiers.one_of("aligned")
    modifiers.done()
    if kind == "fence":
        return lambda warp, mask: require_aligned(warp, mask, "wgmma.fence")
    if kind == "commit_group":
        return _commit
    return _wait


def _commit(warp: Warp, mask: Mask) -> None:
    """PTX: "Commits all prior uncommitted wgmma.mma_async operations into a wgmma-group"."""
    require_aligned(warp, mask, "wgmma.commit_group")
    _products(warp).commit()
    if (watch := warp.block.grid.watch) is not None:
        watch.products_committed(warp, mask)


def _wait(warp: Warp, mask: Mask, pending: Lanes) -> None:
    """PTX: "Wait for N or fewer of the most recent wgmma-groups being pending and all prior wgmma-groups
    complete".
    """
    require_aligned(warp, mask, "wgmma.wait_group")
    count = uniform(pending, mask)
    _products(warp).wait(count)
    if (watch := warp.block.grid.watch) is not None:
        watch.products_waited(warp, mask, count)


class MultiplyAccumulate:
    """PTX: "Perform matrix multiply-and-accumulate across warpgroup": D = A B + D, or A B where scale-d is
    false.
    """

    def __init__(self, i: Instruction) -> None:
        self._instruction = i
        self._product, self._in_registers = _product(i)

    def __call__(self, warp: Warp, mask: Mask, *sources: Lanes) -> list[Lanes]:
        """Issue one product. ``sources``: D, then A, B, scale-d and the flags."""
        count = self._product.registers
        return self.chain(warp, mask, (sources[count:],), *sources[:count])

    def chain(self, warp: Warp, mask: Mask, steps: tuple[tuple[Lanes, ...], ...], *old: Lanes) -> list[Lanes]:
        """Issue products one after another into D. ``steps``: A, B, scale-d and the flags of each."""
        require_aligned(warp, mask, "wgmma.mma_async")
        product = self._product
        operands = [self._operands(step, mask) for step in steps]
        if (watch := warp.block.grid.watch) is not None:
            for a, b, _ in operands:
                watch.copies.product(warp, mask, self._product, a, b, self._instruction)
        queue = _products(warp)
        late = mask is warp.everyone and not warp.block.grid.schedule.product_at_once()
        shape = (product.registers, warp.lanes)
        result = np.full(shape, _POISON, np.uint32) if late else np.empty(shape, np.uint32)
        rows = list(result)
        before = _remember(warp, old, result, rows)

        def compute() -> None:
            accumulators = np.stack(old) if before is None else before
            for a, b, scale_d in operands:
                accumulators = _multiply(warp, product, a, b, accumulators, scale_d)
            result[:] = accumulators

        if late:
            queue.open.append(compute)
        else:
            queue.flush()
            compute()
        return rows

    def rows(self, warp: Warp, mask: Mask, registers: Lanes, *step: Lanes) -> None:
        """Issue one product into the rows of ``registers``, (registers, lanes), which show poison meanwhile.

        ``step``: A, B, scale-d and the flags; registers of A are read now.
        """
        require_aligned(warp, mask, "wgmma.mma_async")
        product = self._product
        a, b, scale_d = self._operands(step, mask)
        if (watch := warp.block.grid.watch) is not None:
            watch.copies.product(warp, mask, product, a, b, self._instruction)
        left = a if isinstance(a, int) else tuple(register.copy() for register in a)
        queue = _products(warp)
        late = mask is warp.everyone and not warp.block.grid.schedule.product_at_once()
        if not late:
            queue.flush()
            np.copyto(registers, _multiply(warp, product, left, b, registers, scale_d), where=mask)
            return
        flying: dict[int, _Accumulators] = warp.state.setdefault("wgmma in flight", {})
        held = flying.get(id(registers))
        if held is None:
            held = flying[id(registers)] = _Accumulators(registers)
        held.issue()
        accumulators = held

        def compute() -> None:
            accumulators.add(warp, product, left, b, scale_d)

        queue.open.append(compute)

    def _operands(self, step: tuple[Lanes, ...], mask: Mask) -> tuple[int | tuple[Lanes, ...], int, bool]:
        """A (a descriptor or registers), the descriptor of B, and scale-d."""
        width = self._product.a_registers if self._in_registers else 1
        a = step[:width] if self._in_registers else uniform(step[0], mask)
        return a, uniform(step[width], mask), bool(uniform(step[width + 1], mask))


class _Accumulators:
    """Registers of D, (registers, lanes), while products into them are in flight.

    Their contents are kept apart, as a fragment or, of float32, as a matrix, until the last one is complete.
    """

    __slots__ = ("_fragment", "_matrix", "_pending", "_registers")

    def __init__(self, registers: Lanes) -> None:
        self._registers = registers
        self._pending = 0
        self._fragment: Lanes | None = None
        self._matrix: Lanes | None = None

    def issue(self) -> None:
        """One more product is in flight."""
        if not self._pending:
            self._fragment, self._matrix = self._registers.copy(), None
            self._registers.fill(_POISON)
        self._pending += 1

    def add(self, warp: Warp, product: Product, a: Any, b: int, scale_d: bool) -> None:
        """Compute one product."""
        if not self._as_matrix(warp, product, a, b, scale_d):
            if self._fragment is None and self._matrix is not None:
                self._fragment, self._matrix = fragment_of(self._matrix).view(np.uint32), None
            assert self._fragment is not None
            self._fragment = _multiply(warp, product, a, b, self._fragment, scale_d)
        self._pending -= 1
        if not self._pending:
            if self._matrix is not None:
                fragment_of(self._matrix, self._registers.view(np.float32))
            else:
                self._registers[:] = self._fragment

    def _as_matrix(self, warp: Warp, product: Product, a: Any, b: int, scale_d: bool) -> bool:
        if warp.lanes != THREADS or not product.in_one_call:
            return False
        if self._matrix is None:
            assert self._fragment is not None
            matrix = matrix_of(self._fragment.view(np.float32)) if scale_d else _empty(product)
        else:
            matrix = self._matrix
        left = a if isinstance(a, int) else np.stack(a)
        if not product.add_to(warp.block.shared, left, b, matrix, scale_d):
            return False
        self._fragment, self._matrix = None, matrix
        return True


def _empty(product: Product) -> Lanes:
    return np.empty((64, product.n), np.float32)


def _remember(warp: Warp, old: tuple[Lanes, ...], result: Lanes, rows: list[Lanes]) -> Lanes | None:
    """Note ``result`` and its rows; the array whose rows, in order, are ``old``, if it is one noted
    before.
    """
    known: dict[int, tuple[Lanes, list[Lanes]]] = warp.state.setdefault("wgmma results", {})
    base = old[0].base
    found = known.get(id(base))
    known[id(result)] = (result, rows)
    if len(known) > _REMEMBERED:
        del known[next(iter(known))]
    if found is None or found[0] is not base or len(found[1]) != len(old) or not all(map(is_, old, found[1])):
        return None
    return found[0]


def _multiply(
    warp: Warp, product: Product, a: int | tuple[Lanes, ...], b: int, accumulators: Lanes, scale_d: bool
) -> Lanes:
    """The product for the warps of ``warp``; those of the warpgroup that run elsewhere are computed for
    nothing.
    """
    shared = warp.block.shared
    fragment = a if isinstance(a, int) else np.stack(a)
    if warp.lanes == THREADS:
        return product.multiply(shared, fragment, b, accumulators, scale_d)
    first = int(warp.threads[0]) % THREADS
    span = slice(first, first + warp.lanes)

    def spread(registers: Lanes) -> Lanes:
        whole = np.zeros((len(registers), THREADS), dtype=np.uint32)
        whole[:, span] = registers
        return whole

    left = fragment if isinstance(fragment, int) else spread(fragment)
    return product.multiply(shared, left, b, spread(accumulators), scale_d)[:, span]


def _product(i: Instruction) -> tuple[Product, bool]:
    modifiers = Modifiers(i)
    modifiers.one_of("mma_async")
    modifiers.one_of("sync")
    modifiers.one_of("aligned")
    shape = next((m for m in i.modifiers if m.startswith("m64n")), "")
    modifiers.one_of(shape)
    types = [m for m in i.modifiers if m in _TYPES]
    if len(types) != 3:
        raise UnsupportedInstruction(i, "three types are needed")
    for name in types:
        modifiers.one_of(name)
    saturate = modifiers.flag("satfinite")
    modifiers.done()
    in_registers = isinstance(i.operands[1], Vector)
    options: dict[str, bool] = {"saturate": saturate}
    if types[0] == "s32":
        operand_count(i, 4)
    else:
        flags = [immediate(i, operand) for operand in i.operands[4:]]
        if len(flags) < 2 or any(flag not in (1, 2**64 - 1) for flag in flags[:2]):
            raise UnsupportedInstruction(i, "the scales of A and B must be 1 or -1")
        options |= {"negate_a": flags[0] != 1, "negate_b": flags[1] != 1}
        transposed = [bool(flag) for flag in flags[2:]]
        if transposed:
            options["transpose_b"] = transposed.pop()
        if transposed:
            options["transpose_a"] = transposed.pop()
    return Product.of(shape, types[0], types[1], types[2], **options), in_registers
