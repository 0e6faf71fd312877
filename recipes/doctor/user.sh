# shellcheck shell=bash
# What the user of a job finds on this host, as that user: limits, devices, shared memory, the prefix, and what a login shell brings.
#
# Reads: PREFIX. HOST_ROOT, for tests, stands before /dev, /proc and /run. Changes nothing.
# Data lines: user, uid; memlock (KiB or "unlimited"), ipc_lock; container; device (path, why it cannot be opened); shm; prefix;
# module, visible, variable (name, value), library; end.

# These say something of their own to NVSHMEM, DeepEP or NCCL, whatever the module sets. Compared with bash patterns.
VARIABLES='NVSHMEM_*|DEEP_EP_*|TORCH_NCCL_USE_COMM_NONBLOCKING|LD_PRELOAD|LD_LIBRARY_PATH|RDMAV_DRIVERS|IBV_DRIVERS'

# open_device PATH: prints why it cannot be opened for reading and writing, nothing when it can. The rights of a file do not tell: a
# container may be refused the device all the same.
open_device() {
    local -r path="$1"
    local said
    said="$( (exec 9<>"${path}") 2>&1)" && return 0
    said="${said%%$'\n'*}"
    printf '%s' "${said##*: }"
}

# report_devices: the driver may need seconds to wake a GPU, so all of them are asked at the same time.
report_devices() {
    local -r root="${HOST_ROOT:-}"
    local path
    for path in "${root}"/dev/nvidia[0-9]* "${root}"/dev/{nvidiactl,nvidia-uvm,gdrdrv,nvidia-caps-imex-channels/channel0} "${root}"/dev/infiniband/{uverbs*,rdma_cm}; do
        [[ -e "${path}" ]] || continue
        data device "${path#"${root}"}"$'\t'"$(open_device "${path}")" &
    done
    wait
}

# report_rights: root may lock memory beyond its limit, unless a container took that right (CAP_IPC_LOCK, bit 14) away.
report_rights() {
    local -r root="${HOST_ROOT:-}"
    local key value rights=0 box=""
    data user "$(id -un)"
    data uid "$(id -u)"
    [[ -n "${DEEPEP_STEP:-}" ]] || data memlock "$(ulimit -S -l)" # in a job of ours it is that job's
    while read -r key value; do
        [[ "${key}" != CapEff: ]] || rights="${value}"
    done <"/proc/self/status"
    data ipc_lock "$(((16#${rights} >> 14) & 1))"
    [[ ! -r "${root}/run/systemd/container" ]] || read -r box <"${root}/run/systemd/container" || true # it may lack the newline
    [[ ! -e "${root}/.dockerenv" ]] || box=docker
    [[ ! -e "${root}/run/.containerenv" ]] || box=podman
    data container "${box}"
}

report_folders() {
    local -r root="${HOST_ROOT:-}"
    local state=absent
    if [[ -d "${root}/dev/shm" ]]; then
        state=denied
        [[ ! -w "${root}/dev/shm" || ! -x "${root}/dev/shm" ]] || state=writable
    fi
    data shm "${state}"
    state=absent
    # A dead file server must cost seconds, not the run.
    if timeout -k 1 5 stat -- "${PREFIX}" >/dev/null 2>&1; then
        state=denied
        [[ ! -r "${PREFIX}" || ! -x "${PREFIX}" ]] || state=readable
        [[ ! -e "${PREFIX}/current" || -r "${PREFIX}/current/manifest.json" ]] || state=denied
    fi
    data prefix "${state}"
}

# Runs inside the login shell, whose own start-up files may say anything on standard output: data lines leave by descriptor 3.
print_login_script() {
    cat <<'SCRIPT'
report() { printf '%s=%s\n' "$1" "$2" >&3; }
plain() { printf '%s' "$1" | tr -s '\n\t' '  ' | cut -c 1-400; }
tab=$(printf '\t')
if type module >/dev/null 2>&1; then
    report module yes
    report visible "$(module -t avail deepep 2>&1 | grep -c '^deepep/')"
else
    report module no
fi
shopt -s extglob
for name in $(compgen -e); do
    [[ $name == @($VARIABLES) && -n ${!name} ]] && report variable "$name$tab$(plain "${!name}")"
done
IFS=:
for folder in ${LD_LIBRARY_PATH-}; do
    [ -n "$folder" ] && [ -e "$folder/libibverbs.so.1" ] && report library "$folder/libibverbs.so.1"
    [ -n "$folder" ] && [ -e "$folder/libnccl.so.2" ] && report library "$folder/libnccl.so.2"
done
for folder in ${PYTHONPATH-} "$HOME"/.local/lib/python3*/site-packages; do
    [ -n "$folder" ] && [ -d "$folder/deep_ep" ] && report library "$folder/deep_ep"
done
true
SCRIPT
}

report_login() {
    local program code=0
    program="VARIABLES='${VARIABLES}'
$(print_login_script)"
    env -i HOME="${HOME:-/}" USER="$(id -un)" LOGNAME="$(id -un)" TERM=dumb PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        timeout -k 1 20 bash -l -c "${program}" 3>&1 >&2 </dev/null || code="$?"
    [[ "${code}" != 124 && "${code}" != 137 ]] || data login "no end of a login shell after 20 s"
}

main() {
    need_env PREFIX
    report_rights
    report_devices
    report_folders
    report_login
    data end 1
}

main "$@"
