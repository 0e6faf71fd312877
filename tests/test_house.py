"""House rules that no linter knows. What a linter knows is in pyproject.toml: imports, complexity, style."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "deepep_bootstrap"


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listing.stdout.split() if (ROOT / name).exists()]


def test_package_inits_import_nothing() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        code = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
        assert code == [], f"{path}: an __init__ that holds code makes import knots"


def test_one_broad_except_in_the_tree() -> None:
    broad = [
        f"{path.name}:{node.lineno}"
        for path in [*sorted(PACKAGE.rglob("*.py")), ROOT / "tasks.py"]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"})
        and not any(isinstance(child, ast.Raise) and child.exc is None for child in ast.walk(node))
    ]
    assert len(broad) == 1, broad
    assert broad[0].startswith("guard.py")


@pytest.mark.usefixtures("programs")
def test_environment_folder_is_tracked() -> None:
    # Many stock .gitignore files swallow a folder called env.
    assert subprocess.run(["git", "ls-files", "env"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("programs")
def test_no_unfinished_marks() -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    for path in tracked("*.py", "*.sh", "Makefile"):
        assert not marks.search(path.read_text(encoding="utf-8", errors="replace")), path


def test_no_folder_became_a_hall() -> None:
    for folder in (path.parent for path in PACKAGE.rglob("__init__.py") if path.parent.name != "commands"):
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 13, f"{folder} has {len(modules)} modules"


@pytest.mark.usefixtures("programs")
def test_a_wrong_import_is_refused(tmp_path: Path) -> None:
    """The contracts in pyproject.toml, on a copy of the engine in which core imports a higher package."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def lint() -> subprocess.CompletedProcess[str]:
        words = [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ]
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    assert lint().returncode == 0
    (tmp_path / PACKAGE.name / "core" / "planted.py").write_text("from deepep_bootstrap.plan import steps\n")
    refused = lint()
    assert refused.returncode == 1
    assert "packages are layers BROKEN" in refused.stdout
    assert "deepep_bootstrap.core.planted -> deepep_bootstrap.plan.steps" in refused.stdout
