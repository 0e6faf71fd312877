# shellcheck shell=bash
# DOCA-OFED, NVIDIA's RDMA drivers: only on a host with Mellanox network functions whose RDMA devices are missing or bear the names that
# the kernel's own driver gives to RoCE devices (rocep…). Its modules are compiled here for the running kernel and work after a reboot.
#
# Arguments: check, apply or remove. Inputs: those of packages.sh and repositories.sh; HEADERS, the headers of the running kernel.

readonly MELLANOX=0x15b3
readonly NETWORK_CLASS=0x02

# Prints how many network functions of Mellanox are on the PCI bus, with a driver or without.
count_functions() {
    local folder vendor class count=0
    for folder in "${HOST_ROOT:-}"/sys/bus/pci/devices/*; do
        [[ -e "${folder}/vendor" && -e "${folder}/class" ]] || continue
        read -r vendor <"${folder}/vendor"
        read -r class <"${folder}/class"
        if [[ "${vendor}" == "${MELLANOX}" && "${class}" == "${NETWORK_CLASS}"* ]]; then count=$((count + 1)); fi
    done
    printf '%s\n' "${count}"
}

# Prints the names of the RDMA devices of Mellanox, in one line.
list_devices() {
    local folder vendor
    for folder in "${HOST_ROOT:-}"/sys/class/infiniband/*; do
        [[ -e "${folder}/device/vendor" ]] || continue
        read -r vendor <"${folder}/device/vendor"
        if [[ "${vendor}" == "${MELLANOX}" ]]; then printf '%s\n' "${folder##*/}"; fi
    done | paste -s -d ' '
}

is_good() {
    local -r devices=" $1"
    [[ "${devices}" != " " && "${devices}" != *" rocep"* ]]
}

list_lacking_packages() {
    local -a packages
    read -r -a packages <<<"${HEADERS:-} ${PACKAGES:-}"
    list_lacking ${packages[@]+"${packages[@]}"}
}

report_state() {
    local -r devices="$(list_devices)" functions="$(count_functions)"
    data wanted "RDMA devices of DOCA-OFED (mlx5_…)"
    if ((functions == 0)); then
        data state ok
        data found "no Mellanox network device"
        return 0
    fi
    data found "${devices:-no RDMA device on ${functions} Mellanox network functions}"
    if is_good "${devices}"; then data state ok; else report_unready; fi
}

report_unready() {
    local -r obstacle="$(find_obstacle "DOCA-OFED 3 and the headers of kernel $(uname -r)")"
    local state=todo
    if [[ -n "${PACKAGES:-}" && -z "$(list_lacking_packages)" ]]; then
        state="$(state_after_change doca-ofed)"
    elif [[ -n "${obstacle}" ]]; then
        data state blocked
        data note "${obstacle}"
        return 0
    fi
    data state "${state}"
    [[ "${state}" != todo ]] || data needs reboot
    note_modules "${state}"
}

# note_modules STATE: what keeps its modules from being compiled or loaded, as far as it can be seen.
note_modules() {
    local -r state="$1" release="$(uname -r)"
    local note=""
    if [[ ! -e "${HOST_ROOT:-}/lib/modules/${release}/build" && ( "${state}" != todo || -z "${HEADERS:-}" ) ]]; then
        note="kernel ${release} has no headers here, so its modules cannot be compiled; "
    fi
    if is_secure_boot; then note+="Secure Boot refuses modules compiled here unless their key is enrolled (mokutil --import); "; fi
    [[ "${state}" != stuck ]] || note+="dkms status and dmesg say more; "
    [[ -z "${note}" ]] || data note "${note%; }"
}

# The value follows four bytes of attributes.
is_secure_boot() {
    local file
    for file in "${HOST_ROOT:-}"/sys/firmware/efi/efivars/SecureBoot-*; do
        [[ ! -r "${file}" || "$(od -An -tu1 -j4 -N1 -- "${file}" | tr -d ' ')" != 1 ]] || return 0
    done
    return 1
}

apply_ofed() {
    local -a packages
    read -r -a packages <<<"${HEADERS:-} ${PACKAGES:-}"
    add_repositories doca-ofed
    run_step "installing ${packages[*]-}" install_and_hold doca-ofed ${packages[@]+"${packages[@]}"}
    stamp_change doca-ofed
}

main() {
    run_held_recipe doca-ofed apply_ofed "${1:-check}"
}

main "$@"
