# shellcheck shell=bash
# Looks at what a user gets on this host: loads the module in a login shell, imports DeepEP, and asks which NVSHMEM it would call.
#
# Reads: LOAD (what to say to `module load`), USE (modulefiles that no hook leads to, "" where one does), ENV_FILE (the same for hosts
# without a module system), DEEPEP and NVSHMEM (the entries it should lead to; NVSHMEM may be a folder beside an external torch),
# PYTHON (an external interpreter, "" for the module's own), IMPORT (yes or no), PROBE (the text of probe.py), GENERATION (the current
# one, where that was just published; 0 for whatever is seen here), SECONDS_TO_SEE (default 60).
# Changes nothing.
# Data lines: stale; module, loaded, said; import, error, deep_ep, torch, nvshmem, nccl, nccl_version; deepep_entry, nvshmem_entry; driver; end.

# Runs inside the login shell, whose own start-up files may say anything on standard output: data lines leave by descriptor 3.
print_login_script() {
    cat <<'SCRIPT'
report() { printf '%s=%s\n' "$1" "$(printf '%s' "$2" | tr -s '\n\t' '  ' | cut -c 1-400)" >&3; }
messages=$(mktemp)
# The module of V2 makes the folder of its compiled kernels; a look leaves none behind.
DEEPEP_CACHE_BASE=$(mktemp -d)
export DEEPEP_CACHE_BASE
trap 'rm -rf "$DEEPEP_CACHE_BASE"' EXIT
if type module >/dev/null 2>&1; then
    report module yes
    [ -z "$USE" ] || module use "$USE" >/dev/null 2>&1
    module load "$LOAD" >"$messages" 2>&1
    for loaded in $(printf '%s' "${LOADEDMODULES-}" | tr ':' ' '); do
        case $loaded in deepep/*) report loaded "$loaded" ;; esac
    done
else
    report module no
    . "$ENV_FILE" >"$messages" 2>&1
fi
report said "$(cat "$messages")"
if [ "$IMPORT" = yes ]; then
    # A deep_ep in the home directory is not what a job would import.
    cd /
    code=0
    "${PYTHON:-python}" -c "$PROBE" 2>"$messages" || code=$?
    cat "$messages" >&2
    if [ "$code" -ne 0 ]; then
        report import no
        report error "the interpreter ${PYTHON:-python} ended with code $code: $({ grep -i error "$messages" || cat "$messages"; } | tail -n 1)"
    fi
fi
rm -f "$messages"
SCRIPT
}

# wait_for_generation: until this host sees the current generation, and say `stale` with what it sees instead when it never does. A network
# filesystem may answer from memory for a minute (acdirmax of NFS); reading the folder makes most ask again.
wait_for_generation() {
    local -r current="${ENV_FILE%/*}" wanted="generations/${GENERATION:-0}"
    local -r end=$((SECONDS + ${SECONDS_TO_SEE:-60}))
    local seen
    [[ "${wanted}" != generations/0 && -d "${current%/*}" ]] || return 0
    while true; do
        ls -a -- "${current%/*}" >/dev/null 2>&1 || true # it may be one that we can pass and not read
        seen="$(readlink -- "${current}")" || seen=nothing
        [[ "${seen}" != "${wanted}" ]] || return 0
        ((SECONDS < end)) || break
        sleep 0.5
    done
    data stale "${seen}"$'\t'"${wanted}"
}

main() {
    need_env LOAD ENV_FILE DEEPEP NVSHMEM IMPORT PROBE
    local program
    wait_for_generation
    program="$(print_login_script)"
    # Entries are read-only for everybody; root could write Python's caches into them all the same.
    export LOAD USE ENV_FILE IMPORT PYTHON PROBE PYTHONDONTWRITEBYTECODE=1
    bash -l -c "${program}" 3>&1 >&2 </dev/null
    data deepep_entry "$(realpath -m -- "${DEEPEP}")"
    data nvshmem_entry "$(realpath -m -- "${NVSHMEM}")"
    if [[ -d /proc/driver/nvidia ]]; then data driver yes; else data driver no; fi
    data end 1
}

main "$@"
