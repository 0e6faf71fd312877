"""Build of the CPU stand-in of DeepEP V2: the kernels of its legacy half with nvcc, then the extension with the host compiler."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
KERNELS = ("csrc/kernels/legacy/intranode.cu", "csrc/kernels/legacy/internode.cu")
PERSISTENT = ("EP_JIT_CACHE_DIR", "EP_NCCL_ROOT_DIR")


def needed(name: str, example: str) -> str:
    """The value of an environment variable, or the end of the build."""
    value = os.environ.get(name, "").strip()
    if not value:
        sys.exit(f"error: {name} is not set; the CPU stand-in of DeepEP V2 does not guess it. Try: {name}={example}")
    return value


def library(root: Path, pattern: str) -> str:
    """The file name of a library that may lack the name without a number, as in wheels."""
    found = sorted(path.name for path in (root / "lib").glob(pattern))
    if not found:
        sys.exit(f"error: no {pattern} in {root / 'lib'}")
    return found[0]


NCCL = Path(needed("EP_NCCL_ROOT_DIR", "/path/to/nccl"))
NVSHMEM = Path(needed("EP_NVSHMEM_ROOT_DIR", "/path/to/nvshmem"))
ARCHS = re.split(r"[ ;]+", needed("TORCH_CUDA_ARCH_LIST", "9.0"))
CUDA_HOME = Path(needed("CUDA_HOME", "/usr/local/cuda"))
FMT = HERE / "third-party/fmt/include"
if not (FMT / "fmt/format.h").is_file():
    sys.exit("error: third-party/fmt is empty. Try: git submodule update --init")
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "deep_ep/__init__.py").read_text(), re.MULTILINE).group(1)
NUMBERS = [arch.replace(".", "") for arch in ARCHS]
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC", *(f"-gencode=arch=compute_{one},code=sm_{one}" for one in NUMBERS)]


class KeepDefaults(build_py):
    """Writes some of the build's environment into the package, as its defaults."""

    def run(self) -> None:
        """Write them, then do what is usual."""
        folder = Path(self.build_lib, "deep_ep")
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"persistent_envs['{name}'] = {os.environ[name]!r}\n" for name in PERSISTENT if name in os.environ]
        (folder / "envs.py").write_text("".join(["persistent_envs = {}\n", *lines]))
        super().run()


class BuildWithNvcc(build_ext):
    """Compiles the kernels, links their device code, and gives the objects to the usual build."""

    def build_extension(self, ext: Extension) -> None:
        """Build the one extension of this package."""
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        objects = [str(folder / f"{Path(source).stem}.cu.o") for source in KERNELS]
        for source, target in zip(KERNELS, objects):
            self.run_nvcc("-dc", *NVCC_FLAGS, f"-I{NVSHMEM}/include", source, "-o", target)
        linked = str(folder / "dlink.o")
        self.run_nvcc("-dlink", *NVCC_FLAGS[2:], *objects, f"-L{NVSHMEM}/lib", "-lnvshmem_device", "-o", linked)
        ext.extra_objects = [*objects, linked]
        super().build_extension(ext)

    @staticmethod
    def run_nvcc(*words: str) -> None:
        """Show and run one command."""
        print("nvcc", *words, flush=True)
        subprocess.run([CUDA_HOME / "bin/nvcc", *words], check=True)


def runtime() -> list:
    """The static CUDA runtime, which objects of the real nvcc need and those of a fake one do not."""
    if not (CUDA_HOME / "lib64/libcudart_static.a").is_file():
        return []
    return [f"-L{CUDA_HOME}/lib64", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


LINK_FLAGS = ["-lcuda", f"-L{NVSHMEM}/lib", f"-l:{library(NVSHMEM, 'libnvshmem_host.so*')}", "-l:libnvshmem_device.a"]
LINK_FLAGS += [f"-Wl,-rpath,{NVSHMEM}/lib", f"-l:{library(NCCL, 'libnccl.so*')}", f"-Wl,-rpath,{NCCL}/lib", *runtime()]

print("Build summary (CPU stand-in of DeepEP V2, no GPU needed):")
print(f" > NVSHMEM path: {NVSHMEM}")
print(f" > NCCL path: {NCCL}")
print(f" > torch {torch.__version__} for CUDA {torch.version.cuda}", flush=True)

setup(
    name="deep_ep",
    version=f"{VERSION}+local",
    packages=["deep_ep", "deep_ep.buffers"],
    package_data={"deep_ep": ["include/deep_ep/**/*"]},
    ext_modules=[
        Extension(
            "deep_ep._C",
            sources=["csrc/python_api.cpp"],
            include_dirs=[f"{NVSHMEM}/include", f"{NCCL}/include", str(FMT), f"{CUDA_HOME}/include"],
            extra_compile_args=["-O3", "-std=c++17"],
            extra_link_args=LINK_FLAGS,
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildWithNvcc, "build_py": KeepDefaults},
)
