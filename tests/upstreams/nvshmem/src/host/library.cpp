// The C interface of the host library: versions, memory, start, end, collectives.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "team.h"

namespace {

standin::Team team;
std::string last_error;

template <typename Body>
int guarded(Body body) {
    try {
        body();
        return 0;
    } catch (const standin::Failure &failure) {
        last_error = failure.what();
        return -1;
    }
}

std::string dotted(int major, int minor, int patch) {
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

// As the real library does: IBGDA only when asked for, and a missing NIC is a line of output, not the end.
void load_transport() {
    const char *asked = std::getenv("NVSHMEM_IB_ENABLE_IBGDA");
    if (asked == nullptr || std::strcmp(asked, "1") != 0) return;
    void *module = dlopen("nvshmem_transport_ibgda.so.3", RTLD_NOW | RTLD_LOCAL);
    auto *init = module != nullptr ? reinterpret_cast<int (*)()>(dlsym(module, "nvshmemt_init")) : nullptr;
    if (init == nullptr || init() != 0) std::fprintf(stderr, "nvshmem (CPU stand-in): init failed for transport: IBGDA\n");
}

}  // namespace

extern "C" {

int nvshmem_my_pe(void) { return team.rank; }

int nvshmem_n_pes(void) { return team.ranks; }

void *nvshmem_malloc(size_t size) { return nvshmem_align(64, size); }

void *nvshmem_align(size_t alignment, size_t size) {
    void *pointer = nullptr;
    return posix_memalign(&pointer, alignment, size) == 0 ? pointer : nullptr;
}

void nvshmem_free(void *pointer) { std::free(pointer); }

void nvshmemx_vendor_get_version_info(int *major, int *minor, int *patch) {
    *major = NVSHMEM_VENDOR_MAJOR_VERSION;
    *minor = NVSHMEM_VENDOR_MINOR_VERSION;
    *patch = NVSHMEM_VENDOR_PATCH_VERSION;
}

const char *nvshmemx_standin_error(void) { return last_error.c_str(); }

int nvshmemx_get_uniqueid(const char *host, int port, nvshmemx_uniqueid_t *id) {
    return guarded([&] {
        if (std::strlen(host) >= sizeof id->host) throw standin::Failure("the host name is too long");
        if (port < 1 || port > 65535) throw standin::Failure("not a port: " + std::to_string(port));
        std::memset(id, 0, sizeof *id);
        std::strcpy(id->host, host);
        id->port = port;
    });
}

int nvshmemx_set_attr_uniqueid_args(int rank, int ranks, const nvshmemx_uniqueid_t *id, nvshmemx_init_attr_t *attr) {
    return guarded([&] {
        if (rank < 0 || rank >= ranks) throw standin::Failure("rank " + std::to_string(rank) + " of " + std::to_string(ranks));
        *attr = {rank, ranks, 30000, *id};
    });
}

int nvshmemid_hostlib_init_attr(const nvshmemx_init_attr_t *attr, int major, int minor, int patch) {
    return guarded([&] {
        const std::string library = dotted(NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION);
        if (dotted(major, minor, patch) != library)
            throw standin::Failure("NVSHMEM device library version " + dotted(major, minor, patch) + " does not match host library " + library);
        load_transport();
        team = standin::connect_team(*attr);
    });
}

void nvshmemid_hostlib_finalize(void) {
    for (const int socket : team.sockets)
        if (socket >= 0) close(socket);
    team = standin::Team();
}

int nvshmemx_standin_alltoallv(const void *const *send, const size_t *send_bytes, void **recv, size_t *recv_bytes, size_t chunk) {
    return guarded([&] { standin::exchange(team, send, send_bytes, recv, recv_bytes, chunk); });
}

void nvshmem_barrier_all(void) {
    const auto ranks = static_cast<std::size_t>(team.ranks);
    const std::vector<const void *> send(ranks, nullptr);
    const std::vector<std::size_t> nothing(ranks, 0);
    std::vector<void *> recv(ranks, nullptr);
    std::vector<std::size_t> recv_bytes(ranks, 0);
    if (nvshmemx_standin_alltoallv(send.data(), nothing.data(), recv.data(), recv_bytes.data(), 0) == 0) return;
    std::fprintf(stderr, "nvshmem (CPU stand-in): rank %d: barrier: %s\n", team.rank, last_error.c_str());
    std::_Exit(1);
}

}  // extern "C"
