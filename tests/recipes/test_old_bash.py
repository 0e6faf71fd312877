"""Every script that runs on a host is written for bash 4.2: nothing in it is newer, and no array that may be empty is
expanded in the way that `set -u` forbids before bash 4.4.

An array is expanded as `"${name[@]}"` only where it cannot be empty: where the script itself gives it its words, each
time with a first one that is no array, glob or command. Everywhere else `${name[@]+"${name[@]}"}` is written, or
`"${name[*]-}"` for one text."""

from __future__ import annotations

import re

import msgspec
import pytest

from tests.support.paths import CASES, ROOT

CONSTRUCTS = msgspec.toml.decode((CASES / "recipes" / "newer-than-bash-4.2.toml").read_bytes())["construct"]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder, names in {
        "recipes": "**/*.sh",
        "deepep_bootstrap/remote/loader": "*.sh",
        "env/programs": "*.sh",
        "env/templates": "*.s*.j2",
    }.items()
    for path in (ROOT / folder).glob(names)
)

GUARDED = re.compile(r'\$\{(\w+)\[@\]\+"\$\{\1\[@\][^}"]*\}"\}|\$\{\w+\[\*\]-\}')
EXPANDED = re.compile(r"\$\{(\w+)\[[@*]\]")
# The assignments of an array: by words in parentheses, by a builtin, or by nothing yet.
WORDS = r"(?:^|[\s;]){}=\(\s*(\S*)"
FILLED = r"\b(?:mapfile|readarray|read)\b[^;|&]*\s{0}\b|\b(?:local|declare|typeset)\s(?:[^=;#]*\s)?{0}(?:\s|;|$)"
# A first word, as far as its first blank, that is one word whatever happens: plain text, or in quotes without an @.
ONE_WORD = re.compile(r"""[\w./:-]+\)?|'.*|"[^"@]+(?:"|$).*""")


def code_of(text: str) -> str:
    """Return a script with its comments empty, line for line."""
    return "\n".join("" if line.lstrip().startswith("#") else line for line in text.splitlines())


def is_never_empty(name: str, code: str) -> bool:
    """Return whether each assignment of an array gives it at least one word."""
    firsts = re.findall(WORDS.format(name), code, re.MULTILINE)
    filled = re.search(FILLED.format(name), code, re.MULTILINE)
    return bool(firsts) and all(map(ONE_WORD.fullmatch, firsts)) and not filled


def find_unguarded(text: str) -> list[str]:
    """Return the lines, with their numbers, that expand an array that may be empty without the guard."""
    code = code_of(text)
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(code.splitlines(), 1)
        if any(not is_never_empty(name, code) for name in EXPANDED.findall(GUARDED.sub("", line)))
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_is_newer_than_bash_4_2(script: str) -> None:
    lines = list(enumerate(code_of((ROOT / script).read_text()).splitlines(), 1))
    newer = [
        f"{script}:{number}: {construct['name']} came with {construct['since']}; instead: {construct['instead']}"
        for construct in CONSTRUCTS
        for number, line in lines
        if re.search(construct["pattern"], line)
    ]
    assert newer == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_arrays_that_may_be_empty_are_guarded(script: str) -> None:
    assert find_unguarded((ROOT / script).read_text()) == []


@pytest.mark.parametrize("construct", CONSTRUCTS, ids=lambda construct: construct["name"])
def test_the_table_finds_what_it_names_and_nothing_near_it(construct: dict[str, list[str]]) -> None:
    for line in construct["found"]:
        assert re.search(str(construct["pattern"]), line), line
    for line in construct["fine"]:
        assert not re.search(str(construct["pattern"]), line), line


@pytest.mark.parametrize(
    "text",
    [
        'words=()\nprintf %s "${words[@]}"',
        'words=("$@")\nprintf %s "${words[@]}"',
        'words=("${others[@]}")\nothers=(a)\nprintf %s "${words[@]}"',
        'words=(${text})\nprintf %s "${words[@]}"',
        'words=(*.c)\nprintf %s "${words[@]}"',
        'words=($(date))\nprintf %s "${words[@]}"',
        'words=(a)\nmapfile -t words <file\nprintf %s "${words[@]}"',
        'IFS=, read -ra words <<<"${x}"\nprintf %s "${words[*]}"',
        'local -a words\nprintf %s "${words[@]}"',
        'printf %s "${words[@]}"',
        'words=()\nprintf %s "${words[@]:1}"',
        'words=()\nprintf %s "${words[@]-}"',
        'words=()\nprintf %s ${words[@]+"${others[@]}"}',
    ],
)
def test_an_array_that_may_be_empty_is_found(text: str) -> None:
    assert len(find_unguarded(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        'words=(a "$@")\nprintf %s "${words[@]}"',
        'local -ra words=("${x}" "$@")\nprintf %s "${words[@]}"',
        'words=()\nprintf %s ${words[@]+"${words[@]}"} ${#words[@]} ${!words[@]}',
        'words=()\nprintf %s "${words[*]-}"',
        'words=()\nprintf %s ${words[@]+"${words[@]:1}"}',
        '# "${words[@]}"',
        'words=(\n    a\n    b\n)\nprintf %s "${words[@]}"',
    ],
)
def test_an_array_that_is_guarded_or_never_empty_is_left_alone(text: str) -> None:
    assert find_unguarded(text) == []
