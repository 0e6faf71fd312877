// The build's variables as texts in the library.
#include "variables.h"

#include "build_variables.h"

namespace standin {

const char *cuda_version() { return STANDIN_CUDA_VERSION; }

const char *cuda_architectures() { return STANDIN_CUDA_ARCHITECTURES; }

const char *build_variables() { return STANDIN_BUILD_VARIABLES; }

}  // namespace standin
