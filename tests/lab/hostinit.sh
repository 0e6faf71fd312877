#!/bin/bash
# PID 1 of a lab host: puts its root together, starts its services, then reaps orphans.
#
# The root is the host's own disk; /usr, /etc and /var show the image and the machine below it, and write to the disk.
# Arguments: lab folder, host name, image folder, address with prefix length.
set -Eeuo pipefail
trap 'echo "hostinit: line $LINENO: $BASH_COMMAND"' ERR

readonly LAB=$1 NAME=$2 IMAGE=$3 ADDRESS=$4
readonly HOME_DIR=$LAB/hosts/$NAME ROOT=$LAB/hosts/$NAME/root
readonly OVERLAY_OPTIONS=redirect_dir=off,index=off,metacopy=off

mount_layers() { # <mount point below the root> <lower folders> <upper folder>
  local -r point=$1 lower=$2 upper=$3
  local -r work=$HOME_DIR/work/${point//\//-}
  mkdir -p "$work" "$upper"
  mount -t overlay -o "lowerdir=$lower,upperdir=$upper,workdir=$work,$OVERLAY_OPTIONS" overlay "$point"
}

mount_root() {
  mount --make-rprivate /
  mount --bind "$HOME_DIR/disk" "$ROOT"
  cd "$ROOT"
  mount_layers usr "$IMAGE/usr:/usr" "$HOME_DIR/disk/usr"
  mount_layers etc "$IMAGE/etc:/etc" "$HOME_DIR/disk/etc"
  mount_layers var "$IMAGE/var" "$HOME_DIR/disk/var"
  mount_layers var/lib/dpkg "$IMAGE/var/lib/dpkg:/var/lib/dpkg" "$HOME_DIR/dpkg"
  mount --bind "$LAB/shared" shared
  mount --bind "$LAB/home" home
  mount -t tmpfs -o mode=755 tmpfs run
  mount -t tmpfs -o mode=1777 tmpfs tmp
  mkdir run/lab run/sshd run/lock
  mount --bind "$HOME_DIR/lab" run/lab
}

mount_kernel() {
  mount -t proc proc proc
  mount -t sysfs sysfs sys
  tr -d '\n' </proc/sys/kernel/random/uuid >run/boot_id
  echo >>run/boot_id
  mount --bind run/boot_id proc/sys/kernel/random/boot_id
}

mount_devices() {
  local node
  mount -t tmpfs -o mode=755 tmpfs dev
  for node in null zero full random urandom tty; do
    : >"dev/$node"
    mount --bind "/dev/$node" "dev/$node"
  done
  mkdir dev/pts dev/shm
  mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts dev/pts
  mount -t tmpfs -o mode=1777 tmpfs dev/shm
  ln -s pts/ptmx dev/ptmx
  ln -s /proc/self/fd dev/fd
  ln -s fd/0 dev/stdin
  ln -s fd/1 dev/stdout
  ln -s fd/2 dev/stderr
}

join_network() {
  ip link set lo up
  until ip link show eth0 >/dev/null 2>&1; do sleep 0.01; done
  ip addr add "$ADDRESS" dev eth0
  ip link set eth0 up
}

main() {
  local pid
  read -r pid _ </proc/self/stat # the number outside: this /proc is still the machine's
  echo "$pid" >"$HOME_DIR/pid.new"
  mv "$HOME_DIR/pid.new" "$HOME_DIR/pid"
  hostname "$NAME"
  mount_root
  mount_kernel
  mount_devices
  MEMLOCK=$(cat run/lab/fake/memlock 2>/dev/null || echo unlimited)
  # shellcheck source=tests/lab/fakes.sh
  source "$LAB/bin/fakes.sh"
  mkdir run/old
  pivot_root . run/old
  cd /
  join_network
  # Unlimited, as a prepared node has it, where this machine lets root raise it (it takes CAP_SYS_RESOURCE).
  ulimit -l "$MEMLOCK" 2>/dev/null || echo "hostinit: the limit of locked memory stays at $(ulimit -l) KiB"
  export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
  /usr/sbin/lab-rc || echo "hostinit: lab-rc failed with code $?"
  /usr/sbin/sshd
  : >"/run/old$HOME_DIR/ready"
  umount -l /run/old
  rmdir /run/old
}

main
trap - ERR
# An orderly reboot ends every process, so that their connections close; a power cut does not.
trap 'kill -TERM -1; sleep 0.2; exit 0' TERM
while :; do
  sleep 3600 &
  wait $! || true # a signal ends the wait, not the host
done
