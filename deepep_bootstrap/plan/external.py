"""The Python of --python: whether it can be used on all hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory.facts import Facts, Python
from deepep_bootstrap.lock import rules
from deepep_bootstrap.lock.compatibility import Book, read_book
from deepep_bootstrap.lock.model import Stack


def check_external(path: str, stack: Stack, hosts: tuple[Mapping[str, Facts], Facts], texts: Mapping[str, str]) -> Python:
    """Return the interpreter at `path` as the build host sees it; Trouble where a host lacks it or it does not fit. `hosts` are the GPU
    hosts by name and the build host, `texts` the files of env/ by relative path."""
    gpu_hosts, here = hosts
    problems = [problem for name, seen in gpu_hosts.items() for problem in _misfits(name, path, seen, (stack, here))]
    problems = problems or [problem for name, seen in gpu_hosts.items() for problem in _lacks(name, path, seen, texts)]
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


def _lacks(name: str, path: str, seen: Facts, texts: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what stands beside torch in the wrong version, or not at all: setuptools by the rules of env/, numpy for upstream's tests."""
    packages, python = dict(seen.external_packages), seen.external_python
    there = (packages["setuptools"],) if "setuptools" in packages else ()
    known = rules.Known({"setuptools": there, "torch": (python.torch,) if python else ()})
    book = read_book(texts)
    install = f"{path} -m pip install '{_setuptools(book, known)}' numpy"
    # One is enough: the same command mends them all.
    for problem, _ in list(rules.broken(book, known, name))[:1]:
        yield Problem(name, f"--python={path}: {problem.what}", problem.found, problem.wanted, install)
    if "numpy" not in packages:
        yield Problem(name, f"--python={path}: DeepEP's tests import numpy", "no numpy", "numpy", install)


def _setuptools(book: Book, known: rules.Known) -> str:
    """Return the setuptools that the rules want beside a torch, as pip is told."""
    meant = [rule for rule in book.rules if all(rules.holds(sentence, known, any) for sentence in rule.when)]
    wanted = [need for rule in meant for need in rule.needs if need.thing == "setuptools" and need.value != "0"]
    return "setuptools" + ",".join(f"{need.operator}{need.value}" for need in wanted)
