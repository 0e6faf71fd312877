# shellcheck shell=bash
# The record of an entry's files: written when it is published, compared by `verify --store`. `sha256sum -c files.sha256` in the entry
# understands the lines of files; the lines that begin with # say the rest: folders, links and their targets, files that may be run, what
# others may write, or not everybody may read, and what belongs to another user than the entry does. Whether the group may write is left
# out: that is for the prefix's owners to change. Generations keep the sum of the record, so that one made anew is seen.

FILES_RECORD=files.sha256

# describe_tree: print what is below the current folder but contents, one thing a line ended by NUL.
describe_tree() {
    local owner
    owner="$(stat -c %u .)"
    find . -mindepth 1 ! -path "./${FILES_RECORD}" \( \
        -type d \( -printf '# folder %P\0' , -perm -0002 -printf '# writable %P\0' , ! -perm -0555 -printf '# private %P\0' , -true \) -o \
        -type l -printf '# link %P -> %l\0' -o \
        -type f \( -perm /0111 -printf '# executable %P\0' , -perm /0202 -printf '# writable %P\0' , ! -perm -0444 -printf '# private %P\0' , \
        -perm /6000 -printf '# setuid %P\0' , -true \) -o \
        -printf '# special %P\0' \)
    find . -maxdepth 0 -perm -0002 -printf '# writable .\0'
    find . -mindepth 1 -path "./${FILES_RECORD}" -perm /0202 -printf '# writable %P\0'
    find . -mindepth 1 ! -uid "${owner}" -printf '# owner %P -> %u\0'
}

# hash_tree WORK: put the SHA-256 of every file below the current folder into files in the empty folder WORK, several processes at once.
hash_tree() {
    local -r work="$1"
    local jobs
    jobs="$(nproc)"
    ((jobs <= 16)) || jobs=16 # more readers than that only disturb each other
    # shellcheck disable=SC2016 # expanded by the inner shell
    find . -type f ! -path "./${FILES_RECORD}" -print0 |
        xargs -0 -r -n 64 -P "${jobs}" bash -c 'sha256sum -z -- "$@" >"$(mktemp "$0/XXXXXXXX")"' "${work}"
}

# list_files FOLDER WORK: print the record of FOLDER but its last line, sorted; WORK is a folder to be made for the while. A backslash or
# newline in a name is written as sha256sum does it. Fails where a file cannot be read, after printing the others.
list_files() {
    local -r folder="$1" work="$2"
    local code=0
    mkdir -- "${work}"
    (cd -- "${folder}" && hash_tree "${work}") || code=1
    {
        find "${work}" -type f -exec cat {} +
        (cd -- "${folder}" && describe_tree)
    } | sed -z -e 's|^\([0-9a-f]\{64\}  \)\./|\1|' -e 's/\\/\\\\/g' -e 's/\n/\\n/g' -e '/^#/!{/\\/s/^/\\/}' | tr '\0' '\n' | sort
    rm -rf -- "${work}"
    return "${code}"
}

# record_files FOLDER WORK: write the record of FOLDER into it; its last line is the sum of all others.
record_files() {
    local -r folder="$1" work="$2"
    list_files "${folder}" "${work}" >"${work}.list"
    printf '# sum %s\n' "$(sum_of <"${work}.list")" | cat -- "${work}.list" - >"${folder}/${FILES_RECORD}"
    chmod 0444 -- "${folder}/${FILES_RECORD}"
    rm -f -- "${work}.list"
}

# sum_of: print the SHA-256 of standard input.
sum_of() {
    sha256sum | cut -d ' ' -f 1
}

# size_of FOLDER: print the bytes of all files in it.
size_of() {
    find "$1" -type f -printf '%s\n' | awk '{ sum += $1 } END { printf "%.0f\n", sum }'
}
