"""The house rules that a machine can check: imports point downward, budgets hold, the tree has what others rely on."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "deepep_bootstrap"

# Level of each module; a module imports only from lower levels (docs/architecture.md says what each is for).
LEVELS: dict[str, int] = {
    "errors": 0, "transcript": 0, "command": 1, "tables": 8, "comments": 8, "recipes": 8, "datalines": 8, "nodeset": 8, "charts": 8,
    "machine": 9, "prefixfacts": 9, "figures": 9, "testruns": 9, "system": 9, "sources": 9, "asked": 9, "windows": 9, "shapes": 9,
    "debrepo": 9, "lock": 10, "nar": 10, "hosts": 10, "facts": 10, "slurm": 10, "runfiles": 10, "patterns": 10, "debclosure": 10,
    "lockfile": 11, "slurm_nodes": 11, "fabric": 11, "profiles": 11, "losses": 12, "topology": 12, "lockwheels": 12,
    "factlines": 12, "savedfacts": 12, "mirrors": 20, "tarstream": 20, "hostkeys": 20, "launch": 20, "wire": 20, "copied": 21,
    "mirrordir": 22, "sshconf": 22, "script": 22, "sshlogin": 23, "packageparts": 23, "sshlink": 24, "sessions": 26,
    "gitsettings": 27, "gitrepo": 28, "mirrorgit": 29, "refs": 30, "archives": 30, "holdings": 30, "remote": 30, "fetch": 30,
    "wheels": 30, "store": 30, "pgp": 30, "wheelindex": 31, "results_lines": 34, "results_ours": 34, "results_ranks": 34,
    "results_passes": 34, "results_voices": 34, "passes": 37,
    "results_parts": 35, "rules": 36, "elastic": 36, "absences": 36, "external": 37, "service": 36, "kinds": 36, "rendering": 36,
    "causes": 36, "loglines": 36, "logfiles": 36, "results_end": 36, "partial": 37, "toolkits": 37, "choose": 38, "offercheck": 38,
    "prefixcheck": 39, "prepare": 39, "jobuser": 39, "tuningdoc": 39, "plan": 40, "findings": 40, "closure": 40, "pins": 40,
    "results": 40, "tuning": 40, "diagnose": 40, "sbom": 40, "bugbundle": 40, "verdicts": 40, "refbook": 40, "results_text": 41,
    "checks_gpu": 41, "checks_network": 41, "checks_host": 41, "checks_user": 41, "disagree": 41, "compare": 41, "wheelcheck": 41,
    "limits": 41, "traffic": 41, "references": 42, "doctor": 42, "refsite": 43, "assess": 43, "testsummary": 44, "runviews": 44,
    "runreport": 45, "runcompose": 46, "testing": 50, "apply": 50, "build": 50, "supply": 50, "modules": 50, "verify": 50,
    "generations": 50, "archive": 50, "signing": 50, "report": 50, "orders": 50, "power": 50, "runs": 50, "tuned": 51,
    "onhosts": 51, "collecting": 51, "html": 51, "mirrorfill": 51, "history": 51, "holders": 51, "cordon": 51, "provenance": 52,
    "transfer": 52, "runscreen": 52, "pastruns": 52, "wave": 52, "closures": 52, "packageindex": 52, "turn": 53, "packagefill": 53,
    "mirrorpeek": 53, "waves": 54, "reboots": 54, "lockview": 55, "explain": 55, "mirrorchoice": 56, "survey": 60, "drained": 61,
    "reach": 61, "offered": 62, "sharing": 61, "testplace": 61, "runreading": 62, "work": 63, "hoststeps": 64, "phases": 65, "rolling": 66,
    "smoke": 66, "lasttests": 53, "driverversion": 40, "rulebook": 35, "defects": 37, "verbs": 70, "commandline": 79, "front": 80,
}  # fmt: skip
# Who reaches other machines or starts programs, and with what; nobody else imports any of these (docs/architecture.md, two doors).
DOORS: dict[str, set[str]] = {
    "command": {"subprocess"},
    "wire": {"subprocess", "paramiko"},
    "sshlink": {"subprocess", "socket", "paramiko", "fabric"},
    "sshlogin": {"socket", "paramiko"},
    "sshconf": {"paramiko"},
    "sessions": {"paramiko", "fabric"},
    "remote": {"paramiko"},
    "archives": {"urllib.request", "http"},
    "wheelindex": {"urllib.request", "http", "ssl"},
}
OUTWARD = {"subprocess", "socket", "urllib.request", "http", "ssl", "ftplib", "asyncio", "paramiko", "fabric", "requests"}
TEST_EQUIPMENT = re.compile(r"lab(_\w+)?$")

MODULE_LINES = 300
RECIPE_LINES = 150
BASH_FUNCTION_LINES = 40
FUNCTION_BODY_MAX = 60
FUNCTION_BODY_P90 = 30
POSITIONAL_MAX = 4


def package_modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def level_of(name: str) -> int:
    return LEVELS[name.split(".")[0]]


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules of our package that `path` imports, relative to the package (`verbs.plan`)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepep_bootstrap"):
            yield from (
                [(node.module or "").removeprefix("deepep_bootstrap.")]
                if node.module != "deepep_bootstrap"
                else [alias.name for alias in node.names]
            )
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("deepep_bootstrap.") for a in node.names if a.name.startswith("deepep_bootstrap."))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body
    docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str)
    first = body[1] if docstring and len(body) > 1 else body[0]
    return (function.end_lineno or first.lineno) - first.lineno + 1


@pytest.mark.parametrize("path", package_modules(), ids=module_name)
def test_imports_point_downward(path: Path) -> None:
    name = module_name(path)
    if TEST_EQUIPMENT.match(name):
        return
    for imported in imports_of(path):
        if TEST_EQUIPMENT.match(imported):
            assert name == "verbs.lab", f"{name} imports {imported}: only the lab's verb may"
            continue
        assert level_of(imported) < level_of(name), f"{name} (level {level_of(name)}) imports {imported} (level {level_of(imported)})"


def outward(path: Path) -> set[str]:
    """Return what of OUTWARD a module imports, whether as `import a.b`, `from a import b` or `from a.b import c`."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {door for door in OUTWARD for name in names if f"{name}.".startswith(f"{door}.")}


