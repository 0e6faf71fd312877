#!/usr/bin/env bash
# The main job on the embedded cluster, from nothing: hosts, stand-in sources, bootstrap, modules, a test under Slurm, and once more.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

PYTHON=$PWD/.venv/bin/python
SECONDS=0

title() {
    printf '\n== %s (%d s)\n' "$1" "$SECONDS"
}

# The hosts are namespaces with devices and daemons of their own: that takes root.
AS_ROOT=()
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null || ! { sudo -n true 2>/dev/null || { [ -t 0 ] && sudo -v; }; }; then
        echo "make demo: needs root, or sudo; found user $(id -un) without it. Try: sudo -v, or as root" >&2
        exit 1
    fi
    AS_ROOT=(sudo -E)
fi

run_lab() {
    "${AS_ROOT[@]}" "$PYTHON" -m invoke lab "$@"
}

read_lab() {
    # <key>: one value of the lab's state
    run_lab status --json | "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"
}

bootstrap() {
    "$PYTHON" -m invoke bootstrap --yes
}

try_kind() {
    # <kind>: it passes, or says in one line why it cannot here
    local said code=0
    local -a more=()
    [ "$1" != pairs ] || more=("--args=--fraction 0.05") # processors play the NICs: what else runs makes one link much slower than another
    [ "$1" != pressure ] || more=(--time-limit=12s) # it has no end of its own, and on a busy machine a late beginning
    said=$("$PYTHON" -m invoke test --kind="$1" "${more[@]}" 2>&1) || code=$?
    if [ "$code" = 0 ]; then
        printf '%s: passed\n' "$1"
    elif grep -m 1 -e 'stands in for it' -e 'has no such test' <<<"$said" | sed "s/^ */$1: not here: /"; then
        return 0
    else
        printf '%s\n%s: failed, exit code %d\n' "$said" "$1" "$code" >&2
        return 1
    fi
}

title "an embedded cluster: two GPU nodes and a login host, each with its own network, sshd and disk; a real Slurm;
   GDRCopy, NVSHMEM and DeepEP as stand-ins that compute on CPUs, over TCP"
run_lab up
LAB=$(read_lab dir)
# shellcheck source=/dev/null # the lab wrote it
. "$LAB/try.sh"

title "invoke bootstrap"
bootstrap

title "module load deepep, in a login shell of each host"
for host in n001 n002 login1; do
    printf '%s: ' "$host"
    # shellcheck disable=SC2016 # expanded on the host
    ssh -F "$DEEPEP_SSH_CONFIG" "$host" 'bash -lc "module load deepep && echo \$LOADEDMODULES"'
done

title "sbatch internode-test.sbatch, on two nodes, followed to its end"
"$PYTHON" -m invoke test --kind=internode

title "invoke test, every other kind, three at a time: Slurm gives each its nodes (smoke was a part of bootstrap)"
export PYTHON
export -f try_kind
printf '%s\n' intranode low-latency pressure nccl pairs example-prefill example-decode ep |
    xargs -P 3 -I {} bash -euo pipefail -c 'try_kind {}'

title "invoke bootstrap again: nothing to do"
START=$(date +%s%N)
bootstrap
printf 'second run: %d ms\n' $((($(date +%s%N) - START) / 1000000))

title "done"
cat <<END
The cluster is up. Look around:
    . .venv/bin/activate; . $LAB/try.sh
    invoke status
    ssh -F $LAB/ssh_config builder@login1        # then: module load deepep; sbatch \$DEEPEP_PREFIX/sbatch/intranode-test.sbatch
Take it away:
    ${AS_ROOT[*]} .venv/bin/invoke lab down
END
