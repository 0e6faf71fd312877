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

# Eight PCI switches, each with one GPU and one RDMA device below it, four to a socket. The real devices are hidden.
fake_pci_devices() { # <gpus>
  local -r gpus=$1 pci=sys/bus/pci/devices
  local i bridge device driver=''
  if is_loaded nvidia; then driver=nvidia; fi
  mount -t tmpfs -o mode=755 tmpfs "$pci"
  mkdir -p "$pci/.drivers/mlx5_core" "$pci/.drivers/nvidia"
  for ((i = 0; i < 8; i++)); do
    printf -v bridge 'pci0000:%x0/0000:%x0:01.0/0000:%x1:00.0' $((i + 1)) $((i + 1)) $((i + 1))
    printf -v device '0000:%x2:00.0' $((i + 1))
    fake_pci_device "$pci" "$bridge/$device" 0x15b3 0x020700 $((i / 4)) mlx5_core
    printf -v device '0000:%x3:00.0' $((i + 1))
    if ((i < gpus)); then fake_pci_device "$pci" "$bridge/$device" 0x10de 0x030200 $((i / 4)) "$driver"; fi
  done
}

fake_pci_device() { # <pci folder> <path> <vendor> <class> <numa node> <driver>
  local -r pci=$1 path=$2 vendor=$3 class=$4 numa=$5 driver=$6
  mkdir -p "$pci/$path"
  echo "$vendor" >"$pci/$path/vendor"
  echo "$class" >"$pci/$path/class"
  echo "$numa" >"$pci/$path/numa_node"
  if [[ -n $driver ]]; then ln -s "/$pci/.drivers/$driver" "$pci/$path/driver"; fi
  ln -s "$path" "$pci/${path##*/}"
}

fake_infiniband() {
  local class i device label
  # sysfs takes no new folders either: cover sys/class and bind the real classes back in.
  mkdir -p run/classes
  mount --rbind sys/class run/classes
  mount -t tmpfs -o mode=755 tmpfs sys/class
  for class in run/classes/*/; do
    class=${class%/}
    mkdir "sys/class/${class##*/}"
    mount --bind "$class" "sys/class/${class##*/}"
  done
  umount -l run/classes
  rmdir run/classes
  for ((i = 0; i < $(fake_value rdma_devices 8); i++)); do
    printf -v device '/sys/bus/pci/devices/0000:%x2:00.0' $((i + 1))
    label=mlx5_$i
    # rdma-core's rule for the inbox driver: RoCE, and the number of the PCI bus in decimal.
    if ! has_ofed; then label=rocep$((16 * (i + 1) + 2))s0; fi
    fake_rdma_device "sys/class/infiniband/$label" "$i" "$device"
  done
}

fake_rdma_device() { # <folder> <index> <pci device>
  local -r folder=$1 index=$2 device=$3 port=$1/ports/1
  local link=InfiniBand
  if [[ -e run/lab/fake/rdma_inbox ]]; then link=Ethernet; fi
  mkdir -p "$port/gids" "$port/gid_attrs/types" "$port/gid_attrs/ndevs" "$port/counters"
  ln -s "$(readlink -m ".$device" | sed "s|^$PWD||")" "$folder/device"
  fake_value rdma_firmware 28.43.2026 >"$folder/fw_ver"
  echo "MT_0000000838" >"$folder/board_id"
  fake_value rdma_link_layer "$link" >"$port/link_layer"
  fake_value rdma_state '4: ACTIVE' >"$port/state"
  echo '5: LinkUp' >"$port/phys_state"
  fake_value rdma_rate '400 Gb/sec (4X NDR)' >"$port/rate"
  printf 'fe80:0000:0000:0000:a088:c203:00%02x:%04x\n' "$index" "0x${NAME//[!0-9]/}" >"$port/gids/0"
  fake_value rdma_gid_type 'IB/RoCE v1' >"$port/gid_attrs/types/0"
  fake_value rdma_netdev "ib$index" >"$port/gid_attrs/ndevs/0"
  # Tests of plain users let them count, too.
  for counter in port_xmit_data port_rcv_data; do echo 0 >"$port/counters/$counter"; done
  chmod a+w "$port"/counters/*
}

fake_gpu_node() {
  local -r gpus=$(fake_value gpus 8)
  fake_modules
  fake_pci_devices "$gpus"
  fake_infiniband
}

if [[ -e run/lab/gpu ]]; then fake_gpu_node; fi
