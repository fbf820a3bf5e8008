"""The operands of a warpgroup's two products: which tiles they are and where they sit.

S = Q K^T takes Q from shared memory, or from registers that a tile fills once; O += P V takes P from
registers, which every step fills.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from attn4.kernels.dsl import mma
from attn4.kernels.dsl.carried import Fixed


class Operands(Fixed):
    """Operand fragments of the warpgroup of ``thread``, counted from the first attending one."""

    def __init__(self, plan, scores_mma, output_mma, thread: Int32, query, key, value_t):
        self.scores_mma = scores_mma
        self.output_mma = output_mma
        self.thread = thread
        self.shared_query = query
        first_thread = cute.arch.make_warp_uniform(thread // mma.GROUP_THREADS) * mma.GROUP_THREADS
        scores = scores_mma.get_slice(first_thread)
        output = output_mma.get_slice(first_thread)
        self.key = scores.make_fragment_B(scores.partition_B(key))
        self.value = output.make_fragment_B(output.partition_B(value_t))
        if plan.query_in_registers:
            shape = (plan.tile_m, plan.head_dim)
            self.query = scores.make_fragment_A(scores.partition_shape_A(shape))
        else:
            self.query = scores.make_fragment_A(scores.partition_A(query))
        shape = (plan.tile_m, plan.tile_n)
        self.probabilities = output.make_fragment_A(output.partition_shape_A(shape))

    @cute.jit
    def load_query(self):
        """Read this warpgroup's queries into registers."""
        dtype = self.shared_query.element_type
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
        mine = cute.make_tiled_copy_A(atom, self.scores_mma).get_slice(self.thread)
        cute.copy(atom, mine.partition_S(self.shared_query[None, None, 0]), mine.retile(self.query))
