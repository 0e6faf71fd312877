# shellcheck shell=bash
# NVIDIA's fabric manager, running, in the loaded driver's own version: on a host with NVSwitches CUDA does not start before it has
# configured their fabric (error 802). It is installed only where the driver is that of the lock's packages; elsewhere the package is named.
#
# Arguments: check, apply or remove. Inputs: those of packages.sh and repositories.sh; DRIVER_PACKAGES, the lock's packages of the driver;
# FABRIC_WAIT, seconds to wait for the fabric after a start.

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
    timeout -k 1 30 nvidia-smi --query-gpu=fabric.state,fabric.status --format=csv,noheader 2>/dev/null |
        sed -e 's/, */\//' -e '/N\/A\|Not Supported/d' -e '/^$/d' | sort -u | paste -s -d , || true # an old driver does not know the question
}

is_well() {
    [[ "$1" == Completed || "$1" == Completed/Success || -z "$1" ]]
}

# has_our_driver: is the driver the one that the lock names?
has_our_driver() {
    local -a packages
    read -r -a packages <<<"${DRIVER_PACKAGES:-}"
    ((${#packages[@]} > 0)) && [[ -z "$(list_lacking "${packages[@]}")" ]]
}

# print_package: the lock's package in the version of the loaded driver; a branch in its name becomes the driver's.
print_package() {
    local -r version="$(print_driver)" name="${PACKAGES:-nvidia-fabricmanager}"
    if [[ "${name}" =~ ^(.*)-[0-9]+$ ]]; then printf '%s' "${BASH_REMATCH[1]}-${version%%.*}"; else printf '%s' "${name}"; fi
    printf '=%s-*' "${version}"
}

report_state() {
    local -r version="$(print_driver)" unit="$(print_unit)" fabric="$(print_fabric)"
    data wanted "the fabric manager of driver ${version:-loaded first}, running; the fabric completed"
    data found "fabric manager ${unit:-without systemd}, fabric ${fabric:-unknown}"
    if is_well "${fabric}" && [[ "${unit}" == active || ("${unit:-absent}" == absent && -n "${fabric}") ]]; then
        data state ok # without a unit somebody else configures it, such as the host of a virtual machine
        return 0
    fi
    local -r obstacle="$(print_obstacle "${version}" "${unit}")"
    if [[ -n "${obstacle}" ]]; then
        data state blocked
        data note "${obstacle}"
    else
        data state todo
    fi
}

# print_obstacle VERSION UNIT: why this program does not install or start it, and what to do; nothing where it does.
print_obstacle() {
    local -r version="$1" unit="$2" start="systemctl enable --now ${UNIT%.service}"
    if [[ -z "${version}" ]]; then
        echo "the driver comes first"
    elif [[ -z "${unit}" ]]; then
        echo "no systemd here that could run it: whoever starts this machine or container has to"
    elif [[ "${unit}" == active ]]; then
        echo "it runs, but the fabric is not completed: journalctl -u ${UNIT%.service}, and nvidia-smi -q, say why"
    elif ! has_our_driver; then
        echo "the driver did not come from the lock's packages: install $(print_package) by hand, then ${start}"
    else
        find_obstacle "NVIDIA's fabric manager ($(print_package))"
    fi
}

start_manager() {
    local i package
    package="$(print_package)"
    add_repositories fabric-manager
    run_step "installing ${package}" install_and_hold fabric-manager "${package}"
    systemctl enable "${UNIT}" >&2 || die "systemctl cannot enable ${UNIT} (what it said is above)"
    systemctl restart "${UNIT}" >&2 || die "${UNIT} does not start: journalctl -u ${UNIT%.service} says why"
    for ((i = 0; i < ${FABRIC_WAIT:-90}; i++)); do
        ! is_well "$(print_fabric)" || break
        sleep 1
    done
}

main() {
    case "${1:-check}" in
        check) report_state ;;
        apply) apply_todo start_manager ;;
        remove)
            release_packages fabric-manager
            remove_files fabric-manager
            data state ok
            data found "no repository of ours; the package stays, and runs" ;;
        *) die "unknown argument $1: check, apply or remove" ;;
    esac
}

main "$@"
