# shellcheck shell=bash
# Options of the NVIDIA driver: EnableStreamMemOPs=1 and the key PeerMappingOverride=1 of RegistryDwords, beside whatever the site has.
#
# Arguments: check, apply, remove, or reload (the modules, instead of a reboot). modprobe reads the files of all its folders in the order of
# their names, then the kernel command line, and of one option the last value counts, whole: two files with RegistryDwords do not add up.
# So one file of ours, read after the others, repeats the keys that they set and adds ours. No other file is touched.

readonly OURS=/etc/modprobe.d/zz-deepep.conf
readonly PARAMS="${HOST_ROOT:-}/proc/driver/nvidia/params"
readonly MODULES=(nvidia_fs nvidia_uvm nvidia_drm nvidia_modeset nvidia_peermem gdrdrv nvidia) # in the order in which they can be unloaded
PATH="${PATH}:/usr/sbin:/sbin"

# read_config: sets module (nvidia, or what an install line loads in its place, as Debian does), before and after: its options around ours.
read_config() {
    local -r config="$(print_modprobe_config "${OURS##*/}" nvidia)"
    module="$(sed -En 's/^install nvidia .* (-i|--ignore-install) +([A-Za-z0-9_-]+).*/\2/p' <<<"${config}")"
    module="${module:-nvidia}"
    local -r values="s/^options ${module//-/_}[[:space:]]+//p"
    before="$(sed -En "/^options ours/q; ${values}" <<<"${config}")"
    after="$(sed -En "0,/^options ours/d; ${values}" <<<"${config}")"
}

# is_one TEXT: 1, 0x1, 01, with or without `=` before it.
is_one() {
    [[ "$1" =~ ^=?(0[xX])?0*1$ ]]
}

# has_key TEXT: is the last PeerMappingOverride of a RegistryDwords text a one?
has_key() {
    local -r text="${1#=}"
    [[ ";${text//[\" ]/}" =~ .*\;PeerMappingOverride=([^\;]*) ]] && is_one "${BASH_REMATCH[1]}"
}

# is_right LINES: do these option lines, taken alone, set both?
is_right() {
    is_one "$(value_of NVreg_EnableStreamMemOPs <<<"$1")" && has_key "$(value_of NVreg_RegistryDwords <<<"$1")"
}

# print_wanted: our file, with every key that was set before it except other values of ours.
print_wanted() {
    local -a entries
    local entry bare keys="" dwords
    dwords="$(value_of NVreg_RegistryDwords <<<"${before}")"
    IFS=';' read -r -a entries <<<"${dwords#=}"
    for entry in ${entries[@]+"${entries[@]}"}; do
        bare="${entry//[[:space:]]/}"
        [[ -z "${bare}" || "${bare,,}" == peermappingoverride?(=*) ]] || keys+="${entry};"
    done
    cat <<FILE
# Written by deepep-bootstrap (recipes/host/driver-options.sh). modprobe reads this file after the others, and of one option the last
# value counts: the keys that the others give RegistryDwords are repeated here. After a change there, the next \`invoke bootstrap\` writes
# this anew; \`invoke remove\` takes it away.
options ${module} NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="${keys}PeerMappingOverride=1;"
FILE
}

# print_spoilers: options set after our file, which would undo it.
print_spoilers() {
    local -r memops="$(value_of NVreg_EnableStreamMemOPs <<<"${after}")" dwords="$(value_of NVreg_RegistryDwords <<<"${after}")"
    [[ -z "${memops}" ]] || is_one "${memops}" || printf 'EnableStreamMemOPs%s ' "${memops}"
    [[ -z "${dwords}" ]] || has_key "${dwords}" || printf 'RegistryDwords%s ' "${dwords}"
}

# disk_state: set (by us or by others), missing, or spoiled.
disk_state() {
    if [[ -n "$(print_spoilers)" ]]; then echo spoiled && return; fi
    if is_installed "${OURS}" 644 <<<"$(print_wanted)"; then echo set && return; fi
    if ! exists "${HOST_ROOT:-}${OURS}" && is_right "${before}"$'\n'"${after}"; then echo set; else echo missing; fi
}

# driver_state: active, inactive, or none where no driver is loaded.
driver_state() {
    local text
    [[ -r "${PARAMS}" ]] || { echo none; return; }
    text="$(<"${PARAMS}")"
    if is_one "$(sed -n 's/^EnableStreamMemOPs: *//p' <<<"${text}")" && has_key "$(sed -n 's/^RegistryDwords: *//p' <<<"${text}")"; then
        echo active
    else
        echo inactive
    fi
}

# print_options_state: of the options alone, as report_state says it of all.
print_options_state() {
    case "$(disk_state) $(driver_state)" in
        spoiled*) echo blocked ;;
        missing*) echo todo ;;
        set\ inactive) state_after_change driver-options ;;
        *) echo ok ;;
    esac
}

report_state() {
    local state options note="" unread found="no driver is loaded" missing
    data wanted 'EnableStreamMemOPs: 1, RegistryDwords with PeerMappingOverride=1'
    if [[ -r "${PARAMS}" ]]; then
        found="$(grep -E '^(EnableStreamMemOPs|RegistryDwords): ' "${PARAMS}" | paste -s -d , | sed 's/,/, /g')"
    fi
    missing="$(print_missing)"
    data found "${found}${missing:+; ${missing} away since a reload that was cut off}"
    command -v modprobe >/dev/null || { data state blocked; data note "modprobe is missing: install kmod"; return; }
    read_config
    unread="$(print_unreadable)"
    [[ -z "${unread}" ]] || note="only root can read ${unread}and there may be options in it"
    options="$(print_options_state)"
    case "${options}" in
        blocked) note="the kernel command line or a file read after ours sets $(print_spoilers)and wins: change it there" ;;
        stuck) note="the files are right and this is a later boot: what loads the driver with other options?" ;;
    esac
    # What a reload took away comes back by apply, whatever is to become of the options.
    state="${missing:+todo}"
    state="${state:-${options}}"
    if [[ "${state}" == todo && "${options}" == @(todo|reboot) && "$(driver_state)" == inactive ]]; then data needs reboot; fi
    data state "${state}"
    [[ -z "${note}" ]] || data note "${note}"
}

write_options() {
    restore_driver
    read_config
    [[ "$(print_options_state)" == todo ]] || return 0
    clear_stamp driver-options # until the initramfs has them too
    if [[ "$(disk_state)" == missing ]]; then install_file driver-options "${OURS}" 644 <<<"$(print_wanted)"; fi
    refresh_initramfs
    [[ "$(driver_state)" != inactive ]] || stamp_change driver-options
}

main() {
    local module="" before="" after="" act=""
    case "${1:-check}" in
        check) report_state ;;
        apply) apply_todo write_options ;;
        reload)
            [[ "$(report_state)" != *state=todo* ]] || die "the options are not written yet: apply comes before reload"
            if [[ "$(driver_state)" == inactive ]]; then reload_modules "${MODULES[@]}"; fi
            apply_todo : ;;
        remove)
            need_root "remove ${OURS}"
            ! is_written driver-options "${OURS}" || act=refresh_initramfs
            remove_files driver-options
            "${act:-:}"
            clear_stamp driver-options
            restore_driver
            data state ok
            data found "no options of ours; a loaded driver keeps what it has" ;;
        *) die "unknown argument $1: check, apply, remove or reload" ;;
    esac
}

main "$@"
