"""Profiles: what hardware cannot tell, read from env/profiles and checked against the variables that upstream reads. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import load

AUTO = "auto"
LINKS = ("Ethernet", "InfiniBand")
HANDLERS = ("gpu", "cpu")
FOLDER = "profiles/"
KNOWN = "known-variables.toml"

HANDLER = "NVSHMEM_IBGDA_NIC_HANDLER"
LEVELS = {
    "service_level": "NVSHMEM_IB_SL",
    "service_level_low_latency": "NVSHMEM_IB_SL",
    "service_level_other": "NCCL_IB_SL",
}
"""The three kinds of traffic that DeepEP's authors keep apart, and the variable of each: normal kernels, low latency, the rest."""

MOST_LEVELS = {"InfiniBand": 15, "Ethernet": 7}
"""InfiniBand has 16 service levels (one for the subnet manager's own use), Ethernet 8 priorities."""

FROM_KEYS = {HANDLER: "handler", "NVSHMEM_IB_SL": "service_level", "NCCL_IB_SL": "service_level_other"}
KEYS = {"title", "link_layer", "handler", "gib", "notes", "environment", *LEVELS}
ONE_LINE = "a text of one line in quotes"


@dataclass(frozen=True)
class Profile:
    """What hardware cannot tell. `link` is the link layer it is for ("" for one node alone), `handler` who rings the NIC's doorbell
    ("" without a network), `gib` whether NCCL goes through Google's gIB (None: where every host has it), `notes` what its user should
    know, `low_latency` the variables that are other for low-latency traffic."""

    name: str
    title: str
    link: str
    environment: Mapping[str, str]
    handler: str = ""
    gib: bool | None = None
    notes: tuple[str, ...] = ()
    low_latency: Mapping[str, str] = field(default_factory=dict)


def read_profile(name: str, texts: Mapping[str, str]) -> Profile:
    """Return profile `name` of the files of env/, every key and variable of it checked; Trouble names all faults at once."""
    file = f"{FOLDER}{name}.toml"
    if file not in texts:
        known = sorted(path.removeprefix(FOLDER).removesuffix(".toml") for path in texts if path.startswith(FOLDER))
        raise Trouble(Problem("profile", "there is no such profile", name, " or ".join([AUTO, *known]), f"writing env/{file}"))
    table: dict[str, Any] = load(texts[file], f"env/{file}")
    rules: dict[str, Any] = load(texts[KNOWN], f"env/{KNOWN}")
    if faults := [*_key_faults(f"env/{file}", table), *_environment_faults(f"env/{file}", table, rules)]:
        raise Trouble(*faults)
    link = table.get("link_layer", "")
    handler = table.get("handler", HANDLERS[0]) if link else ""
    levels = {variable: str(table[key]) for key, variable in LEVELS.items() if key in table and key != "service_level_low_latency"}
    environment = {**({HANDLER: handler} if handler else {}), **levels, **table.get("environment", {})}
    low = {LEVELS[key]: str(table[key]) for key in ("service_level_low_latency",) if key in table}
    return Profile(name, table.get("title", ""), link, environment, handler, table.get("gib"), tuple(table.get("notes", ())), low)


def _key_faults(where: str, table: Mapping[str, Any]) -> Iterator[Problem]:
    link = table.get("link_layer", "")
    yield from (Problem(f"{where}: {key}", "unknown key", wanted=" or ".join(sorted(KEYS))) for key in table if key not in KEYS)
    if link not in ("", *LINKS):
        yield Problem(f"{where}: link_layer", "unknown link layer", str(link), " or ".join(LINKS))
    if table.get("handler", HANDLERS[0]) not in HANDLERS:
        yield Problem(f"{where}: handler", "unknown NIC handler", str(table["handler"]), " or ".join(HANDLERS))
    if not isinstance(table.get("gib", True), bool):
        yield Problem(f"{where}: gib", "neither true nor false", repr(table["gib"]))
    notes = table.get("notes", [])
    if not isinstance(notes, list) or not all(_is_line(note) for note in notes):
        yield Problem(f"{where}: notes", "not a list of texts", repr(notes), f"[{ONE_LINE}, …]")
    if not isinstance(table.get("environment", {}), dict):
        yield Problem(f"{where}: environment", "not a table of variables", repr(table["environment"]))
    most = MOST_LEVELS.get(str(link), 15)
    if not _is_line(table.get("title", "")):
        yield Problem(f"{where}: title", "not a text of one line", repr(table["title"]), ONE_LINE)
    for key in LEVELS:
        level = table.get(key, 0)
        if not isinstance(level, int) or isinstance(level, bool) or not 0 <= level <= most:
            yield Problem(f"{where}: {key}", "not a service level", repr(level), f"a whole number from 0 to {most}")
    if not link:
        network = [key for key in ("handler", "gib", *LEVELS) if key in table]
        yield from (Problem(f"{where}: {key}", "it has no effect without a network", wanted="link_layer") for key in network)


def _environment_faults(where: str, table: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[Problem]:
    environment = table.get("environment", {})
    for variable, value in environment.items() if isinstance(environment, dict) else ():
        if fault := _variable_fault(variable, value, str(table.get("link_layer", "")), rules):
            yield Problem(f"{where}: {variable}", *fault)


def _variable_fault(variable: str, value: object, link: str, rules: Mapping[str, Any]) -> tuple[str, str, str] | None:
    if variable in rules["refused"]:
        return "a profile must not set it", rules["refused"][variable], ""
    if variable not in rules["known"]:
        return "nobody is known to read this variable", "", f"a name in env/{KNOWN}"
    if variable in FROM_KEYS:
        return "it is written from a key of the profile", "", f"{FROM_KEYS[variable]} = …"
    only = rules["known"][variable].get("link_layer", "")
    if only == "any" and not link:
        return "it has no effect without a network", "no link_layer", " or ".join(LINKS)
    if only in LINKS and only != link:
        return f"it is for {only} only", link or "no network", only
    return None if _is_line(value) else ("the value must be a text of one line", repr(value), '"…"')


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()
