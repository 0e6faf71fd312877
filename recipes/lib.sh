# shellcheck shell=bash
# Common ground of every recipe: strict mode, messages, data lines, waiting for the package manager.
#
# The engine puts this text in front of a recipe and sends both as one script. Standard output carries data lines (`key=value`) and
# nothing else; everything said to a person goes to standard error. Nothing here acts on the machine by being read.
set -Eeuo pipefail
umask 022

# Every recipe and the tools it runs speak one language and sort in one order, whatever the account's locale is.
export LC_ALL=C

trap 'report_failure "$?" "${BASH_SOURCE[0]:-script}" "${LINENO}" "${BASH_COMMAND}"' ERR
# A word to a controller that is gone must not be the death of whoever still has to clean up: the ERR trap says one. Caught and not ignored:
# what we start dies of it as usual, and the EXIT trap of a recipe runs.
trap : PIPE

# say TEXT…: a line for the person who watches.
say() {
    printf '%s\n' "$*" >&2
}

# warn TEXT…: something to know that stops nothing.
warn() {
    printf 'warning: %s\n' "$*" >&2
}

# die TEXT…: end the recipe with one line that says why; newlines in the text become spaces.
die() {
    local -r text="$*"
    printf 'error: %s\n' "${text//$'\n'/ }" >&2
    exit 1
}

# report_failure CODE FILE LINE COMMAND: the ERR trap. A subshell reports too, so the message may come twice; the innermost is first.
report_failure() {
    local -r code="$1" file="$2" line="$3" command="$4"
    printf 'error: %s line %s: exit code %s from: %s\n' "${RECIPE:-${file##*/}}" "${line}" "${code}" "${command%%$'\n'*}" >&2
}

# data KEY VALUE: one result for the engine. The engine reads line by line, so a newline in either is refused.
data() {
    local -r key="$1" value="$2"
    [[ "${key}" =~ ^[a-z][a-z0-9_.-]*$ ]] || die "data: bad key '${key}'"
    [[ "${value}" != *$'\n'* ]] || die "data: the value of ${key} has more than one line"
    printf '%s=%s\n' "${key}" "${value}"
}

# need_env NAME…: end here when one of the inputs is missing or empty, naming all of them at once.
need_env() {
    local name
    local -a missing=()
    for name in "$@"; do
        [[ -n "${!name:-}" ]] || missing+=("${name}")
    done
    ((${#missing[@]} == 0)) || die "missing input: ${missing[*]-}"
}

# need_command NAME…: end here when one of the programs is not on PATH, naming all of them at once.
need_command() {
    local name
    local -a missing=()
    for name in "$@"; do
        command -v "${name}" >/dev/null || missing+=("${name}")
    done
    ((${#missing[@]} == 0)) || die "not installed on this machine: ${missing[*]-}"
}

# run_step TITLE COMMAND…: say what begins, run it with its output on standard error, say how long it took.
run_step() {
    local -r title="$1" start="${SECONDS}"
    shift
    say "== ${title}"
    "$@" >&2
    say "== ${title}: done in $((SECONDS - start)) s"
}

# with_package_lock COMMAND…: run apt-get, dpkg or dnf; while another program holds the package database, wait and try again, up to
# PACKAGE_LOCK_WAIT seconds in all. Looking at what the tool says works on every filesystem; /proc/locks does not on an overlay.
with_package_lock() {
    local -r limit="${PACKAGE_LOCK_WAIT:-300}"
    local -r busy="Could not get lock|Unable to (acquire|lock)|is another process using it|locked by another process|already locked by"
    local -r end=$((SECONDS + limit))
    local answer code said=""
    while true; do
        code=0
        # Its talk goes to the person as it comes; its complaints are kept for the question below, then shown too.
        { answer="$("$@" 2>&1 >&3)" || code="$?"; } 3>&2
        [[ -z "${answer}" ]] || say "${answer}"
        ((code != 0)) || return 0
        [[ "${answer}" =~ ${busy} ]] || return "${code}"
        ((SECONDS < end)) || die "the package database is still held by another program after ${limit} s: ${answer%%$'\n'*}"
        [[ -n "${said}" ]] || say "another program is installing packages: waiting up to ${limit} s"
        said=yes
        sleep 2
    done
}

# write_file TARGET MODE: standard input becomes TARGET in one rename, so that nobody ever reads half of it.
write_file() {
    local -r target="$1" mode="$2"
    local aside
    aside="$(mktemp "${target}.XXXXXX")"
    if cat >"${aside}" && chmod "${mode}" "${aside}" && mv -f -- "${aside}" "${target}"; then
        return 0
    fi
    rm -f -- "${aside}"
    die "cannot write ${target}"
}
