"""Small CuTe-DSL programs for the device tests; the DSL reads their source from this file."""

import cutlass
import cutlass.cute as cute

THREADS = 128


@cute.kernel
def double_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    y[i] = x[i] * 2.0


@cute.jit
def double(x, y):
    """y = 2 x, of a multiple of 128 elements."""
    double_kernel(x, y).launch(grid=[x.shape[0] // THREADS, 1, 1], block=[THREADS, 1, 1])


@cute.jit
def double_on(x, y, stream):
    double_kernel(x, y).launch(grid=[x.shape[0] // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def double_at(x: cute.Pointer, y: cute.Pointer, count: cutlass.Constexpr):
    layout = cute.make_layout(count)
    double_kernel(cute.make_tensor(x, layout), cute.make_tensor(y, layout)).launch(
        grid=[count // THREADS, 1, 1], block=[THREADS, 1, 1]
    )


@cute.kernel
def early_kernel(y: cute.Tensor):
    """Waits for nothing that it should wait for."""
    thread, _, _ = cute.arch.thread_idx()
    y[thread + 1] = 1.0


@cute.jit
def write_past_the_end(y):
    early_kernel(y).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])
