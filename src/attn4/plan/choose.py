"""From a problem and a machine to a plan, or to the reasons why there is none."""

from __future__ import annotations

from attn4.machine import MACHINES, Machine
from attn4.plan import (
    sm90,
    sm90_backward,
    sm90_backward_wide,
    sm100,
    sm100_backward,
    sm100_backward_wide,
)
from attn4.plan.channels import validate
from attn4.plan.layout import padded
from attn4.plan.plan import Plan
from attn4.problem import Problem

DTYPES = ("bfloat16", "float16")
MOST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
UNEQUAL_HEAD_DIMS = (192, 128)

REFERENCE = 'use backend="reference", which runs on every device'


def choose(problem: Problem, machine: Machine, *, cta_group: int | None = None) -> Plan:
    """The plan of ``problem`` on ``machine``, checked.

    Shapes, strides and lengths leave no trace in it, except for three choices: whether the query heads of a
    group share a tile, whether a CTA takes one query tile or two, and whether CTAs work in pairs.
    ``cta_group`` asks for pairs of CTAs (2) or single ones (1); by default the plan decides.

    Raises
    ------
    ValueError
        The problem is not one of attention, or ``cta_group`` does not fit it.
    NotImplementedError
        No plan exists for it on this machine.
    """
    wrong = invalid(problem)
    if wrong:
        raise ValueError(" ".join(wrong))
    missing = unplanned(problem, machine)
    if missing:
        raise NotImplementedError(" ".join(missing))
    groups = cta_groups(problem, machine)
    if cta_group is not None and cta_group not in groups:
        raise ValueError(
            f"A group of {cta_group} CTAs was asked for; this problem on {machine.name} is planned with "
            f"{' or '.join(map(str, groups))}. Leave cta_group out, or choose one of those."
        )
    plan = _build(problem, machine, groups[0] if cta_group is None else cta_group)
    validate(plan, machine)
    return plan


def _build(problem: Problem, machine: Machine, cta_group: int) -> Plan:
    if not machine.tensor_columns:
        if problem.direction == "forward":
            return sm90.forward(problem, machine)
        wide = max(problem.head_dim, problem.head_dim_v) > sm90_backward.MOST_HEAD_DIM
        build = sm90_backward_wide.backward if wide else sm90_backward.backward
        return build(problem, machine)
    if problem.direction == "backward":
        if max(problem.head_dim, problem.head_dim_v) > sm100_backward.MOST_HEAD_DIM:
            return sm100_backward_wide.backward(problem, machine)
        return sm100_backward.backward(problem, machine, cta_group)
    return sm100.forward(problem, machine, cta_group)


def cta_groups(problem: Problem, machine: Machine) -> tuple[int, ...]:
    """How many CTAs may share a product of this supported problem, the default first."""
    if 2 not in machine.cta_groups:
        return (1,)
    if problem.direction == "backward":
        largest = max(padded(problem.head_dim), padded(problem.head_dim_v))
        if largest > sm100_backward.MOST_HEAD_DIM:
            return (1,)
        dims = (problem.head_dim, problem.head_dim_v)
        if problem.ragged and not all(map(sm100_backward.halves_loadable, dims)):
            return (1,)
        return (2, 1) if sm100_backward.pairs_pay(largest) else (1, 2)
    # The halves of a pair must take equally many steps: no mask, no lengths that differ, several tiles.
    even = problem.mask.kind == "full" and not problem.ragged
    several = problem.seqlen_q > 2 * sm100.TILE_ROWS
    if not (even and several):
        return (1,)
    return (2, 1) if sm100.pairs_pay(problem) else (1, 2)


def unsupported(problem: Problem, machine: Machine) -> tuple[str, ...]:
    """Why no plan for ``problem`` exists on ``machine``, in full sentences; empty if one does."""
    return (*invalid(problem), *unplanned(problem, machine))


def runnable(problem: Problem, machine: Machine) -> tuple[str, ...]:
    """Why ``problem`` does not run on ``machine`` today: no plan, or no kernel for it; empty if it does.

    Every plan that ``choose`` makes by itself has its kernel today.
    """
    return unsupported(problem, machine)


def invalid(problem: Problem) -> tuple[str, ...]:
    """What is wrong with ``problem`` on any machine that has kernels."""
    reasons = []
    if problem.dtype not in DTYPES:
        reasons.append(
            f"The dtype is {problem.dtype}; kernels take {' and '.join(DTYPES)}. Convert, or {REFERENCE}."
        )
    head_dims = [("head_dim", problem.head_dim)]
    if problem.head_dim_v != problem.head_dim:
        head_dims.insert(0, ("head_dim_v", problem.head_dim_v))
    for name, value in head_dims:
        if value % HEAD_DIM_MULTIPLE or not 0 < value <= MOST_HEAD_DIM:
            reasons.append(
                f"{name} is {value}; kernels take multiples of {HEAD_DIM_MULTIPLE} from {HEAD_DIM_MULTIPLE} "
                f"to {MOST_HEAD_DIM}. Pad with zeros, or {REFERENCE}."
            )
    if problem.heads < 1 or problem.kv_heads < 1 or problem.heads % problem.kv_heads:
        reasons.append(
            f"There are {problem.heads} query heads and {problem.kv_heads} key/value heads; the first must "
            "be a positive multiple of the second. Repeat the key/value heads, or drop some."
        )
    sizes = {"batch": problem.batch, "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k}
    reasons += [f"{name} is {size}; sizes are not negative." for name, size in sizes.items() if size < 0]
    return tuple(reasons)


def unplanned(problem: Problem, machine: Machine) -> tuple[str, ...]:
    """What no plan on ``machine`` covers, of a problem that is valid."""
    if machine.name not in {known.name for known in MACHINES}:
        return (
            f"{machine.chip} ({machine.name}) has no plans; they exist for "
            f"{', '.join(known.name for known in MACHINES)}. Elsewhere, {REFERENCE}.",
        )
    reasons = []
    pair = (padded(problem.head_dim), padded(problem.head_dim_v))
    given = f"head_dim is {problem.head_dim} and head_dim_v is {problem.head_dim_v}"
    if pair[0] != pair[1] and pair != UNEQUAL_HEAD_DIMS:
        reasons.append(
            f"{given}; they must round up to the same multiple of 32, or to {UNEQUAL_HEAD_DIMS[0]} and "
            f"{UNEQUAL_HEAD_DIMS[1]}. Pad the smaller with zeros, or {REFERENCE}."
        )
    return (*reasons, *unloadable(problem, machine))


def unloadable(problem: Problem, machine: Machine) -> tuple[str, ...]:
    """Why a bulk copy cannot load what a plan would have, of a problem that is valid.

    The second CTA of a column share has 96 of 192 columns, in boxes of 64 and 32. One that lies wholly past
    the head dimension is read at the first element of its view, and that of a ragged tensor is no memory.
    """
    most = sm100_backward_wide.COLUMNS_OUTSIDE
    wide = sm100_backward.MOST_HEAD_DIM < problem.head_dim <= most
    if not (machine.tensor_columns and problem.direction == "backward" and wide and problem.ragged):
        return ()
    return (
        f"The backward pass of head_dim {problem.head_dim} over cu_seqlens or seqused has no kernel on "
        f"{machine.name}. Pad head_dim with zeros to {most + HEAD_DIM_MULTIPLE} or more, pad the sequences "
        f"to one length, or {REFERENCE}.",
    )
