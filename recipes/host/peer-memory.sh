# shellcheck shell=bash
# shellcheck disable=SC2310 # functions that only look may fail in conditions
# How a NIC reaches the memory of a GPU: by dma-buf, which the open driver and Linux 5.12 have, else by nvidia_peermem. The old
# nv_peer_mem, a module of its own package, must never be beside it.
#
# Arguments: check, apply or remove. files.sh and kernel-modules.sh stand before this text.

readonly LOADED_AT_BOOT=/etc/modules-load.d/deepep.conf
readonly KEPT_AWAY=/etc/modprobe.d/deepep-peer-memory.conf
PATH="${PATH}:/usr/sbin:/sbin"

print_list() {
    echo "# Written by deepep-bootstrap (recipes/host/peer-memory.sh); \`invoke remove\` takes it away."
    echo nvidia_peermem
}

# An install line works whoever asks modprobe for the module: a list, an init script or a person.
print_ban() {
    cat <<'FILE'
# Written by deepep-bootstrap (recipes/host/peer-memory.sh): nv_peer_mem must not be loaded beside the driver's own ways to the memory of
# a GPU. `invoke remove` takes this file away.
blacklist nv_peer_mem
install nv_peer_mem /bin/false
FILE
}

# has_dmabuf: 5.12 is the first kernel whose RDMA stack registers dma-buf memory; of NVIDIA's drivers only the open one exports it.
has_dmabuf() {
    local release
    release="$(uname -r)"
    grep -qs 'Open Kernel Module' "${HOST_ROOT:-}/proc/driver/nvidia/version" && printf '5.12\n%s\n' "${release%%[!0-9.]*}" | sort -VC
}

# has_legacy_at_boot: would something load nv_peer_mem at the next boot?
has_legacy_at_boot() {
    loads_at_boot nv_peer_mem || [[ -e "${HOST_ROOT:-}/etc/init.d/nv_peer_mem" ]]
}

# print_missing: what is not as it should be, one a line: legacy, legacy-in-use, legacy-at-boot, module, module-at-boot.
print_missing() {
    local users=0
    if is_loaded nv_peer_mem; then
        users="$(cat -- "${HOST_ROOT:-}/sys/module/nv_peer_mem/refcnt" 2>/dev/null || echo 0)"
        if ((users > 0)); then echo legacy-in-use; else echo legacy; fi
    fi
    if has_legacy_at_boot && ! is_installed "${KEPT_AWAY}" 644 <<<"$(print_ban)"; then echo legacy-at-boot; fi
    ! has_dmabuf || return 0
    is_loaded nvidia_peermem || echo module
    loads_at_boot nvidia_peermem || echo module-at-boot
}

print_found() {
    local text="neither dma-buf nor nvidia_peermem"
    if has_dmabuf; then text="dma-buf"; elif is_loaded nvidia_peermem; then text="nvidia_peermem"; fi
    if is_loaded nv_peer_mem; then text+=", the old nv_peer_mem is loaded"; fi
    if [[ "$1" == *legacy-at-boot* ]]; then text+=", the old nv_peer_mem is set to load at boot"; fi
    if [[ "$1" == *module-at-boot* ]]; then text+=", nvidia_peermem is not set to load at boot"; fi
    printf '%s' "${text}"
}

report_state() {
    local state=todo missing
    missing="$(print_missing | paste -s -d ' ')"
    data wanted "dma-buf or nvidia_peermem, without nv_peer_mem"
    data found "$(print_found "${missing}")"
    if [[ -z "${missing}" ]]; then
        state=ok
    elif [[ "${missing/% module/}" == legacy@(|-in-use) ]]; then
        # It is kept away from the next boot on, if not by us then now.
        state="$(state_after_change peer-memory)"
        [[ "${state}" != todo || "${missing}" != legacy-in-use* ]] || data needs reboot
        [[ "${state}" != stuck ]] || data note "something loads nv_peer_mem without modprobe: look for insmod in the boot scripts"
    elif [[ "${missing}" == legacy-in-use* ]]; then
        data needs reboot
    elif ! is_loaded nvidia; then
        state=blocked
        data note "the NVIDIA driver must be loaded first"
    fi
    data state "${state}"
}

# Does it really have to be there? modprobe fails where the RDMA stack has no peer memory clients, as the kernel's own has none.
load_peermem() {
    modprobe nvidia_peermem >&2 || die "nvidia_peermem does not load: it needs DOCA-OFED; the open driver and Linux 5.12 need neither"
    loads_at_boot nvidia_peermem || install_file peer-memory "${LOADED_AT_BOOT}" 644 <<<"$(print_list)"
}

repair_peer_memory() {
    if is_loaded nv_peer_mem || has_legacy_at_boot; then install_file peer-memory "${KEPT_AWAY}" 644 <<<"$(print_ban)"; fi
    if is_loaded nv_peer_mem && ! rmmod nv_peer_mem >&2; then
        say "nv_peer_mem is in use and stays until the next boot"
        stamp_change peer-memory
        # Never beside it: the other one loads at that boot.
        has_dmabuf || loads_at_boot nvidia_peermem || install_file peer-memory "${LOADED_AT_BOOT}" 644 <<<"$(print_list)"
        return 0
    fi
    clear_stamp peer-memory
    has_dmabuf || load_peermem
}

main() {
    case "${1:-check}" in
        check) report_state ;;
        apply) apply_todo repair_peer_memory ;;
        remove)
            need_root "remove files"
            remove_files peer-memory
            clear_stamp peer-memory
            data state ok
            data found "no files of ours; loaded modules stay until the next boot" ;;
        *) die "unknown argument $1: check, apply or remove" ;;
    esac
}

main "$@"
