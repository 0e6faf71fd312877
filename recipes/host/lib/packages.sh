# shellcheck shell=bash
# Installing packages, for the host recipes that do. Before them stand lib.sh, files.sh, this, repositories.sh and keys.sh.
# Inputs, from the lock's row for the distribution: MANAGER, apt or dnf (empty: no row); PACKAGES and HEADERS, NAME or NAME=VERSION,
# where VERSION may be a glob; HOLD, globs of what would break the node if its version drifted; BY_HAND, what an administrator sets up
# first where the lock has no repository; PACKAGE_LOCK_WAIT, seconds to wait for a busy package manager.

# find_obstacle WHAT: print why this program cannot install WHAT here and what to do instead; nothing when it can.
find_obstacle() {
    local -r what="$1"
    local -rA renewals=([apt]="apt-get update" [dnf]="dnf makecache")
    if [[ -z "${MANAGER:-}" || -z "${PACKAGES:-}" ]]; then
        printf 'the lock has no packages for this distribution: install %s by hand\n' "${what}"
    elif [[ -n "${BY_HAND:-}" ]] && ! is_obtainable; then
        printf "set up by hand %s, then \`%s\`; the next run installs %s\n" "${BY_HAND}" "${renewals["${MANAGER}"]}" "${PACKAGES}"
    else
        find_unseen
    fi
}

# Do this host's repositories hold PACKAGES, by the lists at hand? Yes where dnf cannot read one (not fetched, or root's): root finds out.
is_obtainable() {
    local -a packages
    read -r -a packages <<<"${PACKAGES}"
    case "${MANAGER}" in
        apt) apt-get -s -qq install -- ${packages[@]+"${packages[@]}"} ;;
        dnf) [[ -n "$(dnf -C -q repoquery -- ${packages[@]+"${packages[@]/=/-}"} || echo unknown)" ]] ;;
    esac >/dev/null 2>&1
}

