#!/bin/bash
# What one node of a test runs: it reads the counters of its network cards and GPUs, runs the command, reads them again. What the
# command prints goes to standard output and, in the run's folder, to node-<RANK>-<name>.log.
#
# Arguments: the command. Reads RANK, DEEPEP_RUN_DIR, SLURMD_NODENAME or DEEPEP_NODE (the node's name; else its own), and
# DEEPEP_TEST_SECONDS: a test without an end of its own is stopped after so many seconds, and has passed if it still ran by then.
# Exits with the command's code, with 1 when somebody ended it. A counter that cannot be read stops nothing.
set -uo pipefail

readonly INFINIBAND=/sys/class/infiniband
# Names of sysfs, below counters/ and hw_counters/ of a port, that count what should not happen.
readonly FAULTS=(
    symbol_error link_error_recovery link_downed port_rcv_errors port_rcv_remote_physical_errors port_xmit_discards
    local_link_integrity_errors excessive_buffer_overrun_errors VL15_dropped
    out_of_sequence packet_seq_err local_ack_timeout_err rnr_nak_retry_err implied_nak_seq_err duplicate_request
    out_of_buffer req_cqe_error req_remote_access_errors resp_cqe_error roce_adp_retrans_to
)
# What `nvidia-smi nvlink -e` calls errors; it also counts bits that were corrected, which is no fault.
readonly LINK_FAULTS='(Replay|Recovery|CRC|Malformed packet|Buffer overrun|Local link integrity|Rx general|Rx remote|Tx discard) Errors'
readonly SMI_LIMIT=20 # seconds; a driver that hangs must not keep the test from its end

CHILD=""

# read_number FILE: print the whole number in a file of sysfs; fails where there is none.
read_number() {
    local value
    { read -r value <"$1"; } 2>/dev/null || return 1
    [[ $value =~ ^[0-9]+$ ]] && printf '%s\n' "$value"
}

count_port() { # <device> <port folder>
    local -r device=$1 port=$2
    local state layer rate sent received fault folder value line
    { read -r state <"$port/state" && read -r layer <"$port/link_layer" && read -r rate <"$port/rate"; } 2>/dev/null || return 0
    [[ $state == *ACTIVE* ]] || return 0
    sent=$(read_number "$port/counters/port_xmit_data") && received=$(read_number "$port/counters/port_rcv_data") || return 0
    line="nic=$device ${port##*/} ${layer%% *} ${rate%% *} $sent $received"
    for fault in "${FAULTS[@]}"; do
        for folder in counters hw_counters; do
            ! value=$(read_number "$port/$folder/$fault") || line+=" $fault:$value"
        done
    done
    printf '%s\n' "$line"
}

count_nics() {
    local device port
    for device in "$INFINIBAND"/*; do
        [[ $(readlink -f "$device/device/driver" 2>/dev/null) == */mlx5_core ]] || continue
        for port in "$device"/ports/*; do count_port "${device##*/}" "$port"; done
    done
}

count_gpus() {
    local index ecc links
    command -v nvidia-smi >/dev/null || return 0
    links=$(timeout "$SMI_LIMIT" nvidia-smi nvlink -e 2>/dev/null) || links=""
    timeout "$SMI_LIMIT" nvidia-smi --query-gpu=index,ecc.errors.uncorrected.volatile.total --format=csv,noheader,nounits 2>/dev/null |
        while IFS=', ' read -r index ecc; do
            [[ $index =~ ^[0-9]+$ ]] || continue
            printf 'gpu=%s' "$index"
            [[ ! $ecc =~ ^[0-9]+$ ]] || printf ' ecc:%s' "$ecc"
            [[ -z $links ]] || printf ' nvlink:%s' "$(sum_links "$index" <<<"$links")"
            printf '\n'
        done
}

sum_links() { # <GPU index>; the answer of nvidia-smi on standard input
    awk -v gpu="GPU $1:" -v faults="$LINK_FAULTS" '/^GPU / { here = index($0, gpu) == 1 }
        here && $0 ~ faults && $NF ~ /^[0-9]+$/ { sum += $NF } END { printf "%.0f", sum }'
}

# count_all FILE: network cards first, since they need no time, and a node that is being ended has little of it.
count_all() {
    { printf 'time=%s\n' "$(date +%s.%N)" && count_nics && count_gpus; } >"$1" 2>/dev/null || true # it is beside the point of the run
}

# The test's end is not near when somebody ends it: its own processes get the signal too, what they did until now is counted.
# shellcheck disable=SC2329 # a trap calls it
end_early() {
    trap '' TERM INT HUP
    [[ -z $CHILD ]] || kill -TERM "$CHILD" 2>/dev/null
    count_all "$COUNTERS.after"
    exit 1
}

# run_command COMMAND…: sets CODE. tee lives until all that write to it have gone, but is not waited for longer than a moment:
# a process that was left behind by the test may never go.
run_command() {
    local writer tries
    exec 3> >(trap '' TERM INT HUP; exec tee -- "$LOG")
    writer=$!
    "$@" >&3 2>&1 3>&- &
    CHILD=$!
    exec 3>&-
    wait "$CHILD"
    CODE=$?
    CHILD=""
    for ((tries = 0; tries < 30; tries++)); do
        kill -0 "$writer" 2>/dev/null || break
        sleep 0.1
    done
}

# By default Slurm gives a job the soft limits of the shell that submitted it. RDMA locks the memory it works on: all that is allowed here.
raise_memlock() {
    ulimit -l unlimited 2>/dev/null || ulimit -S -l "$(ulimit -H -l)" 2>/dev/null || true # a low limit is told by what fails for it
}

main() {
    local -r name=${SLURMD_NODENAME:-${DEEPEP_NODE:-$(uname -n)}}
    local -r limit=${DEEPEP_TEST_SECONDS:-}
    local begin
    readonly LOG=$DEEPEP_RUN_DIR/node-$RANK-$name.log COUNTERS=$DEEPEP_RUN_DIR/counters/$name
    mkdir -p -- "$DEEPEP_RUN_DIR/counters" 2>/dev/null
    trap end_early TERM INT HUP
    raise_memlock
    count_all "$COUNTERS.before"
    begin=$SECONDS
    if [[ -z $limit ]]; then run_command "$@"; else run_command timeout --kill-after=10 "$limit" "$@"; fi
    count_all "$COUNTERS.after"
    # The nodes of a test are stopped within a second or two of each other: one that fails then only misses its peers.
    if [[ -n $limit ]] && ((SECONDS - begin >= limit - 2)); then
        printf 'deepep: stopped after %s s, as planned\n' "$limit" | tee -a -- "$LOG"
        CODE=0
    fi
    exit "$CODE"
}

main "$@"
