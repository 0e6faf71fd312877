# shellcheck shell=bash
# Package repositories and their keys, for the host recipes that install from other repositories than the distribution's.
#
# Input: REPOSITORIES, lines `name url suite components key-url fingerprint priority`, components joined by commas, "-" for none.
# A key is compared with its full fingerprint before anything of it, or of its repository, is written. Nothing is written twice.

# add_repositories RECIPE: make the repositories of REPOSITORIES known to the package manager; RECIPE owns the files.
add_repositories() {
    local -r recipe="$1"
    local line
    local -a fields
    [[ -n "${REPOSITORIES:-}" ]] || return 0
    ((EUID == 0)) || die "repositories can only be added by root"
    command -v gpg >/dev/null || install_packages "$([[ "${MANAGER:-}" == dnf ]] && echo gnupg2 || echo gpg)"
    while IFS= read -r line; do
        read -r -a fields <<<"${line}"
        ((${#fields[@]} == 7)) || die "REPOSITORIES: not seven fields: ${line}"
        case "${MANAGER:-}" in
            apt) add_apt_repository "${recipe}" "${fields[@]}" ;;
            dnf) add_dnf_repository "${recipe}" "${fields[@]}" ;;
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
        install_file "${recipe}" "/etc/apt/preferences.d/${name}" 644 <<<"$(print_pin "${url}" "${priority}")"
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
    printf '# Written by deepep-bootstrap (recipes/host/repositories.sh); "invoke remove" takes it away.\n'
}

print_source() {
    local -r url="$1" suite="$2" components="$3" keyring="$4"
    print_note
    printf 'Types: deb\nURIs: %s\nSuites: %s\n' "${url}" "${suite}"
    [[ "${components}" == - ]] || printf 'Components: %s\n' "${components//,/ }"
    printf 'Signed-By: %s\n' "${keyring}"
}

# apt calls the host of an address its origin; local files have an empty one.
print_pin() {
    local -r url="$1" priority="$2"
    local origin="${url#*://}"
    origin="${origin%%/*}"
    print_note
    printf 'Package: *\nPin: origin "%s"\nPin-Priority: %s\n' "${origin%%:*}" "${priority}"
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

# trust_key RECIPE KEY_URL FINGERPRINT TARGET: TARGET holds the key with that fingerprint and no other. What else the fetched file holds
# is left out; without the wanted key nothing is written.
trust_key() {
    local -r recipe="$1" url="$2" wanted="$3" target="$4"
    local scratch found
    [[ "$(list_keys "${HOST_ROOT:-}${target}")" != "${wanted}" ]] || return 0
    scratch="$(mktemp -d)"
    fetch_file "${url}" "${scratch}/fetched" || { rm -rf -- "${scratch}"; die "the signing key ${url} cannot be fetched"; }
    found="$(list_keys "${scratch}/fetched" | paste -s -d ' ')"
    if [[ " ${found} " != *" ${wanted} "* ]] || ! pick_key "${scratch}" "${wanted}" "${target}"; then
        rm -rf -- "${scratch}"
        die "${url}: not the key in the lock — found ${found:-no key}, wanted ${wanted}. Nothing was written"
    fi
    install_file "${recipe}" "${target}" 644 <"${scratch}/picked"
    rm -rf -- "${scratch}"
}

# pick_key SCRATCH FINGERPRINT TARGET: SCRATCH/picked is that one key of SCRATCH/fetched, armored as rpm wants it, binary for apt.
pick_key() {
    local -r scratch="$1" wanted="$2"
    local -a form=()
    [[ "$3" == *.gpg ]] || form=(--armor)
    run_gpg "${scratch}" --import "${scratch}/fetched" || return 1
    run_gpg "${scratch}" "${form[@]}" --output "${scratch}/picked" --export "${wanted}" || return 1
    # A key may carry the wanted one as a subkey and would come along.
    [[ "$(list_keys "${scratch}/picked")" == "${wanted}" ]]
}

# list_keys FILE: the full fingerprints of the primary keys in a file, one a line.
list_keys() {
    [[ -s "$1" ]] || return 0
    local -r home="$(mktemp -d)"
    run_gpg "${home}" --with-colons --show-keys "$1" |
        awk -F: '$1 == "pub" { primary = 1 } $1 == "fpr" && primary { print $10; primary = 0 }'
    rm -rf -- "${home}"
}

# run_gpg HOME ARGUMENT…: gpg that knows no keys but those in HOME and starts no agent.
run_gpg() {
    local -r home="$1"
    shift
    gpg --homedir "${home}" --no-autostart --batch --no-tty --quiet "$@" 2>/dev/null
}

# fetch_file URL TARGET: what stands at an address; with the program that is there, apt's own at last.
fetch_file() {
    local -r url="$1" target="$2"
    if [[ "${url}" == file://* ]]; then
        cp -- "${url#file://}" "${target}" 2>/dev/null
    elif command -v curl >/dev/null; then
        curl --fail --silent --show-error --location --retry 2 --connect-timeout 20 --max-time 120 --output "${target}" "${url}" >&2
    elif command -v wget >/dev/null; then
        wget --quiet --tries=2 --timeout=20 --output-document="${target}" "${url}" >&2
    else
        /usr/lib/apt/apt-helper download-file "${url}" "${target}" >&2
    fi
}
