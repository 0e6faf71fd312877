#!/bin/sh
# Receive a script of known length, run it, and end everything that it started when the controller is gone.
#
# What follows the first empty line is sent, in front of it one line that sets: size (bytes of the script), watched (1: end the script
# when standard input ends), interpreter (what runs it), merge (1: standard error goes to standard output), mark (a line written to both
# before the script starts).
# shellcheck disable=SC2154,SC2329 # that line is not in this file; `forget` is called by a trap

# What tools say is read: they speak one language, whatever the account's locale is.
LC_ALL=C
export LC_ALL
[ -w "${TMPDIR:-/tmp}" ] || unset TMPDIR
cd "${HOME:-/}" 2>/dev/null || cd /
child='' box=''
forget() { [ -z "$box" ] || rm -rf "$box"; }
# Signal everything in the script's session: its own group and the groups that programs such as timeout(1) make.
signal_session() {
  kill "-$1" "-$child"
  for stat in /proc/[0-9]*/stat; do
    read -r line <"$stat" || continue
    pid=${line%% *}
    # shellcheck disable=SC2086 # the fields after the program's name are numbers: state, parent, group, session
    set -- "$1" ${line##*) }
    [ "$5" != "$child" ] || [ "$2" = Z ] || { kill "-$1" "$pid" && left=1; }
  done
}
end_session() {
  signal_session TERM
  for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do
    left=''
    signal_session 0
    [ -n "$left" ] || return
    sleep 0.2
  done
  signal_session KILL
}
trap forget EXIT
# Also for PIPE: a shell that says "Killed" of the script to a controller that is gone must not die of that and leave
# the file.
trap 'exit 143' HUP INT TERM PIPE
# A folder that nobody else may enter: everybody could make a file beside one whose name can be read off /tmp.
box=$(mktemp -d "${TMPDIR:-/tmp}/deepep-bootstrap.XXXXXXXX") || exit
job=$box/script
head -c "$size" >"$job" && [ "$(wc -c <"$job")" -eq "$size" ] || {
  echo 'deepep-bootstrap: the script did not arrive whole' >&2
  exit 1
}
printf '%s\n' "$mark"
printf '%s\n' "$mark" >&2
[ "$merge" = 0 ] || exec 2>&1
if [ "$watched" = 0 ]; then
  "$interpreter" "$job"
  exit
fi
exec 3<&0 </dev/null
setsid "$interpreter" "$job" 3<&- &
child=$!
(
  trap - EXIT PIPE
  trap '' HUP INT TERM
  while read -r _; do :; done
  : >"$box/end"
  end_session
) <&3 >/dev/null 2>&1 &
watcher=$!
trap 'end_session 2>/dev/null; kill -KILL "$watcher"; exit 143' HUP INT TERM PIPE
exec 3<&-
wait "$child" 2>/dev/null
code=$?
[ -e "$box/end" ] || kill -KILL "$watcher" 2>/dev/null
wait "$watcher" 2>/dev/null
exit "$code"
