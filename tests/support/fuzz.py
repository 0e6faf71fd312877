"""Hostile values, the places of a document that can hold one, and real shells that say what arrived."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.prefix import modulefiles
from deepep_bootstrap.remote import channel
from tests.support import module_systems
from tests.support.examples import most

CANARY = "CANARY"
COMMANDS = (
    *(
        "$(touch CANARY)",
        "`touch CANARY`",
        "';touch CANARY;'",
        '";touch CANARY;"',
        "a;touch CANARY",
        "a&&touch${IFS}CANARY",
        "|touch CANARY",
    ),
    *(
        "\ntouch CANARY\n",
        "\rtouch CANARY\r",
        "a\u2028touch CANARY",
        "a\x85touch CANARY",
        "a\vtouch CANARY",
        "a\nEOF\ntouch CANARY\n",
    ),
    *(
        "[exec touch CANARY]",
        '"} ; exec touch CANARY',
        "]] os.execute('touch CANARY') --[[",
        '"..os.execute("touch CANARY").."',
    ),
    *("-oProxyCommand=touch CANARY", "--wrap=touch CANARY", "%h$(touch CANARY)"),
    *("https://h/$(touch CANARY)", "https://h/';touch CANARY;'", "../../../CANARY"),
)
"""Whoever runs one of them leaves the file CANARY behind."""

WORDS = (
    *COMMANDS,
    *("{{ 1 }}", "{% raw %}", "--", "-", "=", "~", "~root", "*", "?[a]", "\\", "a\\", "'", '"', "$", "!", "#"),
    *(
        "",
        " ",
        "  a  ",
        "\t",
        "\0",
        "a\0b",
        "\x1b[2J",
        "\x7f",
        "\ufeffa",
        "\u202ea",
        "é",
        "日本",
        "\ud800",
        "\udc80",
        "\u0661",
        "\u00b2",
    ),
    *("/etc/passwd", "..", ".", "a/../../b", "a//b", "a" * 300, "a" * 70_000, "9" * 5000, "0x" + "f" * 5000),
    *(
        "https://[",
        "https://[::1/x",
        "https://h:99999999/x",
        "https://\u2100/x",
        "https://h/%00",
        "https://h/%2e%2e/x",
        "file:///../x",
    ),
    *("ssh://-oX/y", "git@-oX:y", "n[1-99999999]", "n[", "n[1-2]" * 40, "@all", "sha256-" + "A" * 43 + "="),
)
"""Values for every text that a parser takes."""

NO_TEXTS: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1 << 63,
    10**400,
    1.5,
    float("nan"),
    [],
    {},
    [[]],
    {"a": {}},
    ["$(touch CANARY)"],
)

HOSTILE = st.sampled_from(WORDS) | st.text(max_size=6)
ANYTHING = HOSTILE | st.sampled_from(NO_TEXTS)

T = TypeVar("T")
Place = tuple[str | int, ...]


def few(count: int) -> settings:
    """The same `count` examples in every run, of `make quick` the first of them."""
    return settings(
        max_examples=most(count),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def accepted(call: Callable[[], T]) -> T | None:
    """What `call` returns, None where it refuses; anything but Trouble is a fault, and so is one that cannot be
    said."""
    try:
        return call()
    except Trouble as trouble:
        said = [str(problem) for problem in trouble.problems]
    assert said
    assert all(said)
    return None


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every place in a document, from the outside in, without the document itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield (*at, key)
        yield from places(below, (*at, key))


def put(document: T, place: Place, value: Any, *, as_key: bool = False) -> T:
    """A copy of `document` with `value` at `place`, or with `value` as the name of what is there."""
    made: Any = copy.deepcopy(document)
    inside = made
    for key in place[:-1]:
        inside = inside[key]
    if as_key and isinstance(inside, dict):
        inside[value] = inside.pop(place[-1])
    else:
        inside[place[-1]] = value
    return made


def arrives(rows: Sequence[tuple[Sequence[str], Mapping[str, str]]], folder: Path) -> None:
    """Arguments and environments that are sent to a host are there to the letter, in real bash, one process for all
    of them."""
    show = 'printf "%s\\0" "$@"'
    parts = []
    for words, env in rows:
        inside = "\n".join([show, *(f'printf "%s\\0" "${name}"' for name in env)])
        parts.append(b"(\n" + channel.compose(inside, words, env) + b")\n")
    file = folder / "all.sh"
    file.write_bytes(b"".join(parts))
    done = subprocess.run(["bash", file], cwd=folder, capture_output=True, check=False)
    # A printf without arguments prints one empty text.
    wanted = [text for words, env in rows for text in (*(words or [""]), *env.values())]
    assert done.stderr == b""
    assert done.stdout.decode().split("\0")[:-1] == wanted
    assert not (folder / CANARY).exists()


LITERALS: Mapping[str, Callable[[str], str]] = {
    "sh": modulefiles.shell_word,
    "lua": modulefiles.lua_string,
    "tcl": modulefiles.tcl_word,
}


def languages_say(texts: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """What sh, Lua and Tcl take the literals of `texts` for."""
    write = {
        "sh": 'printf "%s\\0" {}\n',
        "lua": 'io.write({}, "\\0")\n',
        "tcl": 'puts -nonewline {}; puts -nonewline "\\0"\n',
    }
    start = {"sh": "", "lua": "", "tcl": "fconfigure stdout -encoding utf-8 -translation binary\n"}
    for name, literal in LITERALS.items():
        body = start[name] + "".join(write[name].replace("{}", literal(text)) for text in texts)
        (folder / f"all.{name}").write_text(body, encoding="utf-8")
    script = "dash all.sh >sh.out\nlua5.3 all.lua >lua.out\nLC_ALL=C.UTF-8 tclsh8.6 all.tcl >tcl.out"
    session = module_systems.run(f"set -e\ncd '{folder}'\n{script}", folder, system="lmod", login=False)
    assert (session.code, session.err) == (0, ""), session.err
    assert not (folder / CANARY).exists()
    return {name: (folder / f"{name}.out").read_bytes().decode().split("\0")[:-1] for name in LITERALS}
