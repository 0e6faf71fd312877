# shellcheck shell=bash
# Whether this host is a client of Slurm whose controller answers. Data lines: path and conf, where the clients are not on PATH but a login
# shell finds them; works=1.
main() {
    local found path
    if ! command -v srun >/dev/null; then
        # shellcheck disable=SC2016 # the login shell expands it
        found="$(env -i HOME="${HOME:-/}" PATH=/usr/bin:/bin bash -lc 'echo "@$(command -v srun)|${SLURM_CONF:-}"' 2>/dev/null | grep '^@/' || true)"
        [[ -n "${found}" ]] || return 0
        found="${found#@}"
        path="${found%%|*}"
        PATH="${PATH}:${path%/*}"
        data path "${path%/*}"
        data conf "${found#*|}"
    fi
    timeout 20 sinfo --noheader --format=%P >/dev/null || return 0 # it says on stderr why
    data works 1
}

main "$@"
