# shellcheck shell=bash
# A prefix that several administrators share. Whoever made it says so by its mode: where the group may write in PREFIX, it may write in
# every folder that we make below it, and these folders have PREFIX's group, whatever the primary group of the one who works there is.
# Reading stays open to everybody inside; PREFIX's own mode decides who gets in. Input: PREFIX.

# is_shared: whether the group of the prefix may write in it.
is_shared() {
    [[ -n "$(find "${PREFIX:?}" -maxdepth 0 -perm -0020 2>/dev/null)" ]]
}

# follow_prefix: set the umask that fits the prefix, for everything made in it from here on.
follow_prefix() {
    umask 022
    ! is_shared || umask 002
}

# suggest_user WHO: print what may help root where WHO refuses it and nobody has named a user who works there (OWNER).
suggest_user() {
    local -r who="$1"
    [[ "$(id -u)" != 0 || -n "${OWNER:-}" ]] ||
        printf ' (root is refused by many %s: build_user=NAME in the hosts file names who works there)' "${who}"
}

# share_tree FOLDER: give a tree of ours to the group of a shared prefix. Its files stay as they are: folders decide who may remove them.
share_tree() {
    local -r folder="$1"
    is_shared || return 0
    chgrp -hR --reference="${PREFIX}" -- "${folder}" || warn "${folder} cannot be given to the group of ${PREFIX}"
    find "${folder}" -type d -exec chmod g+rwxs {} +
}
