"""Build of the CPU stand-in of DeepEP V2.5: one extension, by the host compiler."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
PERSISTENT = ("EP_JIT_CACHE_DIR", "EP_NCCL_ROOT_DIR")
JIT = HERE / "third-party/deep_jit/include"

if not (JIT / "deep_jit/runtime.hpp").is_file():
    sys.exit("error: third-party/deep_jit is empty. Try: git submodule update --init")
if given := [name for name in os.environ if "NVSHMEM" in name and name != "NVSHMEM_DISABLE_NVLS"]:
    sys.exit(f"error: DeepEP V2.5 has no NVSHMEM, and {given[0]} is set")
NCCL = Path(os.environ["EP_NCCL_ROOT_DIR"])
PUBLIC = re.search(r'^__version__ = "(.+)"', (HERE / "deep_ep/__init__.py").read_text(), re.MULTILINE).group(1)


def revision() -> str:
    """What upstream adds to its version: the commit, or `local` where git knows none."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "local"


class KeepDefaults(build_py):
    """Writes some of the build's environment into the package, as its defaults."""

    def run(self) -> None:
        """Write them, then do what is usual."""
        folder = Path(self.build_lib, "deep_ep")
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"persistent_envs['{name}'] = {os.environ[name]!r}\n" for name in PERSISTENT if name in os.environ]
        (folder / "envs.py").write_text("".join(["persistent_envs = {}\n", *lines]))
        super().run()


print("Build summary (CPU stand-in of DeepEP V2.5, no GPU needed):")
print(f" > NCCL path: {NCCL}")
print(f" > torch {torch.__version__} for CUDA {torch.version.cuda}", flush=True)

setup(
    name="deep_ep",
    version=f"{PUBLIC}+{revision()}",
    packages=["deep_ep", "deep_ep.buffers"],
    package_data={"deep_ep": ["include/deep_ep/**/*"]},
    ext_modules=[
        Extension(
            "deep_ep._C",
            sources=["csrc/python_api.cpp"],
            include_dirs=[str(HERE / "deep_ep/include"), str(JIT), f"{NCCL}/include"],
            extra_compile_args=["-O3", "-std=c++20"],
            extra_link_args=["-l:libnccl.so.2", f"-Wl,-rpath,{NCCL}/lib"],
            language="c++",
        )
    ],
    cmdclass={"build_py": KeepDefaults},
)
