# shellcheck shell=bash
# Files that host recipes write, with what stood there before, so that all of it can be taken back. Only functions.
#
# Paths are given as the machine sees them (/etc/…); HOST_ROOT, for tests, is put in front here. Below /var/lib/deepep-bootstrap:
#   originals/PATH    what stood at PATH before this program first wrote it       absent/PATH    a mark that nothing stood there
#   files/RECIPE      a line for each text written: SHA256 PATH; and for each directory made: dir PATH
#   replaced/PATH     what somebody else had made of our text, when it was written over
#   changed/RECIPE    the boot during which RECIPE changed something that works after a reboot only; begun/RECIPE: one it began to install in
# The record is written before the file: whenever this is interrupted, either nothing happened or the record knows about it.

kept_path() {
    local -r kind="$1" name="$2"
    printf '%s/var/lib/deepep-bootstrap/%s/%s' "${HOST_ROOT:-}" "${kind}" "${name#/}"
}

# keep_copy KIND PATH: a copy of the file at PATH below KIND, a link as a link, with owner, mode and time, whole or not at all.
keep_copy() {
    local -r kept="$(kept_path "$1" "$2")" file="${HOST_ROOT:-}$2"
    mkdir -p -- "${kept%/*}"
    cp -a -- "${file}" "${kept}.new" && mv -fT -- "${kept}.new" "${kept}"
}

exists() {
    [[ -e "$1" || -L "$1" ]]
}

is_recorded() {
    local -r list="$(kept_path files "$1")"
    [[ -r "${list}" ]] && grep -qxF -- "$2 $3" "${list}"
}

# is_ours RECIPE PATH: does a text that RECIPE wrote stand at PATH?
is_ours() {
    local -r file="${HOST_ROOT:-}$2"
    [[ -f "${file}" && -r "${file}" && ! -L "${file}" ]] && is_recorded "$1" "$(sha256sum <"${file}" | cut -c 1-64)" "$2"
}

# is_written RECIPE PATH: did RECIPE write PATH at some time?
is_written() {
    local -r list="$(kept_path files "$1")"
    [[ -r "${list}" && $'\n'"$(list_written "${list}")"$'\n' == *$'\n'"$2"$'\n'* ]]
}

list_written() {
    sed -n '/^dir /!s/^[^ ]* //p' -- "$1" | sort -u
}

# is_installed PATH MODE: do exactly the bytes of standard input stand at PATH, with MODE (three digits)?
is_installed() {
    local -r file="${HOST_ROOT:-}$1" mode="$2"
    [[ -f "${file}" && ! -L "${file}" && "$(stat -c %a -- "${file}")" == "${mode}" ]] && cmp -s -- "${file}" -
}

# keep_before RECIPE PATH: remember what stands at PATH, the first time; later, text that somebody else put in the place of ours.
keep_before() {
    local -r recipe="$1" path="$2" mark="$(kept_path absent "$2")"
    if is_written "${recipe}" "${path}"; then
        if exists "${HOST_ROOT:-}${path}" && ! is_ours "${recipe}" "${path}"; then
            keep_copy replaced "${path}"
            say "${path} was changed by somebody else; that text is kept in $(kept_path replaced "${path}")"
        fi
    elif exists "${HOST_ROOT:-}${path}"; then
        keep_copy originals "${path}"
    else
        mkdir -p -- "${mark%/*}" && : >"${mark}"
        rm -f -- "$(kept_path originals "${path}")"
    fi
}

# make_folders RECIPE FOLDER: FOLDER and its parents; those that had to be made are recorded, outermost first.
make_folders() {
    local -r recipe="$1" folder="$2"
    [[ -n "${folder}" && ! -d "${HOST_ROOT:-}${folder}" ]] || return 0
    make_folders "${recipe}" "${folder%/*}"
    is_recorded "${recipe}" dir "${folder}" || printf 'dir %s\n' "${folder}" >>"$(kept_path files "${recipe}")"
    mkdir -p -- "${HOST_ROOT:-}${folder}"
}

