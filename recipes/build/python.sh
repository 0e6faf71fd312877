# shellcheck shell=bash
# A Python environment of the locked wheels, relocatable, with torch's own NVSHMEM replaced by ours.
# Inputs besides those of prefix/publish.sh: SCRATCH/bin/uv, SCRATCH/wheels, SCRATCH/requirements.txt (with hashes), NVSHMEM (entry),
# CUDA_MAJOR; ONLINE=1 where the wheels come from the index and not from SCRATCH/wheels, with the addresses of the indexes in
# INDEXES (one a line; the first is the default one, empty: uv's own). Hashes decide in either case.

WORK="${SCRATCH}/early/${ENTRY}"

# uv unpacks wheels into its cache and links them from there: the environment in scratch costs no second copy, and DeepEP's build
# compiles against it while it is still being copied to the prefix.
build_entry() {
    local -r uv="${SCRATCH}/bin/uv"
    local -ra quiet=(--no-progress --cache-dir "${SCRATCH}/uv-cache")
    local -a from=(--offline --no-config --no-index --find-links "${SCRATCH}/wheels")
    export UV_PYTHON_DOWNLOADS=never
    if [[ -n "${ONLINE:-}" ]]; then
        from=(--index-strategy unsafe-best-match) # the site's own uv settings (mirrors, proxies) hold here
        name_indexes "${INDEXES:-}"
    fi
    "${uv}" venv "${quiet[@]}" --offline --no-config --relocatable --no-project --python "${PYTHON}" "${WORK}"
    "${uv}" pip install "${quiet[@]}" "${from[@]}" --python "${WORK}/bin/python" \
        --no-deps --require-hashes --no-build --link-mode hardlink -r "${SCRATCH}/requirements.txt"
    touch -- "${WORK}.ready"
    cp -a -- "${WORK}/." "${OUT}"
    rm -f -- "${OUT}/.lock"
    forget_uv
    use_our_nvshmem
    compile_modules "${OUT}" lib
}

# forget_uv: uv notes its own version, and beside each package when its wheel came, for its own use: that would differ from build to build.
forget_uv() {
    local note
    sed -i '/^uv = /d' "${OUT}/pyvenv.cfg"
    for note in "${OUT}"/lib/python3*/site-packages/*.dist-info/uv_cache.json; do
        [[ -e "${note}" ]] || continue # this uv leaves none
        rm -- "${note}"
        sed -i '/\.dist-info\/uv_cache\.json,/d' "${note%/*}/RECORD"
    done
}

# use_our_nvshmem: torch opens libnvshmem_host.so.3 in nvidia/nvshmem/lib by path. With that folder being a link to our entry's, ours
# is the only NVSHMEM of the process. Relative, so that a moved prefix keeps working; it may dangle until that entry is published.
use_our_nvshmem() {
    local folder
    for folder in "${OUT}"/lib/python3*/site-packages/nvidia/nvshmem/lib; do
        [[ -d "${folder}" ]] || continue # these wheels bring no NVSHMEM
        rm -rf -- "${folder}"
        ln -s -- "../../../../../../${NVSHMEM}/lib" "${folder}"
    done
}

check_entry() {
    [[ -z "$(find_absolute_scripts)" ]] || die "scripts that name a build path: $(find_absolute_scripts | tr '\n' ' ')"
    wait_for_entry "${NVSHMEM}"
    with_driver_stub "${OUT}/bin/python" - "${CUDA_MAJOR}" "${PREFIX}/store/${NVSHMEM}" "${VERSION}" <<'PYTHON_END'
import importlib.util, pathlib, sys
major, nvshmem, version = sys.argv[1:]
if importlib.util.find_spec("torch") is None:
    sys.exit(0)
import torch
print("torch", torch.__version__, "CUDA", torch.version.cuda, file=sys.stderr)
if torch.__version__.split("+")[0] != version.split("+")[0]:
    sys.exit(f"torch: found {torch.__version__}, wanted {version}")
if (torch.version.cuda or "none").split(".")[0] != major:
    sys.exit(f"torch's CUDA: found {torch.version.cuda}, wanted {major}")
for path in sys.path:
    library = pathlib.Path(path, "nvidia", "nvshmem", "lib", "libnvshmem_host.so.3")
    if library.parent.is_symlink() and pathlib.Path(nvshmem, "lib").resolve() not in library.resolve().parents:
        sys.exit(f"NVSHMEM of torch: found {library.resolve()}, wanted one in {nvshmem}")
PYTHON_END
}

find_absolute_scripts() {
    grep -rlIF -e "${SCRATCH}" -e "${OUT}" -- "${OUT}/bin" "${OUT}/pyvenv.cfg" || true # nothing found is what we want
}

main "$@"
