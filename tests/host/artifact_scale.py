"""A small kernel in CuTe-DSL, which reads its functions' source from the file they are in."""

import cutlass
import cutlass.cute as cute

THREADS = 256


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < x.shape[0]:
        y[i] = x[i] * factor


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream):
    blocks = cute.ceil_div(x.shape[0], THREADS)
    scale_kernel(x, y, factor).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)
