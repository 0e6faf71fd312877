# shellcheck shell=bash
# A Python that the stack has wheels for, beside the distribution's own, where the distribution has one to install.
#
# Arguments: check, apply or remove. Inputs: PYTHON_WANTED, "3.12" (empty: none is wanted); those of packages.sh and repositories.sh.

# The wanted Python must be among the packages of the lock's row: another one would be installed for nothing.
find_python_obstacle() {
    local -r wanted="python${PYTHON_WANTED}"
    if [[ -n "${PACKAGES:-}" && " ${PACKAGES//=/ } " != *" ${wanted} "* ]]; then
        printf 'the lock has no %s for this distribution: install it as /usr/bin/%s by hand, or use --python\n' "${wanted}" "${wanted}"
    else
        find_obstacle "/usr/bin/${wanted}"
    fi
}

report_state() {
    local obstacle
    data wanted "${PYTHON_WANTED:+/usr/bin/python${PYTHON_WANTED}}"
    if [[ -z "${PYTHON_WANTED:-}" ]]; then
        data state ok
        data found "no other Python is needed"
    elif [[ -x "${HOST_ROOT:-}/usr/bin/python${PYTHON_WANTED}" ]]; then
        data state ok
        data found "/usr/bin/python${PYTHON_WANTED}"
    else
        obstacle="$(find_python_obstacle)"
        data state "$([[ -z "${obstacle}" ]] && echo todo || echo blocked)"
        data found "no python${PYTHON_WANTED}"
        [[ -z "${obstacle}" ]] || data note "${obstacle}"
    fi
}

main() {
    local -r verb="${1:-check}"
    local before
    local -a packages
    case "${verb}" in
        check) report_state ;;
        apply)
            before="$(report_state)"
            [[ "${before}" != *state=blocked* ]] || die "${before##*note=}"
            if [[ "${before}" == *state=todo* ]]; then
                read -r -a packages <<<"${PACKAGES:-}"
                add_repositories python
                run_step "installing ${PACKAGES}" install_packages ${packages[@]+"${packages[@]}"}
            fi
            report_state
            ;;
        remove)
            remove_files python
            data state ok
            data found "no repository of ours; packages stay"
            ;;
        *) die "unknown argument ${verb}: check, apply or remove" ;;
    esac
}

main "$@"
