# shellcheck shell=bash
# Who an owner is (of a lock, of a scratch folder), and the rules by which it counts as gone.
# Input: TOKEN (unlike any other run's).

# When this process came; a waiter shows it. Not the heartbeat: that is a counter, so that clocks of different hosts do not matter.
SINCE="$(date -u +%Y-%m-%dT%H:%M:%SZ)"

# find_start PID: print the start time of a living process (clock ticks since boot); nothing for one that is gone or a zombie.
find_start() {
    local -r pid="$1"
    local stat
    local -a parts
    { stat="$(<"/proc/${pid}/stat")"; } 2>/dev/null || return 0 # no such process: print nothing
    read -ra parts <<<"${stat##*) }"
    [[ "${parts[0]}" == Z ]] || printf '%s\n' "${parts[19]}"
}

# describe_owner BEAT: print what identifies this process to others; every beat gives a text of the same length.
describe_owner() {
    local -r beat="$1"
    printf 'host=%s\nboot=%s\npidns=%s\n' "$(uname -n)" "$(</proc/sys/kernel/random/boot_id)" "$(readlink /proc/self/ns/pid)"
    printf 'pid=%s\nstart=%s\ntoken=%s\nsince=%s\nbeat=%010d\n' "$$" "$(find_start "$$")" "${TOKEN:?}" "${SINCE}" "${beat}"
}

# owner_field TEXT KEY: print one value of an owner's description.
owner_field() {
    local -r text="$1" key="$2"
    local line
    while IFS= read -r line; do
        if [[ "${line}" == "${key}="* ]]; then
            printf '%s\n' "${line#*=}"
            return 0
        fi
    done <<<"${text}"
}

# is_dead TEXT: whether this host can tell that the owner is gone. Another host's owner is never judged here, nor one in another
# pid namespace, nor one that /proc hides from us (hidepid): for those only the heartbeat speaks.
is_dead() {
    local -r owner="$1"
    local pid
    pid="$(owner_field "${owner}" pid)"
    [[ "$(owner_field "${owner}" host)" == "$(uname -n)" && "${pid}" =~ ^[0-9]+$ ]] || return 1
    [[ "$(owner_field "${owner}" boot)" == "$(</proc/sys/kernel/random/boot_id)" ]] || return 0
    [[ "$(owner_field "${owner}" pidns)" == "$(readlink /proc/self/ns/pid)" && -e /proc/1 ]] || return 1
    [[ ! -e "/proc/${pid}" || -r "/proc/${pid}/stat" ]] || return 1
    [[ "$(find_start "${pid}")" != "$(owner_field "${owner}" start)" ]]
}
