"""Does a plan add up? Roles, registers, memory and barriers, each fault with its arithmetic written out.

Every barrier of attn4 counts warps: one lane arrives for its warp, after the warp has converged and its
writes are fenced. So a count follows from the roles, and nothing has to be believed:

- ``tma``: the loading warp arrives once and announces the bytes of one stage, which the copies complete.
- ``mma``: one commit of the tensor core.
- ``thread``: every warp of the producer.
- empty barriers: every warp of every consumer; a commit counts as the arrival of the ``mma`` warp.
- ``named``: hardware barriers count threads, in whole warpgroups.

In a pair of CTAs a role that only the leader runs waits for both CTAs, so counts and bytes double there.
An ``empty_arrivals`` of 0 is a channel without empty barriers: its slot comes back with another channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from attn4.machine import Machine
from attn4.plan.layout import BARRIER_BYTES, SWIZZLE_BYTES, alignment, barrier_count, stage_size
from attn4.plan.plan import Buffer, Channel, Plan, Role

WARP = 32
GROUP_WARPS = 4
MOST_WARPS = 32
NAMED_BARRIERS = 15
"""Sixteen named barriers a CTA (PTX ISA, bar), of which barrier 0 is that of the whole CTA."""


def validate(plan: Plan, machine: Machine) -> None:
    """Raise a ``ValueError`` with every fault of ``plan`` on ``machine``, one a line."""
    found = faults(plan, machine)
    if found:
        raise ValueError("\n".join(found))


def faults(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """Everything that is wrong with ``plan`` on ``machine``, as sentences; empty if nothing is."""
    names = tuple(_duplicates(plan))
    if names:
        return names
    return (
        *_role_faults(plan),
        *_register_faults(plan, machine),
        *(fault for buffer in plan.buffers for fault in _buffer_faults(plan, buffer)),
        *_memory_faults(plan, machine),
        *(fault for channel in plan.channels for fault in _channel_faults(plan, channel)),
        *_barrier_faults(plan),
        *_pair_faults(plan),
    )


def _duplicates(plan: Plan) -> Iterator[str]:
    for kind, items in (("role", plan.roles), ("buffer", plan.buffers), ("channel", plan.channels)):
        names = [item.name for item in items]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{kind} {name} is declared {names.count(name)} times"


def _pair_faults(plan: Plan) -> Iterator[str]:
    if plan.cta_group == 1 or plan.direction != "forward":
        return
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    causes = [f"the {plan.mask} mask"] if plan.mask != "full" else []
    causes += [name for name in names if getattr(plan, name)]
    causes += ["a schedule that each CTA takes for itself"] if plan.schedule.dynamic else []
    if causes:
        yield f"a pair of CTAs takes the same steps, one at least, but {', '.join(causes)} may give others"


def _role_faults(plan: Plan) -> Iterator[str]:
    expected = 0
    for role in plan.roles:
        if role.first_warp != expected:
            yield f"role {role.name} begins at warp {role.first_warp}, but those before it end at {expected}"
        expected = role.first_warp + role.warps
    if not 0 < expected <= MOST_WARPS or expected % GROUP_WARPS:
        yield (
            f"the roles have {expected} warps; a CTA has 4 to {MOST_WARPS}, in warpgroups of {GROUP_WARPS} "
            "(registers are reallocated by warpgroup)"
        )


def _register_faults(plan: Plan, machine: Machine) -> Iterator[str]:
    warps = sum(role.warps for role in plan.roles)
    if not warps:
        return
    for role in plan.roles:
        if role.registers % 8 or not 24 <= role.registers <= 256:
            yield f"role {role.name} has {role.registers} registers, not a multiple of 8 from 24 to 256"
    for first, second in pairwise(plan.roles):
        shares_group = (second.first_warp - 1) // GROUP_WARPS == second.first_warp // GROUP_WARPS
        if shares_group and first.registers != second.registers:
            yield (
                f"roles {first.name} ({first.registers} registers) and {second.name} ({second.registers}) "
                "share a warpgroup, which has one register count"
            )
    launch = min(machine.registers // (WARP * warps), 255) // 8 * 8
    wanted = sum(role.warps * role.registers for role in plan.roles)
    if wanted > launch * warps:
        terms = " + ".join(f"{role.name} {role.warps} x {role.registers}" for role in plan.roles)
        yield (
            f"registers: {terms} = {wanted} a lane, but {warps} warps are launched with {launch} each "
            f"({machine.registers} / {WARP * warps} threads, rounded down to 8): {launch * warps}"
        )


def _buffer_faults(plan: Plan, buffer: Buffer) -> Iterator[str]:
    unit = "bytes" if buffer.space == "shared" else "columns"
    stage = stage_size(buffer.space, buffer.shape, buffer.dtype)
    shape = " x ".join(map(str, buffer.shape))
    if buffer.size != buffer.stages * stage:
        yield (
            f"buffer {buffer.name} has {buffer.size} {unit}, but {buffer.stages} stages of {shape} "
            f"{buffer.dtype} are {buffer.stages} x {stage} = {buffer.stages * stage}"
        )
    if buffer.space == "shared":
        need = alignment(buffer)
        rest = buffer.offset % need
        if rest:
            yield f"buffer {buffer.name} begins at byte {buffer.offset}, {rest} past a multiple of {need}"
        if need == SWIZZLE_BYTES and buffer.stages > 1 and stage % need:
            rest = stage % need
            yield f"a stage of buffer {buffer.name} is {stage} bytes, {rest} past a multiple of {need}"
    if buffer.borrows is not None:
        yield from _borrow_faults(plan, buffer)


def _borrow_faults(plan: Plan, buffer: Buffer) -> Iterator[str]:
    owner = next((b for b in plan.buffers if b.name == buffer.borrows), None)
    if owner is None:
        yield f"buffer {buffer.name} borrows {buffer.borrows}, which does not exist"
    elif owner.borrows is not None or owner.space != buffer.space:
        yield f"buffer {buffer.name} borrows {owner.name}, which owns no {buffer.space} memory"
    elif not (owner.offset <= buffer.offset and buffer.offset + buffer.size <= owner.offset + owner.size):
        yield (
            f"buffer {buffer.name} at {buffer.offset}..{buffer.offset + buffer.size} leaves {owner.name}, "
            f"which it borrows, at {owner.offset}..{owner.offset + owner.size}"
        )


def _memory_faults(plan: Plan, machine: Machine) -> Iterator[str]:
    limits = {"shared": (machine.shared_memory, "bytes"), "tensor": (machine.tensor_columns, "columns")}
    for space, (limit, unit) in limits.items():
        owners = sorted(
            (b for b in plan.buffers if b.space == space and b.borrows is None), key=lambda b: b.offset
        )
        for first, second in pairwise(owners):
            if first.offset + first.size > second.offset:
                yield (
                    f"buffers {first.name} ({first.offset} + {first.size} = {first.offset + first.size}) and "
                    f"{second.name} (from {second.offset}) overlap in {space} memory"
                )
        end = max((b.offset + b.size for b in owners), default=0)
        if end > limit:
            terms = " + ".join(f"{b.name} {b.size}" for b in owners)
            yield f"{space} memory: {terms} end at {end} {unit}, but {machine.name} has {limit}"


def arrivals(plan: Plan, roles: tuple[Role, ...], waiting: tuple[Role, ...]) -> tuple[int, str]:
    """Warps of ``roles`` that arrive at a barrier on which ``waiting`` wait, and the arithmetic."""
    count = sum(role.warps for role in roles)
    text = " + ".join(f"{role.name} {role.warps}" for role in roles) + (" warps" if count != 1 else " warp")
    if _hears_both(plan, roles, waiting):
        return plan.cta_group * count, f"({text}) x {plan.cta_group} CTAs"
    return count, text


def _hears_both(plan: Plan, arriving: tuple[Role, ...], waiting: tuple[Role, ...]) -> bool:
    """Whether the barrier lies in the leader of a pair and both CTAs arrive at it."""
    return (
        plan.cta_group > 1
        and any(role.leader_only for role in waiting)
        and not any(role.leader_only for role in arriving)
    )


def _channel_faults(plan: Plan, channel: Channel) -> Iterator[str]:
    known = {role.name: role for role in plan.roles}
    unknown = [name for name in (channel.producer, *channel.consumers) if name not in known]
    if channel.ctas not in (1, plan.cluster):
        yield f"channel {channel.name} is filled by {channel.ctas} CTAs; a cluster has {plan.cluster}"
    if unknown or not channel.consumers:
        named = ", ".join(unknown) or "no consumer"
        yield f"channel {channel.name} names {named}; roles are {', '.join(known)}"
        return
    producer = known[channel.producer]
    consumers = tuple(known[name] for name in channel.consumers)
    if channel.kind == "named":
        yield from _named_faults(channel, producer, consumers)
        return
    full, why = arrivals(plan, (producer,), consumers)
    if channel.kind in ("tma", "mma"):
        full, why = 1, "one commit" if channel.kind == "mma" else "one warp announces the bytes"
    if channel.full_arrivals != full:
        yield f"channel {channel.name}: full_arrivals is {channel.full_arrivals}, but {why} = {full}"
    empty, why = arrivals(plan, consumers, (producer,))
    if channel.ctas > 1:
        empty, why = channel.ctas * empty, f"({why}) x {channel.ctas} CTAs of the cluster"
    if channel.empty_arrivals not in (0, empty):
        yield f"channel {channel.name}: empty_arrivals is {channel.empty_arrivals}, but {why} = {empty}"
    if channel.empty_arrivals == 0 and not _comes_back(plan, channel):
        yield (
            f"channel {channel.name} has no empty barrier, and no other channel leads from "
            f"{' or '.join(channel.consumers)} back to {channel.producer}"
        )
    yield from _slot_faults(plan, channel, consumers)


def _slot_faults(plan: Plan, channel: Channel, consumers: tuple[Role, ...]) -> Iterator[str]:
    buffer = next((b for b in plan.buffers if b.name == channel.buffer), None)
    if channel.buffer is not None and buffer is None:
        yield f"channel {channel.name} hands over buffer {channel.buffer}, which does not exist"
        return
    if buffer is not None and buffer.stages != channel.stages:
        yield (
            f"channel {channel.name} has {channel.stages} slots, but buffer {buffer.name} has "
            f"{buffer.stages} stages"
        )
    wanted, why = 0, "no asynchronous copy reports to it"
    if channel.kind == "tma" and buffer is not None:
        wanted = stage_size("shared", buffer.shape, buffer.dtype)
        shape = " x ".join(map(str, buffer.shape))
        why = f"a stage of {buffer.name} is {shape} {buffer.dtype} = {wanted} bytes"
        if plan.cta_group > 1 and any(role.leader_only for role in consumers):
            wanted *= plan.cta_group
            why += f", x {plan.cta_group} CTAs = {wanted}"
    if channel.kind == "thread" and buffer is not None and channel.ctas > 1:
        size = stage_size("shared", buffer.shape, buffer.dtype)
        wanted = size - size // channel.ctas
        why = f"the other CTAs of the cluster copy theirs of the {size} bytes of a stage"
    if channel.transaction_bytes != wanted:
        yield f"channel {channel.name}: transaction_bytes is {channel.transaction_bytes}, but {why}"


def _named_faults(channel: Channel, producer: Role, consumers: tuple[Role, ...]) -> Iterator[str]:
    roles = {role.name: role for role in (producer, *consumers)}
    threads = WARP * sum(role.warps for role in roles.values())
    if channel.full_arrivals % (WARP * GROUP_WARPS) or not 0 < channel.full_arrivals <= threads:
        yield (
            f"channel {channel.name}: a named barrier of {channel.full_arrivals} threads, but warpgroups "
            f"of {' + '.join(roles)} are multiples of {WARP * GROUP_WARPS} up to {threads}"
        )
    if channel.empty_arrivals or channel.transaction_bytes:
        yield f"channel {channel.name}: a named barrier has neither an empty side nor bytes"


def _comes_back(plan: Plan, channel: Channel) -> bool:
    """Whether signals of other channels lead from every consumer to the producer.

    A grid that is not persistent uses a once-filled channel once, and nothing need come back.
    """
    if not plan.schedule.persistent:
        return True
    edges: set[tuple[str, str]] = set()
    for other in plan.channels:
        if other.name != channel.name:
            edges |= {(other.producer, consumer) for consumer in other.consumers}
            if other.empty_arrivals:
                edges |= {(consumer, other.producer) for consumer in other.consumers}
    return all(channel.producer in _reachable(consumer, edges) for consumer in channel.consumers)


def _reachable(start: str, edges: set[tuple[str, str]]) -> set[str]:
    seen, frontier = {start}, {start}
    while frontier:
        frontier = {to for source, to in edges if source in frontier} - seen
        seen |= frontier
    return seen


def _barrier_faults(plan: Plan) -> Iterator[str]:
    count = barrier_count(plan.channels)
    barriers = next((b for b in plan.buffers if b.name == "barriers"), None)
    size = 0 if barriers is None else barriers.size
    if size != count * BARRIER_BYTES:
        yield (
            f"buffer barriers has {size} bytes, but the channels have {count} barriers: "
            f"{count} x {BARRIER_BYTES} = {count * BARRIER_BYTES}"
        )
    named = sum(c.stages for c in plan.channels if c.kind == "named")
    if named > NAMED_BARRIERS:
        yield f"the channels take {named} named barriers; a CTA has {NAMED_BARRIERS} besides its own"
