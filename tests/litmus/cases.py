"""All litmus kernels, and the pairs of kernel and mutant."""

from litmus import blackwell, clusters, copies, hopper, mbarriers, memory, threads

CHAPTERS = (threads, mbarriers, copies, clusters, hopper, blackwell, memory)
LITMUS = [litmus for chapter in CHAPTERS for litmus in chapter.LITMUS]
MUTANTS = [(litmus, mutant) for litmus in LITMUS for mutant in litmus.mutants]


def title(*part):
    """The name of a pair (pytest asks for each part of a parameter set, this for both)."""
    return ": ".join(p if isinstance(p, str) else p.name for p in part)
