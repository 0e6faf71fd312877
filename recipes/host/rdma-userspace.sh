# shellcheck shell=bash
# shellcheck disable=SC2310 # functions that only look may fail in conditions
# RDMA user space: rdma-core, libibverbs and the provider of mlx5, all of one origin. A second libibverbs of another private ABI, such as
# clouds put into /usr/local/nvidia/lib64, is named and left alone: it belongs to somebody.
#
# Arguments: check, apply or remove. Inputs: those of packages.sh and repositories.sh; TOOLS, programs of these packages that the stack
# runs, in folders where the stack's environment lets every user find them. files.sh, packages.sh, kernel-modules.sh stand before this.

readonly SYSTEM_FOLDERS=(/usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /usr/lib64)
readonly OTHER_FOLDERS=(/usr/local/lib /usr/local/lib64 /usr/local/nvidia/lib64 /usr/local/gib/lib64)
readonly TOOL_FOLDERS=(/usr/local/bin /usr/bin /usr/sbin)
PATH="${PATH}:/usr/sbin:/sbin"

# print_library FOLDER: `ABI FILE` of the libibverbs in a folder; its file's name ends in its version, its text names its private ABI.
print_library() {
    local file abi
    file="$(readlink -f -- "${HOST_ROOT:-}$1/libibverbs.so.1")" && [[ -f "${file}" ]] || return 0
    abi="$(grep -aom 1 -E 'IBVERBS_PRIVATE_[0-9]+' "${file}" | head -n 1)" || abi=""
    printf '%s %s\n' "${abi##*_}" "${file#"${HOST_ROOT:-}"}"
}

# print_providers FOLDER: `ABI FILE` of each mlx5 provider there; the ABI is in its name.
print_providers() {
    local file abi
    for file in "${HOST_ROOT:-}$1"/{,libibverbs/}libmlx5-rdmav*.so; do
        [[ -e "${file}" ]] || continue
        abi="${file##*-rdmav}"
        printf '%s %s\n' "${abi%.so}" "${file#"${HOST_ROOT:-}"}"
    done
}

# print_all PRINTER FOLDER…
print_all() {
    local folder
    for folder in "${@:2}"; do "$1" "${folder}"; done | sort -u
}

# print_strangers ABI: libraries and providers of another private ABI than the system's, with their files.
print_strangers() {
    local what abi file
    while read -r abi file; do
        [[ "${abi}" == "$1" ]] || printf '%s (rdmav%s)\n' "${file}" "${abi:-?}"
    done < <(for what in library providers; do print_all "print_${what}" "${SYSTEM_FOLDERS[@]}" "${OTHER_FOLDERS[@]}"; done)
}

# print_missing_tools: those of TOOLS that no user can run.
print_missing_tools() {
    local -a tools
    local tool folder
    read -r -a tools <<<"${TOOLS:-}"
    for tool in ${tools[@]+"${tools[@]}"}; do
        for folder in "${TOOL_FOLDERS[@]}"; do
            [[ ! -x "${HOST_ROOT:-}${folder}/${tool}" ]] || continue 2
        done
        printf '%s\n' "${tool}"
    done
}

# print_missing LIBRARY: what is not there, in words.
print_missing() {
    [[ -n "$1" ]] || echo "libibverbs"
    [[ -n "$(print_all print_providers "${SYSTEM_FOLDERS[@]}")" ]] || echo "the mlx5 provider"
    compgen -G "${HOST_ROOT:-}/usr/lib/udev/rules.d/*rdma*.rules" >/dev/null ||
        compgen -G "${HOST_ROOT:-}/lib/udev/rules.d/*rdma*.rules" >/dev/null || echo "rdma-core"
    print_missing_tools
}

report_state() {
    local abi="" library="" missing strangers obstacle
    read -r abi library < <(print_all print_library "${SYSTEM_FOLDERS[@]}") || : # none
    missing="$(print_missing "${library}" | paste -s -d , | sed 's/,/, /g')"
    strangers="$(print_strangers "${abi}" | paste -s -d , | sed 's/,/, /g')"
    data wanted "rdma-core, libibverbs and its mlx5 provider of one origin${TOOLS:+; ${TOOLS// /, }}"
    if [[ -n "${missing}" ]]; then
        obstacle="$(find_obstacle "${missing}")"
        data state "$([[ -z "${obstacle}" ]] && echo todo || echo blocked)"
        data found "no ${missing}"
        [[ -z "${obstacle}" ]] || data note "${obstacle}"
    elif [[ -n "${strangers}" ]]; then
        data state blocked
        data found "${library} (rdmav${abi}) beside ${strangers}"
        data note "they do not mix: keep the second's folder out of LD_LIBRARY_PATH and ld.so.conf, or bring both to one version"
    else
        data state ok
        data found "${library} (rdmav${abi})"
    fi
}

install_rdma() {
    local -a packages
    read -r -a packages <<<"${PACKAGES:-}"
    add_repositories rdma-userspace
    run_step "installing ${PACKAGES}" install_packages ${packages[@]+"${packages[@]}"}
}

main() {
    case "${1:-check}" in
        check) report_state ;;
        apply) apply_todo install_rdma ;;
        remove)
            need_root "remove files"
            remove_files rdma-userspace
            data state ok
            data found "packages stay" ;;
        *) die "unknown argument $1: check, apply or remove" ;;
    esac
}

main "$@"
