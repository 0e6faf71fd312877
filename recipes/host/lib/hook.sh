# shellcheck shell=bash
# The MODULEPATH hook of a host: which prefix it leads to, and which ones it led to before. Only functions. files.sh stands before this text.
#
# There is one hook on a host, whatever number of prefixes. Below /var/lib/deepep-bootstrap, before/module-hook holds the modulefiles
# directories that it named until another prefix took its place, the last one last.

readonly HOOK=/etc/profile.d/zz-deepep

# named_folder: print the modulefiles directory that the hook names; fail where there is no hook.
named_folder() {
    local file
    for file in "${HOST_ROOT:-}${HOOK}".sh "${HOST_ROOT:-}${HOOK}".csh; do
        [[ -r "${file}" ]] || continue
        sed -n 's/^# modulefiles: //p' "${file}" | head -n 1 | tr -s /
        return 0
    done
    return 1
}

# others_folder FOLDER: print what the hook names where that is another directory; nothing where it is FOLDER or there is no hook.
others_folder() {
    local found
    found="$(named_folder)" || return 0
    [[ "${found}" == "$1" ]] || printf '%s\n' "${found}"
}

# offers FOLDER: are there modules in it? A shared directory that does not answer has none.
offers() {
    # shellcheck disable=SC2016 # expanded by the inner shell
    timeout 5 bash -c 'compgen -G "$1/deepep/*" >/dev/null' bash "${HOST_ROOT:-}$1"
}

# note_before FOLDER: another directory takes the place of this one.
note_before() {
    local -r folder="$1" list="$(kept_path before module-hook)"
    local others=""
    [[ ! -r "${list}" ]] || others="$(grep -vxF -- "${folder}" "${list}")" || others="" # it is the only one
    mkdir -p -- "${list%/*}"
    write_file "${list}" 644 <<<"${others:+${others}$'\n'}${folder}"
}

# print_heir FOLDER: print the directory that the hook goes back to when FOLDER's prefix leaves: of those it named before, the last one
# that has modules still. Nothing without one.
print_heir() {
    local -r ours="$1" list="$(kept_path before module-hook)"
    local folder heir=""
    [[ -r "${list}" ]] || return 0
    while read -r folder; do
        if [[ -n "${folder}" && "${folder}" != "${ours}" ]] && offers "${folder}"; then heir="${folder}"; fi
    done <"${list}"
    printf '%s\n' "${heir}"
}
