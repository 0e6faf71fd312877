# shellcheck shell=bash
# NVIDIA's compiler from its wheels: exactly what `nvcc -cubin` runs and reads, by which DeepEP V2 compiles its kernels where they run. The
# entry is a CUDA_HOME for that alone. The host compiler is not in it: nvcc calls the gcc on PATH, and sh.
# Inputs besides those of prefix/publish.sh: VERSION (nvcc's), ARCHS ("9.0 10.0"), and those of build/wheel.sh; WHEEL has a line for each of
# several wheels.

WORK="${SCRATCH}/build/${ENTRY}"

# What strace sees `nvcc -cubin` use, and cuobjdump, which DeepEP V2 asks for the name of a kernel. What links host programs (cudafe++,
# fatbinary, nvlink, libraries) stays out.
readonly -a PROGRAMS=(bin/nvcc bin/ptxas bin/cuobjdump nvvm/bin/cicc)
readonly -a FILES=(bin/nvcc.profile nvvm/libdevice include)

build_entry() {
    local -r tree="${WORK}/site/nvidia/cu${VERSION%%.*}"
    local part
    mkdir -p -- "${WORK}"
    install_wheel "${WORK}"
    for part in "${PROGRAMS[@]}" "${FILES[@]}"; do
        [[ -e "${tree}/${part}" ]] || die "the wheels of CUDA ${VERSION} have no nvidia/cu${VERSION%%.*}/${part}"
    done
    mkdir -p -- "${OUT}/bin" "${OUT}/nvvm/bin"
    for part in "${PROGRAMS[@]}" "${FILES[@]}"; do
        cp -a -- "${tree}/${part}" "${OUT}/${part}"
    done
    chmod a+rx -- "${PROGRAMS[@]/#/${OUT}/}"
    keep_licenses
}

# keep_licenses: what the wheels say of themselves, with the texts of their licences. uv's own notes would differ from build to build.
keep_licenses() {
    local folder
    for folder in "${WORK}"/site/*.dist-info; do
        mkdir -p -- "${OUT}/share/${folder##*/}"
        cp -a -- "${folder}/METADATA" "${OUT}/share/${folder##*/}/"
        [[ ! -d "${folder}/licenses" ]] || cp -a -- "${folder}/licenses" "${OUT}/share/${folder##*/}/"
    done
}

# check_entry: it is the locked compiler, and makes machine code for each GPU that the stack is for, with the flags and the kinds of headers
# that DeepEP V2 uses.
check_entry() {
    local -r kernel="${WORK}/check.cu"
    local arch said
    said="$("${OUT}/bin/nvcc" --version)"
    [[ "${said}" == *"V${VERSION}"* ]] || die "nvcc says '${said##*$'\n'}', wanted V${VERSION}"
    printf '%s\n' '#include <cooperative_groups.h>' '#include <cuda/barrier>' '#include <cuda_bf16.h>' '#include <type_traits>' \
        '__global__ void check(__nv_bfloat16* x) { cooperative_groups::this_grid().sync(); x[0] = __hadd(x[0], x[1]); }' >"${kernel}"
    for arch in ${ARCHS}; do
        env -u CUDA_HOME "${OUT}/bin/nvcc" "${kernel}" -cubin -o "${kernel}.${arch}" -std=c++20 "--gpu-architecture=sm_${arch/./}" \
            --compiler-options=-fPIC,-O3,-fconcepts -O3 --expt-relaxed-constexpr ||
            die "nvcc ${VERSION} with $(gcc --version | head -n 1) makes no machine code for sm_${arch/./}"
        [[ "$("${OUT}/bin/cuobjdump" -symbols "${kernel}.${arch}")" == *STO_ENTRY* ]] || die "cuobjdump finds no kernel in what nvcc made"
    done
}

main "$@"
