// DeepEP V2, CPU stand-in: single instructions. The lock replaces text in here as it does in the real tree.
#pragma once

#include <cstdint>

namespace standin::ptx {

__device__ __forceinline__ void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Sets kNumBytes of shared memory to zero.
template <uint32_t kNumBytes>
__device__ __forceinline__ void clear_shared(void *pointer) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    asm volatile("{ .reg .u64 size; mov.u64 size, %1; st.bulk.weak.shared::cta [%0], size, 0; }" ::"r"(address),
                 "r"(kNumBytes)
                 : "memory");
#else
    for (uint32_t i = 0; i < kNumBytes; i += 4) asm volatile("st.shared.u32 [%0], 0;" ::"r"(address + i) : "memory");
#endif
}

}  // namespace standin::ptx
