#!/usr/bin/env bash
# Set up what `make` needs on a fresh Debian or Ubuntu that has only git, python3 and make.
# Usage: tests/setup.sh venv | demo | test
#   venv  the virtual environment .venv with this package and its tools
#   demo  Debian packages the embedded cluster needs on this machine (its hosts have an image of their own)
#   test  Debian packages the tests run for real; services among them are unpacked below .venv, never installed or started
set -Eeuo pipefail
cd "$(dirname "$0")/.."

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

install_packages() {
    # <program or file pattern>=<package>… : install the packages whose program is missing
    local pair missing=()
    for pair in "$@"; do
        command -v "${pair%%=*}" >/dev/null || compgen -G "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    echo "setup: installing ${missing[*]}" >&2
    as_root apt-get update -q >&2
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
}

unpack_packages() {
    # <folder> <package>… : unpack Debian packages below a folder without installing them
    local -r folder=$1
    shift
    [ ! -e "$folder/.complete" ] || return 0
    local scratch
    scratch=$(mktemp -d)
    echo "setup: unpacking $*" >&2
    as_root apt-get update -q >&2
    (cd "$scratch" && apt-get download -q "$@" >&2)
    mkdir -p "$folder"
    local deb
    for deb in "$scratch"/*.deb; do dpkg-deb -x "$deb" "$folder"; done
    rm -r "$scratch"
    touch "$folder/.complete"
}

install_browser() {
    # Debian has Chromium without a window as a package of its own; any other Chromium on PATH does as well
    local name
    for name in chromium-headless-shell chromium chromium-browser google-chrome; do
        ! command -v "$name" >/dev/null || return 0
    done
    install_packages chromium-headless-shell=chromium-headless-shell || echo "setup: tests of the HTML report need a Chromium on PATH" >&2
}

make_venv() {
    python3 -c 'import ensurepip' 2>/dev/null || install_packages "/nonexistent=python3-venv"
    [ -x .venv/bin/python ] || python3 -m venv .venv
    .venv/bin/python -m pip install -qq --disable-pip-version-check -e '.[dev,docs]'
    touch .venv/.ready
}

case "${1:-}" in
    venv) make_venv ;;
    demo) install_packages ip=iproute2 ssh=openssh-client nsenter=util-linux setpriv=util-linux mount=mount ;;
    test)
        install_packages ip=iproute2 ssh=openssh-client nsenter=util-linux mount=mount gcc=gcc g++=g++ make=make /usr/include/python3*/Python.h=python3-dev cmake=cmake ninja=ninja-build \
            /usr/sbin/modprobe=kmod busybox=busybox dash=dash tcsh=tcsh zsh=zsh fish=fish groff=groff-base man=man-db skopeo=skopeo umoci=umoci nix=nix-bin sudo=sudo openssl=openssl ssh-agent=openssh-client \
            gpg=gpg gpg-agent=gpg-agent gpgconf=gpgconf curl=curl wget=wget tmux=tmux dnf=dnf /etc/dnf/plugins/versionlock.conf=dnf-plugins-core rpmbuild=rpm createrepo_c=createrepo-c
        install_browser
        unpack_packages "$PWD/.venv/registry" docker-registry
        unpack_packages "$PWD/.venv/debian" openssh-server openssh-sftp-server libwrap0
        unpack_packages "$PWD/.venv/clustershell" python3-clustershell
        ;;
    *) echo "usage: tests/setup.sh venv | demo | test" >&2; exit 1 ;;
esac
