"""What the compiler made of a kernel: its machine code, read role by role and loop by loop.

``listing`` disassembles and parses, ``flow`` finds loops, ``classes`` sorts instructions, ``roles`` tells
whose code is whose, ``code`` counts, ``report`` puts it beside the Plan. Needs neither a GPU nor CuTe DSL.
"""

from attn4.compiled.listing import DisassemblerMissingError
from attn4.compiled.report import Compiled, Report, read, read_cubin

__all__ = ["Compiled", "DisassemblerMissingError", "Report", "read", "read_cubin"]
