#!/bin/sh
# The task of a step that slurm/fanout.sh starts on a node: run the script on standard input as a session of SSH would, and print what it
# left in lines that nothing of it can be taken for: hidden=WORD (what a job hides on this node; then nothing is run), out=… and err=… (its
# streams, gzip and base64), late=1 (it had no end in its time), code=N at the end.
# Usage: step.sh COMMAND SECONDS BYTES. COMMAND receives the script, as the account's own shell is told it; SECONDS is the time that it has,
# BYTES what is kept of a stream.
exec 2>/dev/null
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
command=$1 seconds=$2 bytes=$3

# Sessions of SSH descend from init, this task from slurmd, which takes away what the job did not ask for.
cpus() { sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/$1/status"; }
mounts() { awk '{ print $3, $4, $5 }' "/proc/$1/mountinfo" | sort; }
[ -n "$(cpus 1)" ] && [ "$(cpus self)" = "$(cpus 1)" ] || { echo hidden=cpus; exit; }
for device in /dev/nvidia[0-9]* /dev/nvidiactl /dev/gdrdrv /dev/infiniband/uverbs*; do
    [ -c "$device" ] || continue
    # What the mode of the file allows and the kernel does not, a cgroup denies.
    case $(id -u):$(stat -c %A "$device") in 0:* | *r??) [ -r "$device" ] || { echo hidden=devices; exit; } ;; esac
done
enter=
if [ "$(mounts self)" != "$(mounts 1)" ]; then
    # A /tmp of each job's own, of which root finds the way out.
    enter='nsenter -t 1 -m --'
    $enter true || { echo hidden=mounts; exit; }
fi

box=$(mktemp -d /tmp/deepep-bootstrap.XXXXXXXX) || exit
trap 'rm -rf "$box"' EXIT
mkfifo "$box/1" "$box/2" || exit
trap 'exit 143' HUP INT TERM
head -c "$bytes" <"$box/1" >"$box/out" &
head -c "$bytes" <"$box/2" >"$box/err" &
user=$(id -un)
account=$(getent passwd "$user")
home=${account%:*} shell=${account##*:}
path=$(sed -n 's/^PATH="\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' /etc/environment | tail -n 1) # pam_env's, which sshd asks
# bash reads the account's bashrc where it sees that sshd started it.
# shellcheck disable=SC2086  # `enter` is words
$enter env -i HOME="${home##*:}" USER="$user" LOGNAME="$user" SHELL="$shell" PATH="${path:-$PATH}" SSH_CLIENT='127.0.0.1 0 22' \
    DEEPEP_STEP="$SLURM_JOB_ID" timeout -k 5 "$seconds" "${shell:-/bin/sh}" -c "$command" >"$box/1" 2>"$box/2"
code=$?
wait
encode() { gzip -c <"$box/$1" | base64 -w 76 | sed "s/^/$1=/"; }
encode out
encode err
[ "$code" != 124 ] || echo late=1
echo "code=$code"
