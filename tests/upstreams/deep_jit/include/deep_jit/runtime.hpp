// The submodule of DeepEP V2.5 (CPU stand-in): something that its extension cannot be compiled without.
#pragma once

#include <string>

namespace deep_jit {

inline std::string dotted(int major, int minor, int patch) {
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

}  // namespace deep_jit
