# shellcheck shell=bash
# The CUDA toolkit of one major: nvcc in any /usr/local/cuda*, whoever installed it. It stands beside the toolkits that are there, and
# /usr/local/cuda keeps pointing at what it pointed at.
#
# Arguments: check, apply or remove. Inputs: CUDA_MAJOR, "12"; CUDA_FLOOR, "12.8", the oldest
# that does ("" for any of the major); those of packages.sh and repositories.sh.

readonly TOOLKITS="${HOST_ROOT:-}/usr/local"
readonly FLOOR="${CUDA_FLOOR:-}"

# Prints `version folder` of every toolkit, those reached through a link once.
list_toolkits() {
    local folder seen=" "
    for folder in "${TOOLKITS}"/cuda-*[0-9] "${TOOLKITS}/cuda"; do
        [[ -x "${folder}/bin/nvcc" && "${seen}" != *" $(readlink -f -- "${folder}") "* ]] || continue
        seen+="$(readlink -f -- "${folder}") "
        printf '%s %s\n' "$("${folder}/bin/nvcc" --version | sed -n 's/.*, V\([0-9.]*\).*/\1/p')" "${folder#"${HOST_ROOT:-}"}"
    done
}

# Prints `version in folder` of the first toolkit of the wanted major that is new enough.
find_toolkit() {
    list_toolkits | awk -v major="${CUDA_MAJOR}" -v floor="${FLOOR}" '
        BEGIN { split(floor, least, ".") }
        { split($1, part, ".") }
        part[1] == major && part[1] * 1000 + part[2] >= least[1] * 1000 + least[2] { print $1 " in " $2; exit }'
}

report_state() {
    local -r found="$(find_toolkit)"
    local obstacle
    data wanted "CUDA ${CUDA_MAJOR} with nvcc${FLOOR:+, ${FLOOR} or newer}"
    if [[ -n "${found}" ]]; then
        data state ok
        data found "${found}"
        note_default
        return 0
    fi
    obstacle="$(find_obstacle "the CUDA toolkit ${CUDA_MAJOR} (nvcc in /usr/local/cuda-${CUDA_MAJOR}.x${FLOOR:+, ${FLOOR} or newer})")"
    data state "$([[ -z "${obstacle}" ]] && echo todo || echo blocked)"
    data found "$(list_toolkits | awk '{ print $1 }' | paste -s -d ' ' | sed 's/^$/no toolkit/')"
    [[ -z "${obstacle}" ]] || data note "${obstacle}"
}

# People who compile by hand use /usr/local/cuda; what we build names its toolkit.
note_default() {
    local version
    [[ -x "${TOOLKITS}/cuda/bin/nvcc" ]] || return 0
    version="$("${TOOLKITS}/cuda/bin/nvcc" --version | sed -n 's/.*, V\([0-9.]*\).*/\1/p')"
    [[ "${version%%.*}" == "${CUDA_MAJOR}" ]] || data note "/usr/local/cuda stays CUDA ${version}; only our builds use CUDA ${CUDA_MAJOR}"
}

# keep_default BEFORE: the packages move /usr/local/cuda to the newest toolkit; put it back to the folder it was, or make it where
# nothing was and the packages made none.
keep_default() {
    local -r before="$1"
    local folder
    if [[ -n "${before}" ]]; then
        [[ "$(readlink -f -- "${TOOLKITS}/cuda")" != "${before}" ]] || return 0
        say "/usr/local/cuda goes back to ${before}"
        update-alternatives --set cuda "${before}" >&2 2>/dev/null || ln -sfn -- "${before}" "${TOOLKITS}/cuda"
    elif [[ ! -e "${TOOLKITS}/cuda" ]]; then
        folder="$(find_toolkit)"
        ln -sfn -- "${folder##* }" "${TOOLKITS}/cuda"
    fi
}

apply_toolkit() {
    local -a packages
    local before="" obstacle
    obstacle="$(find_obstacle "the CUDA toolkit ${CUDA_MAJOR}")"
    [[ -z "${obstacle}" ]] || die "${obstacle}"
    [[ ! -x "${TOOLKITS}/cuda/bin/nvcc" ]] || before="$(readlink -f -- "${TOOLKITS}/cuda")"
    read -r -a packages <<<"${PACKAGES:-}"
    add_repositories cuda-toolkit
    run_step "installing ${PACKAGES}" install_packages ${packages[@]+"${packages[@]}"}
    [[ -n "$(find_toolkit)" ]] || die "${PACKAGES}: installed, but there is no nvcc of CUDA ${CUDA_MAJOR}${FLOOR:+, ${FLOOR} or newer,} in /usr/local/cuda*"
    keep_default "${before}"
}

main() {
    local -r verb="${1:-check}"
    [[ "${verb}" == remove ]] || need_env CUDA_MAJOR
    case "${verb}" in
        check) report_state ;;
        apply)
            if [[ -z "$(find_toolkit)" ]]; then apply_toolkit; fi
            report_state
            ;;
        remove)
            remove_files cuda-toolkit
            data state ok
            data found "no repository of ours; packages stay"
            ;;
        *) die "unknown argument ${verb}: check, apply or remove" ;;
    esac
}

main "$@"
