// Names that a real torch's libtorch_nvshmem.so wants to find when it is loaded on top of this library (LD_PRELOAD). They are there to
// be found, not to be called: nothing here computes on GPUs.
#include <cstdio>
#include <cstdlib>

#define STANDIN_ABSENT(name)                                                        \
    __attribute__((noreturn)) void name(void) {                                     \
        std::fprintf(stderr, "nvshmem (CPU stand-in): " #name " is not in here\n"); \
        std::abort();                                                               \
    }

extern "C" {
STANDIN_ABSENT(nvshmem_info_get_version)
STANDIN_ABSENT(nvshmem_init)
STANDIN_ABSENT(nvshmem_ptr)
STANDIN_ABSENT(nvshmem_team_n_pes)
STANDIN_ABSENT(nvshmem_team_split_strided)
STANDIN_ABSENT(nvshmemid_init_status)
STANDIN_ABSENT(nvshmemx_alltoallmem_on_stream)
STANDIN_ABSENT(nvshmemx_broadcastmem_on_stream)
STANDIN_ABSENT(nvshmemx_cumodule_init)
STANDIN_ABSENT(nvshmemx_getmem_on_stream)
STANDIN_ABSENT(nvshmemx_mc_ptr)
STANDIN_ABSENT(nvshmemx_putmem_on_stream)
STANDIN_ABSENT(nvshmemx_putmem_signal_on_stream)
STANDIN_ABSENT(nvshmemx_signal_wait_until_on_stream)
}
