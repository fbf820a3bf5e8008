"""What the compiler makes of the Hopper kernels, read from the compiled code; no GPU runs here."""

from __future__ import annotations

import importlib.util
import itertools
import re

import pytest

from attn4.machine import machine
from attn4.mask import Mask
from attn4.plan.choose import choose
from attn4.problem import Problem

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="CuTe DSL is not installed"
)

CASES = {
    "narrow full": {"head_dim": 64, "mask": Mask(), "seqlen_q": 16384},
    "causal": {"head_dim": 128, "mask": Mask.of(True), "seqlen_q": 4096},
    "wide window": {"head_dim": 256, "mask": Mask(1000, 10), "seqlen_q": 4096},
    "packed": {"head_dim": 128, "mask": Mask.of(True), "seqlen_q": 512, "cu_seqlens_q": True},
}


def problem(head_dim: int, seqlen_q: int, **fields) -> Problem:
    return Problem(
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q,
        heads=8,
        kv_heads=8,
        head_dim=head_dim,
        head_dim_v=head_dim,
        cu_seqlens_k=fields.get("cu_seqlens_q", False),
        **fields,
    )


def machine_code(library: bytes) -> str:
    """The disassembled kernel of an artefact's shared object."""
    from attn4.artifact.elf import cubins
    from attn4.compiled.listing import DisassemblerMissingError, disassemble

    try:
        return disassemble(next(iter(cubins(library))))
    except DisassemblerMissingError as error:
        pytest.skip(str(error))


@needs_dsl
@pytest.mark.parametrize("name", CASES)
def test_kernels_spill_nothing_and_products_run_on(name, tmp_path):
    """ptxas serialises products where it cannot follow their registers: a wait after each, unannounced."""
    from attn4.artifact import artifact_for, build_bundle, use_bundle

    plan = choose(problem(**CASES[name]), machine("sm_90a"))
    build_bundle([plan], tmp_path, jobs=1)
    with use_bundle(tmp_path):
        artifact = artifact_for(plan)
    (kernel,) = artifact.description.kernels
    assert kernel.stack_bytes == 0
    assert kernel.registers <= 65536 // plan.threads // 8 * 8
    code = machine_code(artifact.library.read_bytes())
    assert not re.search(r"\b(STL|LDL)\b", code)
    products, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
    assert products > 10
    assert waits == artifact.ptx().count("wgmma.wait_group")


@needs_dsl
@pytest.mark.slow
def test_with_turns_exponentials_stay_between_the_barriers():
    """ptxas moves what it may above a wait: without a dependence 98 of the 113 of a step were there."""
    from attn4.artifact import artifact_for
    from attn4.plan import sm100

    plan = sm100.forward(problem(128, 4096, mask=Mask()), machine("sm_100a"), softmax_turns=True)
    code = machine_code(artifact_for(plan).library.read_bytes())
    found = re.findall(r"MUFU\.EX2|BAR\.SYNC|BAR\.ARV", code)
    runs = [(name, len(list(run))) for name, run in itertools.groupby(found)]
    inside = [
        runs[i][1]
        for i in range(1, len(runs) - 1)
        if (runs[i - 1][0], runs[i + 1][0]) == ("BAR.SYNC", "BAR.ARV")
    ]
    # In a masked step all, else less one in eight by polynomial.
    assert inside == [128, 112]


@needs_dsl
def test_plans_that_differ_only_in_lengths_give_one_kernel():
    """Shapes arrive with the call: one artefact serves all lengths on the same side of a tile choice."""
    short, long = (problem(head_dim=128, seqlen_q=n, mask=Mask.of(True)) for n in (333, 99999))
    assert choose(short, machine("sm_90a")) == choose(long, machine("sm_90a"))
