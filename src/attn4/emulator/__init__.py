"""A virtual GPU: runs compiled CuTe-DSL kernels, unmodified, on a CPU.

Knows nothing of attention. ``ptx`` turns the text of a module into typed records, ``isa`` defines what each
instruction does to a whole warp, ``state`` is the memory they act on.
"""
