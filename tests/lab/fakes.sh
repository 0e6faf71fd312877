#!/bin/bash
# Makes a lab host look like a GPU node with eight RDMA devices. Sourced by hostinit.sh in the host's new root, before it is entered.
#
# A file in run/lab/fake, written by a test, changes one thing; all are read at each boot:
#   gpus, capability … what nvidia-smi says (see there)        driver, driver_kind  version; "proprietary" for the closed driver
#   params           the whole text of the driver's parameters, whatever modprobe.d says
#   forget_options   boot without honouring modprobe.d         no_driver   no GPU driver until its package (or its mark) is on the disk
#   rdma_inbox       devices carry the names of the distribution's own driver, until doca-ofed (or its mark) is on the disk
#   rdma_…           count, firmware, link layer, state, rate of the RDMA devices
#   memlock          the limit of every process, in KiB        no_return   after a reboot the host stays off (see supervisor.sh)
#
# What a driver shows follows from the disk: options from modprobe.d, modules from modules-load.d.

# shellcheck source=tests/lab/kernel.sh
source "$LAB/bin/kernel.sh"

# procfs and sysfs take no new entries: cover their folders with ones that do.
fake_modules() {
  local module
  mount -t tmpfs -o mode=755 tmpfs proc/driver
  mount -t tmpfs -o mode=755 tmpfs sys/module
  : >run/modules
  if [[ -e proc/modules ]]; then mount --bind run/modules proc/modules; fi
  : >run/modules.loaded
  for module in $RDMA_MODULES nvidia nvidia_uvm nvidia_modeset $(sed -s 's/[#;].*//; s/-/_/g' etc/modules-load.d/*.conf etc/modules 2>/dev/null); do
    load_module "$module" || true # as at a real boot, a module that is not there stops nothing
  done
  show_modules
}

# Folders and links are made all at once: hosts boot four hundred times in a run of the tests, and each has a hundred of them.
declare -a FOLDERS LINKS

make_folders_and_links() { # FOLDERS, then LINKS (target, link, target, link …)
  mkdir -p "${FOLDERS[@]}"
  perl -e 'while (my ($target, $link) = splice @ARGV, 0, 2) { symlink $target, $link or die "$link: $!\n" }' "${LINKS[@]}"
  FOLDERS=() LINKS=()
}

# Eight PCI switches, each with one GPU and one RDMA device below it, four to a socket. The real devices are hidden.
fake_pci_devices() { # <gpus>
  local -r gpus=$1 pci=sys/bus/pci/devices
  local i bridge nic gpu driver=''
  if is_loaded nvidia; then driver=nvidia; fi
  mount -t tmpfs -o mode=755 tmpfs "$pci"
  FOLDERS+=("$pci/.drivers/mlx5_core" "$pci/.drivers/nvidia")
  for ((i = 0; i < 8; i++)); do
    printf -v bridge 'pci0000:%x0/0000:%x0:01.0/0000:%x1:00.0' $((i + 1)) $((i + 1)) $((i + 1))
    printf -v nic '0000:%x2:00.0' $((i + 1))
    printf -v gpu '0000:%x3:00.0' $((i + 1))
    fake_pci_device "$bridge/$nic" mlx5_core
    if ((i < gpus)); then fake_pci_device "$bridge/$gpu" "$driver"; fi
  done
  make_folders_and_links
  for ((i = 0; i < 8; i++)); do
    printf -v nic '0000:%x2:00.0' $((i + 1))
    printf -v gpu '0000:%x3:00.0' $((i + 1))
    describe_pci_device "$pci/$nic" 0x15b3 0x020700 $((i / 4))
    if ((i < gpus)); then describe_pci_device "$pci/$gpu" 0x10de 0x030200 $((i / 4)); fi
  done
}

fake_pci_device() { # <path> <driver>
  local -r pci=sys/bus/pci/devices path=$1 driver=$2
  FOLDERS+=("$pci/$path")
  if [[ -n $driver ]]; then LINKS+=("/$pci/.drivers/$driver" "$pci/$path/driver"); fi
  LINKS+=("$path" "$pci/${path##*/}")
}

describe_pci_device() { # <folder> <vendor> <class> <numa node>
  echo "$2" >"$1/vendor"
  echo "$3" >"$1/class"
  echo "$4" >"$1/numa_node"
}

fake_infiniband() {
  local -r count=$(fake_value rdma_devices 8)
  local -a labels
  local i label device
  # sysfs takes no new folders either: cover sys/class. Of the real classes a host is asked for that of its network.
  mkdir run/net
  mount --bind sys/class/net run/net
  mount -t tmpfs -o mode=755 tmpfs sys/class
  mkdir sys/class/net
  mount --move run/net sys/class/net
  rmdir run/net
  if ! ((count)); then return; fi
  for ((i = 0; i < count; i++)); do
    label=mlx5_$i
    # rdma-core's rule for the inbox driver: RoCE, and the number of the PCI bus in decimal.
    if ! has_ofed; then label=rocep$((16 * (i + 1) + 2))s0; fi
    labels+=("$label")
    printf -v device '/sys/bus/pci/devices/pci0000:%x0/0000:%x0:01.0/0000:%x1:00.0/0000:%x2:00.0' $((i + 1)) $((i + 1)) $((i + 1)) $((i + 1))
    place_rdma_device "sys/class/infiniband/$label" "$device"
  done
  make_folders_and_links
  for ((i = 0; i < count; i++)); do describe_rdma_device "sys/class/infiniband/${labels[i]}" "$i"; done
  # Tests of plain users let them count, too.
  chmod a+w sys/class/infiniband/*/ports/1/counters/*
}

place_rdma_device() { # <folder> <pci device>
  local -r port=$1/ports/1
  FOLDERS+=("$port/gids" "$port/gid_attrs/types" "$port/gid_attrs/ndevs" "$port/counters")
  LINKS+=("$2" "$1/device")
}

describe_rdma_device() { # <folder> <index>
  local -r folder=$1 index=$2 port=$1/ports/1
  local link=InfiniBand
  if [[ -e run/lab/fake/rdma_inbox ]]; then link=Ethernet; fi
  fake_value rdma_firmware 28.43.2026 >"$folder/fw_ver"
  echo "MT_0000000838" >"$folder/board_id"
  fake_value rdma_link_layer "$link" >"$port/link_layer"
  fake_value rdma_state '4: ACTIVE' >"$port/state"
  echo '5: LinkUp' >"$port/phys_state"
  fake_value rdma_rate '400 Gb/sec (4X NDR)' >"$port/rate"
  printf 'fe80:0000:0000:0000:a088:c203:00%02x:%04x\n' "$index" "0x${NAME//[!0-9]/}" >"$port/gids/0"
  fake_value rdma_gid_type 'IB/RoCE v1' >"$port/gid_attrs/types/0"
  fake_value rdma_netdev "ib$index" >"$port/gid_attrs/ndevs/0"
  echo 0 >"$port/counters/port_xmit_data"
  echo 0 >"$port/counters/port_rcv_data"
}

fake_gpu_node() {
  local -r gpus=$(fake_value gpus 8)
  fake_modules
  fake_pci_devices "$gpus"
  fake_infiniband
}

if [[ -e run/lab/gpu ]]; then fake_gpu_node; fi
