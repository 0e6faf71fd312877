# shellcheck shell=bash
# NVIDIA's fabric manager, running, in the loaded driver's own version: on a host with NVSwitches CUDA does not start before it has
# configured their fabric (error 802). It is installed only where the driver is that of the lock's packages; elsewhere the package is named.
# Programs outlive their fabric manager, but not well its start below them (NVLink multicast): then it starts with the next boot.
#
# Arguments: check, apply or remove. Inputs: those of packages.sh and repositories.sh; DRIVER_PACKAGES, the lock's packages of the driver;
# NVSWITCHES, how many are on the PCI bus; FABRIC_WAIT, seconds to wait for the fabric after a start.

readonly UNIT=nvidia-fabricmanager.service

# print_driver: the version of the loaded driver, nothing without one.
print_driver() {
    local version=""
    [[ ! -r "${HOST_ROOT:-}/sys/module/nvidia/version" ]] || read -r version <"${HOST_ROOT:-}/sys/module/nvidia/version"
    printf '%s' "${version}"
}

# print_unit: systemd's word for the unit: active, inactive, failed …; absent without such a unit, nothing without systemd.
print_unit() {
    [[ -d "${HOST_ROOT:-}/run/systemd/system" ]] || return 0
    if [[ "$(systemctl show -p LoadState --value "${UNIT}")" == not-found ]]; then
        printf absent
    else
        systemctl show -p ActiveState --value "${UNIT}"
    fi
}

# print_fabric: what the GPUs say of their fabric, each different answer once; nothing where they have none, or the driver is too old to say.
print_fabric() {
    local said # an old driver says that it does not know the question where the answer belongs
    said="$(timeout -k 1 30 nvidia-smi --query-gpu=fabric.state,fabric.status --format=csv,noheader 2>/dev/null)" || return 0
    sed -E -e 's/, *\[?(N\/A|Not Supported)\]?$//' -e '/^\[?(N\/A|Not Supported)\]?/d' -e '/^$/d' -e 's/, */\//' <<<"${said}" |
        sort -u | paste -s -d ,
}

is_well() {
    [[ "$1" == Completed || "$1" == Completed/Success || -z "$1" ]]
}

# is_in_use UNIT FABRIC: may programs use the fabric now? Where the GPUs do not say: unless no fabric manager was ever here.
is_in_use() {
    if [[ -z "$2" ]]; then [[ "$1" != absent ]]; else [[ ",$2," == *,Completed?(/Success),* ]]; fi
}

