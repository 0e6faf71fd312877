# shellcheck shell=bash
# Is PREFIX one directory on all hosts? One host writes a file with a fresh name, the others look for it. It needs prefix/lib/share.sh before it.
# Arguments: write|look|clean NAME. Input: PREFIX. Results: state=written|seen|missing|absent|cleaned, id=….
#
# The name must be new and looked for only after it was written: a network filesystem remembers for up to a minute that a name was
# not there. SECONDS_TO_LOOK (default 5) covers the rest of its caching.

write_probe() {
    local -r path="$1"
    # Probes of runs that were killed: nobody looks for them any more.
    find "${PREFIX}" -maxdepth 1 -name '.probe-*' -mmin +60 -delete 2>/dev/null || true # another host may be quicker
    printf 'probe\n' >"${path}" || die "$(id -un) cannot write in ${PREFIX} (owner $(stat -c %U -- "${PREFIX}"))$(suggest_user "network filesystems")"
    data state written
}

look_for_probe() {
    local -r path="$1"
    local -r end=$((SECONDS + ${SECONDS_TO_LOOK:-5}))
    if [[ ! -d "${PREFIX}" ]]; then
        data state absent
        return 0
    fi
    until [[ -s "${path}" ]]; do
        if ((SECONDS >= end)); then
            data state missing
            return 0
        fi
        sleep 0.5
        ls -a "${PREFIX}" >/dev/null # reading the folder makes a network filesystem ask the server again
    done
    data state seen
}

main() {
    local -r verb="${1:-}" path="${PREFIX:-}/.probe-${2:-}"
    need_env PREFIX
    [[ "${2:-}" =~ ^[A-Za-z0-9-]+$ ]] || die "probe: bad name '${2:-}'"
    case "${verb}" in
    write) write_probe "${path}" ;;
    look) look_for_probe "${path}" ;;
    clean) rm -f -- "${path}" && data state cleaned ;;
    *) die "probe: write, look or clean, not '${verb}'" ;;
    esac
    if [[ -r "${PREFIX}/.id" ]]; then
        data id "$(<"${PREFIX}/.id")"
    fi
}

main "$@"
