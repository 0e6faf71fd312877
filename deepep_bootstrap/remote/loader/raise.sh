#!/bin/sh
# Become another user and go on with the loader there. The first line of standard input is the password for sudo, or empty.
#
# What follows the first empty line is sent, in front of it one line that sets: user (who runs the rest), loader (the program that
# receives the next one).
# shellcheck disable=SC2154,SC2329,SC2016 # that line is not in this file; `leave` is called by a trap; the askpass program expands itself

say() { printf 'deepep-bootstrap: %s\n' "$1" >&2; exit 1; }
unset password
IFS= read -r password || exit
if [ "$(id -un)" = "$user" ]; then
  unset password
  exec /bin/sh -c "$loader"
fi
if [ "$(id -u)" -eq 0 ]; then
  unset password
  home=$(getent passwd "$user" | cut -d: -f6)
  [ -n "$home" ] || say 'no such user'
  HOME=$home USER=$user LOGNAME=$user
  export HOME USER LOGNAME
  exec runuser -u "$user" -- /bin/sh -c "$loader"
fi
command -v sudo >/dev/null 2>&1 || say 'no sudo'
LC_ALL=C
export LC_ALL
[ -n "$password" ] || exec sudo -n -H -u "$user" -- /bin/sh -c "$loader"
box='' writer=''
leave() { [ -z "$writer" ] || kill "$writer" 2>/dev/null; [ -z "$box" ] || rm -rf "$box"; }
trap leave EXIT
trap 'exit 143' HUP INT TERM
# sudo asks a program that must be executable, so a directory mounted noexec will not do. The password waits in a FIFO,
# once.
for base in "${XDG_RUNTIME_DIR:-/tmp}" /tmp /dev/shm "$HOME"; do
  box=$(mktemp -d "$base/deepep-bootstrap.XXXXXXXX" 2>/dev/null) || continue
  printf '%s\n' '#!/bin/sh' '[ "$1" = try ] || { cat "${0%/*}/answer" && rm -f "${0%/*}/answer"; }' >"$box/ask"
  chmod 700 "$box/ask" && mkfifo -m 600 "$box/answer" && "$box/ask" try 2>/dev/null && break
  rm -rf "$box"
  box=''
done
[ -n "$box" ] || say 'no directory for the question of sudo'
(printf '%s\n' "$password" >"$box/answer") >/dev/null 2>&1 &
writer=$!
unset password
SUDO_ASKPASS=$box/ask sudo -A -H -p 'password: ' -u "$user" -- /bin/sh -c "$loader"
exit
