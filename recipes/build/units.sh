# shellcheck shell=bash
# The compile units of an entry: the longest ones first, and how long each took. It stands between build/common.sh and the recipes that
# compile much.
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

# tell_times FOLDER: print what ninja noted in FOLDER and below, and what nvcc did; the build's log keeps it.
tell_times() {
    local log
    find "$1" -name .ninja_log -not -path '*/CMakeFiles/*' | while IFS= read -r log; do
        awk '{ print "timing ninja: " $0 }' "${log}"
    done
    [[ ! -s "${NVCC_TIMES}" ]] || awk '{ print "timing nvcc: " $0 }' "${NVCC_TIMES}"
}
