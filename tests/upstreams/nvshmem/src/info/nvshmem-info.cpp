// nvshmem-info, CPU stand-in: how this NVSHMEM was built. -n version, -b build variables, -a everything.
#include <cstdio>
#include <cstring>

#include "nvshmem_version.h"
#include "variables.h"

namespace {

void print_version() {
    std::printf("NVSHMEM v%d.%d.%d (CPU stand-in, no GPU needed)\n\n", NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                NVSHMEM_VENDOR_PATCH_VERSION);
}

void print_build() {
    std::printf("Build Information:\n");
    std::printf("  %-24s %s\n", "CUDA Version", standin::cuda_version());
    std::printf("  %-24s %s\n", "CUDA Architectures", standin::cuda_architectures());
    std::printf("  %-24s %s\n\n", "Build Variables", standin::build_variables());
}

}  // namespace

int main(int argc, char **argv) {
    const char *what = argc == 2 ? argv[1] : "";
    const bool all = std::strcmp(what, "-a") == 0;
    const bool version = all || std::strcmp(what, "-n") == 0;
    const bool build = all || std::strcmp(what, "-b") == 0;
    if (version) print_version();
    if (build) print_build();
    if (version || build) return 0;
    std::fprintf(stderr, "usage: nvshmem-info -a | -b | -n\n");
    return 1;
}
