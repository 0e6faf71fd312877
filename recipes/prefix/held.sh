# shellcheck shell=bash
# Who on this host uses what may be about to go from a prefix; change nothing.
#
# A process uses what it has mapped, and what its command line or its environment names: a shell that loaded the module has nothing of it
# mapped yet, a job between two steps nothing any more.
# Argument: processes|queue. Input: PREFIX, NAMES (store/ENTRY and generations/NUMBER, one a line).
# Results of `processes`: held=NAME PID PROGRAM USER; sees=all|own (whose processes we may look at); squeue=yes|no (is it there); end=1.
# Results of `queue`: job=ID USER for every job that has not begun; end=1.

# list_needles: print what to look for, as the prefix is called and as the kernel calls it where links lead to it.
list_needles() {
    local real name
    real="$(realpath -m -- "${PREFIX}")"
    while IFS= read -r name; do
        [[ "${name}" != generations/* ]] || name+=/ # a number may begin another one; the name of an entry does not
        printf '%s\n' "${PREFIX}/${name}" "${real}/${name}"
    done <<<"${NAMES}"
}

# find_places: print FILE:NEEDLE once for every file of /proc that names one. Processes come and go, and other users' may be hidden.
find_places() {
    find /proc -mindepth 2 -maxdepth 2 -path '/proc/[0-9]*' \( -name maps -o -name environ -o -name cmdline \) -print0 2>/dev/null |
        xargs -0 grep -aosHF -f <(list_needles) | sort -u || true # grep found nothing, or a process has ended
}

look_at_processes() {
    local line path pid name program user
    local -A seen=()
    while IFS= read -r line; do
        path="${line%%:*}" name="${line#*:}" name="${name%/}"
        pid="${path#/proc/}" pid="${pid%%/*}"
        name="${name#"${name%/*/*}/"}"
        [[ -z "${seen["${pid} ${name}"]:-}" ]] || continue
        seen["${pid} ${name}"]=1
        program="$(tr -d '\t\n' <"/proc/${pid}/comm" 2>/dev/null)" || continue # it has ended
        user="$(stat -c %U -- "/proc/${pid}" 2>/dev/null)" || continue         # it has ended
        data held "${name}"$'\t'"${pid}"$'\t'"${program}"$'\t'"${user}"
    done < <(find_places)
    if ((EUID == 0)); then data sees all; else data sees own; fi
    if command -v squeue >/dev/null; then data squeue yes; else data squeue no; fi
}

# look_at_queue: print every job that waits. Slurm keeps the scripts and environments of these to itself.
look_at_queue() {
    local job user
    timeout 20 squeue -h --states=PENDING -o '%A %u' | sort -u | while read -r job user; do
        data job "${job}"$'\t'"${user}"
    done
}

main() {
    need_env PREFIX NAMES
    export -n NAMES # what we look for must not be found in ourselves
    case "${1:-}" in
    processes) look_at_processes ;;
    queue) look_at_queue ;;
    *) die "held: processes or queue, not '${1:-}'" ;;
    esac
    data end 1
}

main "$@"
