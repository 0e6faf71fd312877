# shellcheck shell=bash
# The health checks of an entry of DeepEP V2 and V2.5, and what their builds share. It stands between build/deepep-checks.sh, from which it
# takes with_entry and the look at the device code, and build/deepep-v2.sh or build/deepep-v25.sh.
# Inputs: those of build/deepep-checks.sh, NCCL_VERSION, and those of build/deepep-v2.sh for an external PYTHON.

check_entry() {
    local word
    local environment=""
    wait_for_libraries
    RUN_PYTHON="${PYTHON}" PRELOAD=""
    if [[ -n "${PYTHON_ENTRY:-}" ]]; then
        wait_for_entry "${PYTHON_ENTRY}"
        environment="${PREFIX}/store/${PYTHON_ENTRY}"
        # shellcheck disable=SC2034 # read by with_entry
        RUN_PYTHON="${environment}/bin/python"
    elif [[ -n "${NCCL:-}" ]]; then
        # shellcheck disable=SC2034 # read by with_entry
        PRELOAD="${PREFIX}/store/${NCCL}/lib/libnccl.so.2" # torch would open its own before DeepEP can
    fi
    EXTENSION="$(find "${OUT}/lib/python/deep_ep" -maxdepth 1 -name '_C*.so')"
    [[ -n "${EXTENSION}" ]] || die "DeepEP's build made no deep_ep/_C*.so"
    EP_NCCL_ROOT_DIR="$(find_nccl "${environment}")"
    # Importing prepares the compiler of kernels, which wants to know where it may write.
    export EP_NCCL_ROOT_DIR EP_JIT_CACHE_DIR="${SCRATCH}/jit-${ENTRY}" CUDA_HOME
    check_headers
    for word in ${CHECKS:-}; do
        case "${word}" in
        import) check_import ;;
        device-code) check_device_code ;;
        nvshmem-symbols) check_symbol nvshmem_malloc "$(find_nvshmem)/lib" ;;
        nccl-version) check_nccl_version ;;
        *) die "unknown check '${word}': known are import, device-code, nvshmem-symbols, nccl-version" ;;
        esac
        say "check ${word}: ok"
    done
}

# forget_settings: unset what a user's environment may say to DeepEP and NCCL.
forget_settings() {
    local name
    for name in "${!EP_@}" "${!DJ_@}" "${!NCCL_@}" "${!DEEP_EP_@}"; do
        [[ "${name}" == NCCL_VERSION ]] || unset "${name}"
    done
}

# wait_for_libraries: NVSHMEM and NCCL where they are entries.
wait_for_libraries() {
    local library
    for library in ${NVSHMEM:-} ${NCCL:-}; do
        wait_for_entry "${library}"
    done
}

# find_nvshmem: print the folder of NVSHMEM (include, lib).
find_nvshmem() {
    if [[ -n "${NVSHMEM:-}" ]]; then printf '%s\n' "${PREFIX}/store/${NVSHMEM}"; else printf '%s\n' "${TORCH_NVSHMEM}"; fi
}

# find_nccl ENVIRONMENT: print the folder of NCCL (include, lib): an entry, what an external torch brings, or that of the stack's own Python
# environment.
find_nccl() {
    local folder
    if [[ -n "${NCCL:-}${TORCH_NCCL:-}" ]]; then
        if [[ -n "${NCCL:-}" ]]; then printf '%s\n' "${PREFIX}/store/${NCCL}"; else printf '%s\n' "${TORCH_NCCL}"; fi
        return 0
    fi
    for folder in "$1"/lib/python3*/site-packages/nvidia/nccl; do
        [[ -e "${folder}/lib/libnccl.so.2" ]] || die "NCCL: found nothing at ${folder}, wanted the wheel of the stack"
        printf '%s\n' "${folder}"
    done
}

check_import() {
    with_entry -c 'import torch, deep_ep, deep_ep._C; print("deep_ep", deep_ep.__version__, "with torch", torch.__version__)'
}

# check_headers: kernels are compiled on the nodes, from headers that lie beside the package; a default that names a place of the build
# would be wrong there.
check_headers() {
    [[ -n "$(find "${OUT}/lib/python/deep_ep/include" -type f -print -quit)" ]] || die "DeepEP's headers for its kernels are not installed"
    ! grep -rqsE 'EP_(NCCL_ROOT|JIT_CACHE)_DIR.*/' "${OUT}/lib/python/deep_ep/envs.py" || die "deep_ep/envs.py: a default of the build is left"
}

# check_symbol NAME FOLDER: the function that the extension calls is defined by a file of FOLDER, whatever else torch has opened.
check_symbol() {
    with_entry - "$1" "$2" <<'PYTHON_END'
import ctypes, os, sys
import torch, deep_ep._C
name, wanted = sys.argv[1], os.path.realpath(sys.argv[2])
class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]
info = Info()
symbol = getattr(ctypes.CDLL(deep_ep._C.__file__), name)
if not ctypes.CDLL(None).dladdr(ctypes.cast(symbol, ctypes.c_void_p), ctypes.byref(info)):
    sys.exit(f"{name}: no file defines it")
found = os.path.realpath(os.fsdecode(info.file))
if os.path.dirname(found) != wanted:
    sys.exit(f"{name} of deep_ep: found {found}, wanted one in {wanted}")
print(name, "is from", found)
PYTHON_END
}

# check_nccl_version: one NCCL for headers, link and process. torch pins an older one; DeepEP wants the very version it was built with.
check_nccl_version() {
    check_symbol ncclGetVersion "${EP_NCCL_ROOT_DIR}/lib"
    with_entry - "${NCCL_VERSION}" "${EP_NCCL_ROOT_DIR}/include/nccl.h" <<'PYTHON_END'
import ctypes, re, sys
import torch, deep_ep._C
wanted, path = sys.argv[1:]
number = ctypes.c_int()
ctypes.CDLL(deep_ep._C.__file__).ncclGetVersion(ctypes.byref(number))
library = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
header = ".".join(re.findall(r"define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", open(path).read()))
for what, found in (("library in the process", library), ("header", header)):
    if found != wanted:
        sys.exit(f"NCCL's {what}: found {found}, wanted {wanted}")
PYTHON_END
}
