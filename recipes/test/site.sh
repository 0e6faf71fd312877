# shellcheck shell=bash
# A file of the site's own in the prefix: printed if it is there; with the argument `write`, standard input becomes it. It needs
# prefix/lib/share.sh before it. Inputs: PREFIX, NAME (the file's name there).

main() {
    need_env PREFIX NAME
    local mode=0644
    [[ "${NAME}" =~ ^[a-z][a-z.]*$ ]] || die "bad name '${NAME}'"
    if [[ "${1:-}" == write ]]; then
        ! is_shared || mode=0664
        write_file "${PREFIX}/${NAME}" "${mode}"
        share_tree "${PREFIX}/${NAME}"
    elif [[ -r "${PREFIX}/${NAME}" ]]; then
        cat -- "${PREFIX}/${NAME}"
    fi
}

main "$@"
