// How this library was built: for nvshmem-info, which is linked with the static library. The shared one hides it.
#pragma once

namespace standin {

const char *cuda_version();
const char *cuda_architectures();
const char *build_variables();

}  // namespace standin