def test_the_doors_alone_reach_out() -> None:
    found = {module_name(path): outward(path) for path in package_modules() if not TEST_EQUIPMENT.match(module_name(path))}
    assert {name: doors for name, doors in found.items() if doors} == DOORS


def test_the_architecture_names_every_module_at_its_level() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("\n## Levels\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+)(?:–(\d+))? \| (.*?) \|", text, re.MULTILINE)
    named = {name: (int(low), int(high or low)) for low, high, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert {name for name, level in LEVELS.items() if name not in named or not named[name][0] <= level <= named[name][1]} == set()
    assert (set(named) - set(LEVELS), len(named)) == (set(), sum(len(re.findall(r"`\w+`", names)) for _, _, names in rows))
    assert [int(low) for low, _, _ in rows] == sorted(int(low) for low, _, _ in rows), "the rows are in the order of their levels"


def test_package_inits_are_empty() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        assert path.read_text() == "", f"{path}: an __init__ that holds code makes import knots"


@pytest.mark.parametrize("path", [*package_modules(), ROOT / "tasks.py"], ids=lambda path: path.stem)
def test_module_budgets(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MODULE_LINES
    for function in functions(path):
        where = f"{path.name}:{function.lineno} {function.name}"
        assert body_lines(function) <= FUNCTION_BODY_MAX, f"{where} has {body_lines(function)} lines"
        positional = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args) if arg.arg not in {"self", "cls"}]
        if path.name != "tasks.py":  # Invoke makes a flag of every positional argument of a task
            assert len(positional) <= POSITIONAL_MAX, f"{where} takes {len(positional)} positional arguments"


def test_function_bodies_are_short_as_a_rule() -> None:
    sizes = sorted(body_lines(function) for path in package_modules() for function in functions(path))
    assert sizes[int(len(sizes) * 0.9)] <= FUNCTION_BODY_P90


def test_one_broad_except_in_the_tree() -> None:
    broad = [
        f"{path.name}:{node.lineno}"
        for path in [*package_modules(), ROOT / "tasks.py"]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception"))
    ]
    assert len(broad) == 1, broad
    assert broad[0].startswith("errors.py")


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listing.stdout.split() if (ROOT / name).exists()]


def test_recipe_budgets() -> None:
    for path in tracked("recipes/*.sh", "recipes/**/*.sh"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= RECIPE_LINES, f"{path}: {len(lines)} lines"
        start, name = 0, ""
        for number, line in enumerate(lines):
            if match := re.match(r"(\w+)\(\) *\{", line):
                start, name = number, match.group(1)
            elif line == "}" and name:
                assert number - start <= BASH_FUNCTION_LINES + 1, f"{path}: {name} has {number - start - 1} lines"
                name = ""


def test_environment_folder_is_tracked() -> None:
    # Many stock .gitignore files swallow a folder called env.
    assert subprocess.run(["git", "ls-files", "env"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_no_unfinished_marks() -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    for path in tracked("*.py", "*.sh", "Makefile"):
        assert not marks.search(path.read_text(encoding="utf-8", errors="replace")), path
