# shellcheck shell=sh
# shellcheck disable=SC2154  # the variables are those of facts.sh
# A part of the fact script: GPUs, kernel modules, driver parameters, RDMA devices. facts.sh has the helpers and the call.

follow() { # LINK…: where each leads, one a line, / for one that is not there. One process for all: a node has dozens
    for link; do
        [ -e "$link" ] || link=/
        set -- "$@" "$link"; shift
    done
    [ $# -eq 0 ] || readlink -f "$@"
}
next_path() { # sets `path`: the next line of `paths`. No here-document: older shells need room in /tmp for each
    path=${paths%%"$newline"*}; paths=${paths#*"$newline"}
}
locate() { # DEVICE-LINK: sets `path` (below /sys/devices), from `paths`, and `numa`
    next_path; path=${path#"$root"/sys/devices/}
    [ "$path" != / ] || path=
    first_line "$1/numa_node"; numa=${value:--1}
}
pci_address() { # nvidia-smi writes the domain with 8 digits and capitals, sysfs with 4 and small letters
    pci=${1# }; case $pci in *[A-F]*) pci=$(printf '%s' "$pci" | tr A-F a-f) ;; esac
    pci=${pci#0000}
}

probe_gpus() { # the driver may need many seconds to wake eight GPUs when no persistence daemon runs
    command -v nvidia-smi >/dev/null || return 0
    gpus=$(ask_gpus 30 --query-gpu=index,name,memory.total,compute_cap,driver_version,pci.bus_id --format=csv,noheader,nounits)
    code=${gpus##*code=}; gpus=${gpus%%"$newline"code=*}; gpus=${gpus%"$newline"}
    [ "$code" = 0 ] || { put gpu_problem "nvidia-smi ends with code $code: $gpus"; return 0; }
    paths=$(printf '%s\n' "$gpus" | { set --
        while IFS=, read -r _ _ _ _ _ pci; do
            [ -n "$pci" ] && pci_address "$pci" && set -- "$@" "$root/sys/bus/pci/devices/$pci"
        done
        follow "$@"; })
    printf '%s\n' "$gpus" | while IFS=, read -r index name memory capability driver pci; do
        [ -n "$pci" ] || { put gpu_problem "$index"; continue; }
        pci_address "$pci"; locate "$root/sys/bus/pci/devices/$pci"
        put gpu "$index" "${name# }" "${memory# }" "${capability# }" "${driver# }" "$pci" "$path" "$numa"
    done
}
probe_gpu_processes() {
    ask_gpus 30 --query-compute-apps=gpu_bus_id,pid --format=csv,noheader | while IFS=, read -r pci pid || [ -n "$pci" ]; do
        case $pci in *:*:*.*) pci_address "$pci"; put gpu_process "$pci" "${pid# }" ;; esac
    done
}
probe_kernel() {
    [ -r "$root/proc/driver/nvidia/params" ] && while IFS= read -r line; do
        put nvidia_param "${line%%: *}" "${line#*: }"
    done <"$root/proc/driver/nvidia/params"
    loaded=$(cat "$root/proc/modules" || lsmod)
    for name in nvidia nvidia_uvm nvidia_modeset nvidia_drm nvidia_fs nvidia_peermem nv_peer_mem gdrdrv mlx5_core mlx5_ib ib_core ib_uverbs rdma_cm rdma_ucm irdma efa; do
        case $newline$loaded in *"$newline$name "*) put kernel_module "$name" ;; *) [ -d "$root/sys/module/$name" ] && put kernel_module "$name" ;; esac
    done
    put gdrdrv "$(there "$root/dev/gdrdrv")"
}
probe_fabric() { # by kernel driver: the names of RDMA devices say nothing certain
    set --
    for device in "$root"/sys/class/infiniband/*; do
        [ -d "$device/ports" ] && set -- "$@" "$device/device/driver" "$device/device"
    done
    paths=$(follow "$@")
    while [ $# -gt 0 ]; do
        device=${2%/device}; shift 2
        name=${device##*/}; next_path; driver=${path##*/}
        locate "$device/device"; first_line "$device/fw_ver"
        put rdma "$name" "$driver" "$path" "$numa" "$value"
        # In a virtual machine a virtual function has no physical one beside it, and is the NIC.
        [ -e "$device/device/physfn" ] && put rdma_virtual "$name"
        for port in "$device"/ports/*; do probe_port; done
    done
}
probe_port() { # of `name` and `port`: mlx5 shows 256 GIDs, nearly all of them zero
    number=${port##*/}
    first_line "$port/state"; state=${value#*: }; first_line "$port/link_layer"; link=$value; first_line "$port/rate"
    put port "$name" "$number" "$state" "$link" "${value%% *}"
    for entry in "$port"/gids/*; do
        first_line "$entry"; gid=$value; index=${entry##*/}
        case $gid in '' | 0000:0000:0000:0000:0000:0000:0000:0000) continue ;; esac
        first_line "$port/gid_attrs/types/$index"; kind=$value; first_line "$port/gid_attrs/ndevs/$index"
        put gid "$name" "$number" "$index" "$gid" "$kind" "$value"
    done
}
