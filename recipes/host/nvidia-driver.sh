# shellcheck shell=bash
# NVIDIA's driver with open kernel modules: only on a host with NVIDIA GPUs and no driver. One that is loaded or installed, of whatever
# version and kind, is left alone; where it is the lock's, headers are added that its modules lack. They are there after a reboot.
#
# Arguments: check, apply or remove. Inputs: those of packages.sh and repositories.sh; HEADERS, the headers of the running kernel.

readonly NVIDIA=0x10de
readonly GPU_CLASSES='0x030[02]*'
readonly BRIDGE_CLASS='0x0680*'

# count_functions CLASS: how many PCI functions of NVIDIA have a class; those that are handed to virtual machines do not count.
count_functions() {
    local -r wanted="$1"
    local folder vendor class count=0
    for folder in "${HOST_ROOT:-}"/sys/bus/pci/devices/*; do
        [[ -e "${folder}/vendor" && -e "${folder}/class" ]] || continue
        read -r vendor <"${folder}/vendor"
        read -r class <"${folder}/class"
        # shellcheck disable=SC2053 # the class is a glob
        [[ "${vendor}" == "${NVIDIA}" && "${class}" == ${wanted} ]] || continue
        [[ "$(readlink -- "${folder}/driver")" == */vfio-pci ]] || count=$((count + 1))
    done
    printf '%s\n' "${count}"
}

# Prints `open 580.95.05` or `proprietary 570.1`; nothing when no driver is loaded.
print_loaded() {
    local -r file="${HOST_ROOT:-}/proc/driver/nvidia/version"
    [[ -r "${file}" ]] || return 0
    awk 'NR == 1 {
        kind = /Open Kernel Module/ ? "open" : "proprietary"
        if (match($0, /[0-9]+\.[0-9.]+/)) print kind " " substr($0, RSTART, RLENGTH)
    }' "${file}"
}

# find_module KERNEL: where the driver's module for a kernel lies; for any kernel without an argument.
find_module() {
    find "${HOST_ROOT:-}/lib/modules/${1:-}" -name 'nvidia.ko*' -print -quit 2>/dev/null || true # no modules folder, no module
}

# Prints where a driver lies that is installed, for whatever kernel: modules, or sources of dkms (those of others of NVIDIA's left out).
find_driver() {
    local -r root="${HOST_ROOT:-}"
    local place
    for place in "$(find_module)" "${root}"/var/lib/dkms/nvidia*/[0-9]*/source "${root}"/usr/src/nvidia*/dkms.conf; do
        case "${place#"${root}"}" in */nvidia-fs* | */nvidia-peer* | "") continue ;; esac
        if exists "${place}"; then printf '%s\n' "${place#"${root}"}" && return; fi
    done
}

# is_there PACKAGES: are these packages there, in whatever version?
is_there() {
    local -a packages
    read -r -a packages <<<"$1"
    [[ -n "$1" && -z "$(list_lacking ${packages[@]+"${packages[@]%%=*}"})" ]]
}

# print_candidates: PACKAGES, each with the version that would be installed now, as far as the package lists at hand know it.
print_candidates() {
    local package version
    local -a packages
    read -r -a packages <<<"${PACKAGES:-}"
    for package in ${packages[@]+"${packages[@]}"}; do
        version=""
        if [[ "${MANAGER:-}" == apt && "${package}" != *=* ]]; then
            version="$(apt-cache policy -- "${package}" 2>/dev/null | sed -n 's/^  Candidate: \([0-9].*\)/\1/p')"
        fi
        printf '%s ' "${package}${version:+=${version}}"
    done
}

report_state() {
    local -r gpus="$(count_functions "${GPU_CLASSES}")" loaded="$(print_loaded)"
    data wanted "the NVIDIA driver, loaded"
    if [[ -n "${loaded}" ]]; then
        data state ok
        data found "${loaded}"
        [[ "${loaded}" == open* ]] || data note "the proprietary driver is left alone; with it, RDMA to GPU memory needs nvidia_peermem"
    elif ((gpus == 0)); then
        data state ok
        data found "no NVIDIA GPU"
    else
        data found "no driver loaded for ${gpus} GPUs"
        report_without_driver
    fi
}

report_without_driver() {
    local -r obstacle="$(find_obstacle "NVIDIA's driver with open kernel modules")" changed="$(state_after_change nvidia-driver)"
    local -r kernel="$(uname -r)" module="$(find_module "$(uname -r)")" driver="$(find_driver)"
    if is_there "${PACKAGES:-}" && [[ -z "${module}" && -n "${HEADERS:-}" ]] && ! is_there "${HEADERS}"; then
        data state todo
        data needs reboot
        data note "the driver is installed but has no module for kernel ${kernel}: this installs the headers that are missing"
    elif is_there "${PACKAGES:-}"; then
        data state "${changed}"
        if [[ "${changed}" == todo ]]; then data needs reboot; fi
        if [[ "${changed}" == stuck ]]; then data note "dkms status, modprobe nvidia and dmesg say why"; fi
    elif [[ -n "${module}" ]]; then
        data state blocked
        data note "${module#"${HOST_ROOT:-}"} is there but not loaded: modprobe nvidia, or dmesg, says why"
    elif [[ -n "${driver}" && "$(state_after_change nvidia-driver begun)" != reboot ]]; then
        data state blocked
        data note "a driver is installed (${driver}) but has no module for kernel ${kernel}: install that kernel's headers, then\
 \`dkms autoinstall\`; or a package of that driver with modules for this kernel"
    elif [[ -n "${obstacle}" ]]; then
        data state blocked
        data note "${obstacle}"
    else
        data state todo
        data needs reboot
        data candidate "$(print_candidates)"
        (($(count_functions "${BRIDGE_CLASS}") == 0)) || data note "the fabric manager of the NVSwitches follows after the reboot"
    fi
}

# The first stamp tells what an installation that is cut off leaves from a driver of the site, as long as the boot lasts.
apply_driver() {
    local -a packages
    read -r -a packages <<<"${HEADERS:-} $(is_there "${PACKAGES:-}" || printf '%s\n' "${PACKAGES:-}")"
    is_there "${PACKAGES:-}" || add_repositories nvidia-driver
    stamp_change nvidia-driver begun
    run_step "installing ${packages[*]-}" install_and_hold nvidia-driver ${packages[@]+"${packages[@]}"}
    stamp_change nvidia-driver
    clear_stamp nvidia-driver begun
}

main() {
    run_held_recipe nvidia-driver apply_driver "${1:-check}"
}

main "$@"
