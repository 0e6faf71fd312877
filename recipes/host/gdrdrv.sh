# shellcheck shell=bash
# shellcheck disable=SC2310 # functions that only look may fail in conditions
# GDRCopy's kernel module, for the handler `cpu` only: built with its kernel, loaded at every boot, /dev/gdrdrv with the right major.
#
# Arguments: check, apply or remove. Inputs: GDRDRV_WANTED, yes (else there is nothing to do); GDRCOPY_VERSION; SRC, GDRCopy's tree, to
# build from (needed only where no module is there). files.sh and kernel-modules.sh stand before this text.
#
# The kernel gives the major at each load, and with the closed NVIDIA driver nothing makes the node. So an install line of modprobe makes
# it anew after every load, whoever asks: systemd-modules-load at boot, a service or a person.

readonly LOADED_AT_BOOT=/etc/modules-load.d/deepep-gdrdrv.conf
readonly AFTER_LOAD=/etc/modprobe.d/deepep-gdrdrv.conf
PATH="${PATH}:/usr/sbin:/sbin"

# print_node_command ROOT: a line of sh that makes the node, as modprobe (ROOT empty) and we run it.
print_node_command() {
    # shellcheck disable=SC2016 # the dollars are awk's
    printf 'rm -f %s/dev/gdrdrv && mknod -m 666 %s/dev/gdrdrv c $(awk '\''$2 == "gdrdrv" { print $1 }'\'' %s/proc/devices) 0' "$1" "$1" "$1"
}

print_after_load() {
    cat <<FILE
# Written by deepep-bootstrap (recipes/host/gdrdrv.sh): after each load of gdrdrv its node is made with the major that the kernel gave it.
# \`invoke remove\` takes this file away.
install gdrdrv /sbin/modprobe --ignore-install gdrdrv \$CMDLINE_OPTS && $(print_node_command "")
FILE
}

print_list() {
    echo "# Written by deepep-bootstrap (recipes/host/gdrdrv.sh); \`invoke remove\` takes it away."
    echo gdrdrv
}

# find_built: the module file of the running kernel, whoever made it.
find_built() {
    find "${HOST_ROOT:-}/lib/modules/$(uname -r)/" -name 'gdrdrv.ko*' -print -quit 2>/dev/null || : # no such kernel folder: none
}

# find_driver_sources: the folder of the loaded driver's nv-p2p.c, which GDRCopy's module is compiled with. Left to itself its Makefile takes
# the first driver that lies in /usr/src, which may be one that is not used any more.
find_driver_sources() {
    local -r source="${HOST_ROOT:-}/usr/src"
    local version=""
    [[ ! -r "${HOST_ROOT:-}/sys/module/nvidia/version" ]] || read -r version <"${HOST_ROOT:-}/sys/module/nvidia/version"
    [[ -n "${version}" ]] || return 0
    find "${source}"/nvidia-*"${version}"* "${source}"/kernel-modules/nvidia-*"${version}"* -name nv-p2p.c -printf '%h\n' -quit 2>/dev/null ||
        : # a folder that is not there
}

kernel_major() {
    awk '$2 == "gdrdrv" { print $1; exit }' "${HOST_ROOT:-}/proc/devices" 2>/dev/null
}

# has_node: is /dev/gdrdrv there for everybody, with the major of the kernel?
has_node() {
    local found
    found="$(stat -L -c '%t %a' -- "${HOST_ROOT:-}/dev/gdrdrv" 2>/dev/null)" || return 1
    [[ "${found#* }" == *66 && "$((16#${found% *}))" == "$(kernel_major)" ]]
}

# print_missing: what is not as it should be, in words.
print_missing() {
    [[ -n "$(find_built)" ]] || echo "no module for this kernel"
    if ! is_loaded gdrdrv; then echo "not loaded"; elif ! has_node; then echo "/dev/gdrdrv is missing or closed or has another major"; fi
    loads_at_boot gdrdrv || echo "not loaded at boot"
    is_installed "${AFTER_LOAD}" 644 <<<"$(print_after_load)" || echo "node not made at boot"
}

# print_obstacle: what must be there before anything can be done here.
print_obstacle() {
    if ! is_loaded nvidia; then
        echo "the NVIDIA driver must be loaded first"
    elif [[ -z "$(find_built)" && ! -e "${HOST_ROOT:-}/lib/modules/$(uname -r)/build/Makefile" ]]; then
        echo "install the headers of the kernel $(uname -r) first"
    elif [[ -z "$(find_built)" && -z "$(find_driver_sources)" ]]; then
        echo "install the sources of the loaded NVIDIA driver first: no nv-p2p.c below /usr/src/nvidia-*$(cat -- "${HOST_ROOT:-}/sys/module/nvidia/version" 2>/dev/null) (Ubuntu: nvidia-kernel-source-…, others: the driver's DKMS package)"
    fi
}

