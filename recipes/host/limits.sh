# shellcheck shell=bash
# shellcheck disable=SC2310 # functions that only look may fail in conditions
# Limits: memlock unlimited for logins and for slurmd (RDMA pins memory), and a /dev/shm that is large enough.
#
# Arguments: check, apply or remove. Inputs: SHM_MIB, the smallest /dev/shm wanted, where there is systemd (a container's is given to it from
# outside); without it the kernel's default, half of the memory, is compared and nothing is changed. files.sh and kernel-modules.sh stand before this text. Jobs of users are never disturbed: slurmd is started
# anew only where no job step runs.

readonly LOGINS=/etc/security/limits.d/deepep.conf
readonly SLURMD=/etc/systemd/system/slurmd.service.d/deepep.conf
readonly SHM_UNIT=/etc/systemd/system/deepep-shm.service
readonly SHM_WANT=/etc/systemd/system/sysinit.target.d/deepep-shm.conf
readonly MADE="# Written by deepep-bootstrap (recipes/host/limits.sh); \`invoke remove\` takes it away."
PATH="${PATH}:/usr/sbin:/sbin"

# A star does not stand for root.
print_logins() {
    printf '%s\n' "${MADE}" "* soft memlock unlimited" "* hard memlock unlimited" \
        "root soft memlock unlimited" "root hard memlock unlimited"
}

print_slurmd() {
    printf '%s\n' "${MADE}" "[Service]" "LimitMEMLOCK=infinity"
}

print_shm_unit() {
    printf '%s\n' "${MADE}" "[Unit]" "Description=Enough shared memory for DeepEP" "DefaultDependencies=no" \
        "After=systemd-remount-fs.service local-fs.target" "Before=sysinit.target" \
        "[Service]" "Type=oneshot" "RemainAfterExit=yes" "ExecStart=/bin/mount -o remount,size=${SHM_MIB}m /dev/shm"
}

print_shm_want() {
    printf '%s\n' "${MADE}" "[Unit]" "Wants=${SHM_UNIT##*/}"
}

# print_login_limits: who, soft and hard, as pam_limits reads its files: limits.conf, then limits.d in the order of names; of one name and
# kind the last line counts.
print_login_limits() {
    local file
    for file in "${HOST_ROOT:-}"/etc/security/limits.conf "${HOST_ROOT:-}"/etc/security/limits.d/*.conf; do
        [[ ! -r "${file}" ]] || cat -- "${file}"
    done | awk '$1 !~ /^#/ && $3 == "memlock" {
        value = ($4 ~ /^(unlimited|infinity|-1)$/) ? "unlimited" : $4
        if ($2 != "hard") soft[$1] = value
        if ($2 != "soft") hard[$1] = value
    } END { for (who in hard) soft[who]; for (who in soft) print who, soft[who], hard[who] }'
}

has_logins() {
    local -r limits=$'\n'"$(print_login_limits)"$'\n'
    [[ "${limits}" == *$'\n* unlimited unlimited\n'* && "${limits}" == *$'\nroot unlimited unlimited\n'* ]]
}

has_systemd() {
    [[ -d "${HOST_ROOT:-}/run/systemd/system" ]]
}

# find_process NAME: the first of that name. `slurmstepd infinity` is no step: with cgroups v2 it always runs, to keep the steps' cgroup. Nor
# is a step of our own job somebody's, where a job of Slurm's is the way to this host (slurm/step.sh).
find_process() {
    local file
    while read -r file; do
        grep -qszx infinity "${file%/comm}/cmdline" && continue
        [[ -n "${DEEPEP_STEP:-}" ]] && grep -qszF "[${DEEPEP_STEP}." "${file%/comm}/cmdline" && continue
        basename -- "${file%/comm}" && break
    done < <(grep -sxl "$1" "${HOST_ROOT:-}"/proc/[0-9]*/comm || :) # there is none, or some ended while looking
}

# print_slurmd_problem: what a new start of slurmd, by systemd, would repair: its unit, or what runs since before the unit was right.
print_slurmd_problem() {
    local pid
    has_systemd && [[ "$(systemctl show -p LoadState --value slurmd.service)" == loaded ]] || return 0
    pid="$(find_process slurmd)"
    if [[ "$(systemctl show -p LimitMEMLOCK --value slurmd.service)" != infinity ]]; then
        echo "the unit of slurmd limits memlock"
    elif has_low_limit "${pid}" && [[ -z "$(find_process slurmstepd)" ]]; then echo "slurmd runs with a limit on memlock"; fi
}

