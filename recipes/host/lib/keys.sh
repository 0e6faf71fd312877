# shellcheck shell=bash
# Signing keys of package repositories: fetched, compared with the full fingerprint of the lock, and only then written. Only functions.

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
    run_gpg "${scratch}" ${form[@]+"${form[@]}"} --output "${scratch}/picked" --export "${wanted}" || return 1
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