report_state() {
    local missing obstacle
    if [[ "${GDRDRV_WANTED:-}" != yes ]]; then
        data wanted "" && data found "not needed" && data state ok
        return
    fi
    data wanted "gdrdrv loaded now and at boot, /dev/gdrdrv for everybody"
    missing="$(print_missing | paste -s -d , | sed 's/,/, /g')"
    obstacle="$(print_obstacle)"
    if [[ -z "${missing}" ]]; then data state ok && data found "loaded, major $(kernel_major)"
    elif [[ -n "${obstacle}" ]]; then
        data state blocked && data found "${missing}" && data note "${obstacle}"
    else
        data state todo && data found "${missing}"
    fi
}

print_dkms_conf() {
    cat <<FILE
# Written by deepep-bootstrap (recipes/host/gdrdrv.sh).
# NVIDIA_SRC_DIR names the sources of the driver that is loaded when this is built; where they are gone, GDRCopy's Makefile looks for itself.
PACKAGE_NAME="gdrdrv"
PACKAGE_VERSION="${GDRCOPY_VERSION}"
AUTOINSTALL="yes"
sources="\$(find /usr/src/nvidia-*"\$(cat /sys/module/nvidia/version)"* -name nv-p2p.c -printf '%h' -quit 2>/dev/null)"
MAKE[0]="cd src/gdrdrv && make KVER=\${kernelver}\${sources:+ NVIDIA_SRC_DIR=\${sources}}"
BUILT_MODULE_NAME[0]="gdrdrv"
BUILT_MODULE_LOCATION[0]="src/gdrdrv"
DEST_MODULE_LOCATION[0]="/updates/dkms"
FILE
}

# build_with_dkms: it builds the module again for each kernel that comes later.
build_with_dkms() {
    local -r tree="/usr/src/gdrdrv-${GDRCOPY_VERSION}" release="$(uname -r)" module="gdrdrv/${GDRCOPY_VERSION}"
    local file mode
    while read -r mode file; do
        install_file gdrdrv "${tree}/${file}" "${mode}" <"${SRC}/${file}"
    done < <(cd "${SRC}" && find src/gdrdrv scripts -type f -printf '%m %p\n')
    install_file gdrdrv "${tree}/dkms.conf" 644 <<<"$(print_dkms_conf)"
    [[ -n "$(dkms status "${module}")" ]] || dkms add "${module}" >&2
    run_step "dkms build ${module}" dkms build "${module}" -k "${release}"
    dkms install "${module}" -k "${release}" >&2
}

build_once() {
    local -r release="$(uname -r)" scratch="$(mktemp -d)"
    cp -R -- "${SRC}/." "${scratch}"
    run_step "make driver" make -C "${scratch}" driver KVER="${release}" NVIDIA_SRC_DIR="$(find_driver_sources)"
    install_file gdrdrv "/lib/modules/${release}/extra/gdrdrv.ko" 644 <"${scratch}/src/gdrdrv/gdrdrv.ko"
    rm -r -- "${scratch}"
    depmod "${release}" >&2
}

repair_gdrdrv() {
    if [[ -z "$(find_built)" ]]; then
        need_env SRC GDRCOPY_VERSION
        need_command make gcc
        if command -v dkms >/dev/null; then build_with_dkms; else build_once; fi
    fi
    install_file gdrdrv "${AFTER_LOAD}" 644 <<<"$(print_after_load)"
    loads_at_boot gdrdrv || install_file gdrdrv "${LOADED_AT_BOOT}" 644 <<<"$(print_list)"
    is_loaded gdrdrv || modprobe gdrdrv >&2 || die "gdrdrv does not load (with Secure Boot it must be signed); the kernel's log says why"
    has_node || sh -c "$(print_node_command "${HOST_ROOT:-}")"
}

remove_gdrdrv() {
    local -r list="$(kept_path files gdrdrv)"
    local module="" # the version that was built, which may be another than the lock's of today
    [[ ! -r "${list}" ]] || module="$(list_written "${list}" | sed -n 's,^/usr/src/gdrdrv-\(.*\)/dkms.conf$,gdrdrv/\1,p' | head -n 1)"
    [[ -z "${module}" || -z "$(dkms status "${module}")" ]] || dkms remove "${module}" --all >&2
    remove_files gdrdrv
    depmod "$(uname -r)" >&2
    data state ok && data found "no files of ours; a loaded module stays until the next boot"
}

main() {
    case "${1:-check}" in
        check) report_state ;;
        apply) apply_todo repair_gdrdrv ;;
        remove) need_root "remove the module" && remove_gdrdrv ;;
        *) die "unknown argument $1: check, apply or remove" ;;
    esac
}

main "$@"