# has_our_driver: is the driver the one that the lock names?
has_our_driver() {
    local -a packages
    read -r -a packages <<<"${DRIVER_PACKAGES:-}"
    ((${#packages[@]} > 0)) && [[ -z "$(list_lacking ${packages[@]+"${packages[@]}"})" ]]
}

# print_package: the package in the version of the loaded driver. For the lock's driver, and with dnf, by the lock's name, with the
# driver's branch; else by where apt got the driver. Ubuntu's (-server) has the branch in the name, NVIDIA's own had it before 580.
print_package() {
    local -r version="$(print_driver)"
    local -r branch="${version%%.*}"
    local name="${PACKAGES:-nvidia-fabricmanager}"
    if [[ "${MANAGER:-}" != dnf ]] && ! has_our_driver; then
        name=nvidia-fabricmanager
        if ((branch < 580)) || [[ -n "$(print_installed "libnvidia-compute-${branch}-server")" ]]; then name+="-${branch}"; fi
    elif [[ "${name}" =~ ^(.*)-[0-9]+$ ]]; then
        name="${BASH_REMATCH[1]}-${branch}"
    fi
    printf '%s=%s-*' "${name}" "${version}"
}

report_state() {
    local -r version="$(print_driver)" unit="$(print_unit)" fabric="$(print_fabric)"
    data wanted "the fabric manager of driver ${version:-loaded first}, running; the fabric completed"
    data found "fabric manager ${unit:-without systemd}, fabric ${fabric:-unknown}"
    if is_well "${fabric}" && [[ "${unit}" == @(active|activating|reloading) || ("${unit:-absent}" == absent && -n "${fabric}") ]]; then
        data state ok && return # without a unit somebody else configures it, such as the host of a virtual machine
    fi
    local -r obstacle="$(print_obstacle "${version}" "${unit}" "${fabric}")"
    if [[ -n "${obstacle}" ]]; then
        data state blocked
        data note "${obstacle}"
    elif ! is_in_use "${unit}" "${fabric}"; then
        data state todo
    elif [[ "$(state_after_change fabric-manager)" == reboot ]]; then
        data state reboot
    else
        data state todo # also where it went down again, long after that boot
        data needs reboot
        data note "programs may use the fabric, and a start now would break NVLink multicast below them: it starts with the next boot"
    fi
}

# print_obstacle VERSION UNIT FABRIC: why this program does not install or start it, and what to do; nothing where it does.
print_obstacle() {
    local -r version="$1" unit="$2"
    local start="systemctl enable --now ${UNIT%.service}"
    if is_in_use "${unit}" "$3"; then start="systemctl enable ${UNIT%.service}, a drain and a reboot"; fi
    if [[ -z "${version}" ]]; then
        echo "the driver comes first"
    elif [[ -z "${unit}" ]]; then
        echo "no systemd here that could run it: whoever starts this machine or container has to"
    elif [[ "${unit}" == active ]]; then
        echo "it runs, but the fabric is not completed: journalctl -u ${UNIT%.service}, and nvidia-smi -q, say why"
    elif ((${NVSWITCHES:-0} == 0)); then
        print_nvlsm "${version%%.*}" "${start}"
    elif ! has_our_driver; then
        echo "the driver did not come from the lock's packages: install $(print_package) by hand, then ${start}"
    else
        find_obstacle "NVIDIA's fabric manager ($(print_package))"
    fi
}

# print_nvlsm BRANCH START: what takes the place of the fabric manager alone where the NVSwitches are no PCI devices.
print_nvlsm() {
    echo "no NVSwitch is on the PCI bus. On HGX and DGX B200 and B300 the fabric manager needs NVLSM: install nvlink5-$1 (both)," \
        "libibumad3 (Red Hat: libibumad) and infiniband-diags, and load ib_umad at every boot, by hand, then $2." \
        "In a virtual machine or a GB200 rack, whoever runs the switches starts it"
}

# set_up_manager: start it now or, where programs may use the fabric, with the next boot. What is installed stays then as it is: that
# boot may bring another version of the driver.
set_up_manager() {
    local i unit in_use=""
    unit="$(print_unit)"
    if is_in_use "${unit}" "$(print_fabric)"; then in_use=yes; fi
    if [[ -z "${in_use}" || "${unit}" == absent ]]; then
        add_repositories fabric-manager
        run_step "installing $(print_package)" install_and_hold fabric-manager "$(print_package)"
    fi
    systemctl enable "${UNIT}" >&2 || die "systemctl cannot enable ${UNIT} (what it said is above)"
    [[ -z "${in_use}" ]] || { stamp_change fabric-manager; return 0; }
    systemctl restart "${UNIT}" >&2 || die "${UNIT} does not start: journalctl -u ${UNIT%.service} says why"
    for ((i = 0; i < ${FABRIC_WAIT:-90}; i++)); do
        ! is_well "$(print_fabric)" || break
        sleep 1
    done
}

main() {
    case "${1:-check}" in
        check) report_state ;;
        apply) apply_todo set_up_manager ;;
        remove)
            release_packages fabric-manager
            remove_files fabric-manager
            clear_stamp fabric-manager
            data state ok
            data found "no repository of ours; the package stays, and runs" ;;
        *) die "unknown argument $1: check, apply or remove" ;;
    esac
}

main "$@"
