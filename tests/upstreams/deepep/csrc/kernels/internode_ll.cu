// DeepEP, CPU stand-in: a combine in small, compiled for every architecture and never launched. One warp loads rows
// into stages (TMA), a second adds them up and hands every stage back. The lock replaces text in here as it does in
// the real tree. A fake nvcc knows no PTX.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define STANDIN_HAS_TMA 1

namespace {

using Barrier = unsigned long long;

constexpr int kNumStages = 2;
constexpr int kRowFloats = 128;
constexpr int kRowBytes = kRowFloats * 4;

__device__ __forceinline__ unsigned shared_address(const void *pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ bool elect_one_sync() {
    int elected = 0;
    asm volatile("{ .reg .pred chosen; elect.sync _|chosen, 0xffffffff; selp.b32 %0, 1, 0, chosen; }" : "=r"(elected));
    return elected != 0;
}

__device__ __forceinline__ void mbarrier_init(Barrier &barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Barrier &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(Barrier &barrier, int phase) {
    int passed = 0;
    while (passed == 0)
        asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;"
                     "selp.b32 %0, 1, 0, done; }"
                     : "=r"(passed)
                     : "r"(shared_address(&barrier)), "r"(phase)
                     : "memory");
}

__device__ __forceinline__ void load_row(float *stage, const float *row, Barrier &barrier) {
    const unsigned target = shared_address(stage), loaded = shared_address(&barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(loaded), "r"(kRowBytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "l"(row), "r"(kRowBytes), "r"(loaded)
                 : "memory");
}

}  // namespace
#endif

extern "C" __global__ void standin_combine(float *sums, const float *rows, const int *first, int num_tokens,
                                           int num_topk) {
#ifdef STANDIN_HAS_TMA
    __shared__ alignas(128) float stages[kNumStages][kRowFloats];
    __shared__ Barrier full_barriers[kNumStages], empty_barriers[kNumStages];
    if (threadIdx.x < kNumStages) {
        mbarrier_init(full_barriers[threadIdx.x]);
        mbarrier_init(empty_barriers[threadIdx.x]);
    }
    __syncthreads();

    const int lane = threadIdx.x % 32;
    int stage_idx = 0, phase = 0;
    if (threadIdx.x < 32) {
        for (int token = 0; token < num_tokens; ++token) {
            for (int k = 0; k < num_topk; ++k) {
                if (first[token] >= 0) {
                    mbarrier_wait(empty_barriers[stage_idx], phase ^ 1);
                    const float *row = rows + (first[token] + k) * kRowFloats;
                    if (elect_one_sync()) load_row(stages[stage_idx], row, full_barriers[stage_idx]);
                    stage_idx = (stage_idx + 1) % kNumStages;
                    phase ^= stage_idx == 0;
                }
            }
        }
    } else {
        for (int token = 0; token < num_tokens; ++token) {
            float sum[kRowFloats / 32] = {};
            for (int k = 0; k < num_topk; ++k) {
                if (first[token] >= 0) {
                    mbarrier_wait(full_barriers[stage_idx], phase);
                    for (int i = 0; i < kRowFloats / 32; ++i) sum[i] += stages[stage_idx][i * 32 + lane];

                    if (elect_one_sync())
                        mbarrier_arrive(empty_barriers[stage_idx]);
                    stage_idx = (stage_idx + 1) % kNumStages;
                    phase ^= stage_idx == 0;
                }
            }
            for (int i = 0; i < kRowFloats / 32; ++i) sums[token * kRowFloats + i * 32 + lane] = sum[i];
        }
    }
#endif
}
