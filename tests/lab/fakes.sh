#!/bin/bash
# Makes a lab host look like a GPU node with eight RDMA devices. Sourced by hostinit.sh in the host's new root, before it is entered.
#
# Values come from the files in run/lab/fake where a test wrote one (see nvidia-smi beside this file); they are read at each boot.

fake_value() { # <name> <default>
  local -r file=run/lab/fake/$1
  if [[ -e $file ]]; then cat "$file"; else echo "$2"; fi
}

fake_nvidia_driver() { # <count>
  local -r count=$1
  local i
  for ((i = 0; i < count; i++)); do mknod -m 666 "dev/nvidia$i" c 1 3; done
  for i in nvidiactl nvidia-uvm; do mknod -m 666 "dev/$i" c 1 3; done
  # procfs takes no new folders: cover its driver folder with one that does.
  mount -t tmpfs -o mode=755 tmpfs proc/driver
  mkdir -p proc/driver/nvidia
  fake_value params $'EnableStreamMemOPs: 0\nRegistryDwords: ""\nRegistryDwordsPerDevice: ""' >proc/driver/nvidia/params
  echo "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  $(fake_value driver 580.95.05)  lab" >proc/driver/nvidia/version
}

# Eight PCI switches, each with one GPU and one RDMA device below it, four to a socket. The real devices are hidden.
fake_pci_devices() { # <gpus>
  local -r gpus=$1 pci=sys/bus/pci/devices
  local i bridge device
  mount -t tmpfs -o mode=755 tmpfs "$pci"
  mkdir -p "$pci/.drivers/mlx5_core" "$pci/.drivers/nvidia"
  for ((i = 0; i < 8; i++)); do
    printf -v bridge 'pci0000:%x0/0000:%x0:01.0/0000:%x1:00.0' $((i + 1)) $((i + 1)) $((i + 1))
    printf -v device '0000:%x2:00.0' $((i + 1))
    fake_pci_device "$pci" "$bridge/$device" 0x15b3 0x020700 $((i / 4)) mlx5_core
    printf -v device '0000:%x3:00.0' $((i + 1))
    if ((i < gpus)); then fake_pci_device "$pci" "$bridge/$device" 0x10de 0x030200 $((i / 4)) nvidia; fi
  done
}

fake_pci_device() { # <pci folder> <path> <vendor> <class> <numa node> <driver>
  local -r pci=$1 path=$2 vendor=$3 class=$4 numa=$5 driver=$6
  mkdir -p "$pci/$path"
  echo "$vendor" >"$pci/$path/vendor"
  echo "$class" >"$pci/$path/class"
  echo "$numa" >"$pci/$path/numa_node"
  ln -s "/$pci/.drivers/$driver" "$pci/$path/driver"
  ln -s "$path" "$pci/${path##*/}"
}

fake_infiniband() {
  local class i device
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
    fake_rdma_device "sys/class/infiniband/mlx5_$i" "$i" "$device"
  done
}

fake_rdma_device() { # <folder> <index> <pci device>
  local -r folder=$1 index=$2 device=$3 port=$1/ports/1
  mkdir -p "$port/gids" "$port/gid_attrs/types" "$port/gid_attrs/ndevs" "$port/counters"
  ln -s "$(readlink -m ".$device" | sed "s|^$PWD||")" "$folder/device"
  fake_value rdma_firmware 28.43.2026 >"$folder/fw_ver"
  echo "MT_0000000838" >"$folder/board_id"
  fake_value rdma_link_layer InfiniBand >"$port/link_layer"
  fake_value rdma_state '4: ACTIVE' >"$port/state"
  echo '5: LinkUp' >"$port/phys_state"
  fake_value rdma_rate '400 Gb/sec (4X NDR)' >"$port/rate"
  printf 'fe80:0000:0000:0000:a088:c203:00%02x:%04x\n' "$index" "0x${NAME//[!0-9]/}" >"$port/gids/0"
  fake_value rdma_gid_type 'IB/RoCE v1' >"$port/gid_attrs/types/0"
  fake_value rdma_netdev "ib$index" >"$port/gid_attrs/ndevs/0"
  for counter in port_xmit_data port_rcv_data; do echo 0 >"$port/counters/$counter"; done
}

fake_gpu_node() {
  local -r gpus=$(fake_value gpus 8)
  fake_nvidia_driver "$gpus"
  fake_pci_devices "$gpus"
  fake_infiniband
}

if [[ -e run/lab/gpu ]]; then fake_gpu_node; fi
