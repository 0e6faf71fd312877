# shellcheck shell=bash
# What the recipes of all kinds of entries share: a clean environment, how many jobs, waiting for entries built beside this one.

# Memory that one compiler may need; a recipe whose sources are known to need less says so.
COMPILER_MEMORY_KIB=$((2 * 1024 * 1024))

# is_published NAME: whether an entry is in the store. Its name is all that counts: it appears by one rename, complete.
is_published() {
    [[ -d "${PREFIX}/store/$1" ]]
}

# clear_environment: forget settings of the account or the image that would change what is compiled, or where wheels come from. The way to
# the network stays: proxies and certificates (HTTPS_PROXY and its like, SSL_CERT_FILE, and uv's switch to those of the system).
clear_environment() {
    local name
    unset CC CXX CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH LD_PRELOAD MAKEFLAGS DESTDIR \
        CUDACXX CUDAHOSTCXX CUDAFLAGS NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS TORCH_CUDA_ARCH_LIST PYTHONPATH PYTHONHOME VIRTUAL_ENV \
        PYTHONDONTWRITEBYTECODE GIT_DIR LDSHARED LDCXXSHARED TOPK_IDX_BITS
    unset OMP_NUM_THREADS OMP_THREAD_LIMIT # nproc obeys them: with 1, common on shared machines, one compiler would run at a time
    for name in "${!NVSHMEM_@}" "${!DEEPEP_@}" "${!DISABLE_@}" "${!CMAKE_@}" "${!UV_@}" "${!PIP_@}"; do
        case "${name}" in
        NVSHMEM_DISABLE_NVLS) ;; # protects a machine shared with others, and builds nothing
        UV_NATIVE_TLS | UV_SYSTEM_CERTS) ;;
        *) unset "${name}" ;;
        esac
    done
    # Last, what stands beside the interpreter: an environment often brings its own cmake and ninja. GDRCopy's Makefile calls ldconfig.
    # shellcheck disable=SC2153 # an input, as prefix/publish.sh says
    export PATH="${PATH}:/usr/sbin:/sbin:${PYTHON%/*}"
    export CFLAGS="-ffile-prefix-map=${SCRATCH}=." CXXFLAGS="-ffile-prefix-map=${SCRATCH}=."
    # Byte code comes from compile_modules alone: what Python writes by itself names the folder it was in.
    export SOURCE_DATE_EPOCH CUDA_HOME PYTHONDONTWRITEBYTECODE=1
}

# name_indexes ADDRESSES: let uv ask these indexes, one a line; the first one is its default index, an empty line leaves uv its own. They go
# by the environment: an address may hold a password, and everybody on the host may read command lines. The commands that are noted for
# the manifest of an entry are spared them too.
name_indexes() {
    local -r addresses="$1"
    local traced=""
    [[ $- != *x* ]] || traced=yes
    { set +x; } 2>/dev/null
    local first="" others="" address number=0
    while IFS= read -r address; do
        if ((number++ == 0)); then first="${address}"; else others+="${address:+${others:+ }${address}}"; fi
    done <<<"${addresses}"
    [[ -z "${first}" ]] || export UV_DEFAULT_INDEX="${first}"
    [[ -z "${others}" ]] || export UV_INDEX="${others}"
    [[ -z "${traced}" ]] || set -x
}

# count_jobs: print how many compilers to run at once: one per processor we may use, as long as each has memory enough.
count_jobs() {
    local cpus free
    cpus="$(nproc)"
    free="$(awk '$1 == "MemAvailable:" { print $2 }' /proc/meminfo)"
    ((cpus <= free / COMPILER_MEMORY_KIB)) || cpus=$((free / COMPILER_MEMORY_KIB))
    ((cpus > 0)) || cpus=1
    printf '%s\n' "${cpus}"
}

# builder_lives NAME: whether the process that builds NAME in this run is there; one that has not begun yet counts for two minutes.
builder_lives() {
    local -r name="$1" waited="$2"
    local pid start
    if read -r pid start 2>/dev/null <"${SCRATCH}/early/${name}.builder"; then
        [[ "$(find_start "${pid}")" == "${start}" ]]
    else
        ((waited < 240))
    fi
}

# wait_for_entry NAME [MARK]: wait until NAME is published, or (with MARK) until its builder in this run has made the file MARK.
wait_for_entry() {
    local -r name="$1" mark="${2:-}"
    local waited=0
    until is_published "${name}" || [[ -n "${mark}" && -e "${mark}" ]]; do
        # The builder's last act is to publish: look again after seeing it gone.
        builder_lives "${name}" "${waited}" || is_published "${name}" || die "${name} was not built, ${ENTRY} needs it"
        ((waited > 0)) || say "waiting for ${name}"
        waited=$((waited + 1))
        sleep 0.5
    done
}

# find_driver: print the path of the NVIDIA driver's library, or nothing. Some images name its folder in LD_LIBRARY_PATH alone.
find_driver() {
    local -a folders=()
    local folder
    IFS=: read -ra folders <<<"${LD_LIBRARY_PATH:-}"
    for folder in ${folders[@]+"${folders[@]}"}; do
        if [[ "${folder}" == /* && ! "${folder%/}" =~ /stubs?$ && -e "${folder}/libcuda.so.1" ]]; then
            printf '%s\n' "${folder%/}/libcuda.so.1"
            return 0
        fi
    done
    { ldconfig -p 2>/dev/null || true; } | awk '$1 == "libcuda.so.1" { print $NF; exit }' # no ldconfig: no driver to be found
}

# offer_driver FOLDER: DeepEP links libcuda.so, which is in none of the linker's own folders: it is the toolkit's stub, or else the driver. A
# link to it in FOLDER comes last in LIBRARY_PATH.
offer_driver() {
    local -r folder="$1"
    local library="${CUDA_HOME}/lib64/stubs/libcuda.so"
    [[ -e "${library}" ]] || library="$(find_driver)"
    [[ -n "${library}" ]] || return 0
    mkdir -p -- "${folder}"
    ln -sfn -- "${library}" "${folder}/libcuda.so"
    export LIBRARY_PATH="${LIBRARY_PATH:+${LIBRARY_PATH}:}${folder}"
}

# can_import_torch PYTHON: whether an environment that is still in scratch serves for building. Its torch has its own NVSHMEM yet; where it
# cannot be imported with that one, the finished entry is needed.
can_import_torch() {
    local said
    said="$("$1" -c 'import torch' 2>&1)" && return 0
    say "torch serves for building once its NVSHMEM is ours; by now: ${said##*$'\n'}"
    return 1
}

# with_driver_stub COMMAND…: run a program that links the driver's library; where no driver is, with the toolkit's stub in its place.
with_driver_stub() {
    local -r stub="${CUDA_HOME}/lib64/stubs/libcuda.so" folder="${SCRATCH}/stub"
    local path="${LD_LIBRARY_PATH:-}"
    if [[ -z "$(find_driver)" && -e "${stub}" ]]; then
        mkdir -p -- "${folder}"
        ln -sfn -- "${stub}" "${folder}/libcuda.so.1"
        path="${folder}${path:+:${path}}"
    fi
    LD_LIBRARY_PATH="${path}" "$@"
}

# compile_modules ROOT FOLDER: byte-compile every module below ROOT/FOLDER for good. Unchecked hashes instead of times: no copy and no
# move makes Python compile again (as root it would write into the store). Paths in tracebacks are relative to ROOT.
compile_modules() {
    local -r root="$1" folder="$2"
    local -r python="${3:-${root}/bin/python}"
    # Some packages carry files that are no valid Python on purpose (templates, test data); nothing imports them.
    "${python}" -m compileall -q -q -f -j "${JOBS}" --invalidation-mode unchecked-hash -s "${root}" "${root}/${folder}" ||
        say "some files of ${folder} are not valid Python and stay uncompiled"
}
