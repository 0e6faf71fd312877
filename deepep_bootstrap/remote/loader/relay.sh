#!/bin/sh
# Run what follows on standard input as a session of its own would, and print what it left in lines that stay whole on any way back: the
# mark; out=… and err=… (its streams, gzip and base64); late=1 (it had no end in its time); code=N at the end.
#
# What follows the first empty line is sent, in front of it one line that sets: loader (the program that receives the script), seconds (the
# time that it has), bytes (what is kept of a stream), mark (a line before which the account's start-up files may have printed).
# shellcheck disable=SC2154 # that line is not in this file

exec 2>/dev/null
printf '\n%s\n' "$mark"
box=$(mktemp -d "${TMPDIR:-/tmp}/deepep-bootstrap.XXXXXXXX") || exit
trap 'rm -rf "$box"' EXIT
trap 'exit 143' HUP INT TERM PIPE
mkfifo "$box/1" "$box/2" || exit
head -c "$bytes" <"$box/1" >"$box/out" &
head -c "$bytes" <"$box/2" >"$box/err" &
timeout -k 5 "$seconds" /bin/sh -c "$loader" >"$box/1" 2>"$box/2"
code=$?
wait
encode() { gzip -c <"$box/$1" | base64 -w 16384 | sed "s/^/$1=/"; }
encode out
encode err
[ "$code" != 124 ] || echo late=1
echo "code=$code"
