# shellcheck shell=bash
# What DeepEP of every version needs to be built by its own setup.py. It stands between build/units.sh behind the checks
# of an entry and build/deepep*.sh.
# Inputs besides those of prefix/publish.sh: SRC, VERSION, CUDA_HOME, CUDA_VERSION, ARCHS ("9.0 10.0"), OPTIONS (NAME=VALUE for setup.py's
# environment, one a line), PYTHON_ENTRY (entry, "" where PYTHON is an external one), SPLIT_COMPILE.

WORK="${SCRATCH}/build/${ENTRY}"

# choose_python: set ENVIRONMENT ("" for an external Python) and BUILD_PYTHON. What this run is building is used from scratch as soon as it
# serves for compiling.
choose_python() {
    local -r early="${SCRATCH}/early"
    ENVIRONMENT="" BUILD_PYTHON="${PYTHON}"
    [[ -n "${PYTHON_ENTRY:-}" ]] || return 0
    wait_for_entry "${PYTHON_ENTRY}" "${early}/${PYTHON_ENTRY}.ready"
    ENVIRONMENT="${early}/${PYTHON_ENTRY}"
    if is_published "${PYTHON_ENTRY}" || ! can_import_torch "${ENVIRONMENT}/bin/python"; then
        wait_for_entry "${PYTHON_ENTRY}"
        ENVIRONMENT="${PREFIX}/store/${PYTHON_ENTRY}"
    fi
    BUILD_PYTHON="${ENVIRONMENT}/bin/python"
}

# export_tools: what setup.py and torch read from the environment whatever the version; the lock's options come last and win.
export_tools() {
    local option
    # torch asks for architectures where no GPU is there to look at, also of a build without device code.
    export TORCH_CUDA_ARCH_LIST="${ARCHS// /;}" MAX_JOBS="${JOBS}"
    # The version must not depend on a git above us: without one setup.py calls it VERSION+local.
    export GIT_CEILING_DIRECTORIES="${SCRATCH}" GIT_DIR="${WORK}/no-repository"
    export PATH="${CUDA_HOME}/bin:${PATH}"
    unset CFLAGS CXXFLAGS # for setuptools they would replace Python's own flags; the compilers below add ours
    # setup.py of V2.5 names that of /usr/local/cuda, which may be another toolkit.
    ((${CUDA_VERSION%%.*} < 13)) || export CPLUS_INCLUDE_PATH="${CUDA_HOME}/include/cccl"
    [[ "${SPLIT_COMPILE:-0}" != 1 ]] || export NVCC_APPEND_FLAGS="--split-compile=0"
    time_nvcc
    offer_driver "${WORK}/driver"
    while IFS= read -r option; do
        [[ "${option}" != *=* ]] || export "${option?}"
    done <<<"${OPTIONS:-}"
}

# check_version: the tree must be of the version that the lock promises; setup.py may add a local part.
check_version() {
    local found
    found="$(cd -- "${SRC}" && with_driver_stub "${BUILD_PYTHON}" setup.py --version | tail -n 1)"
    [[ "${found%%+*}" == "${VERSION%%+*}" ]] || die "DeepEP's version: found ${found}, wanted ${VERSION}"
}

# write_compilers FOLDER BEFORE-LINK [nvcc]: put wrappers of the host compilers, and of nvcc, into FOLDER and that into PATH.
write_compilers() {
    local -r folder="$1" before_link="$2"
    local name real
    shift 2
    choose_cache
    mkdir -p -- "${folder}"
    for name in "$@" cc c++ gcc g++ "$(gcc -dumpmachine)-gcc" "$(gcc -dumpmachine)-g++"; do
        real="$(command -v "${name}")" || continue
        write_compiler "${real}" "${before_link}" >"${folder}/${name}"
        chmod 755 -- "${folder}/${name}"
    done
    export PATH="${folder}:${PATH}"
}

