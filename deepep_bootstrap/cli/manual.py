"""The manual page deepep-bootstrap(1), made of the same texts as the help when a wheel is built.

Written in roff with the macros of man(7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepep_bootstrap.cli.usage import sections, shown
from deepep_bootstrap.cli.verbs import GROUPS, Declaration, declared, help_text
from deepep_bootstrap.core.program import NAME, OUR_COMMAND

ENVIRONMENT: Mapping[str, str] = {
    "DEEPEP_HOSTS": "what --hosts is, where that is not given",
    "DEEPEP_LOCK": "the same for --lock",
    "DEEPEP_PREFIX": "the same for --prefix, where the hosts file states none",
    "DEEPEP_MIRRORS": "more values of --mirror, between blanks or one a line",
    "DEEPEP_SSH_CONFIG": "a file in place of ~/.ssh/config",
    "NO_COLOR": "no colours on a terminal",
}
FILES: Mapping[str, str] = {
    "./deepep.lock.toml": "the lock, where no flag, variable or deepep.toml names one; else the packaged one",
    "deepep.toml": "beside the hosts file: hosts, lock, prefix and mirror where no flag and no variable names them",
    "~/.config/deepep-bootstrap/deepep.toml": "the same for all hosts files",
    "~/.local/state/deepep-bootstrap": "logs",
    "~/.cache/deepep-bootstrap": "downloads",
}
STATUS: Mapping[str, str] = {
    "0": "done, or nothing to do",
    "1": "expected trouble: a message says where, what was found, what was wanted, what to try",
    "2": "--check found something to do",
    "3": "a bug of this program; a log has everything to report",
    "4": "a check says no: doctor blocks, verify or a test fails, the store has changed, a mirror is not complete",
    "130": "interrupted; the same command goes on",
}


def manual(version: str) -> str:
    """Return the manual page."""
    lines = [
        f'.TH DEEPEP\\-BOOTSTRAP 1 "" "{NAME} {version}" "User Commands"',
        ".SH NAME",
        f"{escaped(NAME)} \\- {escaped('from a lock and a list of GPU hosts to `module load deepep`')}",
        ".SH SYNOPSIS",
        f".B {escaped(NAME)}",
        "VERB [flags]",
        ".SH DESCRIPTION",
        escaped(
            "Makes a cluster of a list of GPU machines on which DeepEP works: looks at the hosts over SSH, prints a "
            "plan, prepares them, builds once into a shared prefix, offers modules, and proves that they load. "
            f"`{NAME} plan HOSTS` shows all of it and changes nothing. In the source tree `invoke` does the same."
        ),
    ]
    for group, verbs in GROUPS.items():
        lines.append(f".SH VERBS TO {group.upper()}")
        for verb in verbs:
            lines += _verb(declared(verb.name))
    for title, entries in (("ENVIRONMENT", ENVIRONMENT), ("FILES", FILES), ("EXIT STATUS", STATUS)):
        lines.append(f".SH {title}")
        for word, text in entries.items():
            lines += [".TP", f".B {escaped(word)}", escaped(text)]
    return "\n".join(lines) + "\n"


def _verb(verb: Declaration) -> Iterator[str]:
    """Yield the part of one verb."""
    text = verb.verb
    alone = [each.name.upper() for each in verb.parameters if each.is_argument]
    alone += [f"[{text.natural.upper()}]"] if text.natural else []
    yield f".SS {escaped(' '.join((text.name, *alone)))}"
    yield escaped(" ".join(verb.doc.split()))
    for title, parameters in sections(verb):
        yield ".PP"
        yield f".I {title}"
        for each in parameters:
            yield from (".TP", f".B {escaped(shown(each))}", escaped(help_text(text.name, each.name)))
    yield ".PP"
    yield ".EX"
    yield from (escaped(f"{NAME} {example}") for example in text.examples)
    yield ".EE"


def escaped(text: str) -> str:
    """Return a text as roff shows it: no escapes, no requests, dashes that can be copied, our commands as those of the
    installed program."""
    plain = OUR_COMMAND.sub(f"{NAME} ", text).replace("\\", "\\e").replace("-", "\\-")
    plain = "".join(letter if letter.isascii() else f"\\[u{ord(letter):04X}]" for letter in plain)
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain
