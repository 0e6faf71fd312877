# shellcheck shell=bash
# NVSHMEM, built by its own CMake project with the options of the lock. Its headers are offered to DeepEP's build as soon as they are there.
# The lock takes an ordering out of that project that Makefiles need and Ninja does not: so Ninja it is, everywhere.
# Inputs besides those of prefix/publish.sh: SRC, VERSION, CUDA_HOME, ARCHS ("9.0 10.0"), OPTIONS (NAME=VALUE, one a line), GDRCOPY (entry),
# SPLIT_COMPILE (1 where nvcc has --split-compile). It stands behind build/units.sh.

BUILD="${SCRATCH}/build/${ENTRY}"
# Its largest files took 0.5 GiB each; machines whose memory grows with use report little of it as free.
# shellcheck disable=SC2034 # read by count_jobs of build/common.sh
COMPILER_MEMORY_KIB=$((1024 * 1024))

build_entry() {
    need_command cmake ninja gcc g++
    [[ "${SPLIT_COMPILE:-0}" != 1 ]] || export NVCC_APPEND_FLAGS="--split-compile=0"
    time_nvcc
    # Each of the first four took 80 to 88 s of the 144 s of a build on 128 cores, the others of their kind 64 s.
    first_units "${SCRATCH}/ninja-${ENTRY}" 'transfer_device[.]cu' 'reduce_(sum|max|min|prod)[.]cu' 'reduce_[a-z_]*[.]cu'
    wait_for_entry "${GDRCOPY}"
    configure
    offer_headers
    cmake --build "${BUILD}" --parallel "${JOBS}"
    cmake --install "${BUILD}"
    tell_times "${BUILD}"
}

# configure: nvshmem-info links the driver's library, so a machine without a driver needs the toolkit's stub of it.
configure() {
    local -a options=()
    local option numbers="${ARCHS//./}"
    while IFS= read -r option; do
        [[ -z "${option}" ]] || options+=("-D${option}")
    done <<<"${OPTIONS:-}"
    cmake -S "${SRC}" -B "${BUILD}" -G Ninja ${options[@]+"${options[@]}"} \
        -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_INSTALL_PREFIX="${OUT}" \
        -DCMAKE_INSTALL_LIBDIR=lib \
        -DCMAKE_CUDA_ARCHITECTURES="${numbers// /;}" \
        -DCMAKE_CUDA_COMPILER="${CUDA_HOME}/bin/nvcc" \
        -DCUDAToolkit_ROOT="${CUDA_HOME}" \
        -DGDRCOPY_HOME="${PREFIX}/store/${GDRCOPY}" || explain_configure
}

# explain_configure: the configure step has failed; say the reason that CMake does not name well.
explain_configure() {
    if [[ -z "$(find_driver)" && ! -e "${CUDA_HOME}/lib64/stubs/libcuda.so" ]]; then
        die "cmake cannot configure NVSHMEM: there is neither a driver's libcuda.so.1 nor ${CUDA_HOME}/lib64/stubs/libcuda.so"
    fi
    die "cmake cannot configure NVSHMEM"
}

# offer_headers: DeepEP's objects compile while NVSHMEM is still being built: its headers are complete after the configure step. The
# libraries are reached through a link that begins to work when the entry is published.
offer_headers() {
    local -r early="${SCRATCH}/early/${ENTRY}"
    [[ -e "${BUILD}/src/include/nvshmem.h" ]] || return 0 # this version puts them elsewhere: they come with the entry
    mkdir -p -- "${early}"
    ln -sfn -- "${BUILD}/src/include" "${early}/include"
    ln -sfn -- "${PREFIX}/store/${ENTRY}/lib" "${early}/lib"
    touch -- "${early}.ready"
}

check_entry() {
    local told file
    for file in lib/libnvshmem_host.so lib/libnvshmem_device.a lib/nvshmem_transport_ibgda.so include/nvshmem.h; do
        [[ -s "${OUT}/${file}" ]] || die "NVSHMEM's install tree: no ${file}"
    done
    # Its RUNPATH is its own folder, which does not lead to the libraries; only some linkers leave out the one it does not call.
    told="$(LD_LIBRARY_PATH="${OUT}/lib${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}" with_driver_stub "${OUT}/bin/nvshmem-info" -a)"
    grep -q 'NVSHMEM_IBGDA_SUPPORT=ON' <<<"${told}" ||
        die "nvshmem-info -a: found $(grep -m 1 IBGDA_SUPPORT <<<"${told}" || echo 'no IBGDA line'), wanted NVSHMEM_IBGDA_SUPPORT=ON"
    [[ -e "${OUT}/lib/libnvshmem_host.so.${VERSION}" ]] || grep -qwF -- "${VERSION}" <<<"${told}" ||
        die "NVSHMEM: found $(cd "${OUT}/lib" && echo libnvshmem_host.so.*), wanted version ${VERSION}"
}

main "$@"
