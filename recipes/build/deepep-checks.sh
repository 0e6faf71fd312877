# shellcheck shell=bash
# The health checks of a DeepEP entry, by the words of the lock's `checks`. It stands between build/common.sh and build/deepep.sh.
# Inputs: CHECKS, ARCHS, CUDA_HOME, NVSHMEM (entry), PYTHON_ENTRY (entry, or "" where PYTHON is an external one), OUT.

check_entry() {
    local word
    RUN_PYTHON="${PYTHON}"
    PRELOAD=""
    wait_for_entry "${NVSHMEM}"
    if [[ -n "${PYTHON_ENTRY:-}" ]]; then
        wait_for_entry "${PYTHON_ENTRY}"
        RUN_PYTHON="${PREFIX}/store/${PYTHON_ENTRY}/bin/python"
    elif [[ -n "$(find_driver)" ]]; then
        PRELOAD="${PREFIX}/store/${NVSHMEM}/lib/libnvshmem_host.so.3"
    fi
    EXTENSION="$(find "${OUT}/lib/python" -maxdepth 1 -name 'deep_ep_cpp*.so')"
    [[ -n "${EXTENSION}" ]] || die "DeepEP's build made no deep_ep_cpp*.so"
    for word in ${CHECKS:-}; do
        case "${word}" in
        import) check_import ;;
        device-code) check_device_code ;;
        nvshmem-symbols) check_nvshmem_symbols ;;
        *) die "unknown check '${word}': known are import, device-code, nvshmem-symbols" ;;
        esac
        say "check ${word}: ok"
    done
}

# with_entry PYTHON-ARGUMENTS…: the interpreter as a user of the module will have it.
with_entry() {
    # -P where it exists keeps the current folder out of the search; we stand in one without modules.
    (
        cd -- "${SCRATCH}" || exit
        export PYTHONPATH="${OUT}/lib/python"
        [[ -z "${PRELOAD}" ]] || export LD_PRELOAD="${PRELOAD}"
        with_driver_stub "${RUN_PYTHON}" "$@"
    )
}

check_import() {
    with_entry -c 'import torch, deep_ep, deep_ep_cpp; print("deep_ep from", deep_ep.__file__, "with torch", torch.__version__)'
}

# check_device_code: a GPU without code for its architecture fails only when the first kernel starts.
check_device_code() {
    local found arch wanted
    found="$("${CUDA_HOME}/bin/cuobjdump" --list-elf "${EXTENSION}")"
    for arch in ${ARCHS}; do
        wanted="sm_${arch//./}"
        grep -qE "${wanted}[a-z]?([^0-9a-z]|\$)" <<<"${found}" ||
            die "device code: found $(grep -oE 'sm_[0-9]+[a-z]?' <<<"${found}" | sort -u | tr '\n' ' '), wanted ${wanted}"
    done
}

# check_nvshmem_symbols: which file defines the NVSHMEM functions that the extension calls? That two NVSHMEM are mapped says nothing:
# the first in the search wins. An external Python brings its own copy, and only a preloaded library of ours beats it, which needs a
# driver; without one only what the file says of itself can be checked.
check_nvshmem_symbols() {
    if [[ -z "${PYTHON_ENTRY:-}" && -z "${PRELOAD}" ]]; then
        say "nvshmem-symbols: no driver here, so only the extension's own RUNPATH is checked; the users' check runs on the GPU nodes"
        check_run_path
        return 0
    fi
    with_entry - "${PREFIX}/store/${NVSHMEM}/lib" <<'PYTHON_END'
import ctypes, os, sys
import torch, deep_ep_cpp
wanted = os.path.realpath(sys.argv[1])
class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]
symbol = ctypes.CDLL(deep_ep_cpp.__file__).nvshmem_malloc
info = Info()
if not ctypes.CDLL(None).dladdr(ctypes.cast(symbol, ctypes.c_void_p), ctypes.byref(info)):
    sys.exit("nvshmem_malloc: no file defines it")
found = os.path.realpath(os.fsdecode(info.file))
if os.path.dirname(found) != wanted:
    sys.exit(f"NVSHMEM of deep_ep_cpp: found {found}, wanted one in {wanted}")
print("nvshmem_malloc is from", found)
PYTHON_END
}

# check_run_path: the first folder of the RUNPATH is our NVSHMEM's, seen from where the extension will lie.
check_run_path() {
    local first
    first="$("${PYTHON}" -c 'import sys; sys.path.insert(0, sys.argv[1]); import relocate
print(relocate.run_paths(open(sys.argv[2], "rb").read())[0].split(":")[0])' "${SCRATCH}/bin" "${EXTENSION}")"
    # shellcheck disable=SC2016 # $ORIGIN is the loader's word
    [[ "${first/'$ORIGIN'/"${EXTENSION%/*}"}" -ef "${PREFIX}/store/${NVSHMEM}/lib" ]] || die "RUNPATH: found ${first}, wanted ${NVSHMEM}/lib first"
}
