# shellcheck shell=bash
# The build dependencies, on the build host only: compiler, make, cmake, ninja, git, the headers of the mlx5 driver and of Python.
#
# Arguments: check, apply or remove. Inputs: those of packages.sh; PYTHON, the interpreter to build for (empty: its header is not looked
# for).

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
        data state "$([[ -n "${PACKAGES:-}" ]] && echo todo || echo blocked)"
        data found "no ${missing}"
        [[ -n "${PACKAGES:-}" ]] || data note "the lock has no packages for this distribution: install by hand ${missing}"
    fi
}

apply_packages() {
    local -a packages
    read -r -a packages <<<"${PACKAGES:-}"
    if ((${#packages[@]} == 0)); then
        die "this lock does not say what this distribution calls the packages. Please install by hand: $(list_missing | join_lines)"
    fi
    add_repositories build-deps
    install_packages ${packages[@]+"${packages[@]}"}
}

main() {
    local -r verb="${1:-check}"
    local left
    case "${verb}" in
        check) report_state ;;
        apply)
            if [[ "$(report_state)" != *state=ok* ]]; then apply_packages; fi
            left="$(list_missing | join_lines)"
            [[ -z "${left}" ]] || die "still missing after the installation: ${left}. Please install by hand what this distribution has not"
            report_state
            ;;
        remove)
            remove_files build-deps
            data state ok
            data found "no repository of ours; packages stay"
            ;;
        *) die "unknown argument ${verb}: check, apply or remove" ;;
    esac
}

main "$@"
