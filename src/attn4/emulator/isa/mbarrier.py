"""mbarrier objects (PTX 9.7.13.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.faults import BarrierFault
from attn4.emulator.isa.memory import address_operand, displaced
from attn4.emulator.isa.registry import BLOCKED, Function, Modifiers, UnsupportedInstruction, effect
from attn4.emulator.ptx.module import Address, Instruction
from attn4.emulator.state.active import shared_value
from attn4.emulator.state.barrier import Mbarrier, PhaseWait
from attn4.emulator.state.block import OFFSET_MASK, RANK_SHIFT

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]

_SPACES = ("shared", "shared::cta", "shared::cluster")


def _destinations(i: Instruction) -> int:
    return 0 if isinstance(i.operands[0], Address) else 1


def _types(i: Instruction) -> tuple[str, ...]:
    waits = i.modifiers[0] in ("test_wait", "try_wait") and "parity" not in i.modifiers
    if i.modifiers[0] == "pending_count":
        return ("b64",)
    return ("u64", "b64", "u32") if waits else ("u64", "u32", "u32")


@effect("mbarrier", destinations=_destinations, types=_types)
def mbarrier(i: Instruction) -> Function:
    """PTX 9.7.13.15: each operation on an mbarrier object has a function below."""
    modifiers = Modifiers(i)
    kind = modifiers.one_of(
        *("init", "inval", "expect_tx", "complete_tx", "arrive", "arrive_drop", "test_wait", "try_wait"),
    )
    expects = modifiers.flag("expect_tx") if kind in ("arrive", "arrive_drop") else False
    parity = modifiers.flag("parity")
    relaxed = modifiers.flag("relaxed")
    for name in ("release", "acquire", "cta", "cluster", "b64"):
        modifiers.flag(name)
    modifiers.one_of(*_SPACES, default="shared")
    modifiers.done()
    address = address_operand(i, _destinations(i))
    locate = displaced(address)
    match kind:
        case "init":
            return _init(i, locate)
        case "inval":
            return _inval(i, locate)
        case "expect_tx":
            return _transactions(i, locate, announce=True)
        case "complete_tx":
            return _transactions(i, locate, announce=False)
        case "arrive" | "arrive_drop":
            return _arrive(i, locate, expects=expects, drop=kind == "arrive_drop", relaxed=relaxed)
    if _destinations(i) != 1:
        raise UnsupportedInstruction(i, "a wait without a predicate")
    return _wait(i, locate, parity=parity, blocks=kind == "try_wait", relaxed=relaxed)


def _each(mask: Mask, addresses: Lanes) -> list[tuple[int, Mask]]:
    """The distinct addresses of the active lanes, each with its lanes."""
    value = shared_value(addresses, mask)
    if value is not None:
        return [(value, mask)]
    return [(value, mask & (addresses == value)) for value in np.unique(addresses[mask]).tolist()]


def _init(i: Instruction, locate: Any) -> Function:
    """mbarrier.init: phase 0, "expected and pending arrival count ... to count"."""

    def run(warp: Warp, mask: Mask, base: Lanes, count: Lanes) -> None:
        for address, lanes in _each(mask, locate(base)):
            block = warp.block
            if address >> RANK_SHIFT != block.rank:
                raise BarrierFault(f"mbarrier.init at {address:#x}, in another CTA's shared memory")
            if address % 8:
                raise BarrierFault(f"mbarrier.init at {address:#x}: an mbarrier is aligned to 8 bytes")
            block.shared.write(address, np.zeros(8, dtype=np.uint8))
            offset = address & OFFSET_MASK
            if block.grid.watch is not None:
                block.grid.watch.mbarrier_made(warp, lanes, address, i)
            block.mbarriers[offset] = Mbarrier.of(
                offset, int(count[lanes.argmax()]), block.grid.layout.variable(offset)
            )
        warp.block.grid.changes += 1

    return run


def _inval(i: Instruction, locate: Any) -> Function:
    """mbarrier.inval: afterwards the memory may serve another purpose."""

    def run(warp: Warp, mask: Mask, base: Lanes) -> None:
        for address, lanes in _each(mask, locate(base)):
            barrier = warp.block.mbarrier(address)
            if (watch := warp.block.grid.watch) is not None:
                watch.mbarrier_ended(warp, lanes, barrier, address >> RANK_SHIFT, i)
            del warp.block.mbarriers[address & OFFSET_MASK]

    return run


def _transactions(i: Instruction, locate: Any, *, announce: bool) -> Function:
    """mbarrier.expect_tx and .complete_tx: "increases" and "decreases" the tx-count of the current phase."""

    def run(warp: Warp, mask: Mask, base: Lanes, count: Lanes) -> None:
        for address, lanes in _each(mask, locate(base)):
            barrier = warp.block.mbarrier(address)
            total = int(count[lanes].sum(dtype=np.int64))
            if (watch := warp.block.grid.watch) is not None:
                watch.mbarrier_used(warp, lanes, barrier, address >> RANK_SHIFT, i)
            if announce:
                barrier.expect(total)
            elif barrier.deliver(total, warp):
                warp.block.wake()
        warp.block.grid.changes += 1

    return run


def _arrive(i: Instruction, locate: Any, *, expects: bool, drop: bool, relaxed: bool) -> Function:
    """mbarrier.arrive: pending count less count (1 by default); .expect_tx first adds to the transactions."""
    returns = _destinations(i) == 1

    def run(warp: Warp, mask: Mask, base: Lanes, *count: Lanes) -> Any:
        state = np.zeros(warp.lanes, dtype=np.uint64) if returns else None
        for address, lanes in _each(mask, locate(base)):
            barrier = warp.block.mbarrier(address)
            if state is not None:
                state[lanes] = barrier.phase
            if (watch := warp.block.grid.watch) is not None:
                watch.mbarrier_arrives(warp, lanes, barrier, address >> RANK_SHIFT, i, relaxed=relaxed)
            arrivals = int(lanes.sum())
            if expects:
                barrier.expect(int(count[0][lanes].sum(dtype=np.int64)))
            elif count:
                arrivals = int(count[0][lanes].sum(dtype=np.int64))
            complete = barrier.drop(arrivals, warp) if drop else barrier.arrive(arrivals, warp)
            if complete:
                warp.block.wake()
        warp.block.grid.changes += 1
        return state

    return run


def copies_arrived(i: Instruction, modifiers: Modifiers) -> Function:
    """PTX 9.7.13.15.15 cp.async.mbarrier.arrive: an "arrive-on operation" by each lane once its cp.async
    copies are done, which they are here when they are issued.

    "When .noinc modifier is not specified, the pending count of the mbarrier object is incremented by 1
    prior to the asynchronous arrive-on operation": the two make no difference.
    """
    modifiers.one_of("arrive")
    counted = modifiers.flag("noinc")
    modifiers.one_of("shared", "shared::cta", default="shared")
    modifiers.one_of("b64")
    modifiers.done()
    locate = displaced(address_operand(i, 0))

    def run(warp: Warp, mask: Mask, base: Lanes) -> None:
        for address, lanes in _each(mask, locate(base)):
            barrier = warp.block.mbarrier(address)
            if (watch := warp.block.grid.watch) is not None:
                watch.copies.small_arrives(warp, lanes, barrier, address >> RANK_SHIFT, i)
            if counted and barrier.arrive(int(lanes.sum()), warp):
                warp.block.wake()
        warp.block.grid.changes += 1

    return run


def _wait(i: Instruction, locate: Any, *, parity: bool, blocks: bool, relaxed: bool) -> Function:
    """mbarrier.test_wait, .try_wait: whether the phase of ``state``, or the one of this parity, is complete.

    "mbarrier.try_wait is a potentially blocking instruction": here it waits until nothing else can happen.
    """

    def run(warp: Warp, mask: Mask, base: Lanes, phase: Lanes, *_: Lanes) -> Any:
        result = np.zeros(warp.lanes, dtype=np.bool_)
        each = _each(mask, locate(base))
        for address, lanes in each:
            barrier = warp.block.mbarrier(address)
            if parity:
                result[lanes] = (phase[lanes] & 1) != (barrier.phase & 1)
            else:
                result[lanes] = barrier.phase > phase[lanes]
            if (watch := warp.block.grid.watch) is not None and (passed := result & lanes).any():
                watch.mbarrier_passed(warp, passed, barrier, address >> RANK_SHIFT, i, relaxed=relaxed)
            last = barrier
        if blocks and not warp.expired and not result.any():
            wanted = int(phase[mask.argmax()])
            seen = last.phase if len(each) == 1 else None
            warp.waiting = PhaseWait(last, f"parity {wanted & 1}" if parity else f"phase {wanted}", seen)
            return BLOCKED
        return result

    return run
