"""deepep-venv on the embedded cluster: an environment on top of the loaded module, by a user without rights, with a
package that is compiled against what the module has.
"""

from __future__ import annotations

import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.e2e import Engine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

SETUP = """
import numpy, torch
from setuptools import Extension, setup

setup(
    name="halves",
    version="1.0",
    install_requires=["torch", "numpy"],
    ext_modules=[Extension("halves", ["halves.c"], include_dirs=[numpy.get_include()],
                           define_macros=[("TORCH", '"%s"' % torch.__version__)])],
)
"""
SOURCE = r"""
#include <Python.h>
#include <numpy/arrayobject.h>

static PyObject *halve(PyObject *self, PyObject *array) {
    PyArrayObject *found = (PyArrayObject *)array;
    double *numbers = PyArray_DATA(found);
    for (npy_intp i = 0; i < PyArray_SIZE(found); ++i) numbers[i] /= 2;
    return PyUnicode_FromString(TORCH);
}

static PyMethodDef methods[] = {{"halve", halve, METH_O, ""}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "halves", "", -1, methods};

PyMODINIT_FUNC PyInit_halves(void) {
    import_array();
    return PyModule_Create(&module);
}
"""
INSTALL = "pip install --disable-pip-version-check --no-index --no-build-isolation"
USE = (
    "import deep_ep, halves, numpy, torch; numbers = numpy.array([3.0, 5.0]); "
    "print(halves.halve(numbers), numbers.tolist(), deep_ep.__file__.startswith('/shared/deepep/store'), torch.__file__)"
)


class User:
    """A person without rights on a host of the lab, whose home all hosts share."""

    def __init__(self, lab: LiveLab) -> None:
        self.lab, self.home = lab, lab.lab.homes / "builder"

    def run(self, host: str, script: str) -> subprocess.CompletedProcess[str]:
        argv = ["ssh", "-F", str(self.lab.lab.ssh_config), "-l", "builder", host, f"bash -lc {shlex.quote(script)}"]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def user(lab: LiveLab, standin_sources: Path, built_entries: Path) -> User:
    lab.reset()
    engine = Engine(lab, standin_sources, built=built_entries)
    engine.use_built()
    ended = engine.run("bootstrap", "--yes")
    assert ended.code == 0, ended.text
    user = User(lab)
    folder = user.home / "halves"
    folder.mkdir()
    (folder / "setup.py").write_text(SETUP)
    (folder / "halves.c").write_text(SOURCE)
    subprocess.run(["chown", "-R", "7001:7001", folder], check=True)
    made = user.run("n001", "module load deepep; deepep-venv my-env")
    assert made.returncode == 0, made.stderr
    assert "/home/builder/my-env: Python 3." in made.stdout
    assert " with the packages of deepep/v1, torch==2.10.0" in made.stdout
    return user


def test_a_package_is_compiled_against_the_modules_torch_and_numpy(user: User) -> None:
    load = "module load deepep; . ~/my-env/bin/activate; "
    installed = user.run("n001", f"{load}{INSTALL} ~/halves")
    assert installed.returncode == 0, installed.stdout + installed.stderr
    for host in ("n001", "login1"):  # the home is shared
        used = user.run(host, f"{load}cd /; python -c {shlex.quote(USE)}")
        torch, *numbers, ours, place = used.stdout.split()
        assert (torch, "".join(numbers), ours) == ("2.10.0+standin", "[1.5,2.5]", "True"), used.stdout + used.stderr
        assert place.startswith("/shared/deepep/store/")
        assert used.stderr == ""


def test_pip_keeps_the_modules_torch(user: User) -> None:
    refused = user.run("n001", f"module load deepep; . ~/my-env/bin/activate; {INSTALL} torch==2.11.0")
    assert refused.returncode == 1
    assert "The user requested (constraint) torch==2.10.0" in refused.stdout + refused.stderr


def test_python_says_when_the_module_is_not_loaded(user: User) -> None:
    said = user.run("login1", "~/my-env/bin/python -c pass").stderr
    assert said == "/home/builder/my-env: made for deepep/v1, and no deepep is loaded: module load deepep/v1\n"
    other = user.run("login1", "export DEEPEP_PYTHON=/other; ~/my-env/bin/python -c pass").stderr
    assert "what is loaded has another torch: make one for it with deepep-venv" in other


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "deepep-venv my-env",
            "deepep-venv: /home/builder/my-env is there already. Try: another name, or remove it first",
        ),
        ("deepep-venv", "usage: deepep-venv DIRECTORY"),
        ("unset DEEPEP_PYTHON; deepep-venv new", "deepep-venv: no deepep module is loaded. Try: module load deepep"),
        ("deepep-venv /proc/new", "/proc/new"),
    ],
)
def test_what_cannot_be_made(script: str, said: str, user: User) -> None:
    done = user.run("n001", f"module load deepep; {script}")
    assert (done.returncode, said in done.stdout + done.stderr) == (1, True), done.stdout + done.stderr
    assert not (user.home / "new").exists()


def test_one_for_a_python_of_ones_own(user: User) -> None:
    """What `--python` gives: the interpreter is somebody's environment, and its packages show."""
    make = "/usr/bin/python3 -m venv theirs; for site in theirs/lib/python3.*/site-packages; do touch $site/theirs.py; done"
    over = "export DEEPEP_STACK=v1 DEEPEP_PYTHON=$PWD/theirs/bin/python; deepep-venv over"
    use = "over/bin/python -c 'import theirs, pip'"
    done = user.run("n001", f"module load deepep; {make}; {over}; {use}")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    gone = user.run("n001", "rm -r theirs; over/bin/python -c 'import pip'")
    said = "/home/builder/over: made for deepep/v1, which is not there any more: make it anew with deepep-venv\n"
    assert (gone.returncode, gone.stderr) == (0, said)
