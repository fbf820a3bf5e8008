"""A plan in words: who does what, where things lie, who waits for whom, and what bounds the speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from attn4.machine import Machine
from attn4.machine import machine as machine_named
from attn4.mask import Mask
from attn4.plan.choose import choose, cta_groups, runnable, unsupported
from attn4.plan.feeds import UNITS, Feeds, Step, feeds
from attn4.plan.layout import padded
from attn4.plan.makespan import MOST_TILES, Makespan, alternatives, makespan
from attn4.plan.order import Batch, tile_count
from attn4.plan.plan import Buffer, Plan, Space
from attn4.plan.tiles import Tiles, count_tiles
from attn4.problem import DType, Problem

REFERENCE_TILE = 128
"""Side of the tile whose cycles are printed for every plan, so that plans and papers compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What attn4 does with ``problem`` on ``machine``; ``str()`` is the text, ``to_dict()`` the same as data.

    ``plan`` and ``tiles`` are None where no plan exists: ``reasons`` say why. ``obstacles`` say why it does
    not run today, plan or no plan. ``feeds`` hold the bound of a 128 x 128 tile, for each group of CTAs that
    is worth comparing, and then that of the plan's own step if it is another one. ``makespans``: how long
    schedules take, by name: the plan's "own", "dealt" in advance in linear order, and where lengths were
    given, "sorted"; empty for a backward pass, and for more tiles than are worth dealing. ``lengths`` are
    those of packed sequences, if they were given.
    """

    problem: Problem
    machine: Machine
    plan: Plan | None
    reasons: tuple[str, ...]
    obstacles: tuple[str, ...]
    tiles: Tiles | None
    feeds: tuple[Feeds, ...]
    makespans: dict[str, Makespan]
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers, ready for JSON."""
        return {
            "problem": asdict(self.problem),
            "machine": {k: v for k, v in asdict(self.machine).items() if k != "sources"},
            "supported": self.plan is not None,
            "reasons": list(self.reasons),
            "runnable": not self.obstacles,
            "obstacles": list(self.obstacles),
            "plan": None if self.plan is None else asdict(self.plan),
            "tiles": None if self.tiles is None else {**asdict(self.tiles), "waves": self.tiles.waves},
            "feeds": [_feeds_dict(f, self.machine) for f in self.feeds],
            "lengths": list(self.lengths),
            "makespans": {name: {**asdict(m), "ratio": m.ratio} for name, m in self.makespans.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A problem in the words of a caller, every word optional.

    ``head_dim_v``, ``kv_heads`` and ``seqlen_k`` are by default ``head_dim``, ``heads`` and ``seqlen_q``.
    ``causal`` and ``window_size`` as in ``flash_attn_func``; ``varlen``: packed sequences, cu_seqlens.
    ``lengths`` of packed sequences, queries and keys alike, take the place of ``batch``, ``seqlen_q``,
    ``seqlen_k`` and ``varlen``.
    """

    batch: int = 4
    seqlen_q: int = 4096
    seqlen_k: int | None = None
    heads: int = 16
    kv_heads: int | None = None
    head_dim: int = 128
    head_dim_v: int | None = None
    dtype: DType = "bfloat16"
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    varlen: bool = False
    lengths: tuple[int, ...] = ()
    backward: bool = False
    deterministic: bool = False

    def problem(self) -> Problem:
        """The problem that this call is."""
        longest = max(self.lengths, default=self.seqlen_q)
        packed = self.varlen or bool(self.lengths)
        return Problem(
            batch=len(self.lengths) or self.batch,
            seqlen_q=longest,
            seqlen_k=longest if self.seqlen_k is None or self.lengths else self.seqlen_k,
            heads=self.heads,
            kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim if self.head_dim_v is None else self.head_dim_v,
            dtype=self.dtype,
            mask=Mask.of(self.causal, self.window_size),
            cu_seqlens_q=packed,
            cu_seqlens_k=packed,
            direction="backward" if self.backward else "forward",
            deterministic=self.deterministic,
        )


def explain(
    problem: Problem | None = None,
    machine: Machine | str = "sm_90a",
    *,
    cta_group: int | None = None,
    **call: Any,
) -> Explanation:
    """Explain ``problem``, or the call that keywords describe, on ``machine``; needs no GPU.

    ``explain(machine="B200", head_dim=128, causal=True, backward=True)``: the keywords are the fields of
    ``Call``. ``machine`` is an architecture, a product, or a ``Machine``. ``cta_group``: plan for single
    CTAs (1) or pairs (2); by default the plan decides.

    Raises
    ------
    TypeError
        Both a problem and keywords that describe one, or an unknown keyword.
    ValueError
        No such machine, or ``cta_group`` does not fit. An unsupported problem is not an error here.
    """
    lengths: tuple[int, ...] = ()
    if problem is None:
        described = Call(**call)
        problem, lengths = described.problem(), described.lengths
    elif call:
        raise TypeError(f"Give a problem or its keywords, not both; got a problem and {', '.join(call)}.")
    where = machine_named(machine) if isinstance(machine, str) else machine
    reasons = unsupported(problem, where)
    plan = None if reasons else choose(problem, where, cta_group=cta_group)
    tiles = None if plan is None else count_tiles(problem, plan, where)
    return Explanation(
        problem=problem,
        machine=where,
        plan=plan,
        reasons=reasons,
        obstacles=runnable(problem, where),
        tiles=tiles,
        feeds=tuple(feeds(where, step) for step in _steps(problem, where, plan, cta_group)),
        makespans={} if plan is None else _makespans(problem, where, plan, lengths),
        lengths=lengths,
    )


def _makespans(
    problem: Problem, machine: Machine, plan: Plan, lengths: tuple[int, ...]
) -> dict[str, Makespan]:
    batch = Batch.of(problem)
    if lengths:
        batch = replace(Batch.self_attention(lengths, problem.heads, problem.mask), kv_heads=problem.kv_heads)
    if plan.direction != "forward" or tile_count(plan, batch) > MOST_TILES:
        return {}
    others = alternatives(plan)
    chosen = {"own": plan, "dealt": others["dealt"]} | ({"sorted": others["sorted"]} if lengths else {})
    return {name: makespan(each, machine, batch) for name, each in chosen.items()}


def _steps(problem: Problem, machine: Machine, plan: Plan | None, cta_group: int | None) -> list[Step]:
    if problem.direction == "backward":
        groups: Sequence[int] = machine.cta_groups
    elif plan is None:
        groups = (cta_group or 1,)
    else:
        groups = sorted(cta_groups(problem, machine))
    steps = [
        Step(
            tile_m=REFERENCE_TILE,
            tile_n=REFERENCE_TILE,
            head_dim=padded(problem.head_dim),
            head_dim_v=padded(problem.head_dim_v),
            direction=problem.direction,
            cta_group=group,
        )
        for group in groups
    ]
    own = [] if plan is None else [Step.of(plan)]
    return steps + [step for step in own if step not in steps]


def _feeds_dict(bound: Feeds, machine: Machine) -> dict[str, Any]:
    return {
        "step": asdict(bound.step),
        "cycles": {unit: bound.cycles(unit) for unit in UNITS},
        "terms": [asdict(term) for term in bound.terms],
        "bound": bound.bound,
        "binds": list(bound.binds),
        "tensor_share": bound.tensor_share,
        "tflops": bound.tensor_share * machine.peak_tflops,
    }


def _text(e: Explanation) -> Iterable[str]:
    yield from _head(e)
    if e.plan is None:
        yield from ("", "No plan:", *(f"  {reason}" for reason in e.reasons))
    else:
        yield from ("", "Roles", *_roles(e.plan))
        yield from ("", f"Shared memory ({_use(e.plan, 'shared', e.machine.shared_memory)} bytes)")
        yield from _memory(e.plan, "shared")
        if e.machine.tensor_columns:
            yield from ("", f"Tensor memory ({_use(e.plan, 'tensor', e.machine.tensor_columns)} columns)")
            yield from _memory(e.plan, "tensor")
        yield from ("", "Channels (arrivals are warps, one lane each; a named barrier's are threads)")
        yield from _channels(e.plan)
        yield from ("", "Schedule", *_schedule(e))
    yield from _bounds(e)
    if e.plan is not None and e.obstacles:
        yield from ("", "Does not run today:", *(f"  {obstacle}" for obstacle in e.obstacles))


def _head(e: Explanation) -> Iterable[str]:
    p, m = e.problem, e.machine
    window = "" if p.mask.kind != "window" else f" ({p.mask.left}, {p.mask.right})"
    features = [*_lengths(p), *(["deterministic"] if p.deterministic else [])]
    yield (
        f"{p.direction.capitalize()}, {p.dtype}, {p.mask.kind} mask{window}: batch {p.batch}, "
        f"queries {p.seqlen_q}, keys {p.seqlen_k}, heads {p.heads} over {p.kv_heads}, "
        f"head_dim {p.head_dim}, head_dim_v {p.head_dim_v}" + "".join(f", {name}" for name in features)
    )
    yield f"{m.chip} ({m.name}): {m.sms} SMs, {m.peak_tflops:.0f} TFLOP/s in 16 bits at {m.clock_ghz:g} GHz"
    if e.plan is not None:
        plan = e.plan
        group = "single CTAs" if plan.cta_group == 1 else "pairs of CTAs"
        group = f"clusters of {plan.cluster} CTAs" if plan.cluster > 1 else group
        packed = f", {plan.pack_gqa} query heads packed in a tile" if plan.pack_gqa > 1 else ""
        yield (
            f"Tile of a CTA: {plan.tile_m} queries x {plan.tile_n} keys a step, head dims padded to "
            f"{plan.head_dim} and {plan.head_dim_v}, {group}{packed}"
        )


def _lengths(problem: Problem) -> list[str]:
    """The tensors of lengths that the problem comes with."""
    return [n for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k") if getattr(problem, n)]


def _roles(plan: Plan) -> Iterable[str]:
    rows = [("name", "warps", "registers", "job")]
    for role in plan.roles:
        last = role.first_warp + role.warps - 1
        warps = f"{role.first_warp}-{last}" if role.warps > 1 else f"{last}"
        job = role.job + (" (leader CTA only)" if role.leader_only else "")
        rows.append((role.name, warps, str(role.registers), job))
    yield from _table(rows)


def _use(plan: Plan, space: Space, limit: int) -> str:
    end = max(b.offset + b.size for b in plan.buffers if b.space == space)
    return f"{end} of {limit}"


def _memory(plan: Plan, space: Space) -> Iterable[str]:
    rows = [("from", "to", "name", "stages", "of", "storage")]
    found = sorted(
        (b for b in plan.buffers if b.space == space), key=lambda b: (b.offset, b.borrows is not None)
    )
    rows.extend(
        (str(b.offset), str(b.offset + b.size), b.name, str(b.stages), _shape(b), _storage(b)) for b in found
    )
    yield from _table(rows)


def _shape(buffer: Buffer) -> str:
    return " x ".join(map(str, buffer.shape)) + f" {buffer.dtype}"


def _storage(buffer: Buffer) -> str:
    return "own" if buffer.borrows is None else f"borrows {buffer.borrows}"


def _channels(plan: Plan) -> Iterable[str]:
    rows = [("name", "kind", "slots", "from -> to", "full", "empty", "bytes", "buffer")]
    rows.extend(
        (
            c.name,
            c.kind,
            str(c.stages),
            f"{c.producer} -> {', '.join(c.consumers)}",
            str(c.full_arrivals),
            str(c.empty_arrivals or "-"),
            str(c.transaction_bytes or "-"),
            c.buffer or "-",
        )
        for c in plan.channels
    )
    yield from _table(rows)


def _schedule(e: Explanation) -> Iterable[str]:
    assert e.plan is not None
    assert e.tiles is not None
    schedule, tiles = e.plan.schedule, e.tiles
    unit = "CTA" if e.plan.together == 1 else "pair of CTAs"
    grid = f"one {unit} a tile" if not schedule.persistent else "persistent CTAs"
    dealt = "dealt in advance" if schedule.persistent else "begun as SMs are free"
    if schedule.counted:
        dealt = "taken from a counter"
    if schedule.launch_control:
        grid, dealt = f"one {unit} a tile", "taken over from CTAs that have not started"
    order = schedule.order.replace("_", " ")
    section = f", in sections of {schedule.section_bytes >> 20} MiB for L2" if schedule.section_bytes else ""
    most = "at most " if _lengths(e.problem) else ""
    place = "SMs" if e.plan.together == 1 else "pairs of SMs"
    rotated = ", each from a query block of its own" if schedule.rotated else ""
    if e.plan.column_shares > 1:
        grid = f"{e.plan.column_shares} CTAs, each with its columns, for the same keys"
    yield f"  {grid}, {order} order, {dealt}{section}{rotated}"
    yield f"  {most}{tiles.tiles} tiles on {tiles.slots} {place}: {tiles.waves:.2f} waves"
    share = tiles.steps / tiles.full_steps if tiles.full_steps else 1
    yield f"  {most}{tiles.steps} steps ({share:.0%} of an unmasked call), the longest tile {tiles.longest}"
    yield from _makespan_line(e)


def _makespan_line(e: Explanation) -> Iterable[str]:
    if not e.makespans or not e.makespans["own"].bound:
        return
    own = e.makespans["own"]
    most = "at most " if _lengths(e.problem) and not e.lengths else ""
    microseconds = own.cycles / (e.machine.clock_ghz * 1000)
    told = {"sorted": "with scheduler metadata", "dealt": "dealt in linear order"}
    others = "".join(
        f"; {words} {e.makespans[name].ratio:.2f}"
        for name, words in told.items()
        if name in e.makespans and e.makespans[name] != own
    )
    yield f"  makespan {most}{microseconds:.1f} us, {own.ratio:.2f} of the bound{others} (modelled)"


def _bounds(e: Explanation) -> Iterable[str]:
    for bound in e.feeds:
        step = bound.step
        mine = e.plan is not None and step == Step.of(e.plan)
        group = "" if len(e.machine.cta_groups) == 1 else f", {step.cta_group}-CTA"
        note = "" if mine or e.plan is None else " (for comparison)"
        dims = " and ".join(map(str, dict.fromkeys((step.head_dim, step.head_dim_v))))
        yield ""
        yield f"Feeds and speeds: {step.tile_m} queries x {step.tile_n} keys, head dim {dims}{group}{note}"
        yield "  cycles a CTA: " + ", ".join(f"{unit} {bound.cycles(unit):g}" for unit in UNITS)
        rows = [(t.unit, t.name, f"{t.cycles:g}", t.arithmetic) for t in bound.terms]
        yield from _table([("unit", "for", "cycles", "from"), *rows], indent=4)
        yield (
            f"  binds: {' and '.join(bound.binds)}, at {bound.bound:g} cycles; at most "
            f"{bound.tensor_share:.1%} of tensor peak, "
            f"{bound.tensor_share * e.machine.peak_tflops:.0f} TFLOP/s"
        )
    yield from _whole_call(e)
    yield from _remarks(e)


def _whole_call(e: Explanation) -> Iterable[str]:
    if e.plan is None or e.tiles is None or not e.tiles.steps:
        return
    bound = next(f for f in e.feeds if f.step == Step.of(e.plan))
    steps = max(e.tiles.steps / e.machine.sms, e.tiles.longest)
    microseconds = steps * bound.bound / (e.machine.clock_ghz * 1000)
    yield f"  the whole call: at least {microseconds:.1f} us, {steps:.1f} steps in a row (modelled)"


def _remarks(e: Explanation) -> Iterable[str]:
    if e.plan is not None and e.plan.softmax.fma_exp_every:
        every = e.plan.softmax.fma_exp_every
        share = f"the exponential unit does {1 - 1 / every:.1%}"
        yield f"  1 in {every} exponentials is a polynomial on the FMA units: {share}"
    if e.plan is not None and e.plan.column_shares > 1:
        yield f"  S and dP are computed by each of the {e.plan.column_shares} CTAs of the same keys"
    yield "  not counted: copies that fill shared memory, row statistics, output; operands are 16-bit"


def _table(rows: Sequence[Sequence[str]], indent: int = 2) -> Iterable[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield (" " * indent + "  ".join(cells)).rstrip()
