#!/bin/sh
# Facts of one host: POSIX sh, read-only, one round trip. Prints `key=value` lines (fields separated by tabs), the last one `end=1`.
# Usage: facts.sh PREFIX [PYTHON]. FACTS_ROOT, for tests, stands before /sys, /proc, /etc, /dev, /usr, /lib, /run and /var.
# A missing tool is a fact and no error: there is no `set -e`, and what tools say on stderr is dropped. Slow questions run side by
# side, so the order of lines means nothing; deepep_bootstrap/inventory/facts.py joins what belongs together.
# Most questions stand in facts/*.sh, which the engine puts in front. By hand: cat recipes/facts/*.sh recipes/facts.sh | sh -s PREFIX
set -u
LC_ALL=C; export LC_ALL
tab=$(printf '\t'); newline='
'
spaces=$IFS
root=${FACTS_ROOT:+$(cd -P "$FACTS_ROOT" && pwd -P)}

put() { # KEY FIELD…: one record; a newline inside a field becomes a space
    put_key=$1; shift; IFS=$tab; put_text="$*"; IFS=$spaces
    case $put_text in *"$newline"*) put_text=$(printf '%s' "$put_text" | tr '\n' ' ') ;; esac
    printf '%s=%s\n' "$put_key" "$put_text"
}
has() { if command -v "$1" >/dev/null; then echo 1; else echo 0; fi; }
there() { if [ -e "$1" ]; then echo 1; else echo 0; fi; }
limit() { limit_s=$1; shift; if command -v timeout >/dev/null; then timeout -k 1 "$limit_s" "$@"; else "$@"; fi; }
ask_gpus() { # SECONDS ARGUMENT…: what nvidia-smi answers, then a line code=N. Where the driver hangs, not even KILL ends nvidia-smi, and it
    # keeps its output open for ever: so it is not its end that is waited for, but that of a reader which can be ended.
    ask_s=$1; shift
    { limit "$ask_s" ${smi_libraries:+env "LD_LIBRARY_PATH=$smi_libraries"} nvidia-smi "$@"; printf '\ncode=%s\n' "$?"; } | limit $((ask_s + 2)) cat || printf '\ncode=124\n'
}
first_line() { value=; [ -r "$1" ] && IFS= read -r value <"$1"; }
ask() { # NAME SECONDS COMMAND…: sets `answer`. What does not end in time, or is killed, is asked once more with twice the time; then NAME
    # is `unanswered`: not known, which is another thing than absent, and the host is left out of every plan.
    ask_name=$1; ask_for=$2; shift 2
    for ask_limit in "$ask_for" $((ask_for * 2)); do
        answer=$(limit "$ask_limit" "$@"); ask_code=$?
        case $ask_code in 124 | 137) ;; *) return "$ask_code" ;; esac
    done
    put unanswered "$ask_name" $((ask_for * 3)); answer=
    return 124
}
version_of() { # COMMAND…: sets `version` to the first word of its first line that begins like a version number
    version=; ask "${1##*/}" 5 "$@"; set -f
    for word in ${answer%%"$newline"*}; do
        case $word in [0-9]*.*) version=${word%%[!0-9.]*}; version=${version%.}; break ;; esac
    done
    set +f
}