# list_lacking PACKAGE…: those that are not there, or in another version. A module (@NAME:STREAM) lacks as long as one of the others does.
list_lacking() {
    local package name version installed
    local -a modules=() lacking=()
    for package in "$@"; do
        name="${package%%=*}"
        version=""
        [[ "${package}" != *=* ]] || version="${package#*=}"
        [[ "${name}" != @* ]] || { modules+=("${name}"); continue; }
        installed="$(print_installed "${name}")"
        # shellcheck disable=SC2053 # the version is a glob
        [[ -n "${installed}" && ( -z "${version}" || "${installed}" == ${version} ) ]] || lacking+=("${package}")
    done
    ((${#lacking[@]} == 0)) || printf '%s\n' ${modules[@]+"${modules[@]}"} ${lacking[@]+"${lacking[@]}"}
}

# print_installed NAME: the version of an installed package; nothing when it is not (wholly) there.
print_installed() {
    local -r name="$1"
    if [[ "${MANAGER:-}" == dnf ]]; then
        rpm -q --qf '%{VERSION}-%{RELEASE}\n' -- "${name}" 2>/dev/null | grep -v ' ' | tail -n 1
    else
        dpkg-query -W -f '${db:Status-Status} ${Version}\n' -- "${name}" 2>/dev/null | sed -n 's/^installed //p' | tail -n 1
    fi || true # a package that is not there is an answer
}

# install_packages PACKAGE…: install what lacks of them. Nothing is removed or downgraded, no question asked, no configuration lost.
install_packages() {
    local -r by_hand="install by hand: $*${BY_HAND:+ (from ${BY_HAND})}"
    local -a lacking
    ((EUID == 0)) || die "packages can only be installed by root. As root, ${by_hand}"
    case "${MANAGER:-}" in
        apt) need_command apt-get dpkg-query ;;
        dnf) need_command dnf rpm ;;
        *) die "no package manager that this recipe knows (MANAGER=${MANAGER:-}). Please ${by_hand}" ;;
    esac
    mapfile -t lacking < <(list_lacking "$@" | sed '/^$/d')
    ((${#lacking[@]} > 0)) || return 0
    # With `||` the functions run without the strict mode's early end; they return the code of their last command.
    "install_with_${MANAGER}" ${lacking[@]+"${lacking[@]}"} ||
        die "${MANAGER} could not install the packages$(print_sources) (what it said is above). Please ${by_hand}"
}

# print_sources: the addresses of REPOSITORIES as the end of "the packages"; nothing where only the host's own are used.
print_sources() {
    local url
    local -a urls=()
    while read -r _ url _; do
        [[ -z "${url}" ]] || urls+=("${url}")
    done <<<"${REPOSITORIES:-}"
    ((${#urls[@]} == 0)) || printf ' from %s' "${urls[*]-}"
}

# run_apt ARGUMENT…: apt-get that asks nothing, keeps configuration files as the site has them and gives up on a dead mirror.
run_apt() {
    with_package_lock env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l apt-get -y -o Dpkg::Options::=--force-confold \
        -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 "$@"
}

# The package lists are fetched only when the ones at hand do not do. apt refuses to work after ^C or a lost network ended dpkg in the
# middle: what that had begun is finished first. Another program's dpkg at work looks the same, but is waited for.
install_with_apt() {
    if compgen -G '/var/lib/dpkg/updates/[0-9]*' >/dev/null; then
        say "an earlier installation was cut off: dpkg --configure -a"
        with_package_lock env DEBIAN_FRONTEND=noninteractive dpkg --force-confold --configure -a || return
    fi
    if run_apt --no-install-recommends --no-remove install -- "$@"; then return 0; fi
    say "trying again with new package lists"
    run_apt update
    run_apt --no-install-recommends --no-remove install -- "$@"
}

# dnf would wait for another dnf without a limit of its own, so it is told not to. Its lists are for two days good enough to it.
install_with_dnf() {
    local -ra options=(-y --setopt=install_weak_deps=False --setopt=exit_on_lock=True)
    if with_package_lock dnf "${options[@]}" install -- "${@/=/-}"; then return 0; fi
    say "trying again with new package lists"
    with_package_lock dnf "${options[@]}" --refresh install -- "${@/=/-}"
}

# install_and_hold RECIPE PACKAGE…: install packages and keep them, and the kernel they were made for, at their versions. What this
# program held before is let go for the installation, so that a newer lock can move it on.
install_and_hold() {
    local -r recipe="$1"
    shift
    local code=0
    release_packages "${recipe}"
    # In a subshell, because a failure must not leave the packages without their hold.
    (install_packages "$@") || code="$?"
    hold_packages "${recipe}"
    ((code == 0)) || exit "${code}"
}

# hold_packages RECIPE: keep what is installed and matches HOLD at its version; what somebody else holds is theirs and left alone.
hold_packages() {
    local -r recipe="$1" record="${HOST_ROOT:-}/var/lib/deepep-bootstrap/held/$1"
    local -a patterns names
    read -r -a patterns <<<"${HOLD:-}"
    ((${#patterns[@]} > 0)) || return 0
    mapfile -t names < <(list_free ${patterns[@]+"${patterns[@]}"} | sort -u)
    ((${#names[@]} > 0)) || return 0
    case "${MANAGER}" in
        apt) with_package_lock apt-mark hold -- ${names[@]+"${names[@]}"} >&2 ;;
        dnf) dnf -q -C versionlock add -- ${names[@]+"${names[@]}"} >&2 ;;
    esac || { warn "could not be held at their versions: ${names[*]-}"; return 0; }
    mkdir -p -- "${record%/*}"
    printf '%s\n' ${names[@]+"${names[@]}"} | sort -u - "$([[ -e "${record}" ]] && echo "${record}" || echo /dev/null)" | write_file "${record}" 644
    say "held at their versions (${recipe}): ${names[*]-}"
}

# list_free PATTERN…: installed packages that match and that nobody holds.
list_free() {
    case "${MANAGER}" in
        apt)
            dpkg-query -W -f '${db:Status-Want} ${db:Status-Status} ${Package}\n' -- "$@" 2>/dev/null | sed -n 's/^install installed //p'
            ;;
        dnf) rpm -qa --qf '%{NAME}\n' -- "$@" ;;
    esac || true # a pattern that nothing matches is an answer
}

# release_packages RECIPE: let go what hold_packages held for a recipe.
release_packages() {
    local -r record="${HOST_ROOT:-}/var/lib/deepep-bootstrap/held/$1"
    local -a names
    [[ -s "${record}" ]] || return 0
    mapfile -t names <"${record}"
    case "${MANAGER:-}" in
        dnf) dnf -q -C versionlock delete -- ${names[@]+"${names[@]}"} >&2 || warn "these may still be locked: ${names[*]-}" ;;
        *) with_package_lock apt-mark unhold -- ${names[@]+"${names[@]}"} >&2 || warn "these may still be held: ${names[*]-}" ;;
    esac
    rm -f -- "${record}"
}

# run_held_recipe RECIPE APPLY VERB: what a recipe does that installs packages and holds them. It has defined report_state, and the function
# APPLY, which is called where something is to be done.
run_held_recipe() {
    local -r recipe="$1" apply="$2" verb="$3"
    local before
    case "${verb}" in
        check) report_state ;;
        apply)
            before="$(report_state)"
            [[ "${before}" != *state=blocked* ]] || die "${before##*note=}"
            if [[ "${before}" == *state=todo* ]]; then "${apply}"; fi
            report_state
            ;;
        remove)
            release_packages "${recipe}"
            remove_files "${recipe}"
            data state ok
            data found "no repository of ours; packages stay"
            ;;
        *) die "unknown argument ${verb}: check, apply or remove" ;;
    esac
}
