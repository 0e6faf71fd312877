# shellcheck shell=bash
# The MODULEPATH hook: two small files in /etc/profile.d through which a login shell finds our modulefiles, under Lmod and under
# Environment Modules alike. They look at no file: a shared directory that does not answer must not stop people from logging in.
#
# Arguments: check, apply or remove. Inputs: MODULEFILES, the directory to name; TAKES, directories of other prefixes, joined by colons, whose
# place it may take, or any. files.sh and hook.sh stand before this text; HOST_ROOT, for tests, stands before /etc and /usr.
#
# The hook is the host's: a prefix that nobody was asked about keeps it, and one that leaves gives it back to the one before.

# The modulefiles line of the header is what facts.sh reads.
print_header() {
    local -r folder="$1"
    cat <<'HEADER'
# Written by deepep-bootstrap (recipes/host/module-hook.sh), so that `module load deepep` works in every login shell. The next
# `invoke bootstrap` writes it anew; `invoke remove` takes it away.
HEADER
    printf '# modulefiles: %s\n' "${folder}"
}

print_sh() {
    local -r folder="$1"
    print_header "${folder}"
    cat <<SH
case ":\${MODULEPATH:-}:" in
    *:${folder}:*) ;;
    *) export MODULEPATH="${folder}\${MODULEPATH:+:\$MODULEPATH}" ;;
esac
SH
}

print_csh() {
    local -r folder="$1"
    print_header "${folder}"
    cat <<CSH
if ( ! \$?MODULEPATH ) setenv MODULEPATH ""
if ( "\$MODULEPATH" == "" ) then
    setenv MODULEPATH "${folder}"
else if ( ":\${MODULEPATH}:" !~ *:${folder}:* ) then
    setenv MODULEPATH "${folder}:\${MODULEPATH}"
endif
CSH
}

# Is there anything that would read MODULEPATH? Either where packages put it, or, for one installed by hand, in a login shell.
has_module_system() {
    local -r root="${HOST_ROOT:-}"
    local init
    for init in "${root}"/usr/share/{lmod/lmod,modules,Modules}/init/bash "${root}"/opt/apps/lmod/lmod/init/bash; do
        [[ ! -e "${init}" ]] || return 0
    done
    [[ -z "${root}" ]] && bash -lc 'type module' >/dev/null 2>&1 </dev/null
}

report_state() {
    local -r folder="$1"
    local found
    data wanted "${folder}"
    if ! has_module_system; then
        data state ok
        data found "no module system"
        data note "no module system here: users load the environment with . ${folder%/modulefiles}/current/env.sh"
    elif is_installed "${HOOK}.sh" 644 <<<"$(print_sh "${folder}")" && is_installed "${HOOK}.csh" 644 <<<"$(print_csh "${folder}")"; then
        data state ok
        data found "${folder}"
    else
        found="$(named_folder)" || found=""
        data state todo
        data found "$([[ "${found}" == "${folder}" ]] && echo "the hook of another version" || echo "${found:-no hook}")"
    fi
}

# need_consent FOLDER: end here where the hook is another prefix's and nobody said that ours may take its place.
need_consent() {
    local -r other="$(others_folder "$1")"
    [[ -z "${other}" || "${TAKES:-}" == any || ":${TAKES:-}:" == *":${other}:"* ]] ||
        die "${HOOK}.sh is of ${other%/modulefiles}, and nobody said that $1 may take its place (--take-over)"
}

apply_hook() {
    local -r folder="$1" other="$(others_folder "$1")"
    [[ -z "${other}" ]] || note_before "${other}"
    write_hook "${folder}"
}

write_hook() {
    local -r folder="$1"
    install_file module-hook "${HOOK}.sh" 644 <<<"$(print_sh "${folder}")"
    install_file module-hook "${HOOK}.csh" 644 <<<"$(print_csh "${folder}")"
}

# Earlier versions of this program wrote the hook without putting it on record: what carries its header is ours too.
drop_unrecorded_hook() {
    local file
    for file in "${HOOK}.sh" "${HOOK}.csh"; do
        is_written module-hook "${file}" && continue
        ! grep -sq '^# Written by deepep-bootstrap ' "${HOST_ROOT:-}${file}" || rm -f -- "${HOST_ROOT:-}${file}"
    done
}

# give_back FOLDER: let the hook lead to the prefix before ours again; fail where there is none, or where somebody changed the hook.
give_back() {
    local -r heir="$(print_heir "$1")"
    [[ -n "${heir}" ]] && is_ours module-hook "${HOOK}.sh" && is_ours module-hook "${HOOK}.csh" || return 1
    write_hook "${heir}"
    data note "given back to ${heir%/modulefiles}"
}

remove_hook() {
    local -r folder="$1" other="$(others_folder "$1")"
    if [[ -n "${other}" ]]; then
        data note "left, it is of ${other%/modulefiles}"
    elif ! give_back "${folder}"; then
        remove_files module-hook
        drop_unrecorded_hook
        rm -f -- "$(kept_path before module-hook)"
    fi
    data state ok
    data found "$(named_folder || echo "no hook")"
}

main() {
    local -r verb="${1:-check}"
    need_env MODULEFILES
    local -r folder="${MODULEFILES}"
    # The path goes into shell text that every login reads: only what needs no quoting anywhere may stand in it.
    [[ "${folder}" =~ ^/[A-Za-z0-9._/+-]+$ ]] || die "MODULEFILES: not a plain absolute path: ${folder}"
    case "${verb}" in
        check) report_state "${folder}" ;;
        apply)
            if [[ "$(report_state "${folder}")" == *state=todo* ]]; then
                need_consent "${folder}"
                apply_hook "${folder}"
            fi
            local -r after="$(report_state "${folder}")"
            [[ "${after}" == *state=ok* ]] || die "the hook in ${HOOK}.sh is not what was written: ${after}"
            printf '%s\n' "${after}"
            ;;
        remove) remove_hook "${folder}" ;;
        *) die "unknown argument ${verb}: check, apply or remove" ;;
    esac
}

main "$@"
