// DeepEP V2, CPU stand-in: a barrier between nodes over NCCL's device side (GIN). Nothing on the embedded cluster
// compiles it. The lock replaces text in here as it does in the real tree.
#pragma once

#include <type_traits>

#include <nccl.h>
#include <nccl_device.h>

#include <deep_ep/common/ptx.cuh>

namespace standin::comm {

// Every rank of the team comes this far before any goes on. Called by all kNumThreads threads of every block.
template <int kNumRanks, int kNumThreads, typename team_t, bool kFlushStores = true>
__device__ __forceinline__ void wait_for_team(const ncclDevComm_t &nccl_dev_comm, int rank_idx) {
    const int thread_idx = threadIdx.x;
    const int num_contexts = static_cast<int>(nccl_dev_comm.ginContextCount);

    // What this rank has sent is under way before its signal is.
    if constexpr (kFlushStores) {
        for (int i = thread_idx / 32; i < num_contexts; i += kNumThreads / 32) {
            ncclGin(nccl_dev_comm, i, NCCL_GIN_RESOURCE_SHARING_CTA).flush(ncclCoopWarp());
        }
        __syncthreads();
    }

    if (blockIdx.x == 0) {
        constexpr bool is_world = std::is_same_v<team_t, ncclTeamTagWorld>;
        const ncclTeam team = is_world ? ncclTeamWorld(nccl_dev_comm) : ncclTeamRail(nccl_dev_comm);
        const ncclGin gin(nccl_dev_comm, 0, NCCL_GIN_RESOURCE_SHARING_CTA);
        for (int i = thread_idx; i < kNumRanks; i += kNumThreads)
            gin.signal(team, i, ncclGin_SignalInc{static_cast<ncclGinSignal_t>(rank_idx)});

        // Every rank has a signal of its own at each receiver, and the receiver counts how often it came.
        for (int i = thread_idx; i < kNumRanks; i += kNumThreads) {
            const auto signal_idx = static_cast<ncclGinSignal_t>(i);
            const uint64_t awaited = ++*gin.getSignalShadowPtr(signal_idx);
            while (gin.readSignal(signal_idx) < awaited) {
            }
        }
    }
}

}  // namespace standin::comm
