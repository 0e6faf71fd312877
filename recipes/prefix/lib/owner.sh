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

# is_here TEXT: whether the owner is a process that /proc of this host shows while it lives. The same name with another boot id may be
# another host of that name as well as this one before it booted; and /proc may hide processes (another pid namespace, hidepid).
is_here() {
    local -r owner="$1"
    local pid
    pid="$(owner_field "${owner}" pid)"
    [[ "$(owner_field "${owner}" host)" == "$(uname -n)" && "${pid}" =~ ^[0-9]+$ ]] || return 1
    [[ "$(owner_field "${owner}" boot)" == "$(</proc/sys/kernel/random/boot_id)" ]] || return 1
    [[ "$(owner_field "${owner}" pidns)" == "$(readlink /proc/self/ns/pid)" && -e /proc/1 ]] || return 1
    [[ ! -e "/proc/${pid}" || -r "/proc/${pid}/stat" ]]
}

# is_dead TEXT: whether this host can tell that the owner is gone. For one that is not here only the silence of its heartbeat speaks.
is_dead() {
    local -r owner="$1"
    is_here "${owner}" || return 1
    [[ "$(find_start "$(owner_field "${owner}" pid)")" != "$(owner_field "${owner}" start)" ]]
}
