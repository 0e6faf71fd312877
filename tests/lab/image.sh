#!/bin/bash
# Installs packages into an image layer over this machine's own system, without changing the machine.
#
# Runs as root in mount and PID namespaces of its own (`unshare -m -p -f --kill-child`), so that a kill at any moment leaves
# neither a mount nor a process. The layer's folders usr, etc and var are the upper sides of overlays over /usr, /etc and /var.
# Arguments: layer folder, then the words for `apt-get install` (a trailing `-` removes a package).
set -Eeuo pipefail
trap 'echo "image.sh: line $LINENO: $BASH_COMMAND" >&2' ERR

readonly OVERLAY_OPTIONS=redirect_dir=off,index=off,metacopy=off

mount_system() { # <layer>
  local -r layer=$1 root=$1/root
  local part link
  mount --make-rprivate /
  mkdir -p "$root"/{proc,sys,dev,run,tmp,root,home}
  mount -t proc proc /proc
  for link in /bin /sbin /lib*; do
    if [[ -L $link ]]; then cp -P "$link" "$root$link"; fi
  done
  for part in usr etc var; do
    mkdir -p "$layer/$part" "$layer/work/$part" "$root/$part"
    mount -t overlay -o "lowerdir=/$part,upperdir=$layer/$part,workdir=$layer/work/$part,$OVERLAY_OPTIONS" lab-image "$root/$part"
  done
  mount --rbind /proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs -o mode=755 tmpfs "$root/run"
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
  # A link into /run would name nothing in there: give the layer the text itself.
  if [[ -L /etc/resolv.conf && -e /etc/resolv.conf ]]; then
    rm "$root/etc/resolv.conf"
    cat /etc/resolv.conf >"$root/etc/resolv.conf"
  fi
}

install_packages() { # <root> <word>…
  local -r root=$1
  # In hosts mandb would index all manuals after each package, for seconds.
  rm -f "$root/var/lib/man-db/auto-update"
  local -r apt=(chroot "$root" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Options::=--force-unsafe-io -o Dpkg::Options::=--force-confold)
  shift
  # Nothing that a package brings may start on this machine.
  printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
  chmod 755 "$root/usr/sbin/policy-rc.d"
  if ! "${apt[@]}" install --purge --no-install-recommends "$@"; then
    echo "image.sh: trying again with fresh package lists" >&2
    "${apt[@]}" update
    "${apt[@]}" install --purge --no-install-recommends "$@"
  fi
  rm "$root/usr/sbin/policy-rc.d"
}

add_users() { # <root>: a plain user for builds, and one who may use sudo
  local -r root=$1
  chroot "$root" useradd --uid 7001 --user-group --create-home --shell /bin/bash --password '*' builder
  chroot "$root" useradd --uid 7002 --user-group --create-home --shell /bin/bash --password '*' keeper
  echo 'keeper ALL=(ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/lab"
  chmod 440 "$root/etc/sudoers.d/lab"
}

drop_private_files() { # <layer>: what belongs to the machine's owner, or is only of use while installing
  local -r layer=$1 root=$1/root
  local file
  for file in "$root"/etc/profile.d/*; do
    if ! chroot "$root" dpkg-query -S "${file#"$root"}" >/dev/null 2>&1; then rm -f "$file"; fi
  done
  rm -f "$root/etc/ssh/"ssh_host_* "$root/etc/environment"
  : >"$root/etc/environment"
  umount -R "$root"/{proc,sys,dev,run,tmp} "$root"/{usr,etc,var}
  cd "$layer"
  rm -rf var/{cache,log,tmp,spool,mail,backups} var/lib/apt work usr/local root
  mkdir -p "$layer"/var/{cache/apt/archives/partial,cache/debconf,log/apt,spool,backups,mail,lib/apt/lists/partial,lib/dpkg}
  install -d -m 1777 "$layer/var/tmp"
  ln -sfn /run "$layer/var/run"
  ln -sfn /run/lock "$layer/var/lock"
  mkdir -p "$layer"/usr/local/{bin,etc,include,lib,sbin,share,src}
}

main() {
  local -r layer=$1
  shift
  umask 022
  mount_system "$layer"
  install_packages "$layer/root" "$@"
  add_users "$layer/root"
  drop_private_files "$layer"
}

main "$@"
