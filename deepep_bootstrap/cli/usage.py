"""Help as text: the list of verbs in their groups, and the flags of one verb in sections, with examples."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from deepep_bootstrap.cli.verbs import GROUPS, SECTIONS, Declaration, Parameter, help_text
from deepep_bootstrap.core.program import called_as, data_root, is_source_tree

MOST_COLUMNS = 100
"""Longer lines are hard to read."""

REST = "How"
"""The section of the flags that no other one names."""

FLAG_WIDTH = 30


def columns() -> int:
    """Return how wide help may be: the terminal, as far as that is readable."""
    return min(shutil.get_terminal_size((MOST_COLUMNS, 24)).columns, MOST_COLUMNS)


def listing(width: int) -> str:
    """Return the verbs in their groups, each with what it does."""
    longest = max(len(verb.name) for verbs in GROUPS.values() for verb in verbs)
    lines = ["From a lock and a list of GPU hosts to `module load deepep` and a passing sbatch test.", ""]
    for group, verbs in GROUPS.items():
        lines.append(f"{group}:")
        for verb in verbs:
            lines += _entry(f"  {verb.name:<{longest}}  ", verb.summary, width)
    me = called_as()
    lines += ["", f"{me} VERB --help says more of each. First: {me} plan HOSTS, which changes nothing."]
    return "\n".join(lines)


def usage(verb: Declaration, width: int) -> str:
    """Return the help of a verb: how it is called, what it does, its flags, two examples, where more is written."""
    me, text = called_as(), verb.verb
    alone = [each.name.upper() for each in verb.parameters if each.is_argument]
    if text.natural:
        alone.append(f"[{text.natural.upper()}]")
    lines = [" ".join(["usage:", me, text.name, *alone, "[flags]"]), ""]
    lines += textwrap.wrap(" ".join(verb.doc.split()), width, initial_indent="  ", subsequent_indent="  ")
    for title, parameters in sections(verb):
        lines += ["", f"{title}:"]
        for each in parameters:
            lines += _entry(f"  {shown(each)}  ", help_text(text.name, each.name), width, FLAG_WIDTH)
    lines += ["", "Examples:", *(f"  {me} {example}" for example in text.examples), "", f"More: {address(text.docs)}"]
    return "\n".join(lines)


def sections(verb: Declaration) -> Iterator[tuple[str, list[Parameter]]]:
    """Yield the sections of a verb's help that have flags, arguments first."""
    placed = {name: title for title, names in SECTIONS.items() for name in names}
    order = {name: number for names in SECTIONS.values() for number, name in enumerate(names)}
    for title in SECTIONS:
        found = [each for each in verb.parameters if placed.get(each.name, REST) == title]
        if found:
            yield title, sorted(found, key=lambda each: (not each.is_argument, order.get(each.name, 0)))


def shown(parameter: Parameter) -> str:
    """Return a flag as help has it: `--hosts=HOSTS`, an argument as `DIRECTORY`."""
    name = parameter.name.strip("_").upper()
    return name if parameter.is_argument else parameter.flag if parameter.is_switch else f"{parameter.flag}={name}"


def address(docs: str) -> str:
    """Return where a page of the documentation is: below the source tree, or what the wheel brought along."""
    return docs if is_source_tree() else str(data_root() / docs)


def _entry(left: str, text: str, width: int, column: int = 0) -> Sequence[str]:
    """Return the lines of one entry: a word, and behind it what it means; below it where the word is long."""
    column = column or len(left)
    body = textwrap.wrap(text, max(width - column, 20), break_long_words=False, break_on_hyphens=False)
    rest = [" " * column + line for line in body[1:]]
    if len(left) > column:
        return [left.rstrip(), " " * column + body[0], *rest]
    return [f"{left:<{column}}{body[0]}", *rest]
