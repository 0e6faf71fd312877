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

# The options of nvidia.ko as modprobe knows them, on one line each.
nvidia_options() {
  if [[ -e run/lab/fake/forget_options ]]; then return; fi
  chroot . /bin/bash -c 'exec -a modprobe /bin/kmod -c' | grep '^options nvidia ' || true # there are none
}

# The text of an option as modprobe would hand it to nvidia.ko: of several the last one counts. The kernel takes the quotes away.
nvidia_option() { # <options> <name> <default>
  local value=''
  if [[ $1 == *NVreg_$2=* ]]; then
    value=$(grep -oP "\bNVreg_$2=\K(\"[^\"]*\"|\S*)" <<<"$1" | tail -n 1 || true) # one whose name ends alike
  fi
  value=${value//\"/}
  echo "${value:-$3}"
}

show_nvidia_driver() {
  local kind='NVIDIA UNIX Open Kernel Module for x86_64'
  local device index options
  local -a devices=(dev/nvidiactl dev/nvidia-uvm)
  for ((index = $(fake_value gpus 8) - 1; index >= 0; index--)); do devices+=("dev/nvidia$index"); done
  for device in "${devices[@]}"; do
    if [[ ! -e $device ]]; then mknod -m 666 "$device" c 1 3; fi
  done
  options=$(nvidia_options)
  if [[ $(fake_value driver_kind open) != open ]]; then kind='NVIDIA UNIX x86_64 Kernel Module'; fi
  mkdir -p proc/driver/nvidia
  fake_value params "EnableStreamMemOPs: $(nvidia_option "$options" EnableStreamMemOPs 0)
RegistryDwords: \"$(nvidia_option "$options" RegistryDwords '')\"
RegistryDwordsPerDevice: \"\"" >proc/driver/nvidia/params
  echo "NVRM version: $kind  $(fake_value driver 580.95.05)  lab" >proc/driver/nvidia/version
}

# A host boots four hundred times in a run of the tests, so these start no processes; users_of leaves its answer in REPLY.

is_loaded() { # <module>
  local -a loaded
  mapfile -t loaded <run/modules.loaded
  [[ " ${loaded[*]} " == *" $1 "* ]]
}

users_of() { # <module>: the loaded modules that need it, separated by commas
  local user
  REPLY=''
  for user in ${NEEDED_BY[$1]:-}; do
    if is_loaded "$user"; then REPLY+=${REPLY:+,}$user; fi
  done
}

# /sys/module and the text of /proc/modules, from the names in run/modules.loaded.
show_modules() {
  local module users count
  local -a loaded each
  mapfile -t loaded <run/modules.loaded
  rm -rf sys/module/*
  if ((${#loaded[@]})); then mkdir -p "${loaded[@]/#/sys/module/}"; fi
  for module in ${loaded[@]+"${loaded[@]}"}; do
    users_of "$module"
    users=$REPLY
    IFS=, read -r -a each <<<"$users"
    count=${#each[@]}
    if [[ $module == nvidia* && -s run/lab/fake/compute_apps ]]; then count=$((count + 1)); fi
    echo "$count" >"sys/module/$module/refcnt"
    if [[ $module == nvidia* ]]; then fake_value driver 580.95.05 >"sys/module/$module/version"; fi
    echo "$module 65536 $count ${users:--}${users:+,} Live 0x0000000000000000"
  done >run/modules
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
