"""Tensor memory and the products of sm_100a (PTX 9.7.16): one builder for each family of instructions.

Products and copies are queued by the thread that issues them and run in its order: at once, or when the
schedule completes a commit that covers them. Loads and stores of tensor memory are done when they are issued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.control import require_aligned, uniform
from attn4.emulator.isa.memory import address_operand, displaced, displaced_value
from attn4.emulator.isa.registry import (
    BLOCKED,
    Function,
    Modifiers,
    UnsupportedInstruction,
    WithRows,
    effect,
    immediate,
    operand_count,
)
from attn4.emulator.ptx.module import Address, Instruction, Vector
from attn4.emulator.state.active import active, shared_value
from attn4.emulator.state.asynchronous import Copy, Step
from attn4.emulator.state.block import OFFSET_MASK, RANK_SHIFT
from attn4.emulator.state.tensor_memory import Access, TensorMemoryFault
from attn4.emulator.units.scaled import BLOCKS, decode_scaled
from attn4.emulator.units.tcgen05 import Cta, copy_matrix, decode_instruction

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.state.block import Block

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]

_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
_KINDS = ("kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8")
_SCALED = tuple(f"kind::{kind}" for kind in BLOCKS)
_COLLECTORS = ("discard", "fill", "use", "lastuse")


def _destinations(i: Instruction) -> int:
    return 1 if i.modifiers[0] == "ld" else 0


def _types(i: Instruction) -> tuple[str, ...]:
    if i.modifiers[0] != "mma":
        return ("u32", "b64") if i.modifiers[0] == "cp" else ("u32",)
    lanes = sum(len(operand.items) for operand in i.operands if isinstance(operand, Vector))
    a = "u32" if isinstance(i.operands[1], Address) else "b64"
    if "block_scale" in i.modifiers:
        return ("u32", a, "b64", "b32", "u32", "u32", "pred")
    return ("u32", a, "b64", "b32", *["b32"] * lanes, "pred")


@effect("tcgen05", destinations=_destinations, types=_types)
def tcgen05(i: Instruction) -> Function:
    """PTX 9.7.16: each instruction of the fifth generation of tensor cores has a function below."""
    modifiers = Modifiers(i)
    families: dict[str, Callable[[Instruction, Modifiers], Function]] = {
        "alloc": _alloc,
        "dealloc": _dealloc,
        "relinquish_alloc_permit": _relinquish,
        "ld": _ld,
        "st": _st,
        "mma": _mma,
        "cp": _cp,
        "commit": _commit,
    }
    orders = ("wait::ld", "wait::st", "fence::before_thread_sync", "fence::after_thread_sync")
    kind = modifiers.one_of(*families, *orders)
    if kind in families:
        return families[kind](i, modifiers)
    # Loads and stores are complete when they have been issued, and the machine executes in order.
    modifiers.flag("sync")
    modifiers.flag("aligned")
    modifiers.done()
    return _order(kind)


def _order(kind: str) -> Function:
    """PTX 9.7.16.11 tcgen05.fence, 9.7.16.8 tcgen05.wait: a Watch is told of them."""

    def run(warp: Warp, mask: Mask) -> None:
        watch = warp.block.grid.watch
        if watch is None:
            return
        if kind.startswith("wait::"):
            watch.tensor.waited(warp, mask, kind.removeprefix("wait::"))
        else:
            watch.tensor_fence(warp, mask, before=kind == "fence::before_thread_sync")

    return run


def _group(modifiers: Modifiers) -> int:
    return int(modifiers.one_of("cta_group::1", "cta_group::2")[-1])


def _aligned(modifiers: Modifiers) -> None:
    modifiers.one_of("sync")
    modifiers.one_of("aligned")


def _alloc(i: Instruction, modifiers: Modifiers) -> Function:
    """PTX tcgen05.alloc: "blocks if the requested amount of Tensor Memory is not available"; the address goes
    to shared memory. A CTA pair allocates in each of its CTAs.
    """
    _group(modifiers)
    _aligned(modifiers)
    modifiers.one_of("shared::cta", default="shared::cta")
    modifiers.one_of("b32")
    modifiers.done()
    locate = displaced(address_operand(i, 0))

    def run(warp: Warp, mask: Mask, base: Lanes, columns: Lanes) -> Any:
        require_aligned(warp, mask, "tcgen05.alloc")
        block = warp.block
        if block.tensor_permit_given_up:
            raise TensorMemoryFault("tcgen05.alloc after relinquish_alloc_permit")
        count = uniform(columns, mask)
        first = block.tensor_memory.allocate(count, block.index)
        if first is None:
            warp.waiting = f"{count} columns of tensor memory"
            return BLOCKED
        target = uniform(locate(base), mask)
        block.shared.write(target, np.array([first], dtype=np.uint32))
        if (watch := block.grid.watch) is not None:
            watch.allocates(warp, mask, target, i)
        block.grid.changes += 1
        return None

    return run


def _dealloc(i: Instruction, modifiers: Modifiers) -> Function:
    """PTX tcgen05.dealloc: "deallocates the Tensor Memory specified by the address operand"."""
    _group(modifiers)
    _aligned(modifiers)
    modifiers.one_of("b32")
    modifiers.done()
    operand_count(i, 2)

    def run(warp: Warp, mask: Mask, address: Lanes, columns: Lanes) -> None:
        require_aligned(warp, mask, "tcgen05.dealloc")
        block = warp.block
        start, count = uniform(address, mask), uniform(columns, mask)
        if (watch := block.grid.watch) is not None:
            watch.tensor.freed(warp, start & 0xFFFF, count, i)
        block.tensor_memory.deallocate(start, count, block.index)
        block.wake()

    return run


def _relinquish(i: Instruction, modifiers: Modifiers) -> Function:
    """PTX tcgen05.relinquish_alloc_permit: "the CTA of the executing thread is relinquishing the right to
    allocate".
    """
    _group(modifiers)
    _aligned(modifiers)
    modifiers.done()
    operand_count(i, 0)

    def run(warp: Warp, mask: Mask) -> None:
        require_aligned(warp, mask, "tcgen05.relinquish_alloc_permit")
        warp.block.tensor_permit_given_up = True

    return run


def _access(i: Instruction, modifiers: Modifiers, packing: str, fragment: int) -> Access:
    _aligned(modifiers)
    shape = modifiers.one_of(*_SHAPES)
    repeat = int(modifiers.one_of(*(f"x{1 << n}" for n in range(8)))[1:])
    packed = modifiers.flag(packing)
    modifiers.one_of("b32")
    modifiers.done()
    offset = 0
    if shape == "16x32bx2":
        offset = immediate(i, i.operands[2 if fragment == 0 else 1])
    access = Access(shape, repeat, packed, offset)
    items = i.operands[fragment]
    if (len(items.items) if isinstance(items, Vector) else 1) != access.registers:
        raise UnsupportedInstruction(i, f"{access.registers} registers are needed")
    return access


def _by_address(warp: Warp, mask: Mask, addresses: Lanes) -> list[tuple[int, list[int]]]:
    """Column and lane within a quarter, each with the positions in ``warp`` of the warps that access them."""
    positions = active(mask).warps
    common = shared_value(addresses, mask)
    if common is not None and common >> 16 == 0:
        return [(common, list(positions))]
    rows, lanes = addresses.reshape(-1, 32), mask.reshape(-1, 32)
    found: dict[int, list[int]] = {}
    for position in positions:
        address = uniform(rows[position], lanes[position])
        quarter = warp.numbers[position] % 4
        if (address >> 16) // 32 == quarter:
            address -= quarter * 32 << 16
        found.setdefault(address, []).append(position)
    return list(found.items())


def _ld(i: Instruction, modifiers: Modifiers) -> Function:
    """PTX tcgen05.ld: "asynchronous collective load from tensor memory into registers" of a warp."""
    access = _access(i, modifiers, "pack::16b", 0)
    locate = displaced(address_operand(i, 1))
    single = access.registers == 1

    def run(warp: Warp, mask: Mask, base: Lanes, *_: Lanes) -> Any:
        result = np.zeros((access.registers, warp.lanes), dtype=np.uint32)
        fill(warp, mask, result, base)
        return result[0] if single else list(result)

    def fill(warp: Warp, mask: Mask, rows: Lanes, base: Lanes, *_: Lanes) -> None:
        require_aligned(warp, mask, "tcgen05.ld")
        block = warp.block
        result = rows.reshape(access.registers, -1, 32)
        for address, positions in _by_address(warp, mask, locate(base)):
            warps = [warp.numbers[position] for position in positions]
            words = block.tensor_memory.load(access, warps, address, block.index)
            if (watch := block.grid.watch) is not None:
                watch.tensor.load(warp, access, warps, address, i)
            if _neighbours(positions):
                rows[:, 32 * positions[0] : 32 * positions[-1] + 32] = words
            else:
                result[:, positions] = words.reshape(access.registers, -1, 32)

    return WithRows(run, fill)


def _neighbours(positions: list[int]) -> bool:
    return positions[-1] - positions[0] == len(positions) - 1


def _st(i: Instruction, modifiers: Modifiers) -> Function:
    """PTX tcgen05.st: "asynchronous collective store to tensor memory from registers" of a warp."""
    fragment = len(i.operands) - 1
    access = _access(i, modifiers, "unpack::16b", fragment)
    locate = displaced(address_operand(i, 0))

    def run(warp: Warp, mask: Mask, base: Lanes, *sources: Lanes) -> None:
        take(warp, mask, np.stack(sources[-access.registers :]), base)

    def take(warp: Warp, mask: Mask, rows: Lanes, base: Lanes, *_: Lanes) -> None:
        require_aligned(warp, mask, "tcgen05.st")
        block = warp.block
        registers = rows.reshape(access.registers, -1, 32)
        for address, positions in _by_address(warp, mask, locate(base)):
            warps = [warp.numbers[position] for position in positions]
            if _neighbours(positions):
                words = rows[:, 32 * positions[0] : 32 * positions[-1] + 32]
            else:
                words = registers[:, positions].reshape(access.registers, -1)
            block.tensor_memory.store(access, warps, address, words, block.index)
            if (watch := block.grid.watch) is not None:
                watch.tensor.store(warp, access, warps, address, i)
        block.grid.changes += 1

    return WithRows(run, take)


def _ctas(block: Block, group: int) -> list[Cta]:
    """The CTA, or the pair that it belongs to, the even rank first."""
    members = [block] if group == 1 else [block.cluster.rank(block.rank & ~1 | n) for n in range(2)]
    return [Cta(member.shared, member.tensor_memory, member.index) for member in members]


@dataclass(slots=True)
class _Queue:
    """What a thread has issued and not yet run, how many of its operations have run, and its commits that
    have not been signalled, in order.
    """

    steps: list[Step] = field(default_factory=list)
    done: int = 0
    commits: list[Copy] = field(default_factory=list)


def _queue(warp: Warp, lane: int) -> _Queue:
    threads: dict[int, _Queue] = warp.state.setdefault("tcgen05", {})
    found = threads.get(lane)
    if found is None:
        found = threads[lane] = _Queue()
    return found


def _issue(warp: Warp, lane: int, step: Step) -> None:
    queue = _queue(warp, lane)
    queue.steps.append(step)
    if warp.block.grid.schedule.product_at_once():
        _run(warp, queue, len(queue.steps))


def _run(warp: Warp, queue: _Queue, count: int) -> None:
    for step in queue.steps[:count]:
        step()
    del queue.steps[:count]
    queue.done += count
    warp.block.grid.changes += 1


def _mma(i: Instruction, modifiers: Modifiers) -> Function:
    """PTX tcgen05.mma: "initiates an asynchronous matrix multiply and accumulate": D = A B + D, without D if
    enable-input-d is false. Issued by one thread.
    """
    group = _group(modifiers)
    kind = modifiers.one_of(*_KINDS, *_SCALED).removeprefix("kind::")
    if modifiers.flag("block_scale"):
        return _scaled_mma(i, modifiers, group, kind)
    for name in _COLLECTORS:
        modifiers.flag(f"collector::a::{name}")
    modifiers.done()
    operand_count(i, 5, 6, 7)
    if kind in BLOCKS:
        raise UnsupportedInstruction(i, f"kind::{kind} goes with block_scale")
    in_tensor = isinstance(i.operands[1], Address)
    lanes = len(i.operands[4].items) if isinstance(i.operands[4], Vector) else 0
    if lanes not in (0, 4 * group):
        raise UnsupportedInstruction(i, f"a disable-output-lane vector of {lanes}, not {4 * group} words")
    shrink = 0
    if len(i.operands) == 6 + bool(lanes):
        shrink = immediate(i, i.operands[-1])
        if kind not in ("f16", "tf32") or not 0 <= shrink <= 15:
            raise UnsupportedInstruction(i, f"scale-input-d {shrink} with kind::{kind}")
    locate_d = displaced_value(address_operand(i, 0))
    locate_a = displaced_value(address_operand(i, 1)) if in_tensor else int

    def run(warp: Warp, mask: Mask, *sources: Lanes) -> None:
        for lane in np.flatnonzero(mask).tolist():
            here = [source.item(lane) for source in sources]
            product = decode_instruction(kind, here[3], group)
            operands = locate_d(here[0]), locate_a(here[1]), here[2]
            accumulate = here[4 + lanes]
            ctas = _account(warp, lane, i, (product, accumulate, in_tensor), operands)

            def step(
                product: Any = product,
                ctas: list[Cta] = ctas,
                operands: tuple[int, int, int] = operands,
                accumulate: bool = accumulate,
                disabled: tuple[int, ...] = tuple(here[4 : 4 + lanes]),
            ) -> None:
                product.multiply(
                    ctas,
                    *operands,
                    accumulate=accumulate,
                    a_in_tensor=in_tensor,
                    shrink=shrink,
                    disabled=disabled,
                )

            _issue(warp, lane, step)

    return run


def _account(
    warp: Warp, lane: int, i: Instruction, form: tuple[Any, bool, bool], operands: tuple[int, int, int]
) -> list[Cta]:
    """Count a product and tell the watch of it; the CTAs that take part."""
    product, _, in_tensor = form
    tally = warp.block.grid.tally
    tally.add(warp, lane, "products")
    tally.add(warp, lane, "flop", 2 * product.m * product.n * product.k)
    tally.add(warp, lane, "operand bytes", product.operand_bytes(in_tensor))
    ctas = _ctas(warp.block, product.ctas)
    if (watch := warp.block.grid.watch) is not None:
        watch.copies.tensor_product(warp, lane, ctas, form, operands, i)
    return ctas


def _scaled_mma(i: Instruction, modifiers: Modifiers, group: int, kind: str) -> Function:
    """PTX tcgen05.mma.block_scale: A and B are scaled, block by block, before they are multiplied."""
    known = BLOCKS.get(kind)
    if known is None:
        raise UnsupportedInstruction(i, f"block_scale does not go with kind::{kind}")
    blocks = known[modifiers.one_of(*known, default="" if "" in known else None)]
    for name in _COLLECTORS:
        modifiers.flag(f"collector::a::{name}")
    modifiers.done()
    operand_count(i, 7)
    in_tensor = isinstance(i.operands[1], Address)
    locate = {n: displaced_value(address_operand(i, n)) for n in (0, 4, 5)}
    locate_a = displaced_value(address_operand(i, 1)) if in_tensor else int

    def run(warp: Warp, mask: Mask, *sources: Lanes) -> None:
        for lane in np.flatnonzero(mask).tolist():
            here = [source.item(lane) for source in sources]
            product = decode_scaled(kind, blocks, here[3], group)
            operands = locate[0](here[0]), locate_a(here[1]), here[2]
            ctas = _account(warp, lane, i, (product, here[6], in_tensor), operands)

            def step(
                product: Any = product,
                ctas: list[Cta] = ctas,
                operands: tuple[int, int, int] = operands,
                scales: tuple[int, int] = (locate[4](here[4]), locate[5](here[5])),
                accumulate: bool = here[6],
            ) -> None:
                product.multiply_scaled(ctas, operands, scales, accumulate=accumulate, a_in_tensor=in_tensor)

            _issue(warp, lane, step)

    return run


def _cp(i: Instruction, modifiers: Modifiers) -> Function:
    """PTX tcgen05.cp: "asynchronous copy from shared memory to tensor memory", in order with products."""
    group = _group(modifiers)
    shape = modifiers.one_of("128x256b", "128x128b", "64x128b", "32x128b")
    spread = {"32x128b": ("warpx4",), "64x128b": ("warpx2::02_13", "warpx2::01_23")}.get(shape)
    if spread:
        shape += f".{modifiers.one_of(*spread)}"
    modifiers.done()
    locate = displaced(address_operand(i, 0))

    def run(warp: Warp, mask: Mask, base: Lanes, descriptor: Lanes) -> None:
        addresses = locate(base)
        for lane in np.flatnonzero(mask).tolist():
            target, source = int(addresses[lane]), int(descriptor[lane])
            ctas = _ctas(warp.block, group)
            if (watch := warp.block.grid.watch) is not None:
                watch.copies.tensor_copy(warp, lane, ctas, shape, (target, source), i)

            def step(ctas: list[Cta] = ctas, target: int = target, source: int = source) -> None:
                for cta in ctas:
                    copy_matrix(cta, shape, target, source)

            _issue(warp, lane, step)

    return run


def _commit(i: Instruction, modifiers: Modifiers) -> Function:
    """PTX tcgen05.commit: "makes the mbarrier object track the completion of all prior asynchronous tcgen05
    operations initiated by the executing thread"; .multicast signals the same offset in each CTA of the mask.
    """
    _group(modifiers)
    modifiers.one_of("mbarrier::arrive::one")
    modifiers.one_of("shared::cluster", default="shared::cluster")
    multicast = modifiers.flag("multicast::cluster")
    modifiers.one_of("b64")
    modifiers.done()
    operand_count(i, 2 if multicast else 1)
    locate = displaced(address_operand(i, 0))

    def run(warp: Warp, mask: Mask, base: Lanes, *ctas: Lanes) -> None:
        addresses = locate(base)
        for lane in np.flatnonzero(mask).tolist():
            address = int(addresses[lane])
            targets = [address]
            if multicast:
                ranks = [rank for rank in range(16) if int(ctas[0][lane]) >> rank & 1]
                targets = [rank << RANK_SHIFT | address & OFFSET_MASK for rank in ranks]
            _track(warp, lane, targets, i)
        warp.block.grid.changes += 1

    return run


def _track(warp: Warp, lane: int, targets: list[int], i: Instruction) -> None:
    queue = _queue(warp, lane)
    covered = queue.done + len(queue.steps)
    watch = warp.block.grid.watch
    signal = None if watch is None else watch.tensor.commits(warp, lane)
    if watch is not None:
        watch.tensor.promised(warp, lane, targets)

    def complete() -> None:
        # The operations of a thread end in the order of issue, and so do its commits: kernels that wait for a
        # later one rely on it that the barriers of those before it have moved.
        while queue.commits[0] is not copy:
            queue.commits[0].complete()
        del queue.commits[0]
        _run(warp, queue, max(covered - queue.done, 0))
        for address in targets:
            if signal is not None:
                signal(address)
            if warp.block.mbarrier(address).arrive(1, f"a tcgen05.commit of {warp}"):
                warp.block.wake()

    copy = Copy(f"a tcgen05.commit issued by {warp} at PTX line {i.line}", complete)
    queue.commits.append(copy)
    warp.block.grid.issue(copy)
