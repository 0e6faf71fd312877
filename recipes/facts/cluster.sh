# shellcheck shell=sh
# shellcheck disable=SC2154  # the variables are those of facts.sh
# A part of the fact script: the module system and Slurm. facts.sh has the helpers and the call.

# One login shell a run, with a clean environment: what a user finds after logging in. In single quotes: the login shell expands it.
# shellcheck disable=SC2016
login_questions='version=
[ -z "$(type -t module)" ] || version=${LMOD_VERSION:-$(module --version 2>&1 | grep -o "[0-9][0-9.]*[0-9]" | head -n 1)}
printf "\n@facts|%s|%s|%s|%s\n@slurm|%s|%s\n" "${LMOD_PKG:-${LMOD_CMD%/libexec/*}}" "${MODULESHOME:-}" "$version" "${MODULEPATH:-}" \
    "$(command -v sinfo)" "${SLURM_CONF:-}"'
probe_modules() {
    lines=
    shell=$(command -v bash) && {
        ask login-shell 10 env -i HOME="${HOME:-/}" USER="$me_called" LOGNAME="$me_called" TERM=dumb \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$shell" -lc "$login_questions"
        lines=$(printf '%s\n' "$answer" | grep -E '^@(facts|slurm)\|')
    }
    [ "$clients" = 1 ] || probe_slurm_of_login "${lines##*@slurm|}" &
    IFS='|' read -r _ lmod home version modulepath <<ANSWER
$lines
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
    wait
}
# Sites put Slurm's clients into places that sshd's PATH lacks, or sudo's: beside the slurmd that runs, or where a login shell finds them.
# `slurm_path` says where, and every later script gets it. Of root's process a plain user sees only how it was called, not its link.
find_slurm() { # fails where sinfo is neither on PATH nor beside slurmd
    process=$(find_slurmd); [ -z "$process" ] || put slurmd 1
    program=$(command -v sinfo) && { use_slurm "${program%/*}" "${SLURM_CONF:-}"; return 0; }
    [ -n "$process" ] || return 1
    program=$(readlink "$process/exe") || program=$(tr '\0' '\n' <"$process/cmdline" | head -n 1)
    use_slurm "$root${program%/*}" '' || use_slurm "$root${program%/*/*}/bin" ''
}
find_slurmd() { find_own slurmd; }
list_daemons() { # every process that may be one: `/proc/PID/comm:NAME`, one a line. A node has thousands of processes: they are looked at once
    grep -sxHE 'slurmd|kubelet|k3s-server|k3s-agent|kubelite' "$root"/proc/[0-9]*/comm
}
files_of() { # NAME: those of `daemons` with this name
    printf '%s\n' "$daemons" | sed -n "s/:$1\$//p"
}
find_own() { # NAME: the daemon of this host itself, as a folder of /proc: not one in a container, nor what another user tries
    case $daemons in *":$1"*) ;; *) return 0 ;; esac
    files_of "$1" | while IFS= read -r file; do
        awk -v me="$me" '$1 == "Uid:" { own = $2 == 0 || $2 == me } $1 == "NSpid:" { inner = NF > 2 } END { exit !own || inner }' \
            "${file%comm}status" && echo "${file%/comm}" && break
    done
}
probe_kubelet() { # k3s and microk8s have it inside another program. Where other users' processes are hidden, systemd tells
    for name in kubelet k3s-server k3s-agent kubelite; do
        [ -z "$(find_own "$name")" ] || { put kubelet 1; return 0; }
    done
    [ -d "$root/run/systemd/system" ] || return 0
    for name in kubelet k3s k3s-agent rke2-server rke2-agent snap.microk8s.daemon-kubelite; do
        limit 5 systemctl is-active --quiet "$name" >/dev/null && { put kubelet 1; return 0; }
    done
}
use_slurm() { # FOLDER CONF
    case $1 in /*) [ -x "$1/sinfo" ] || return 1 ;; *) return 1 ;; esac
    PATH=$PATH:$1; [ -z "$2" ] || { SLURM_CONF=$2; export SLURM_CONF; }
    put slurm_path "${1#"$root"}" "$2"
}
probe_slurm() { # without clients, it is the login shell's turn
    [ "$clients" = 0 ] || ask_slurm
}
probe_slurm_of_login() { # PATH-OF-SINFO|CONF
    case $1 in /*'/sinfo|'*) use_slurm "${1%%/sinfo|*}" "${1#*|}" ;; esac
    ask_slurm
}
ask_slurm() {
    version=; [ "$(has sinfo)" = 0 ] || version_of sinfo --version
    works=0; [ -n "$version" ] && limit 10 sinfo -h -o %P >/dev/null && works=1
    put slurm "$works" "$version" "$(has sbatch)"
    [ "$works" = 1 ] || return 0
    limit 10 scontrol show config | while read -r key _ value; do
        case $key in PropagateResourceLimits*) put slurm_limits "$key" "$value" ;; esac
    done
    host=${SLURMD_NODENAME:-$(uname -n)}; host=${host%%.*}
    # A site may give nodes other names than hosts. The configuration knows this host's, without a question to the controller, which would
    # have to tell each of n hosts of n nodes. Nodes that came while Slurm runs are not in it; a login host is none.
    node=$(limit 5 scontrol show aliases "$host"); node=${node%% *}
    ask scontrol 6 scontrol show node -o "${node:-$host}"
    record=$(printf '%s\n' "$answer" | grep -m 1 '^NodeName=') || return 0
    node=; state=; gres=; partitions=; set -f
    for word in ${record%%" Reason="*}; do # a reason is free text and may look like any of these
        case $word in NodeName=*) node=${word#*=} ;; State=*) state=${word#*=} ;; Gres=*) gres=${word#*=} ;; Partitions=*) partitions=${word#*=} ;; esac
    done
    # Facts that are asked by a job of our own (slurm/step.sh) are those of the node without it: it was free.
    [ -z "${DEEPEP_STEP:-}" ] || case $state in ALLOCATED* | MIXED* | COMPLETING*) state=IDLE${state#"${state%%[!A-Z]*}"} ;; esac
    put slurm_node "$node" "$state" "$gres" "$partitions"
    # It goes to the end but for a few keys that newer versions print after it; a tab in it would look like another field.
    case $record in *' Reason='*)
        reason=${record#*" Reason="}
        for word in Comment Extra InstanceId InstanceType ReservationName; do reason=${reason%%" $word="*}; done
        put slurm_reason "$(printf '%s' "$reason" | tr '\t' ' ')" ;;
    esac
    ask squeue 6 squeue -h -w "$node" -o %A
    for job in $answer; do [ "$job" = "${DEEPEP_STEP:-}" ] || put slurm_job "$job"; done
}
