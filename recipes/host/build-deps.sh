# shellcheck shell=bash
# The build dependencies, on the build host only: compiler, make, cmake, ninja, git, the headers of the mlx5 driver and of Python.
#
# Arguments: check or apply. Inputs: PACKAGES, what the distribution calls them; MANAGER, apt or dnf (empty: install by hand); PYTHON,
# the interpreter to build for (empty: its header is not looked for); PACKAGE_LOCK_WAIT, seconds to wait for a busy package manager.

readonly CMAKE_FLOOR=3.19
readonly MLX5_HEADER=/usr/include/infiniband/mlx5dv.h

# Prints what is missing, one a line, nothing when all is there.
list_missing() {
    local name
    for name in gcc g++ make ninja git; do
        command -v "${name}" >/dev/null || printf '%s\n' "${name}"
    done
    list_missing_cmake
    [[ -e "${MLX5_HEADER}" ]] || printf 'infiniband/mlx5dv.h\n'
    list_missing_python_header
}

list_missing_cmake() {
    local version=none
    if command -v cmake >/dev/null; then version="$(cmake --version | awk 'NR == 1 { print $3 }')"; fi
    if [[ "${version}" == none ]]; then
        printf 'cmake\n'
    elif ! printf '%s\n%s\n' "${CMAKE_FLOOR}" "${version}" | sort -VC; then
        printf 'cmake %s or newer (there is %s)\n' "${CMAKE_FLOOR}" "${version}"
    fi
}

list_missing_python_header() {
    local include
    [[ -n "${PYTHON:-}" ]] || return 0
    include="$("${PYTHON}" -I -c 'import sysconfig; print(sysconfig.get_path("include"))')" || include="an unknown folder"
    [[ -e "${include}/Python.h" ]] || printf 'Python.h of %s\n' "${PYTHON}"
}

join_lines() {
    paste -s -d , - | sed 's/,/, /g'
}

report_state() {
    local -r missing="$(list_missing | join_lines)"
    data wanted "compiler, make, cmake ${CMAKE_FLOOR} or newer, ninja, git, mlx5 and Python headers"
    if [[ -z "${missing}" ]]; then
        data state ok
        data found "all of them"
    else
        data state todo
        data found "no ${missing}"
    fi
}

# install_apt PACKAGE…: what is installed stays as it is, nothing is removed, no question is asked. The package lists are fetched only
# when the ones at hand do not do.
install_apt() {
    export DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l
    local -ra options=(-y --no-install-recommends --no-upgrade --no-remove -o Dpkg::Options::=--force-confold
        -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
    if with_package_lock apt-get "${options[@]}" install "$@"; then return 0; fi
    say "trying again with new package lists"
    with_package_lock apt-get -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 update
    with_package_lock apt-get "${options[@]}" install "$@"
}

# install_dnf PACKAGE…: dnf would wait for another dnf without a limit of its own, so it is told not to.
install_dnf() {
    with_package_lock dnf -y --setopt=install_weak_deps=False --setopt=exit_on_lock=True install "$@"
}

apply_packages() {
    local -a packages
    read -r -a packages <<<"${PACKAGES:-}"
    local -r by_hand="install by hand: ${packages[*]:-$(list_missing | join_lines)}"
    ((EUID == 0)) || die "packages can only be installed by root. As root, ${by_hand}"
    ((${#packages[@]} > 0)) || die "this lock does not say what this distribution calls the packages. Please ${by_hand}"
    case "${MANAGER:-}" in
        apt) need_command apt-get ;;
        dnf) need_command dnf ;;
        *) die "no package manager that this recipe knows (MANAGER=${MANAGER:-}). Please ${by_hand}" ;;
    esac
    # With `||` the functions run without the strict mode's early end; they return the code of their last command.
    "install_${MANAGER}" "${packages[@]}" || die "${MANAGER} could not install the packages (no network?). Please ${by_hand}"
}

main() {
    local -r verb="${1:-check}"
    local left
    case "${verb}" in
        check) report_state ;;
        apply)
            if [[ "$(report_state)" == *state=todo* ]]; then apply_packages; fi
            left="$(list_missing | join_lines)"
            [[ -z "${left}" ]] || die "still missing after the installation: ${left}. Please install by hand what this distribution has not"
            report_state
            ;;
        *) die "unknown argument ${verb}: check or apply" ;;
    esac
}

main "$@"
