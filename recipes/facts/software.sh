# shellcheck shell=sh
# shellcheck disable=SC2154  # the variables are those of facts.sh
# A part of the fact script: tools, headers, CUDA toolkits, Pythons. facts.sh has the helpers and the call.

probe_tools() {
    for name in gcc g++ clang cmake ninja git make curl uv; do
        command -v "$name" >/dev/null || continue
        { version_of "$name" --version; put tool "$name" "$version"; } &
    done
    [ -x "$root/usr/sbin/sshd" ] && put tool sshd ''
    for name in infiniband/mlx5dv.h infiniband/verbs.h; do [ -e "$root/usr/include/$name" ] && put header "$name"; done
    wait
}
probe_toolkits() { # CUDA_HOME is left out on purpose: it belongs to a person's shell, not to the host
    for toolkit in "$root"/usr/local/cuda "$root"/usr/local/cuda-*; do
        [ -x "$toolkit/bin/nvcc" ] || continue
        probe_toolkit &
    done
    wait
}
probe_toolkit() {
    ask nvcc 8 "$toolkit/bin/nvcc" --version
    version=$(printf '%s\n' "$answer" | sed -n 's/.*, V\([0-9.]*\).*/\1/p')
    ask nvcc 8 "$toolkit/bin/nvcc" --help
    split=0; case $answer in *--split-compile*) split=1 ;; esac
    real=$(readlink -f "$toolkit")
    put toolkit "${toolkit#"$root"}" "$version" "$split" "$(there "$toolkit/lib64/stubs/libcuda.so")" "${real#"$root"}"
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
# C++ ABI stands in the CMake file it ships, or else in the names of the C++ library. NCCL and NVSHMEM are those that torch finds by its
# run path, beside itself; they count only with their headers, which say their versions.
torch_questions='
import glob, importlib.metadata, importlib.util, os, platform, re, runpy, sysconfig
for name in ("setuptools", "numpy"):
    try:
        print("%s\t%s" % (name, importlib.metadata.version(name)))
    except importlib.metadata.PackageNotFoundError:
        pass
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
site = os.path.dirname(home)
owners = {}
for each in importlib.metadata.distributions(path=[site]) if home else ():
    known_as = str(each.metadata["Name"] or "").lower().replace("_", "-")
    if re.match(r"nvidia-(nccl|nvshmem)-cu[0-9]+$", known_as):
        owners[known_as.split("-")[1]] = known_as
def library(kind, file, header, define):
    root = os.path.join(site, "nvidia", kind)
    headers = glob.glob(os.path.join(glob.escape(root), "include", "**", header), recursive=True)
    if not home or not headers or not os.path.exists(os.path.join(root, "lib", file)):
        return
    with open(sorted(headers)[0], errors="replace") as text:
        lines = text.read()
    numbers = [re.findall(r"define\s+%s\s+(\d+)" % (define % part), lines)[:1] for part in ("MAJOR", "MINOR", "PATCH")]
    if all(numbers):
        print("\t".join((kind, owners.get(kind, ""), ".".join(number[0] for number in numbers), root)))
library("nccl", "libnccl.so.2", "nccl.h", "NCCL_%s")
library("nvshmem", "libnvshmem_host.so.3", "nvshmem_version.h", "NVSHMEM_VENDOR_%s_VERSION")
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
        answer=$(limit 20 "$python" -I -c "$torch_questions")
        printf '%s\n' "$answer" | grep -E "^(setuptools|numpy)$tab" | while IFS=$tab read -r name version; do
            put external_package "$name" "$version"
        done
        printf '%s\n' "$answer" | sed -n "/^nccl$tab/s/^/external_library=/p; /^nvshmem$tab/s/^/external_library=/p"
        answer=$(printf '%s\n' "$answer" | tail -n 1)
        put external_python "$python" "${answer:-${blank}does not run as a Python interpreter}"
    fi
}
