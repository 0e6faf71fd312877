#!/bin/bash
# Keeps one lab host running: boots it, waits for its end, boots it again when it asked for a reboot.
#
# With lab/fake/no_return a host that asked for a reboot does not come back: `LiveLab.boot` starts it again.
# A power cut (killing the host's PID 1) ends the supervisor too: `invoke lab up` boots the host again.
# Arguments: lab folder, host name, image folder, address with prefix length, bridge, name of the outer end of its cable.
set -Eeuo pipefail

boot_host() {
  local -r lab=$1 name=$2 image=$3 address=$4 bridge=$5 cable=$6
  local -r home=$lab/hosts/$name
  local child pid up
  rm -f "$home"/{pid,ready,lab/reboot}
  read -r up _ </proc/uptime
  unshare -n -m -u -p -i -f -T --boottime "-${up%.*}" --kill-child \
    "$lab/bin/hostinit.sh" "$lab" "$name" "$image" "$address" &
  child=$!
  until [[ -s $home/pid ]]; do
    if ! kill -0 "$child"; then return; fi
    sleep 0.003
  done
  read -r pid <"$home/pid"
  ip link del "$cable" 2>/dev/null || true # the cable of the boot before is usually gone with its network namespace
  # The same hardware address at every boot: others remember it, and would send to one that is gone for half a minute.
  ip link add "$cable" type veth peer name eth0 address "$(derive_hardware_address "$address")" netns "$pid"
  ip link set "$cable" master "$bridge" up
  wait "$child" || true # however it ended, what it left on its disk says whether to boot again
}

derive_hardware_address() {
  # <address with prefix length>: 02 says that nobody was assigned it; the four numbers of the address make it unique
  local -a numbers
  IFS=./ read -r -a numbers <<<"$1"
  printf '02:00:%02x:%02x:%02x:%02x\n' "${numbers[@]:0:4}"
}

main() {
  local -r home=$1/hosts/$2
  exec >>"$home/console" 2>&1 </dev/null
  while :; do
    boot_host "$@"
    if [[ ! -e $home/lab/reboot || -e $home/lab/fake/no_return ]]; then break; fi
  done
}

main "$@"
