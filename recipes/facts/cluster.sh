# shellcheck shell=sh
# shellcheck disable=SC2154  # the variables are those of facts.sh
# A part of the fact script: the module system and Slurm. facts.sh has the helpers and the call.

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
    for word in ${record%%" Reason="*}; do # a reason is free text and may look like any of these
        case $word in NodeName=*) node=${word#*=} ;; State=*) state=${word#*=} ;; Gres=*) gres=${word#*=} ;; Partitions=*) partitions=${word#*=} ;; esac
    done
    put slurm_node "$node" "$state" "$gres" "$partitions"
    # It goes to the end but for a few keys that newer versions print after it; a tab in it would look like another field.
    case $record in *' Reason='*)
        reason=${record#*" Reason="}
        for word in Comment Extra InstanceId InstanceType ReservationName; do reason=${reason%%" $word="*}; done
        put slurm_reason "$(printf '%s' "$reason" | tr '\t' ' ')" ;;
    esac
    for job in $(limit 10 squeue -h -w "$node" -o %A); do put slurm_job "$job"; done
}