# install_file RECIPE PATH MODE: standard input becomes PATH in one rename; what is so already is not touched. Give the text with <<<, not
# through a pipe: a command that fails in a pipe would leave half a text.
install_file() {
    local -r recipe="$1" path="$2" mode="$3" list="$(kept_path files "$1")"
    local aside
    [[ ! -d "${HOST_ROOT:-}${path}" ]] || die "${path} is a directory, wanted is a file"
    mkdir -p -- "${list%/*}"
    aside="$(mktemp "${list}.XXXXXX")"
    cat >"${aside}" || { rm -f -- "${aside}"; die "cannot write below ${list%/*}"; }
    if ! is_installed "${path}" "${mode}" <"${aside}"; then
        keep_before "${recipe}" "${path}"
        make_folders "${recipe}" "${path%/*}"
        printf '%s %s\n' "$(sha256sum <"${aside}" | cut -c 1-64)" "${path}" >>"${list}"
        write_file "${HOST_ROOT:-}${path}" "${mode}" <"${aside}"
        say "wrote ${path}"
    fi
    rm -f -- "${aside}"
}

# put_back RECIPE PATH: what stood there before, and no more memory of it.
put_back() {
    local -r path="$2" file="${HOST_ROOT:-}$2" kept="$(kept_path originals "$2")" list="$(kept_path files "$1")"
    local others
    exists "${kept}" || rm -f -- "${file}"
    ! exists "${kept}" || { cp -a -- "${kept}" "${file}.deepep-back" && mv -fT -- "${file}.deepep-back" "${file}"; }
    say "${path} is as it was before"
    others="$(awk -v path="${path}" '/^dir / || substr($0, index($0, " ") + 1) != path' "${list}")"
    write_file "${list}" 644 <<<"${others}"
    rm -f -- "${kept}" "$(kept_path absent "${path}")"
}

# stands_as_before PATH: is the file as it was before us, or as absent?
stands_as_before() {
    local -r kept="$(kept_path originals "$1")" file="${HOST_ROOT:-}$1"
    if exists "${kept}"; then cmp -s -- "${kept}" "${file}"; else ! exists "${file}"; fi
}

# remove_files RECIPE: put back or remove every file that RECIPE wrote and every directory that it made. A file that somebody changed after
# us is left alone, stays on record and is named in a `note` line on standard output.
remove_files() {
    local -r recipe="$1" list="$(kept_path files "$1")"
    local word path left=""
    [[ -f "${list}" ]] || return 0
    while read -r path; do
        if is_ours "${recipe}" "${path}" || stands_as_before "${path}"; then
            put_back "${recipe}" "${path}"
        else
            left+="${left:+, }${path}"
        fi
    done < <(list_written "${list}")
    while read -r word path; do
        if [[ "${word}" == dir && -d "${HOST_ROOT:-}${path}" ]]; then rmdir --ignore-fail-on-non-empty -- "${HOST_ROOT:-}${path}"; fi
    done < <(tac -- "${list}")
    if [[ -z "${left}" ]]; then rm -f -- "${list}"; else data note "changed by somebody else since, left alone: ${left}"; fi
}

# stamp_change RECIPE [begun]: something was changed that works only after a reboot.
stamp_change() {
    local -r stamp="$(kept_path "${2:-changed}" "$1")"
    mkdir -p -- "${stamp%/*}"
    write_file "${stamp}" 644 <"${HOST_ROOT:-}/proc/sys/kernel/random/boot_id"
}

clear_stamp() {
    rm -f -- "$(kept_path "${2:-changed}" "$1")"
}

# state_after_change RECIPE [begun]: `reboot` while the boot of the change lasts, `stuck` in a later one, `todo` where there was no change.
state_after_change() {
    local -r stamp="$(kept_path "${2:-changed}" "$1")" boot="${HOST_ROOT:-}/proc/sys/kernel/random/boot_id"
    if [[ ! -r "${stamp}" ]]; then echo todo; elif [[ "$(<"${stamp}")" == "$(<"${boot}")" ]]; then echo reboot; else echo stuck; fi
}
