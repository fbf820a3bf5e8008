"""The fixed-function units of an SM, free of instructions and threads: bulk copies and tensor core.

``formats``    number formats to and from bits
``reductions`` what reductions in memory do to an element
``swizzle``    where the 16-byte chunks of a swizzled tile lie in shared memory
``tensormap``  the 128-byte descriptor of a tiled tensor
``bulk``       tiles and plain spans between global and shared memory
``matrix``     shared-memory descriptors of the products
``dot``        the arithmetic of a product, and its order of summation
``wgmma``      the warpgroup product of sm_90a
``tcgen05``    the product of sm_100a, into tensor memory
"""