has_low_limit() {
    [[ -n "$1" ]] && ! grep -q '^Max locked memory  *unlimited ' "${HOST_ROOT:-}/proc/$1/limits"
}

shm_mib() {
    df -P -k "${HOST_ROOT:-}/dev/shm" | awk 'NR == 2 { print int($2 / 1024) }'
}

print_problems() {
    has_logins || echo "memlock of logins is limited"
    print_slurmd_problem
    if [[ -n "${SHM_MIB:-}" ]] && has_systemd && (($(shm_mib) < SHM_MIB)); then echo "/dev/shm has $(shm_mib) MiB"; fi
}

# print_notes: what is worth knowing and not ours to change.
print_notes() {
    local -r root="${HOST_ROOT:-}" others="$(print_login_limits | awk '$2 $3 != "unlimitedunlimited" { print $1 }' | paste -s -d ' ')"
    local half
    half="$(awk '/^MemTotal:/ { print int($2 / 2048) }' "${root}/proc/meminfo")"
    if is_installed "${LOGINS}" 644 <<<"$(print_logins)" && [[ -n "${others}" ]]; then
        echo "other lines below /etc/security limit memlock of ${others}"
    fi
    if [[ -e "${root}/etc/ssh/sshd_config" && ! -r "${root}/etc/ssh/sshd_config" ]]; then
        echo "only root can read whether sshd uses PAM"
    elif [[ -e "${root}/etc/ssh/sshd_config" ]] && ! grep -siqE '^\s*UsePAM\s+yes' "${root}"/etc/ssh/sshd_config{,.d/*.conf}; then
        echo "sshd has no UsePAM yes: it ignores these limits"
    fi
    has_low_limit "$(find_process slurmd)" && [[ -z "$(print_slurmd_problem)" ]] && echo "slurmd gets its limit when it starts next"
    # A hundredth of tolerance: the kernel rounds.
    [[ -z "${SHM_MIB:-}" ]] && (($(shm_mib) * 101 / 100 < half)) && echo "/dev/shm has $(shm_mib) MiB, less than half of the memory"
    return 0
}

report_state() {
    local state=todo
    local -r problems="$(print_problems | paste -s -d ';' | sed 's/;/; /g')" notes="$(print_notes | paste -s -d ';' | sed 's/;/; /g')"
    data wanted "memlock unlimited for logins and slurmd${SHM_MIB:+, /dev/shm of ${SHM_MIB} MiB}"
    data found "${problems:-as wanted}"
    [[ -z "${notes}" ]] || data note "${notes}"
    if [[ -z "${problems}" ]]; then state=ok; fi
    if [[ "${problems}" == "memlock of logins is limited" && "${notes}" == "other lines"* ]]; then state=blocked; fi
    data state "${state}"
}

repair_limits() {
    local -r problem="$(print_slurmd_problem)"
    has_logins || install_file limits "${LOGINS}" 644 <<<"$(print_logins)"
    if [[ -n "${SHM_MIB:-}" ]] && has_systemd && (($(shm_mib) < SHM_MIB)); then
        install_file limits "${SHM_UNIT}" 644 <<<"$(print_shm_unit)"
        install_file limits "${SHM_WANT}" 644 <<<"$(print_shm_want)"
        mount -o "remount,size=${SHM_MIB}m" "${HOST_ROOT:-}/dev/shm"
    fi
    if [[ "${problem}" == *unit* ]]; then install_file limits "${SLURMD}" 644 <<<"$(print_slurmd)"; fi
    ! has_systemd || systemctl daemon-reload >&2
    if [[ -n "${problem}" && -n "$(find_process slurmd)" && -z "$(find_process slurmstepd)" ]]; then
        systemctl restart slurmd.service >&2
    fi
}

main() {
    case "${1:-check}" in
        check) report_state ;;
        apply) apply_todo repair_limits ;;
        remove)
            need_root "remove files"
            remove_files limits
            ! has_systemd || systemctl daemon-reload >&2
            data state ok
            data found "no files of ours; what runs keeps its limits" ;;
        *) die "unknown argument $1: check, apply or remove" ;;
    esac
}

main "$@"
