# shellcheck shell=bash
# Who may change a prefix: whoever owns a folder of it, or above it, or may write there, decides what all users of the cluster load, and
# what root's login shell reads. It needs prefix/lib/share.sh before
# it. Inputs: PREFIX; OWNER ("" or the user who builds).
#
# Trusted are root, who works here now, and OWNER. Whoever only reads the prefix trusts its owner too. Where the group may write in PREFIX
# itself, its administrators share it (prefix/lib/share.sh): what lies in it may be owned by members of this group, and be theirs to write.
# PREFIX itself may then belong to another member, where who works here was made a member on purpose: it is not the primary group.
# Others may write nothing; above PREFIX a sticky one (as /tmp) is fine, since nobody can rename there what is not his own. What the
# group may do above PREFIX was given by a trusted owner, and stays his matter.

# Users by number, 1 where they are trusted and 0 where they are not.
declare -A KNOWN_USERS=()
SHARING_GROUP=""

# is_member USER GROUP: whether a user belongs to a group, both by name.
is_member() {
    [[ " $(id -Gn -- "$1" 2>/dev/null) " == *" $2 "* ]]
}

# is_fellow USER GROUP: whether who works here was made a member of a group of which a user is one too.
is_fellow() {
    [[ "$2" != "$(id -gn)" ]] && is_member "$(id -un)" "$2" && is_member "$1" "$2"
}

# learn_trusted: fill in who is trusted, and the group that shares the prefix.
learn_trusted() {
    local name user group builder
    KNOWN_USERS=([0]=1 ["$(id -u)"]=1)
    SHARING_GROUP=""
    if [[ -n "${OWNER:-}" ]] && builder="$(id -u -- "${OWNER}" 2>/dev/null)"; then KNOWN_USERS["${builder}"]=1; fi
    [[ -d "${PREFIX}" ]] || return 0
    IFS=$'\t' read -r user name group < <(stat -L --printf='%u\t%U\t%G\n' -- "${PREFIX}")
    [[ -w "${PREFIX}" ]] || KNOWN_USERS["${user}"]=1
    is_shared || return 0
    [[ -z "${KNOWN_USERS["${user}"]:-}" ]] && ! is_fellow "${name}" "${group}" && return 0
    KNOWN_USERS["${user}"]=1
    SHARING_GROUP="${group}"
}

# is_trusted USER NAME PLACE: whether what is at PLACE (above or inside the prefix) may belong to a user.
is_trusted() {
    local -r user="$1" name="$2" place="$3"
    if [[ -z "${KNOWN_USERS["${user}"]:-}" && "${place}" == inside && -n "${SHARING_GROUP}" ]]; then
        if is_member "${name}" "${SHARING_GROUP}"; then KNOWN_USERS["${user}"]=1; else KNOWN_USERS["${user}"]=0; fi
    fi
    [[ "${KNOWN_USERS["${user}"]:-0}" == 1 ]]
}

# judge PLACE USER NAME GROUP MODE KIND PATH: print PATH, what is wrong with it, and the command that mends it, divided by tabs; nothing
# where it is as it should be. MODE is octal, KIND a letter of find.
judge() {
    local -r place="$1" user="$2" name="$3" group="$4" mode=$((8#$5)) kind="$6" path="$7"
    local away=""
    if ! is_trusted "${user}" "${name}" "${place}"; then
        printf '%s\tbelongs to %s\tchown -h root %q, or build_user=%s in the hosts file\n' "${path}" "${name}" "${path}" "${name}"
        return 0
    fi
    [[ "${kind}" != l ]] || return 0 # a link has no mode
    if ((mode & 020)) && [[ "${place}" == inside && "${group}" != "${SHARING_GROUP}" ]]; then away=g; fi
    if ((mode & 02)) && { [[ "${place}" == inside ]] || ! ((mode & 01000)); }; then away+=o; fi
    case "${away}" in
    "") ;;
    g) printf '%s\tmay be written by the group %s (mode %o), which does not share the prefix\tchmod g-w %q\n' "${path}" "${group}" "${mode}" "${path}" ;;
    *) printf '%s\tmay be written by everybody (mode %o)\tchmod %s-w %q\n' "${path}" "${mode}" "${away}" "${path}" ;;
    esac
}

# describe PATH…: print what judge wants of folders above the prefix, as what links among them lead to.
describe() {
    stat -L --printf='above\t%u\t%U\t%G\t%a\td\t%n\n' -- "$@"
}

# describe_link PATH: the same of a link itself.
describe_link() {
    stat --printf='above\t%u\t%U\t%G\t%a\tl\t%n\n' -- "$1"
}

# find_above PATH: describe every folder above PATH that is there, and every link among them also as the link it is.
find_above() {
    local path="$1"
    while [[ -n "${path}" ]]; do
        path="${path%/*}"
        [[ ! -L "${path:-/}" ]] || describe_link "${path}"
        [[ ! -d "${path:-/}" ]] || describe "${path:-/}"
    done
}

# find_places: describe everything that decides what is loaded: the folders above the prefix by its name and by its real one, the prefix,
# its folders, the entries as folders, and the current generation with all that is in it.
find_places() {
    local -r form='inside\t%U\t%u\t%g\t%m\t%y\t%p\n'
    local real current path
    local -a places=()
    real="$(realpath -m -- "${PREFIX}")"
    { find_above "${PREFIX}" && find_above "${real}"; } | sort -u
    [[ ! -L "${PREFIX}" ]] || describe_link "${PREFIX}"
    [[ -d "${PREFIX}" ]] || return 0
    find -H "${PREFIX}" -maxdepth 0 -printf "${form}"
    for path in current modulefiles sbatch bin examples .id; do
        [[ ! -e "${PREFIX}/${path}" && ! -L "${PREFIX}/${path}" ]] || places+=("${PREFIX}/${path}")
    done
    ((${#places[@]} == 0)) || find ${places[@]+"${places[@]}"} -maxdepth 0 -printf "${form}"
    for path in store generations; do
        # What is being made or removed at this moment is hidden, and may be gone when we look.
        [[ ! -d "${PREFIX}/${path}" ]] ||
            find "${PREFIX}/${path}" -maxdepth 1 ! -name '.*' -type d -printf "${form}" 2>/dev/null || true # it went while we looked
    done
    current="$(find "${PREFIX}/current" -maxdepth 0 -printf '%l' 2>/dev/null)" || current="" # nothing is offered yet
    if [[ "${current}" =~ ^generations/[0-9]+$ && -d "${PREFIX}/${current}" ]]; then
        find "${PREFIX}/${current}" -mindepth 1 -printf "${form}" 2>/dev/null || true # it went while we looked
    fi
}

# find_unsafe: print a line of judge for everything that somebody else could change.
find_unsafe() {
    local place user name group mode kind path places
    learn_trusted
    places="$(find_places)"
    while IFS=$'\t' read -r place user name group mode kind path; do
        judge "${place}" "${user}" "${name}" "${group}" "${mode}" "${kind}" "${path}"
    done <<<"${places}"
}

# refuse_unsafe: end here where somebody else could change what users of this prefix load.
refuse_unsafe() {
    local found path what remedy
    found="$(find_unsafe)"
    [[ -n "${found}" ]] || return 0
    IFS=$'\t' read -r path what remedy <<<"${found}"
    die "${path} ${what}: whoever may change it decides what everybody loads, root too ($(wc -l <<<"${found}") such paths). Try: ${remedy}"
}
