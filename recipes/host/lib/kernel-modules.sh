# shellcheck shell=bash
# What host recipes that handle kernel modules and limits have in common. Only functions. HOST_ROOT, for tests, stands before all paths.

# is_loaded MODULE
is_loaded() {
    [[ -d "${HOST_ROOT:-}/sys/module/${1//-/_}" ]]
}

# need_root WHAT
need_root() {
    ((EUID == 0)) || [[ -n "${HOST_ROOT:-}" ]] || die "only root can $1"
}

# apply_todo ACT: with the recipe's report_state, look, ACT where there is something to do, look again; prints the last answer.
apply_todo() {
    local answer
    answer="$(report_state)"
    if [[ $'\n'"${answer}" == *$'\n'state=todo* ]]; then
        need_root "change this"
        "$1"
        answer="$(report_state)"
    fi
    [[ $'\n'"${answer}" == *$'\n'state=@(ok|reboot)* ]] || die "not as wanted: $(paste -s -d ';' <<<"${answer}")"
    printf '%s\n' "${answer}"
}

# loads_at_boot MODULE: do the lists of modules to load, of whatever package or person, name it?
loads_at_boot() {
    local -r root="${HOST_ROOT:-}" line="[[:space:]]*${1//[-_]/[-_]}[[:space:]]*"
    grep -sqxE "${line}" "${root}"/etc/modules "${root}"/{etc,run,usr/local/lib,usr/lib}/modules-load.d/*.conf
}

# print_modprobe_config NAME PATTERN: the option and install lines of modules that PATTERN fits, as modprobe itself understands all its
# folders and the kernel command line. In place of a file NAME stands the line `options ours here`: what comes later wins over that file.
print_modprobe_config() {
    local -a folders=()
    local folder scratch
    scratch="$(mktemp -d)"
    echo "options ours here" >"${scratch}/$1" # a name in the first folder hides the same name in the others
    for folder in etc run usr/local/lib usr/lib lib; do folders+=(-C "${HOST_ROOT:-}/${folder}/modprobe.d"); done
    modprobe --showconfig -C "${scratch}" ${folders[@]+"${folders[@]}"} | sed -En "/^(options|install) ($2|ours)/p"
    rm -r -- "${scratch}"
}

# print_unreadable: the files of modprobe that this user cannot read.
print_unreadable() {
    local file
    for file in "${HOST_ROOT:-}"/{etc,run,usr/local/lib,usr/lib}/modprobe.d/*.conf; do
        [[ ! -e "${file}" || -r "${file}" ]] || printf '%s ' "${file}"
    done
}

# value_of NAME: `=` and the last value of a module's option in the lines of standard input, without quotes; nothing where it is not set.
value_of() {
    local -r word='^[[:space:]]*(([^[:space:]"]|"[^"]*("|$))+)(.*)$'
    local rest token name value=""
    while read -r rest; do
        while [[ "${rest}" =~ ${word} ]]; do
            token="${BASH_REMATCH[1]//\"/}" rest="${BASH_REMATCH[4]}" name="${token%%=*}"
            [[ "${name//-/_}" != "$1" || "${token}" == "${name}" ]] || value="=${token#*=}"
        done
    done
    printf '%s' "${value}"
}

# refresh_initramfs: rebuild what the kernel reads its first modules and options from, with the tool that this distribution has.
refresh_initramfs() {
    if command -v update-initramfs >/dev/null; then
        run_step "update-initramfs" update-initramfs -u -k all
    elif command -v dracut >/dev/null; then
        run_step "dracut" dracut --force --regenerate-all
    else
        say "neither update-initramfs nor dracut is here: no initramfs to refresh"
    fi
}

# runs_unit UNIT: does systemd run it now?
runs_unit() {
    [[ -d "${HOST_ROOT:-}/run/systemd/system" ]] && systemctl is-active --quiet "$1"
}

# list_gpu_users NAME…: the processes with an open /dev/nvidia*, as `NAME (PID)`, without those called NAME.
list_gpu_users() {
    local folder name
    while read -r folder; do
        name="$(cat -- "${folder%/fd}/comm" 2>/dev/null)" || continue # it has ended
        folder="${folder%/fd}"
        [[ " $* " == *" ${name} "* ]] || printf '%s (%s)\n' "${name}" "${folder##*/}"
    done < <({ find "${HOST_ROOT:-}"/proc/[0-9]*/fd -lname '/dev/nvidia*' -printf '%h\n' 2>/dev/null || :; } | sort -u) # some end meanwhile
}

# unload_modules MODULE…: those of them that are loaded, in this order, up to one that stays.
unload_modules() {
    local module
    for module in "$@"; do
        ! is_loaded "${module}" || rmmod "${module}" >&2 || return 0
    done
}

# list_holders MODULE…: the loaded modules that use one of these and are not among them.
list_holders() {
    local module holder
    for module in "$@"; do
        for holder in "${HOST_ROOT:-}/sys/module/${module}/holders"/*; do
            [[ ! -L "${holder}" || " $* " == *" ${holder##*/} "* ]] || printf '%s\n' "${holder##*/}"
        done
    done | sort -u
}

