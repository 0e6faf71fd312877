# shellcheck shell=bash
# What an entry says of how it came to be: manifest.json with what the engine knows (MANIFEST), the commands of the build, where and when
# that was, and the hash of its log. It needs files.sh before it.
#
# The log is kept by the engine. It holds, between the lines `== build of ENTRY` and `== log of ENTRY`, all that was hashed: lines as they
# came, carriage returns as ends of lines, bytes that are no UTF-8 replaced; but not the data lines (phase=…, waiting=…).

# run_logged FUNCTION: run it in a shell of its own that does not hold the heart's pipe, with its output where people read and in the log.
run_logged() {
    (
        exec {BEAT}>&-
        "$1"
    ) 2>&1 | tee -a -- "${SCRATCH}/log-${ENTRY}" {BEAT}>&- >&2
}

# build_traced: build_entry, with every command that it runs noted in a file of its own.
build_traced() {
    exec {BASH_XTRACEFD}>"${SCRATCH}/trace-${ENTRY}"
    PS4='+ '
    set -x
    build_entry
}

# write_manifest SECONDS: put it into the entry, and tell the end of the log. Of the commands those count that make something; addresses
# in them are left out, since they may hold a password, and places are named by what they are for.
write_manifest() {
    local -r seconds="$1"
    "${PYTHON}" - "${OUT}/manifest.json" "$(uname -n)" "${seconds}" "$(size_of "${OUT}")" \
        "${SCRATCH}/trace-${ENTRY}" "${SCRATCH}/log-${ENTRY}" <<'PYTHON_END'
import hashlib, json, os, re, sys, time
path, host, seconds, size, trace, log = sys.argv[1:]
MAKERS = re.compile(r"([^\s=]*/)?(cmake|make|uv|python[0-9.]*|cp|ln|sed)( |$)|export (?!PATH=)")
def read(path):
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        return [line for line in re.split("\r\n|\r|\n", file.read())]
def told(command):
    places = {os.path.dirname(path): "$OUT", os.environ["SCRATCH"]: "$SCRATCH", os.environ["PREFIX"]: "$PREFIX"}
    for place in sorted(places, key=len, reverse=True):
        command = command.replace(place, places[place])
    return re.sub(r"[a-z][a-z0-9+.-]*://[^\s']+", "(address)", command)
manifest = json.loads(os.environ["MANIFEST"])
manifest["bytes"] = int(size)
manifest["built"] = {"host": host, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "seconds": int(seconds)}
commands = [re.sub(r"^\++ ", "", line) for line in read(trace) if re.match(r"\++ ", line)]
manifest["commands"] = [told(command) for command in commands if MAKERS.match(command)]
lines = read(log)
lines = lines[:-1] if lines[-1] == "" else lines
digest = hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()
manifest["log"] = {"sha256": digest, "lines": len(lines)}
with open(path, "w", encoding="utf-8") as file:
    json.dump(manifest, file, ensure_ascii=False, indent=2)
    file.write("\n")
print("== log of {}: {} lines, SHA-256 {}".format(os.environ["ENTRY"], len(lines), digest), file=sys.stderr)
PYTHON_END
}
