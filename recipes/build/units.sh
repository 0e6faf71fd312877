# shellcheck shell=bash
# The compile units of an entry: the longest ones first, how long each took, and ccache for those of the host compiler. It stands between
# build/common.sh and the recipes that compile much.
# Inputs: SCRATCH, ENTRY, CUDA_HOME.

NVCC_TIMES="${SCRATCH}/times-${ENTRY}.csv"

# first_units FOLDER NAME…: put a ninja into FOLDER, and that into PATH, which starts the units whose source is called NAME (an extended regular
# expression) before all others, in this order, as far as the graph allows: among the commands that are ready ninja takes the one that stands
# first in its file; from 1.12 on, the one with the longest way to go, and of equal ones the first. Where a build has no ninja, nothing is done.
first_units() {
    local -r folder="$1"
    local real
    shift
    real="$(command -v ninja)" || return 0
    [[ "${real}" != "${folder}/ninja" ]] || return 0
    mkdir -p -- "${folder}"
    cat >"${folder}/ninja" <<WRAPPER
#!/bin/sh
folder=.
[ "\$1" != -C ] || folder="\$2"
file="\${folder}/build.ninja"
if [ -f "\${file}" ] && awk -v first='$*' '
    BEGIN { count = split(first, name, " ") }
    function keep(    rank) {
        if (edge == "") return
        for (rank = 1; rank <= count; rank++) if (head ~ ("/" name[rank] "( |\$)")) break
        edges[rank] = edges[rank] edge
        edge = ""
    }
    /^build / { keep(); head = \$0; edge = \$0 "\\n"; next }
    edge != "" && /^ / { edge = edge \$0 "\\n"; next }
    { keep() }
    /^default / { last = last \$0 "\\n"; next }
    { print }
    END { keep(); for (rank = 1; rank <= count + 1; rank++) printf "%s", edges[rank]; printf "%s", last }
' "\${file}" >"\${file}.first" && ! cmp -s -- "\${file}" "\${file}.first"; then
    mv -f -- "\${file}.first" "\${file}"
else
    rm -f -- "\${file}.first"
fi
exec "${real}" "\$@"
WRAPPER
    chmod 755 -- "${folder}/ninja"
    export PATH="${folder}:${PATH}"
}

# time_nvcc: let nvcc note how long each of its phases takes, where it can. That changes nothing of what it makes.
time_nvcc() {
    [[ "$("${CUDA_HOME}/bin/nvcc" --help 2>/dev/null)" == *$'\n--time '* ]] || return 0
    export NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:+${NVCC_APPEND_FLAGS} }--time=${NVCC_TIMES}"
}

# choose_cache: set CACHE to the path of ccache where it is installed and works, else to nothing. Its objects lie in a folder that is this
# account's alone, whatever a setting of the site says: what others may write is nothing to build from. The whole preprocessed text and the
# content of the compiler decide what is the same; what the options that map paths do is in that text.
choose_cache() {
    local -r folder="${HOME:-/nowhere}/.cache/deepep-bootstrap/ccache" probe="${SCRATCH}/ccache-${ENTRY}"
    local name found
    CACHE=""
    found="$(command -v ccache)" || return 0
    for name in "${!CCACHE_@}"; do unset "${name}"; done
    { mkdir -p -- "${folder%/*}" && mkdir -m 0700 -- "${folder}"; } 2>/dev/null || true # it is looked at next
    if [[ -L "${folder}" || ! -O "${folder}" || "$(stat -c %a -- "${folder}" 2>/dev/null)" != 700 ]]; then
        say "ccache is not used: ${folder} is not a folder of this account alone"
        return 0
    fi
    export CCACHE_DIR="${folder}" CCACHE_CONFIGPATH=/dev/null CCACHE_NODIRECT=1 CCACHE_COMPILERCHECK=content CCACHE_NOHASHDIR=1 \
        CCACHE_IGNOREOPTIONS='-ffile-prefix-map=*'
    printf 'int works;\n' >"${probe}.c"
    if "${found}" gcc -c "${probe}.c" -o "${probe}.o" >/dev/null 2>&1 && [[ -s "${probe}.o" ]]; then
        # shellcheck disable=SC2034 # read by write_compiler of build/deepep-setup.sh
        CACHE="${found}"
    else
        say "ccache is not used: ${found} does not compile here"
    fi
}

# tell_times FOLDER: print what ninja noted in FOLDER and below, and what nvcc did; the build's log keeps it.
tell_times() {
    local log
    find "$1" -name .ninja_log -not -path '*/CMakeFiles/*' | while IFS= read -r log; do
        awk '{ print "timing ninja: " $0 }' "${log}"
    done
    [[ ! -s "${NVCC_TIMES}" ]] || awk '{ print "timing nvcc: " $0 }' "${NVCC_TIMES}"
}