# The record of a reload is the boot, then what the reload takes away: `module NAME`, in the order of loading, and `service NAME`. It is
# written before anything stops and goes when all is back: whatever ends a reload, the next run knows what is missing. Another boot loads and
# starts by itself what belongs there.

# record_reload MODULE…: what is loaded of these modules, given in the order of unloading, and runs of the driver's services; also what a
# reload earlier in this boot took away and did not bring back.
record_reload() {
    local -r record="$(kept_path reload driver)" missing=$'\n'"$(list_missing)"$'\n'
    local i service
    mkdir -p -- "${record%/*}"
    {
        printf 'boot %s\n' "$(<"${HOST_ROOT:-}/proc/sys/kernel/random/boot_id")"
        for ((i = $#; i > 0; i--)); do
            if is_loaded "${!i}" || [[ "${missing}" == *$'\n'"module ${!i}"$'\n'* ]]; then printf 'module %s\n' "${!i}"; fi
        done
        for service in nvidia-persistenced nvidia-fabricmanager; do
            if runs_unit "${service}" || [[ "${missing}" == *$'\n'"service ${service}"$'\n'* ]]; then printf 'service %s\n' "${service}"; fi
        done
    } | write_file "${record}" 644
}

# list_missing: what a reload in this boot took away and is not back, in the words of the record.
list_missing() {
    local -r record="$(kept_path reload driver)"
    local kind name
    [[ -r "${record}" ]] || return 0
    while read -r kind name; do
        case "${kind}" in
            boot) [[ "${name}" == "$(<"${HOST_ROOT:-}/proc/sys/kernel/random/boot_id")" ]] || return 0 ;;
            module) is_loaded "${name}" || printf 'module %s\n' "${name}" ;;
            service) runs_unit "${name}" || printf 'service %s\n' "${name}" ;;
        esac
    done <"${record}"
}

# print_missing: the names of the same, for people.
print_missing() {
    list_missing | cut -d ' ' -f 2 | paste -s -d ' '
}

# restore_driver: load and start what a reload took away; what does not come keeps nothing else from coming, and the record stays.
restore_driver() {
    local line
    local -a lines=()
    mapfile -t lines < <(list_missing)
    for line in ${lines[@]+"${lines[@]}"}; do
        case "${line}" in
            module\ *) modprobe "${line#* }" >&2 || warn "${line#* } does not load" ;;
            service\ *) systemctl start "${line#* }" >&2 || warn "${line#* } does not start" ;;
        esac || : # nobody may be there any more to hear the warning
    done
    [[ -n "$(list_missing)" ]] || rm -f -- "$(kept_path reload driver)"
}

# restore_after_all: the EXIT trap of a reload. It works in a session of its own: who ends ours gives it five seconds, and modules of eight
# GPUs may take longer.
restore_after_all() {
    trap '' HUP INT TERM PIPE # whoever ends us may say so twice, and nobody may be listening any more
    trap - ERR
    set +e
    setsid bash -c "$(declare -f warn kept_path is_loaded runs_unit list_missing restore_driver); restore_driver" &
    wait "$!"
}

# reload_modules MODULE…: unload and load the modules of the GPU driver, given in the order in which they can be unloaded, where no
# process uses a GPU. The driver's daemons stop meanwhile. Whatever ends it, what was unloaded is loaded again as far as it can be.
reload_modules() {
    local -rA names=([nvidia-persistenced]=nvidia-persiste [nvidia-fabricmanager]=nv-fabricmanage) # of their processes: 15 characters
    local users holders daemon missing stayed=""
    local -a daemons=() ours=()
    need_root "reload the driver"
    for daemon in "${!names[@]}"; do
        if runs_unit "${daemon}"; then daemons+=("${daemon}") ours+=("${names[${daemon}]}"); fi
    done
    users="$(list_gpu_users ${ours[@]+"${ours[@]}"} | paste -s -d ,)"
    [[ -z "${users}" ]] || die "the GPUs are in use by ${users}: the driver stays as it is"
    # The fabric manager is not to be stopped in vain: it starts anew well only below a driver that was loaded anew.
    holders="$(list_holders "$@" | paste -s -d ,)"
    [[ -z "${holders}" ]] || die "${holders} holds the driver's modules and would stay: the driver stays as it is"
    record_reload "$@" || die "cannot write down what is to come back: the driver stays as it is"
    trap '' PIPE # a message that nobody reads any more must not end this without its EXIT trap
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap restore_after_all EXIT
    for daemon in ${daemons[@]+"${daemons[@]}"}; do systemctl stop "${daemon}" >&2 || warn "${daemon} does not stop"; done
    unload_modules "$@"
    if is_loaded "${!#}"; then stayed=yes; fi
    restore_driver
    missing="$(print_missing)"
    trap - EXIT HUP INT TERM
    [[ -z "${missing}" ]] || die "what was taken away does not come back: ${missing}"
    [[ -z "${stayed}" ]] || die "the driver could not be unloaded; its modules are loaded as before"
}
