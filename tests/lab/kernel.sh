#!/bin/bash
# What a lab host's kernel shows of GPU and RDMA drivers. Sourced at boot (fakes.sh) and by the tools that change it (lab-kmod), each
# time with the host's root as the current folder: all paths are relative.
#
# run/modules.loaded holds the names of the loaded modules; everything shown is made from it.

declare -rA NEEDED_BY=(
  [nvidia]='nvidia_uvm nvidia_modeset nvidia_peermem' [nvidia_modeset]=nvidia_drm [mlx5_core]=mlx5_ib [ib_uverbs]=mlx5_ib
  [ib_core]='mlx5_ib ib_uverbs rdma_cm rdma_ucm nvidia_peermem' [rdma_cm]=rdma_ucm
)
readonly RDMA_MODULES='ib_core ib_uverbs mlx5_core mlx5_ib rdma_cm rdma_ucm'

fake_value() { # <name> <default>
  local -r file=run/lab/fake/$1
  if [[ -e $file ]]; then cat "$file"; else echo "$2"; fi
}

is_installed() { # <package pattern> <marker file>: by the host's package database, or by what a recipe's test left in its place
  [[ -e $2 ]] || awk -v name="^($1)$" '/^Package:/ { ours = $2 ~ name } ours && /^Status: (install|hold) ok installed/ { found = 1 } END { exit !found }' \
    var/lib/dpkg/status
}

has_nvidia_driver() {
  [[ ! -e run/lab/fake/no_driver ]] || is_installed '(nvidia|cuda)-(open|driver|drivers|dkms).*' usr/share/nvidia-driver/installed
}

has_ofed() {
  [[ ! -e run/lab/fake/rdma_inbox ]] || is_installed 'doca-ofed.*' usr/share/doca-ofed/installed
}

# The text of an option as modprobe would hand it to nvidia.ko: of several the last one counts. The kernel takes the quotes away.
nvidia_option() { # <name> <default>
  local value=''
  if [[ ! -e run/lab/fake/forget_options ]]; then
    value=$(chroot . /bin/bash -c 'exec -a modprobe /bin/kmod -c' | grep '^options nvidia ' | grep -oP "\bNVreg_$1=\K(\"[^\"]*\"|\S*)" | tail -n 1 || true) # no such option
  fi
  value=${value//\"/}
  echo "${value:-$2}"
}

show_nvidia_driver() {
  local kind='NVIDIA UNIX Open Kernel Module for x86_64'
  local device
  for device in $(seq --format 'dev/nvidia%.0f' 0 $(($(fake_value gpus 8) - 1))) dev/nvidiactl dev/nvidia-uvm; do
    if [[ ! -e $device ]]; then mknod -m 666 "$device" c 1 3; fi
  done
  if [[ $(fake_value driver_kind open) != open ]]; then kind='NVIDIA UNIX x86_64 Kernel Module'; fi
  mkdir -p proc/driver/nvidia
  fake_value params "EnableStreamMemOPs: $(nvidia_option EnableStreamMemOPs 0)
RegistryDwords: \"$(nvidia_option RegistryDwords '')\"
RegistryDwordsPerDevice: \"\"" >proc/driver/nvidia/params
  echo "NVRM version: $kind  $(fake_value driver 580.95.05)  lab" >proc/driver/nvidia/version
}

is_loaded() { # <module>
  grep -qx "$1" run/modules.loaded
}

users_of() { # <module>: the loaded modules that need it, separated by commas
  local user users=''
  for user in ${NEEDED_BY[$1]:-}; do
    if is_loaded "$user"; then users+=${users:+,}$user; fi
  done
  echo "$users"
}

# /sys/module and the text of /proc/modules, from the names in run/modules.loaded.
show_modules() {
  local module users count
  rm -rf sys/module/*
  while read -r module; do
    users=$(users_of "$module")
    count=$(wc -w <<<"${users//,/ }")
    if [[ $module == nvidia* && -s run/lab/fake/compute_apps ]]; then count=$((count + 1)); fi
    mkdir -p "sys/module/$module"
    echo "$count" >"sys/module/$module/refcnt"
    if [[ $module == nvidia* ]]; then fake_value driver 580.95.05 >"sys/module/$module/version"; fi
    echo "$module 65536 $count ${users:--}${users:+,} Live 0x0000000000000000"
  done <run/modules.loaded >run/modules
}

load_module() { # <module>: it and what it needs, as far as the host has them; fails for one that it does not have
  local -r module=$1
  local needed
  if is_loaded "$module"; then return; fi
  case " $RDMA_MODULES nvidia nvidia_uvm nvidia_modeset nvidia_drm nvidia_peermem " in
    *" $module "*) if [[ $module == nvidia* ]] && ! has_nvidia_driver; then return 1; fi ;;
    *) compgen -G "lib/modules/$(uname -r)/**/$module.ko*" >/dev/null || return 1 ;;
  esac
  for needed in "${!NEEDED_BY[@]}"; do
    case " ${NEEDED_BY[$needed]} " in *" $module "*) load_module "$needed" ;; esac
  done
  if [[ $module == nvidia ]]; then show_nvidia_driver; fi
  echo "$module" >>run/modules.loaded
}

unload_module() { # <module>
  grep -vx "$1" run/modules.loaded >run/modules.rest || true # the last one leaves nothing
  cat run/modules.rest >run/modules.loaded
  if [[ $1 == nvidia ]]; then rm -rf proc/driver/nvidia; fi
}
