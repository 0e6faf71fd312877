# shellcheck shell=bash
# Looks at what a user gets on this host: loads the module in a login shell, imports DeepEP, and asks which NVSHMEM it would call.
#
# Reads: LOAD (what to say to `module load`), ENV_FILE (the same for hosts without a module system), DEEPEP and NVSHMEM (the entries
# it should lead to), PYTHON (an external interpreter, "" for the module's own), IMPORT (yes or no). Changes nothing.
# Data lines: module, loaded, said; import, error, deep_ep, torch, nvshmem; deepep_entry, nvshmem_entry; driver.

# Runs inside the login shell, whose own start-up files may say anything on standard output: data lines leave by descriptor 3.
print_login_script() {
    cat <<'SCRIPT'
report() { printf '%s=%s\n' "$1" "$(printf '%s' "$2" | tr -s '\n\t' '  ' | cut -c 1-400)" >&3; }
messages=$(mktemp)
if type module >/dev/null 2>&1; then
    report module yes
    module load "$LOAD" >"$messages" 2>&1
    for loaded in $(printf '%s' "${LOADEDMODULES-}" | tr ':' ' '); do
        case $loaded in deepep/*) report loaded "$loaded" ;; esac
    done
else
    report module no
    . "$ENV_FILE" >"$messages" 2>&1
fi
report said "$(cat "$messages")"
rm -f "$messages"
if [ "$IMPORT" = yes ]; then
    code=0
    "${PYTHON:-python}" -c "$PROBE" || code=$?
    if [ "$code" -ne 0 ]; then
        report import no
        report error "the interpreter ${PYTHON:-python} ended with code $code"
    fi
fi
SCRIPT
}

# dlsym on the extension's own handle follows the order in which its symbols are bound; dladdr names the file that defines the result.
print_probe() {
    cat <<'PROBE'
import ctypes
import os
import sys


class Info(ctypes.Structure):
    _fields_ = [(name, kind) for name, kind in zip(("file", "base", "name", "at"), (ctypes.c_char_p, ctypes.c_void_p) * 2)]


def describe(key, value):
    return key + "=" + " ".join(str(value).split())[:400] + "\n"


def defining_file(extension, names):
    handle = ctypes.CDLL(extension)
    for name in names:
        try:
            address = ctypes.cast(getattr(handle, name), ctypes.c_void_p)
        except AttributeError:
            continue
        info = Info()
        if ctypes.CDLL(None).dladdr(address, ctypes.byref(info)):
            return os.path.realpath(os.fsdecode(info.file))
    return ""


def look():
    try:
        import deep_ep
        import deep_ep_cpp
    except (ImportError, OSError, RuntimeError, AttributeError, NameError, SyntaxError, TypeError, ValueError) as error:
        return [("import", "no"), ("error", "%s: %s" % (type(error).__name__, error))]
    return [
        ("import", "yes"),
        ("deep_ep", os.path.realpath(deep_ep.__file__)),
        ("torch", getattr(sys.modules.get("torch"), "__version__", "")),
        ("nvshmem", defining_file(deep_ep_cpp.__file__, ("nvshmem_malloc", "nvshmem_my_pe", "nvshmem_align"))),
    ]


# One write at the end: libraries print on standard output too, and a crash must leave no half answer.
lines = "".join(describe(*pair) for pair in look())
os.write(3, lines.encode("utf-8", "replace"))
PROBE
}

main() {
    need_env LOAD ENV_FILE DEEPEP NVSHMEM IMPORT
    local program
    program="$(print_login_script)"
    PROBE="$(print_probe)"
    # Entries are read-only for everybody; root could write Python's caches into them all the same.
    export LOAD ENV_FILE IMPORT PYTHON PROBE PYTHONDONTWRITEBYTECODE=1
    bash -l -c "${program}" 3>&1 >&2 </dev/null
    data deepep_entry "$(realpath -m -- "${DEEPEP}")"
    data nvshmem_entry "$(realpath -m -- "${NVSHMEM}")"
    if [[ -d /proc/driver/nvidia ]]; then data driver yes; else data driver no; fi
    data end 1
}

main "$@"
