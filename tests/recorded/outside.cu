// What a bulk tensor copy does with a box that lies wholly outside its tensor, on a GPU with clusters.
//
//   nvcc -arch=sm_90a -o outside tests/recorded/outside.cu -lcuda && ./outside OPERATION PAGES COLUMN ROW EXTRA
//
// Each row of a tensor of 4 rows of 64 bf16 has a page of 2 MiB of its own; a third dimension of 9 has the stride
// of rows, so that the tensor map begins at page 0 and (row, extra) is in page row + extra. Bit i of PAGES says
// whether page i is memory. One process a question: an error ends its context.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <cuda.h>
#include <cuda_runtime.h>

enum Operation { LOAD, LOAD_INTO_BOTH, LOAD_BY_MASK_INTO_ONE, STORE, ADD, PREFETCH };

static void require(CUresult result) {
  const char *text = nullptr;
  if (result == CUDA_SUCCESS) return;
  cuGetErrorString(result, &text);
  printf("%s\n", text);
  exit(2);
}

__global__ void __cluster_dims__(2, 1, 1)
    copy(const __grid_constant__ CUtensorMap map, int operation, int column, int row, int extra, unsigned *first) {
  __shared__ alignas(1024) uint16_t tile[64];
  __shared__ alignas(8) uint64_t barrier;
  uint32_t rank, full = __cvta_generic_to_shared(&barrier), at = __cvta_generic_to_shared(tile);
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < 64; i++) tile[i] = 0x1234;
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(full));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async;");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;");
  bool loads = operation < STORE, filled = loads && !(operation == LOAD_BY_MASK_INTO_ONE && rank == 1);
  if (threadIdx.x == 0) {
    if (filled) asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 128;" ::"r"(full));
    if (operation == LOAD)
      asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                   "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(at), "l"(&map), "r"(column), "r"(row), "r"(extra), "r"(full)
                   : "memory");
    else if (loads && rank == 0)
      asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                   "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(at), "l"(&map), "r"(column), "r"(row), "r"(extra),
                   "r"(full), "h"((uint16_t)(operation == LOAD_INTO_BOTH ? 3 : 1))
                   : "memory");
    else if (operation == STORE && rank == 0)
      asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
                   "r"(column), "r"(row), "r"(extra), "r"(at)
                   : "memory");
    else if (operation == ADD && rank == 0)
      asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
                       &map),
                   "r"(column), "r"(row), "r"(extra), "r"(at)
                   : "memory");
    else if (operation == PREFETCH && rank == 0)
      asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map), "r"(column), "r"(row),
                   "r"(extra)
                   : "memory");
    if (filled)
      asm volatile("{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity.shared.b64 p, [%0], 0;\n@!p bra W;\n}" ::"r"(full));
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;");
    __nanosleep(100000);
    first[rank] = tile[0];
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;");
}

int main(int count, char **words) {
  if (count != 6) return 1;
  unsigned pages = strtoul(words[2], nullptr, 0), *first, result[2] = {};
  const size_t page = 2 << 20;
  CUdevice device;
  CUcontext context;
  CUdeviceptr begin;
  require(cuInit(0));
  require(cuDeviceGet(&device, 0));
  require(cuDevicePrimaryCtxRetain(&context, device));
  require(cuCtxSetCurrent(context));
  require(cuMemAddressReserve(&begin, 64 * page, page, 0, 0));
  CUmemAllocationProp kind = {};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemAccessDesc access = {kind.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  for (int i = 0; i < 32; i++) {
    CUmemGenericAllocationHandle memory;
    if (!(pages >> i & 1)) continue;
    require(cuMemCreate(&memory, page, &kind, 0));
    require(cuMemMap(begin + i * page, page, 0, memory, 0));
    require(cuMemSetAccess(begin + i * page, page, &access, 1));
    require(cuMemsetD16(begin + i * page, 0x100 + i, page / 2));
  }
  cudaMalloc(&first, sizeof result);
  CUtensorMap map;
  cuuint64_t dims[3] = {64, 4, 9}, strides[2] = {page, page};
  cuuint32_t box[3] = {64, 1, 1}, steps[3] = {1, 1, 1};
  require(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)begin, dims, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                 CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  copy<<<2, 32>>>(map, atoi(words[1]), atoi(words[3]), atoi(words[4]), atoi(words[5]), first);
  cudaError_t error = cudaDeviceSynchronize();
  if (!error) cudaMemcpy(result, first, sizeof result, cudaMemcpyDeviceToHost);
  printf("%s; first element in each CTA: %#x %#x\n", cudaGetErrorString(error), result[0], result[1]);
  return error != cudaSuccess;
}
