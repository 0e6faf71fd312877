// What kernels of DeepEP V2 take from the toolkit: CCCL's barrier, half-precision types, cooperative groups, libdevice.
#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda/std/tuple>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <type_traits>
#include <utility>

template <typename T>
__device__ T halved(T value) {
    if constexpr (std::is_same_v<T, float>)
        return sinf(value) / 2;
    return value;
}

extern "C" __global__ void copy(float* to, const __nv_bfloat16* from) {
    __shared__ alignas(8) cuda::barrier<cuda::thread_scope_block> ready;
    if (threadIdx.x == 0)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(&ready))));
    cooperative_groups::this_grid().sync();
    to[threadIdx.x] = halved(static_cast<float>(from[threadIdx.x]));
}
