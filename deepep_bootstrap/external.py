"""The Python of --python: whether it can be used on all hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepep_bootstrap.errors import Problem, Trouble
from deepep_bootstrap.facts import Facts, Python
from deepep_bootstrap.lock import Stack


def check_external(path: str, stack: Stack, gpu_hosts: Mapping[str, Facts], here: Facts) -> Python:
    """Return the interpreter at `path` as the build host (`here`) sees it; Trouble where a host lacks it or it does not fit."""
    problems = [problem for name, seen in gpu_hosts.items() for problem in _misfits(name, path, seen, (stack, here))]
    if problems or here.external_python is None:
        raise Trouble(*problems)
    return here.external_python


def _misfits(name: str, path: str, seen: Facts, wish: tuple[Stack, Facts]) -> Iterator[Problem]:
    stack, here = wish
    python = seen.external_python
    if python is None or python.problem:
        found = python.problem if python else "not asked for"
        yield Problem(name, f"--python={path} cannot be used", found, "an interpreter with torch")
    elif python.torch_cuda.split(".")[0] != stack.cuda:
        found = f"torch {python.torch} for CUDA {python.torch_cuda or 'none'}"
        remedy = f'--stack with cuda = "{python.torch_cuda.split(".")[0]}"'
        yield Problem(name, "torch's CUDA major does not fit the stack", found, f"CUDA {stack.cuda}", remedy)
    elif here.external_python and (python.torch, python.version) != (here.external_python.torch, here.external_python.version):
        found = f"Python {python.version}, torch {python.torch}"
        wanted = f"Python {here.external_python.version}, torch {here.external_python.torch} as on the build host"
        yield Problem(name, "the external Python differs between hosts", found, wanted)
