# shellcheck shell=bash
# Make the prefix: PREFIX/{store,generations,logs} and, once, its random id. Safe to run at the same time on several hosts. A PREFIX that is
# there already keeps its owner, group and mode, and is refused where somebody else could change what users load from it. It needs
# prefix/lib/share.sh and trust.sh before it.
# Inputs: PREFIX, TOKEN, OWNER ("" or the user who builds; given the folders where we are root and make them).
# Results: state=created|ok, id=….

# make_folder PATH: one folder of the prefix, with the mode that lets everybody read, and its owner write: in a shared prefix also its group.
make_folder() {
    local -r path="$1"
    [[ ! -d "${path}" ]] || return 0
    # Whether it is a folder is asked last: another host may be making it at this moment.
    [[ (! -e "${path}" && ! -L "${path}") || -d "${path}" ]] || die "${path} exists and is not a directory"
    mkdir -- "${path}" 2>/dev/null || [[ -d "${path}" ]] || die "cannot make the directory ${path}: $(explain_refusal "${path%/*}")"
    give_to_owner "${path}"
    follow_prefix
    [[ "${path}" == "${PREFIX}" ]] || share_tree "${path}"
}

# give_to_owner PATH: where we are root, the user who builds gets what we make.
give_to_owner() {
    local -r path="$1"
    if [[ -n "${OWNER:-}" && "$(id -u)" == 0 ]]; then
        chown -- "${OWNER}:" "${path}"
    fi
}

# explain_refusal FOLDER: print why nothing can be made in a folder.
explain_refusal() {
    local -r folder="${1:-/}"
    local free hint=""
    if [[ ! -d "${folder}" ]]; then
        printf '%s is not a directory\n' "${folder}"
    elif [[ ! -w "${folder}" ]]; then
        printf '%s may not write in %s (owner %s, mode %s)%s\n' "$(id -un)" "${folder}" "$(stat -c '%U' -- "${folder}")" "$(stat -c '%a' -- "${folder}")" \
            "$(suggest_user "network filesystems")"
    else
        free="$(df -Pk -- "${folder}" | awk 'NR == 2 { print $4 }')"
        ((free == 0)) || printf -v hint '%s' "$(suggest_user "network filesystems")"
        printf 'the filesystem of %s refuses it (%s KiB free)%s\n' "${folder}" "${free}" "${hint}"
    fi
}

# make_parents PATH: the folders above the prefix, outermost first.
make_parents() {
    local -r path="$1"
    local -r parent="${path%/*}"
    [[ -n "${parent}" ]] || return 0
    [[ ! -e "${parent}" || -d "${parent}" ]] || die "${parent} exists and is not a directory"
    [[ -d "${parent}" ]] || make_parents "${parent}"
    [[ -d "${parent}" ]] || mkdir -m 0755 -- "${parent}" 2>/dev/null || [[ -d "${parent}" ]] ||
        die "cannot make the directory ${parent}: $(explain_refusal "${parent%/*}")"
}

# give_id: the id appears by one hard link, complete; whoever comes second uses the first one's.
give_id() {
    local -r aside="${PREFIX}/.id-${TOKEN}"
    [[ ! -s "${PREFIX}/.id" ]] || return 0
    tr -d '-' </proc/sys/kernel/random/uuid >"${aside}" 2>/dev/null || die "cannot write in ${PREFIX}: $(explain_refusal "${PREFIX}")"
    chmod 0444 -- "${aside}"
    give_to_owner "${aside}"
    ln -- "${aside}" "${PREFIX}/.id" 2>/dev/null || [[ -s "${PREFIX}/.id" ]] || die "cannot make a hard link in ${PREFIX}: what filesystem is this?"
    rm -f -- "${aside}"
}

main() {
    local folder state=ok
    need_env PREFIX TOKEN
    umask 022
    [[ "${PREFIX}" == /?* ]] || die "the prefix must be an absolute path below /, not '${PREFIX}'"
    refuse_unsafe
    [[ -s "${PREFIX}/.id" ]] || state=created
    make_parents "${PREFIX}"
    for folder in "${PREFIX}" "${PREFIX}/store" "${PREFIX}/generations" "${PREFIX}/logs"; do
        make_folder "${folder}"
    done
    [[ -w "${PREFIX}" ]] || die "${PREFIX}: $(explain_refusal "${PREFIX}")"
    give_id
    data state "${state}"
    data id "$(<"${PREFIX}/.id")"
}

main "$@"
