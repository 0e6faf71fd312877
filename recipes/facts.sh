#!/bin/sh
# Facts of one host: POSIX sh, read-only, one round trip. Prints `key=value` lines (fields separated by tabs), the last one `end=1`.
# Usage: facts.sh PREFIX [PYTHON]. FACTS_ROOT, for tests, stands before /sys, /proc, /etc, /dev, /usr/bin, /usr/include and /usr/local.
# A missing tool is a fact and no error: there is no `set -e`, and what tools say on stderr is dropped. Slow questions run side by
# side, so the order of lines means nothing; deepep_bootstrap/facts.py joins what belongs together.
set -u
LC_ALL=C; export LC_ALL
tab=$(printf '\t'); newline='
'
spaces=$IFS
root=${FACTS_ROOT:+$(cd -P "$FACTS_ROOT" && pwd -P)}

put() { # KEY FIELD…: one record; a newline inside a field becomes a space
    put_key=$1; shift; IFS=$tab; put_text="$*"; IFS=$spaces
    case $put_text in *"$newline"*) put_text=$(printf '%s' "$put_text" | tr '\n' ' ') ;; esac
    printf '%s=%s\n' "$put_key" "$put_text"
}
has() { if command -v "$1" >/dev/null; then echo 1; else echo 0; fi; }
there() { if [ -e "$1" ]; then echo 1; else echo 0; fi; }
limit() { limit_s=$1; shift; if command -v timeout >/dev/null; then timeout -k 1 "$limit_s" "$@"; else "$@"; fi; }
first_line() { value=; [ -r "$1" ] && IFS= read -r value <"$1"; }
version_of() { # COMMAND…: sets `version` to the first word of its first line that begins like a version number
    version=; set -f
    for word in $(limit 5 "$@" | head -n 1); do
        case $word in [0-9]*.*) version=${word%%[!0-9.]*}; version=${version%.}; break ;; esac
    done
    set +f
}
locate() { # DEVICE LINK: sets `path` (below /sys/devices) and `numa`
    path=; [ -e "$1" ] && path=$(readlink -f "$1") && path=${path#"$root"/sys/devices/}
    first_line "$1/numa_node"; numa=${value:--1}
}
pci_address() { # nvidia-smi writes the domain with 8 digits and capitals, sysfs with 4 and small letters
    pci=$(printf '%s' "${1# }" | tr A-F a-f); pci=${pci#0000}
}

probe_system() {
    # In a subshell: the file is shell text and its variables must not meet ours.
    # shellcheck disable=SC1091
    (ID=; VERSION_ID=; PRETTY_NAME=; [ -r "$root/etc/os-release" ] && . "$root/etc/os-release"
     put os_id "$ID"; put os_version "$VERSION_ID"; put os_name "$PRETTY_NAME")
    put kernel "$(uname -r)"; put machine "$(uname -m)"; put hostname "$(uname -n)"
    put user "$(id -un)"; put uid "$(id -u)"; put cpus "$(nproc || getconf _NPROCESSORS_ONLN)"
    first_line "$root/proc/sys/kernel/random/boot_id"; put boot_id "$value"
    value=$(grep -m 1 '^model name' "$root/proc/cpuinfo"); put cpu_model "${value#*: }"
    value=$(getconf GNU_LIBC_VERSION); put glibc "${value#* }"
    while read -r name value _; do
        case $name in MemTotal:) put memory_mib $((value / 1024)) ;; MemAvailable:) put memory_free_mib $((value / 1024)) ;; esac
    done <"$root/proc/meminfo"
    set -- "$(limit 5 df -P -k "${TMPDIR:-/tmp}" | awk 'END { print int($(NF - 2) / 1024) }')"; put scratch_free_mib "$1"
}
probe_gpus() { # the driver may need many seconds to wake eight GPUs when no persistence daemon runs
    command -v nvidia-smi >/dev/null || return 0
    gpus=$(limit 30 nvidia-smi --query-gpu=index,name,memory.total,compute_cap,driver_version,pci.bus_id --format=csv,noheader,nounits)
    code=$?; [ "$code" = 0 ] || { put gpu_problem "nvidia-smi ends with code $code: $gpus"; return 0; }
    printf '%s\n' "$gpus" | while IFS=, read -r index name memory capability driver pci; do
        [ -n "$pci" ] || { put gpu_problem "$index"; continue; }
        pci_address "$pci"; locate "$root/sys/bus/pci/devices/$pci"
        put gpu "$index" "${name# }" "${memory# }" "${capability# }" "${driver# }" "$pci" "$path" "$numa"
    done
}
probe_gpu_processes() {
    limit 30 nvidia-smi --query-compute-apps=gpu_bus_id,pid --format=csv,noheader | while IFS=, read -r pci pid || [ -n "$pci" ]; do
        case $pci in *:*:*.*) pci_address "$pci"; put gpu_process "$pci" "${pid# }" ;; esac
    done
}
probe_kernel() {
    [ -r "$root/proc/driver/nvidia/params" ] && while IFS= read -r line; do
        put nvidia_param "${line%%: *}" "${line#*: }"
    done <"$root/proc/driver/nvidia/params"
    loaded=$(cat "$root/proc/modules" || lsmod)
    for name in nvidia nvidia_uvm nvidia_peermem nv_peer_mem gdrdrv mlx5_core mlx5_ib ib_core ib_uverbs rdma_cm rdma_ucm irdma efa; do
        case $newline$loaded in *"$newline$name "*) put kernel_module "$name" ;; *) [ -d "$root/sys/module/$name" ] && put kernel_module "$name" ;; esac
    done
    put gdrdrv "$(there "$root/dev/gdrdrv")"
}
probe_fabric() { # by kernel driver: the names of RDMA devices say nothing certain
    for device in "$root"/sys/class/infiniband/*; do
        [ -d "$device/ports" ] || continue
        name=${device##*/}; driver=
        [ -e "$device/device/driver" ] && driver=$(readlink -f "$device/device/driver")
        locate "$device/device"; first_line "$device/fw_ver"
        put rdma "$name" "${driver##*/}" "$path" "$numa" "$value"
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
probe_tools() {
    for name in gcc g++ clang cmake ninja git make curl uv; do
        command -v "$name" >/dev/null || continue
        version_of "$name" --version; put tool "$name" "$version"
    done
    for name in infiniband/mlx5dv.h infiniband/verbs.h; do [ -e "$root/usr/include/$name" ] && put header "$name"; done
}
probe_toolkits() { # CUDA_HOME is left out on purpose: it belongs to a person's shell, not to the host
    for toolkit in "$root"/usr/local/cuda "$root"/usr/local/cuda-*; do
        [ -x "$toolkit/bin/nvcc" ] || continue
        version=$(limit 10 "$toolkit/bin/nvcc" --version | sed -n 's/.*, V\([0-9.]*\).*/\1/p')
        split=0; limit 10 "$toolkit/bin/nvcc" --help | grep -q -e '--split-compile' && split=1
        real=$(readlink -f "$toolkit")
        put toolkit "${toolkit#"$root"}" "$version" "$split" "$(there "$toolkit/lib64/stubs/libcuda.so")" "${real#"$root"}"
    done
}
probe_pythons() {
    for program in "$root"/usr/bin/python3.*; do
        name=${program##*/}
        case ${name#python3.} in '' | *[!0-9]*) continue ;; esac
        version_of "$program" -V
        put python "${program#"$root"}" "$version" "$(there "$root/usr/include/$name/Python.h")"
    done
}
# What one --python must say, without importing torch (seconds) and without single quotes: its version module is a few assignments, its
# C++ ABI stands in the CMake file it ships, or else in the names of the C++ library.
torch_questions='
import importlib.util, os, platform, re, runpy, sysconfig
spec = importlib.util.find_spec("torch")
home = os.path.dirname(spec.origin) if spec and spec.origin else ""
known, abi, problem = {}, "", "" if home else "has no torch"
if home:
    try:
        known = runpy.run_path(os.path.join(home, "version.py"))
        with open(os.path.join(home, "share/cmake/Torch/TorchConfig.cmake")) as config:
            abi = "".join(re.findall(r"_GLIBCXX_USE_CXX11_ABI=([01])", config.read())[:1])
        if not abi:
            with open(os.path.join(home, "lib/libc10.so"), "rb") as library:
                abi = str(int(b"__cxx11" in library.read()))
    except OSError as error:
        problem = "its torch is not complete: %s" % error
if home and not problem and not known.get("cuda"):
    problem = "its torch is built without CUDA"
header = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
fields = [platform.python_version(), sysconfig.get_config_var("SOABI"), known.get("__version__"), known.get("git_version"), known.get("cuda")]
print("\t".join(" ".join(str(field or "").split()) for field in fields + [abi, str(int(header)), problem]))
'
probe_external() {
    [ -n "$python" ] || return 0
    blank="$tab$tab$tab$tab$tab${tab}0$tab"
    if [ ! -e "$python" ]; then put external_python "$python" "${blank}is not there"
    elif [ ! -x "$python" ] || [ -d "$python" ]; then put external_python "$python" "${blank}is not a program"
    else
        answer=$(limit 20 "$python" -I -c "$torch_questions" | tail -n 1)
        put external_python "$python" "${answer:-${blank}does not run as a Python interpreter}"
    fi
}
# One login shell a run, with a clean environment: what a user finds after logging in. In single quotes: the login shell expands it.
# shellcheck disable=SC2016
login_questions='version=; [ -z "$(type -t module)" ] || version=$(module --version 2>&1 | grep -o "[0-9][0-9.]*[0-9]" | head -n 1)
printf "\n@facts|%s|%s|%s|%s\n" "${LMOD_PKG:-${LMOD_CMD%/libexec/*}}" "${MODULESHOME:-}" "$version" "${MODULEPATH:-}"'
probe_modules() {
    shell=$(command -v bash) && lines=$(limit 10 env -i HOME="${HOME:-/}" USER="$(id -un)" LOGNAME="$(id -un)" TERM=dumb \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$shell" -lc "$login_questions" | grep '^@facts|')
    IFS='|' read -r _ lmod home version modulepath <<ANSWER
${lines:-}
ANSWER
    kind=none; init=
    if [ -n "$lmod" ]; then kind=lmod; init=$lmod/init/bash
    elif [ -n "$home" ]; then kind=environment-modules; init=$home/init/bash
    else
        for init in "$root"/usr/share/lmod/lmod/init/bash "$root"/opt/apps/lmod/lmod/init/bash "$root"/usr/share/[mM]odules/init/bash ''; do
            [ -e "$init" ] && break
        done
        case $init in */lmod/*) kind=lmod ;; */init/bash) kind=environment-modules ;; esac
    fi
    put modules "$kind" "$version" "${init#"$root"}" "$modulepath"
    for shell in sh csh; do
        [ -r "$root/etc/profile.d/zz-deepep.$shell" ] && put hook "$shell" "$(sed -n 's/^# modulefiles: //p' "$root/etc/profile.d/zz-deepep.$shell")"
    done
}
probe_slurm() {
    version=; [ "$(has sinfo)" = 0 ] || version_of sinfo --version
    works=0; [ -n "$version" ] && limit 10 sinfo -h -o %P >/dev/null && works=1
    put slurm "$works" "$version" "$(has sbatch)"
    [ "$works" = 1 ] || return 0
    host=${SLURMD_NODENAME:-$(uname -n)}; host=${host%%.*}
    record=$(limit 10 scontrol show node -o "$host" | grep -m 1 '^NodeName=')
    # A site may give nodes other names than hosts; on a login host neither question finds anything.
    [ -n "$record" ] || record=$(limit 10 scontrol show node -o | grep -m 1 " NodeHostName=$host ") || return 0
    node=; state=; gres=; partitions=; set -f
    for word in $record; do
        case $word in NodeName=*) node=${word#*=} ;; State=*) state=${word#*=} ;; Gres=*) gres=${word#*=} ;; Partitions=*) partitions=${word#*=} ;; esac
    done
    put slurm_node "$node" "$state" "$gres" "$partitions"
    for job in $(limit 10 squeue -h -w "$node" -o %A); do put slurm_job "$job"; done
}
probe_prefix() { # a dead NFS server must cost seconds, not the run: `stat` in a child of its own asks first
    put prefix_path "$prefix"
    limit 5 stat "$prefix" >/dev/null
    case $? in 124 | 137) put prefix_problem 'does not answer within 5 s'; return 0 ;; esac
    parent=$prefix
    while [ ! -e "$parent" ]; do parent=${parent%/*}; parent=${parent:-/}; done
    put prefix_exists "$(if [ -d "$prefix" ]; then echo 1; else echo 0; fi)"
    put prefix_writable "$(if [ -w "$parent" ]; then echo 1; else echo 0; fi)"
    limit 5 df -P -T -k "$parent" | tail -n 1 | while read -r source fs _ _ free _; do put prefix_fs "$fs" "$((free / 1024))" "$source"; done
    first_line "$prefix/.id"; put prefix_id "$value"
    for entry in "$prefix"/store/*; do [ -d "$entry" ] && put prefix_entry "${entry##*/}"; done
    link=$(readlink "$prefix/current") && put prefix_generation "${link##*/}"
    [ -r "$prefix/current/manifest.json" ] && put prefix_manifest "$(base64 <"$prefix/current/manifest.json" | tr -d '\n')"
}

main() {
    exec </dev/null 2>/dev/null
    prefix=$1; python=${2:-}
    put facts 1
    for probe in gpus gpu_processes slurm modules external tools toolkits pythons; do "probe_$probe" & done
    probe_system; probe_kernel; probe_fabric
    wait
    probe_prefix
    put end 1
}
main "$@"