# write_compiler REAL BEFORE-LINK: print the wrapper of one compiler. Code names its files without the scratch folder; what nvcc hands to the
# host compiler passes unchanged. The host's own units are compiled in the scratch folder, under names relative to it, so that nothing of what
# goes in or out depends on where that is, and ccache, where there is one, knows them again; one with a relative name is compiled where it is
# asked for. The list of headers gets whole names again, since ninja reads it from where it runs. Run paths into places of this build are left out of what is linked, since LDFLAGS has the right ones: their
# length would stay in the file. BEFORE-LINK is a line of sh that runs before it links.
write_compiler() {
    local -r real="$1" before_link="$2"
    local map=""
    [[ "${real}" == */nvcc ]] || map="-ffile-prefix-map=${SCRATCH}=. -ffile-prefix-map=${PREFIX}=."
    cat <<WRAPPER
#!/bin/sh
case " \$* " in
*" -dlink "* | *" --device-link "* | *" -shared "*)
    for word; do
        shift
        case "\${word}" in
        -Wl,*rpath[,=]"${PREFIX}"/* | -Wl,*rpath[,=]"${SCRATCH}"/*) ;;
        *) set -- "\$@" "\${word}" ;;
        esac
    done
    ${before_link}
    ;;
*__CUDACC__*) ;;
*" -c "*)
    inside=yes
    for word; do
        case "\${word}" in
        /* | -I/*) ;;
        -I* | [!-]*) inside="" ;;
        esac
    done
    [ -n "\${inside}" ] || exec "${real}" ${map} "\$@"
    depends="" before=""
    for word; do
        shift
        [ "\${before}" != -MF ] || depends="\${word}"
        before="\${word}"
        case "\${word}" in
        "${SCRATCH}"/*) word="./\${word#"${SCRATCH}/"}" ;;
        -I"${SCRATCH}"/*) word="-I./\${word#-I"${SCRATCH}/"}" ;;
        esac
        set -- "\$@" "\${word}"
    done
    cd -- "${SCRATCH}" || exit
    ${CACHE:+"${CACHE}"} "${real}" ${map} "\$@" || exit
    [ -z "\${depends}" ] || exec sed -i -E 's#(^|[[:space:]])(\./)?([^/[:space:]\\])#\1${SCRATCH}/\3#g' "\${depends}"
    exit 0
    ;;
esac
exec "${real}" "\$@"
WRAPPER
}

# run_setup: with --split-compile the host's part (all of torch's headers) took 43 s, internode.cu 27 and internode_ll.cu 21; without, internode.cu
# took 58. setuptools gives the sources by name, so the host's part of V2 would come last.
run_setup() {
    first_units "${WORK}/ninja" '(deep_ep|python_api)[.]cpp' 'internode[.]cu' 'internode_ll[.]cu' 'intranode[.]cu'
    cd -- "${SRC}" || exit
    with_driver_stub "${BUILD_PYTHON}" setup.py build --build-lib "${WORK}/lib" --build-temp "${WORK}/temp"
    tell_times "${WORK}"
}

# install_tree: setup.py of V2 keeps some of its environment as defaults of the package. Where NCCL was during the build is none: the module
# says where it is, and DeepEP finds it in its own environment otherwise.
install_tree() {
    local -r defaults="${OUT}/lib/python/deep_ep/envs.py"
    mkdir -p -- "${OUT}/lib"
    cp -a -- "${WORK}/lib" "${OUT}/lib/python"
    cp -a -- "${SRC}/tests" "${OUT}/tests"
    [[ ! -e "${defaults}" ]] || sed -i '/EP_NCCL_ROOT_DIR/d' "${defaults}"
    find "${OUT}" -name __pycache__ -type d -prune -exec rm -rf -- {} +
    compile_modules "${OUT}" lib "${BUILD_PYTHON}"
    compile_modules "${OUT}" tests "${BUILD_PYTHON}"
}
