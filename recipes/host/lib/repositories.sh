# shellcheck shell=bash
# Package repositories and their keys, for the host recipes that install from other repositories than the distribution's.
#
# Input: REPOSITORIES, lines `name url suite components key-url fingerprint priority`, components joined by commas, "-" for none.
# A key is compared with its full fingerprint (keys.sh) before anything of it, or of its repository, is written. Nothing is written
# twice. An address may be that of a mirror, also of a directory (file://): the engine has put it there, the fingerprint stays the lock's.

# find_unseen: print which of REPOSITORIES is in a directory that is not here, and what to do; nothing when all of them can be reached.
find_unseen() {
    local name url key_url place _
    while read -r name url _ _ key_url _; do
        for place in "${url}" "${key_url%/*}"; do
            [[ "${place}" == file://* && ! -d "${place#file://}" ]] || continue
            printf 'the repository %s is mirrored in the directory %s, which this host does not see: ' "${name}" "${place#file://}"
            printf 'give --mirror a path that all hosts see, on NFS or the like, or the http:// address of a web server with it\n'
            return 0
        done
    done <<<"${REPOSITORIES:-}"
}

# add_repositories RECIPE: make the repositories of REPOSITORIES known to the package manager; RECIPE owns the files.
add_repositories() {
    local -r recipe="$1"
    local line unseen
    local -a fields
    [[ -n "${REPOSITORIES:-}" ]] || return 0
    ((EUID == 0)) || die "repositories can only be added by root"
    unseen="$(find_unseen)"
    [[ -z "${unseen}" ]] || die "${unseen}"
    command -v gpg >/dev/null || install_packages "$([[ "${MANAGER:-}" == dnf ]] && echo gnupg2 || echo gpg)"
    while IFS= read -r line; do
        read -r -a fields <<<"${line}"
        ((${#fields[@]} == 7)) || die "REPOSITORIES: not seven fields: ${line}"
        case "${MANAGER:-}" in
            apt) add_apt_repository "${recipe}" ${fields[@]+"${fields[@]}"} ;;
            dnf) add_dnf_repository "${recipe}" ${fields[@]+"${fields[@]}"} ;;
            *) die "no package manager that this recipe knows (MANAGER=${MANAGER:-})" ;;
        esac
    done <<<"${REPOSITORIES}"
}

# add_apt_repository RECIPE NAME URL SUITE COMPONENTS KEY_URL FINGERPRINT PRIORITY: keyring, pin and source, then its package lists.
add_apt_repository() {
    local -r recipe="$1" name="deepep-$2" url="$3" suite="$4" components="$5" key_url="$6" fingerprint="$7" priority="$8"
    local -r source="/etc/apt/sources.list.d/${name}.sources" keyring="/etc/apt/keyrings/${name}.gpg"
    local text
    text="$(print_site_source "${url}" "${suite}")"
    if [[ -n "${text}" ]]; then say "${url} is a repository of this host already, in ${text}" && return; fi
    trust_key "${recipe}" "${key_url}" "${fingerprint}" "${keyring}"
    if ((priority > 0)); then
        text="$(print_pin "${url}" "${suite}" "${keyring}" "${priority}")"
        install_file "${recipe}" "/etc/apt/preferences.d/${name}" 644 <<<"${text}"
    fi
    text="$(print_source "${url}" "${suite}" "${components}" "${keyring}")"
    if is_installed "${source}" 644 <<<"${text}"; then return 0; fi
    install_file "${recipe}" "${source}" 644 <<<"${text}"
    if ! run_apt -o "Dir::Etc::sourcelist=${source}" -o Dir::Etc::sourceparts=- -o APT::Get::List-Cleanup=0 \
        -o APT::Update::Error-Mode=any update; then
        # Left behind, it would disturb every later apt-get update of the site.
        remove_files "${recipe}" >&2
        die "the package lists of ${url} cannot be had (what apt said is above); its repository was taken away again"
    fi
}

# print_site_source URL SUITE: the file and line in which the site itself names a repository; nothing where it does not. Ours must not
# stand beside it: apt refuses all sources of a host when two of them name different keyrings for one repository, as ours and that of
# NVIDIA's package cuda-keyring.
print_site_source() {
    local -r url="${1%/}/" suite="$2"
    local base="dists/${suite}/"
    [[ "${suite}" != */ ]] || base="${suite#/}"
    base="${url/#file:\/\/\//file:\/}${base}"
    # shellcheck disable=SC2016 # the dollars are apt's
    apt-get indextargets --no-release-info --format '$(BASE_URI) $(SOURCESENTRY)' |
        awk -v base="${base}" '$1 == base && $2 !~ /^\/etc\/apt\/sources.list.d\/deepep-/ && !found++ { print $2 }'
}

print_note() {
    printf '# Written by deepep-bootstrap (recipes/host/lib/repositories.sh); "invoke remove" takes it away.\n'
}

print_source() {
    local -r url="$1" suite="$2" components="$3" keyring="$4"
    print_note
    printf 'Types: deb\nURIs: %s\nSuites: %s\n' "${url}" "${suite}"
    [[ "${components}" == - ]] || printf 'Components: %s\n' "${components//,/ }"
    printf 'Signed-By: %s\n' "${keyring}"
}

# print_pin URL SUITE KEYRING PRIORITY: the pin for all that the signed file of a repository calls its own; by host (apt's "origin")
# only where it does not say: a site's web server may well have a mirror of the distribution, too, and local files have no host at all.
print_pin() {
    local -r url="$1" suite="$2" keyring="$3" priority="$4"
    local origin="${url#*://}" said
    origin="${origin%%/*}"
    said="$(print_signed "${url}" "${suite}" "${keyring}" | awk -F ': ' '
        $1 == "Origin" && !origin { origin = $2 }
        $1 == "Label" && !label { label = $2 }
        END { if (origin label !~ /[",]/ && origin && label) print "release o=" origin ",l=" label }')"
    print_note
    printf 'Package: *\nPin: %s\nPin-Priority: %s\n' "${said:-origin \"${origin%%:*}\"}" "${priority}"
}

# print_signed URL SUITE KEYRING: what the repository's InRelease says, as far as a key of KEYRING signed it.
print_signed() {
    local -r url="${1%/}/" suite="$2" keyring="$3"
    local -r scratch="$(mktemp -d)"
    local base="dists/${suite}/"
    [[ "${suite}" != */ ]] || base="${suite#./}"
    if fetch_file "${url}${base#/}InRelease" "${scratch}/signed" 2>/dev/null; then
        gpgv --quiet --keyring "${HOST_ROOT:-}${keyring}" --output "${scratch}/text" "${scratch}/signed" 2>/dev/null &&
            cat -- "${scratch}/text"
    fi || true # one without such a file, or whose Release is signed apart, is pinned by its host
    rm -rf -- "${scratch}"
}

# add_dnf_repository RECIPE NAME URL - - KEY_URL FINGERPRINT -: dnf fetches lists when it installs. Packages must be signed by that key,
# which dnf imports from the file that was compared.
add_dnf_repository() {
    local -r recipe="$1" name="deepep-$2" url="$3" key_url="$6" fingerprint="$7"
    local -r key="/etc/pki/rpm-gpg/RPM-GPG-KEY-${name}"
    local text
    trust_key "${recipe}" "${key_url}" "${fingerprint}" "${key}"
    text="$(print_note; printf '%s\n' "[${name}]" "name=${name}" "baseurl=${url}" enabled=1 gpgcheck=1 "gpgkey=file://${key}")"
    install_file "${recipe}" "/etc/yum.repos.d/${name}.repo" 644 <<<"${text}"
}
