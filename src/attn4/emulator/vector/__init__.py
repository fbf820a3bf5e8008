"""The instructions that only compute defined a second time, as LLVM vector code: the same bits, faster.

The definitions in ``isa`` are the machine; these are an accelerator that a test holds to them, bit by bit.
An instruction or a form of one without a vector definition runs by the one in ``isa``.
"""
