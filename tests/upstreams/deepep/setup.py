"""Build of the CPU stand-in of DeepEP: device objects with nvcc, a device link, then the extension with the host compiler."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
KERNELS = ("csrc/kernels/intranode.cu", "csrc/kernels/internode.cu", "csrc/kernels/internode_ll.cu")


def needed(name: str, example: str) -> str:
    """The value of an environment variable, or the end of the build."""
    value = os.environ.get(name, "").strip()
    if not value:
        sys.exit(f"error: {name} is not set; the CPU stand-in of DeepEP does not guess it. Try: {name}={example}")
    return value


def find_nvcc() -> Path:
    """nvcc of PYTORCH_NVCC, CUDA_HOME, PATH or /usr/local/cuda, in this order."""
    home = os.environ.get("CUDA_HOME")
    found = os.environ.get("PYTORCH_NVCC") or (home and f"{home}/bin/nvcc") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(found).is_file():
        sys.exit(f"error: no nvcc at {found}. Try: CUDA_HOME=/usr/local/cuda")
    return Path(found)


def check_toolkit(nvcc: Path) -> str:
    """The toolkit's release; it must be of torch's CUDA major."""
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        sys.exit(f"error: {nvcc} --version names no release")
    if match.group(1) != str(torch.version.cuda).split(".")[0]:
        sys.exit(f"error: torch was built for CUDA {torch.version.cuda}, but {nvcc} is of CUDA {match.group(1)}.{match.group(2)}")
    return f"{match.group(1)}.{match.group(2)}"


def gencode(arch_list: str) -> list[str]:
    """nvcc's flags for a list such as "9.0 10.0a" or "9.0;9.0+PTX"."""
    flags = []
    for word in re.split(r"[ ;]+", arch_list.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+[a-z]?)(\+PTX)?", word)
        if match is None:
            sys.exit(f"error: TORCH_CUDA_ARCH_LIST: {word!r} is not like 9.0, 9.0a or 9.0+PTX")
        number = match.group(1) + match.group(2)
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match.group(3):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


NVSHMEM_DIR = Path(needed("NVSHMEM_DIR", "/path/to/nvshmem"))
ARCH_LIST = needed("TORCH_CUDA_ARCH_LIST", "9.0")
ARCH_FLAGS = gencode(ARCH_LIST)
NVCC = find_nvcc()
CUDA = check_toolkit(NVCC)
CUDA_HOME = NVCC.parent.parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "deep_ep/__init__.py").read_text(), re.MULTILINE).group(1)
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC", *ARCH_FLAGS, f"-I{NVSHMEM_DIR}/include"]


class BuildWithNvcc(build_ext):
    """Compiles the kernels, links their device code, and gives the objects to the usual build."""

    def build_extension(self, ext: Extension) -> None:
        """Build the one extension of this package."""
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        objects = [str(folder / f"{Path(source).stem}.cu.o") for source in KERNELS]
        commands = [[NVCC, "-dc", *NVCC_FLAGS, source, "-o", target] for source, target in zip(KERNELS, objects)]
        with ThreadPoolExecutor(max_workers=int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            list(pool.map(self.run_nvcc, commands))
        linked = str(folder / "dlink.o")
        device = ["-dlink", "-Xcompiler", "-fPIC", *ARCH_FLAGS, *objects, f"-L{NVSHMEM_DIR}/lib", "-lnvshmem_device", "-o", linked]
        self.run_nvcc([NVCC, *device])
        ext.extra_objects = [*objects, linked]
        super().build_extension(ext)

    @staticmethod
    def run_nvcc(command: list) -> None:
        """Show and run one command."""
        print(" ".join(str(word) for word in command), flush=True)
        subprocess.run(command, check=True)


def cuda_runtime() -> list[str]:
    """The static CUDA runtime, which objects of the real nvcc need and those of a fake one do not."""
    if not (CUDA_HOME / "lib64/libcudart_static.a").is_file():
        return []
    return [f"-L{CUDA_HOME}/lib64", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


NVSHMEM_FLAGS = [f"-L{NVSHMEM_DIR}/lib", "-l:libnvshmem_host.so", "-l:libnvshmem_device.a", f"-Wl,-rpath,{NVSHMEM_DIR}/lib"]
# The driver's library without a folder: it is for whoever builds to let the linker find it.
LINK_FLAGS = ["-lcuda", *NVSHMEM_FLAGS, *cuda_runtime()]

print("Build summary (CPU stand-in of DeepEP, no GPU needed):")
print(f" > Version: {VERSION}")
print(f" > Sources: {['csrc/deep_ep.cpp', *KERNELS]}")
print(f" > Compilation flags: {NVCC_FLAGS}")
print(f" > Link flags: {LINK_FLAGS}")
print(f" > Arch list: {ARCH_LIST}")
print(f" > NVSHMEM path: {NVSHMEM_DIR}")
print(f" > CUDA: {CUDA} at {CUDA_HOME}, torch {torch.__version__} for CUDA {torch.version.cuda}", flush=True)

setup(
    name="deep_ep",
    version=VERSION,
    packages=["deep_ep"],
    ext_modules=[
        Extension(
            "deep_ep_cpp",
            sources=["csrc/deep_ep.cpp"],
            include_dirs=[f"{NVSHMEM_DIR}/include", f"{CUDA_HOME}/include"],
            extra_compile_args=["-O3", "-std=c++17"],
            extra_link_args=LINK_FLAGS,
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildWithNvcc},
)
