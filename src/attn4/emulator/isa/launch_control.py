"""Cluster launch control (PTX 9.7.13.16): a running cluster takes the place of one that has not started."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from attn4.emulator.isa.memory import address_operand, displaced
from attn4.emulator.isa.registry import (
    Function,
    Modifiers,
    UnsupportedInstruction,
    effect,
    operand_count,
)
from attn4.emulator.ptx.module import Instruction, Register, Vector
from attn4.emulator.state.asynchronous import Copy
from attn4.emulator.state.block import OFFSET_MASK

if TYPE_CHECKING:
    from attn4.emulator.engine import Warp
    from attn4.emulator.state.block import Block

Mask = NDArray[np.bool_]
Lanes = NDArray[Any]

RESPONSE_BYTES: Final = 16
"""Size of the response, opaque to programs. Here: x, y and z of the first CTA, and 1 if there is one."""

_DIMENSIONS: Final = {f"get_first_ctaid::{name}": n for n, name in enumerate("xyz")}


@effect(
    "clusterlaunchcontrol",
    destinations=lambda i: int(i.modifiers[0] == "query_cancel"),
    types=lambda i: ("b128",) if i.modifiers[0] == "query_cancel" else ("u64", "u64"),
)
def clusterlaunchcontrol(i: Instruction) -> Function:
    """PTX clusterlaunchcontrol.try_cancel: "requests atomically cancelling the launch of a cluster that has
    not started running yet"; .query_cancel reads the response.
    """
    operand_count(i, 2)
    modifiers = Modifiers(i)
    if modifiers.one_of("try_cancel", "query_cancel") == "try_cancel":
        return _try_cancel(i, modifiers)
    return _query(i, modifiers)


def _try_cancel(i: Instruction, modifiers: Modifiers) -> Function:
    """The response is written, and counted on the barrier, when the schedule says so; .multicast does both at
    the same offsets in every CTA of the cluster.
    """
    modifiers.one_of("async")
    modifiers.one_of("shared::cta", default="generic")
    modifiers.one_of("mbarrier::complete_tx::bytes")
    everywhere = modifiers.flag("multicast::cluster::all")
    modifiers.one_of("b128")
    modifiers.done()
    locate, locate_barrier = (displaced(address_operand(i, n)) for n in (0, 1))

    def run(warp: Warp, mask: Mask, base: Lanes, barrier_base: Lanes) -> None:
        addresses, barriers = locate(base), locate_barrier(barrier_base)
        block = warp.block
        for lane in np.flatnonzero(mask).tolist():
            blocks = block.cluster.blocks if everywhere else [block]
            if (watch := block.grid.watch) is not None:
                for target in blocks:
                    places = (
                        target.shared.absolute(int(x[lane]) & OFFSET_MASK) for x in (addresses, barriers)
                    )
                    watch.copies.fills(warp, lane, next(places), RESPONSE_BYTES, next(places), i)
            complete = _response(blocks, int(addresses[lane]), int(barriers[lane]), str(warp))
            block.grid.issue(Copy(f"a try_cancel issued by {warp} at PTX line {i.line}", complete))
        block.grid.changes += 1

    return run


def _response(blocks: list[Block], address: int, barrier: int, who: str) -> Callable[[], None]:
    """What the completion of a request does: cancel a cluster, write the response, signal the barriers."""

    def complete() -> None:
        first = blocks[0].grid.cancel()
        words = np.array((0, 0, 0, 0) if first is None else (*first, 1), dtype=np.uint32)
        for block in blocks:
            block.shared.write(block.shared.absolute(address & OFFSET_MASK), words)
            found = block.mbarrier(block.shared.absolute(barrier & OFFSET_MASK))
            if found.deliver(RESPONSE_BYTES, f"a try_cancel issued by {who}"):
                block.wake()
            block.grid.changes += 1

    return complete


def _query(i: Instruction, modifiers: Modifiers) -> Function:
    """.is_canceled: whether a cluster was cancelled; .get_first_ctaid: the index of its first CTA."""
    what = modifiers.one_of("is_canceled", "get_first_ctaid", *_DIMENSIONS)
    vector = modifiers.flag("v4")
    modifiers.one_of("pred" if what == "is_canceled" else "b32")
    modifiers.one_of("b128")
    modifiers.done()
    if not isinstance(i.operands[1], Register) or i.operands[1].type != "b128":
        raise UnsupportedInstruction(i, "the response must be a .b128 register")
    whole = isinstance(i.operands[0], Vector)
    if vector != whole or whole != (what == "get_first_ctaid"):
        raise UnsupportedInstruction(i, "v4 belongs to get_first_ctaid and to a vector of four")

    def query(_: Warp, __: Mask, response: Lanes) -> Any:
        words = np.ascontiguousarray(response).view(np.uint32).reshape(-1, 4)
        columns = np.ascontiguousarray(words.T)
        if what == "is_canceled":
            return columns[3] != 0
        return tuple(columns) if whole else columns[_DIMENSIONS[what]]

    return query