probe_system() {
    # In a subshell: the file is shell text and its variables must not meet ours.
    # shellcheck disable=SC1091
    (ID=; VERSION_ID=; PRETTY_NAME=; [ -r "$root/etc/os-release" ] && . "$root/etc/os-release"
     put os_id "$ID"; put os_version "$VERSION_ID"; put os_name "$PRETTY_NAME")
    put kernel "$kernel"; put machine "$machine"; put hostname "$(uname -n)"
    put user "$me_called"; put uid "$me"; put cpus "$(unset OMP_NUM_THREADS OMP_THREAD_LIMIT; nproc || getconf _NPROCESSORS_ONLN)"
    first_line "$root/proc/sys/kernel/random/boot_id"; put boot_id "$value"
    value=$(grep -m 1 '^model name' "$root/proc/cpuinfo"); put cpu_model "${value#*: }"
    value=$(getconf GNU_LIBC_VERSION); put glibc "${value#* }"
    while read -r name value _; do
        case $name in MemTotal:) put memory_mib $((value / 1024)) ;; MemAvailable:) put memory_free_mib $((value / 1024)) ;; esac
    done <"$root/proc/meminfo"
    # A way out of the local network is a guess at whether the package index can be asked from here at all.
    if grep -qs '^[^[:space:]]*[[:space:]]00000000[[:space:]]' "$root/proc/net/route" ||
        grep -sE '^0{32} 00 ' "$root/proc/net/ipv6_route" | grep -qv ' lo$'; then
        put default_route 1
    fi
    set -- "$(limit 5 df -P -k "${TMPDIR:-/tmp}" | awk 'END { print int($(NF - 2) / 1024) }')"; put scratch_free_mib "$1"
}
probe_prefix() { # a dead NFS server must cost seconds, not the run: `stat` in a child of its own asks first
    put prefix_path "$prefix"
    limit 5 stat "$prefix" >/dev/null
    case $? in 124 | 137) put prefix_problem 'does not answer within 5 s'; return 0 ;; esac
    parent=$prefix
    while [ ! -e "$parent" ]; do parent=${parent%/*}; parent=${parent:-/}; done
    put prefix_exists "$(if [ -d "$prefix" ]; then echo 1; else echo 0; fi)"
    put prefix_writable "$(if [ -w "$parent" ]; then echo 1; else echo 0; fi)"
    limit 5 df -P -T -k "$parent" | tail -n 1 | while read -r source fs _ _ free _; do put prefix_fs "$fs" "$((free / 1024))" "$source"; done
    first_line "$prefix/.id"; put prefix_id "$value"
    for entry in "$prefix"/store/*; do [ -d "$entry" ] && put prefix_entry "${entry##*/}"; done
    for mark in "$prefix"/.unproved-*; do [ -e "$mark" ] && put prefix_unproved "${mark##*/.unproved-}"; done
    link=$(readlink "$prefix/current") && put prefix_generation "${link##*/}"
    [ -r "$prefix/current/manifest.json" ] && put prefix_manifest "$(base64 <"$prefix/current/manifest.json" | tr -d '\n')"
}

find_managed() { # GKE puts the driver that it manages, and gIB, where only its own plugins look
    smi_libraries=; folder=$root/home/kubernetes/bin
    [ -e "$folder/gib/scripts/set_nccl_env.sh" ] && put managed gib
    [ -x "$folder/nvidia/bin/nvidia-smi" ] || return 0
    put managed driver
    command -v nvidia-smi >/dev/null || { PATH=$PATH:$folder/nvidia/bin; smi_libraries=$folder/nvidia/lib64; }
}

main() {
    exec </dev/null 2>/dev/null
    prefix=$1
    python=${2:-}
    # An environment often brings its own cmake and ninja; they serve where the system has none. Builds look there too.
    case $python in /*) PATH=$PATH:${python%/*} ;; esac
    kernel=$(uname -r); machine=$(uname -m); me=$(id -u); me_called=$(id -un)
    put facts 1
    find_managed
    # shellcheck disable=SC2034  # facts/cluster.sh reads it
    daemons=$(list_daemons)
    clients=0
    # shellcheck disable=SC2034  # facts/cluster.sh reads it
    find_slurm && clients=1
    for probe in gpus gpu_processes nvlinks nvswitch imex slurm kubelet modules external tools toolkits pythons packages verbs verbs_devices flow_control network daemons; do "probe_$probe" & done
    probe_system; probe_kernel; probe_fabric; probe_devices; probe_state
    wait
    probe_prefix
    put end 1
}
main "$@"
