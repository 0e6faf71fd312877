# shellcheck shell=sh
# shellcheck disable=SC2154  # the variables are those of facts.sh
# A part of the fact script: how far the host is prepared. facts.sh has the helpers and the calls, deepep_bootstrap/inventory/machine.py says what
# the lines mean: here as little as possible is decided. Everything works as a plain user.

probe_state() { # files alone: nothing here can be slow
    first_line "$root/proc/driver/nvidia/version"; put nvidia_module "$value"
    [ -e "$root/lib/modules/$kernel/build/Makefile" ] && put kernel_headers 1
    file=$root/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c
    [ -r "$file" ] && put secure_boot "$(tail -c 1 "$file" | od -An -tu1 | tr -d ' ')"
    [ -e "$root/run/reboot-required" ] && put reboot_required 1
    first_line "$root/proc/uptime"; put uptime "${value%% *}"
    put page_kib $(($(getconf PAGESIZE || echo 0) / 1024))
    # shellcheck disable=SC3045  # dash, bash and busybox know it; where it is unknown, nothing is said, and in a job it is the job's
    [ -n "${DEEPEP_STEP:-}" ] || put memlock "$(ulimit -l)"
    file=/usr/local/gib/scripts/set_nccl_env.sh; [ -e "$root$file" ] && put gib "$file"
    [ -r "$root/proc/devices" ] && while read -r major name; do
        [ "$name" = gdrdrv ] && put gdrdrv_major "$major"
    done <"$root/proc/devices"
    [ -e "$root/dev/gdrdrv" ] && put gdrdrv_node "$(stat -L -c %t "$root/dev/gdrdrv")"
    for file in "$root"/var/lib/deepep-bootstrap/changed/*; do
        [ -r "$file" ] || continue
        first_line "$file"; put stamp "${file##*/}" "$value"
    done
    # Interfaces with a device behind them, RDMA's among them, and bonds of such; no bridges, tunnels and containers' ends.
    for file in "$root"/sys/class/net/*; do
        { [ -e "$file/device" ] || [ -e "$file/bonding" ]; } || continue
        first_line "$file/mtu"; put mtu "${file##*/}" "$value"
    done
    probe_ofed
}
probe_ofed() { # a module that was not built with its kernel is marked O; without the mark, its version decides
    module=$root/sys/module/mlx5_core
    first_line "$module/version"; version=$value
    first_line "$module/taint"
    # Kernels up to 5.7 gave a version to the driver of their own too.
    case $value:$version in
        *O*:*) put ofed "${version:-$(limit 5 ofed_info -s)}" ;;
        *: | *:2.2-1 | *:3.0-1 | *:5.0-0) ;;
        *) [ -e "$module/taint" ] || put ofed "$version" ;;
    esac
}
probe_devices() { # PCI functions by vendor and class: 3D and VGA controllers, NVSwitches, Ethernet and InfiniBand controllers
    grep -slE '^0x(10de|15b3)' "$root"/sys/bus/pci/devices/*/vendor | while IFS= read -r file; do
        device=${file%/vendor}
        [ -e "$device/physfn" ] && continue
        first_line "$file"; vendor=$value; first_line "$device/class"
        case $vendor.$value in 0x10de.0x030[02]*) kind=gpu ;; 0x15b3.0x020[07]*) kind=mellanox ;; 0x10de.0x0680*) kind=nvswitch ;; *) continue ;; esac
        domain=; [ -e "$device/iommu_group" ] && first_line "$device/iommu_group/type" && domain=${value:-on}
        put device "$kind" "${device##*/}" "$domain"
    done
}
probe_daemons() {
    df -P -k "$root/dev/shm" | while read -r _ blocks _; do
        case $blocks in '' | *[!0-9]*) ;; *) put shm_mib $((blocks / 1024)) ;; esac
    done
    oldest_slurmd | while read -r _ folder; do
        sed -n 's/^Max locked memory  *\([^ ]*\) .*/slurmd_memlock=\1/p' "$folder/limits"
    done
    [ -d "$root/run/systemd/system" ] || return 0 # what sd_booted(3) asks: in containers systemctl only takes time to fail
    limit 5 systemctl show -p LoadState -p ActiveState nvidia-fabricmanager.service | while IFS='=' read -r name known; do
        put fabric_manager "$name" "$known"
    done
}
oldest_slurmd() { # its start and folder: a fork that is about to become a step bears the same name for a moment, with init as its parent
    files_of slurmd | while IFS= read -r file; do
        read -r _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ start _ 2>/dev/null <"${file%comm}stat" && echo "$start ${file%/comm}"
    done | sort -n | head -n 1
}
probe_nvlinks() {
    command -v nvidia-smi >/dev/null || return 0
    ask_gpus 30 topo -m | awk -F '\t' '
        { gsub("\033\\[[0-9;]*m", ""); gsub(/ /, "") }
        $1 == "" { for (i = 2; i <= NF; i++) if ($i ~ /^GPU[0-9]+$/) column[i] = substr($i, 4) }
        $1 ~ /^GPU[0-9]+$/ {
            row = substr($1, 4)
            for (i in column) if (row + 0 < column[i] + 0) print "reached=" row "\t" column[i] "\t" $i
        }'
}
probe_nvswitch() { # have GPUs joined their NVLink fabric? On four H200 the fields took 0.06 s, `-q` 0.42 s; old drivers lack them, hanging ones are asked once
    command -v nvidia-smi >/dev/null || return 0
    known=$(ask_gpus 20 --query-gpu=fabric.state,fabric.status --format=csv,noheader)
    case ${known##*code=} in 0 | 124 | 137) ;; *) known=$(ask_gpus 15 -q | awk '
        /^ *Fabric *$/ { inside = 1 }
        inside && /^ *State *:/ { state = $0; sub(/.*: */, "", state) }
        inside && /^ *Status *:/ { sub(/.*: */, ""); print state ", " $0; inside = 0 }') ;; esac
    printf '%s\n' "$known" | while IFS=, read -r state status; do [ -n "$status" ] && put fabric_state "$state" "${status# }"; done
}

probe_imex() { # NVLink between nodes: the service that hands memory over, its channels, and which GPUs belong together. Grace alone has it
    [ "$machine" = aarch64 ] || return 0
    set -- "$root"/dev/nvidia-caps-imex-channels/channel*
    [ -e "$1" ] || set --
    put imex_channels $#
    [ -d "$root/run/systemd/system" ] && limit 5 systemctl show -p LoadState -p ActiveState nvidia-imex.service | while IFS='=' read -r name known; do
        put imex "$name" "$known"
    done
    command -v nvidia-smi >/dev/null || return 0
    known=$(ask_gpus 20 --query-gpu=fabric.clusterUuid,fabric.cliqueId --format=csv,noheader)
    case ${known##*code=} in 0 | 124 | 137) ;; *) known=$(ask_gpus 15 -q | awk '
        /^ *Fabric *$/ { inside = 1 }
        inside && /^ *CliqueId *:/ { clique = $0; sub(/.*: */, "", clique) }
        inside && /^ *ClusterUUID *:/ { sub(/.*: */, ""); print $0 ", " clique; inside = 0 }') ;; esac
    printf '%s\n' "$known" | while IFS=, read -r domain clique; do [ -n "$clique" ] && put clique "$domain" "${clique# }"; done
}

# In single quotes: these are patterns of the package manager, of which Debian and Red Hat each know some.
packages='doca-ofed mlnx-ofed-kernel-* mlnx-ofa_kernel* rdma-core libibverbs1 libibverbs ibverbs-providers cuda-toolkit-* nvidia-open*
    nvidia-driver* nvidia-dkms* kmod-nvidia* gdrdrv-dkms gdrcopy-kmod dkms'
probe_packages() {
    set -f
    # shellcheck disable=SC2016,SC2086  # dpkg-query reads the dollars, and the list is to be split
    known=$(limit 10 dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\n' $packages)
    # shellcheck disable=SC2086
    [ -n "$known" ] || known=$(limit 10 rpm -qa --qf 'installed %{NAME} %{VERSION}-%{RELEASE}\n' $packages)
    printf '%s\n' "$known" | while read -r state name version; do [ "$state" = installed ] && put package "$name" "$version"; done
}
probe_verbs() { # libibverbs and libmlx5 wherever the loader or an LD_LIBRARY_PATH in use for DeepEP finds them
    PATH=$PATH:/usr/sbin:/sbin
    seen=; paths=; set --
    for folder in $(ldconfig -p | sed -n -E 's/.*\(libc6,[^)]*64.*\) => (.*)\/lib(ibverbs|mlx5)\.so\.1$/\1/p') \
        "/usr/lib/$machine-linux-gnu" /usr/lib64 /usr/local/lib /usr/local/nvidia/lib64 /usr/local/gib/lib64; do
        cd -P "$root$folder" || continue
        folder=${PWD#"$root"}
        case $seen in *"$folder$newline"*) continue ;; esac
        seen=$seen$folder$newline
        for file in libibverbs.so.1 libibverbs/libmlx5-rdmav*.so libmlx5-rdmav*.so libmlx5.so.1; do
            [ -e "$file" ] || continue
            real=$(readlink -f "$file"); put library "$folder/$file" "${real#"$root"}"
            set -- "$@" "$root$folder/$file"; paths=$paths$folder/$file$newline
        done
    done
    [ $# -gt 0 ] || return 0
    # The newest symbol version of libmlx5 says what it can do: NCCL asks for functions by it.
    grep -aoHE 'MLX5_1\.[0-9]+' "$@" | awk -F ':MLX5_1[.]' '
        $2 + 0 > newest[$1] + 0 { newest[$1] = $2 } END { for (file in newest) print newest[file] " " file }' |
        while read -r version file; do put library_mlx5 "${file#"$root"}" "1.$version"; done
    grep -aom 1 -HE 'IBVERBS_PRIVATE_[0-9]+' "$@" | while IFS=: read -r file abi; do put library_abi "${file#"$root"}" "${abi##*_}"; done
    name_owners
}
probe_verbs_devices() { # those that programs see: the kernel's, for which libibverbs has found a provider and loaded it
    known=$(limit 5 ibv_devices) || return 0 # not there, or it cannot tell
    put verbs_asked 1
    printf '%s\n' "$known" | while read -r name guid; do
        case $guid in '' | *[!0-9a-f]*) ;; *) put verbs_device "$name" ;; esac
    done
}
probe_flow_control() { # of RoCE ports: priorities with PFC, with ECN at its receiver and at its sender, and forced adaptive routing
    for device in "$root"/sys/class/infiniband/*; do
        first_line "$device/ports/1/link_layer"; [ "$value" = Ethernet ] || continue
        for net in "$device"/device/net/*; do
            [ -e "$net" ] && probe_flow_control_of "${device##*/}" "${net##*/}" &
            break
        done
    done
    wait
}
probe_flow_control_of() { # DEVICE INTERFACE; the register can be read by root alone
    PATH=$PATH:/usr/sbin:/sbin
    digits=; forced=
    for word in $(limit 5 dcb pfc show dev "$2" prio-pfc); do
        case $word in [0-7]:on) digits=${digits}1 ;; [0-7]:off) digits=${digits}0 ;; esac
    done
    if [ "$me" = 0 ] && command -v mlxreg >/dev/null; then
        pci=$(readlink -f "$root/sys/class/infiniband/$1/device")
        forced=$(limit 5 mlxreg -d "${pci##*/}" --reg_name ROCE_ACCL --get |
            sed -n 's/^adaptive_routing_forced_en *| *0x0*\([01]\) *$/\1/p')
    fi
    put flow_control "$1" "$(eight "$digits")" "$(ecn_priorities "$2" roce_np)" "$(ecn_priorities "$2" roce_rp)" "$forced"
}
ecn_priorities() { # INTERFACE SIDE
    digits=
    for number in 0 1 2 3 4 5 6 7; do
        first_line "$root/sys/class/net/$1/ecn/$2/enable/$number"; digits=$digits$value
    done
    eight "$digits"
}
eight() { case $1 in [01][01][01][01][01][01][01][01]) printf '%s' "$1" ;; esac; } # a digit for each priority, or nothing
name_owners() { # of `paths`; dpkg's lists, of packages that could, answer faster than dpkg-query. They may say /lib where that is a link
    if [ -d "$root/var/lib/dpkg/info" ]; then
        set -- "$root"/var/lib/dpkg/info/*verbs*.list "$root"/var/lib/dpkg/info/*mlx5*.list "$root"/var/lib/dpkg/info/*rdma*.list
        grep -sxFH "$paths$(printf '%s' "$paths" | sed 's/^\/usr//')" "$@" | while IFS= read -r line; do
            file=${line##*:}; name=${line##*/info/}; name=${name%%.list:*}; put library_owner "$file" "${name%:*}"
        done
        return 0
    fi
    printf '%s' "$paths" | while IFS= read -r file; do
        name=$(limit 5 rpm -qf --qf '%{NAME}\n' "$file") && put library_owner "$file" "${name%%"$newline"*}"
    done
}
probe_network() { # as `ip` says it, else from the kernel's tables, which machine.py puts together
    PATH=$PATH:/usr/sbin:/sbin
    limit 2 getent ahosts "$(uname -n)" | while read -r address kind _; do [ "$kind" = STREAM ] && put resolved "$address"; done
    if known=$(ip -o addr); then
        printf '%s\n' "$known" | while read -r _ name family address _; do
            case $family in inet | inet6) put address "${name%%@*}" "$address" ;; esac
        done
        for family in 4 6; do
            # A next hop begins with a tab, which would look like another field.
            ip -"$family" -o route | while IFS= read -r line; do
                case $line in *"$tab"*) line=$(printf '%s' "$line" | tr '\t' ' ') ;; esac
                put route "$family" "$line"
            done
        done
        return 0
    fi
    awk '$1 == "|--" { a = $2 } $2 == "host" && $3 == "LOCAL" && !seen[a]++ { print a }' "$root/proc/net/fib_trie" |
        while read -r address; do put local_address "$address"; done
    [ -r "$root/proc/net/if_inet6" ] && while read -r address _ bits _ _ name; do
        put kernel_address "$name" "$address" "$bits"
    done <"$root/proc/net/if_inet6"
    [ -r "$root/proc/net/route" ] && while read -r name target _ _ _ _ metric mask _; do
        case $name in Iface | '*') ;; *) put kernel_route "$name" "$target" "$mask" "$metric" ;; esac
    done <"$root/proc/net/route"
}
