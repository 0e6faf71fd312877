"""Removal of passwords, tokens, keys and names from texts that leave this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping

from deepep_bootstrap.core.text import REMOVED

NAMES = (
    r"[A-Za-z0-9_.-]*(?:password|passwd|passphrase|secret|token(?!s|i)|credential|api[_-]?key|access[_-]?key"
    r"|private[_-]?key|auth[_-]?key|_pw)"
    r"[A-Za-z0-9_.-]*"
)
"""Names whose value is a secret, whatever it looks like. How many tokens a test sends is none: `tokens` does
not count."""

HARMLESS = frozenset(("none", "true", "false", "yes", "no", "null", "''", '""'))
"""What such a name may say without telling a secret."""

PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z0-9 ]*PRIVATE KEY[A-Z ]*)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
USER_IN_ADDRESS = re.compile(r"\b(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^\s/'\"<>]*)@")
IN_QUERY = re.compile(
    r"([?&](?:[A-Za-z0-9_.-]*(?:token|key|secret|signature|sig|password|auth|credential)[A-Za-z0-9_.-]*)=)[^\s&#'\"<>]+",
    re.IGNORECASE,
)
NAMED = re.compile(
    rf"""(?P<name>(?<![A-Za-z0-9_.-])["']?{NAMES}(?<!error)(?<!exception)["']?[ \t]*(?:=>|[:=])[ \t]*)"""
    r"""(?P<value>"(?:\\.|[^"\\\n])*"|'[^'\n]*'|[^\s"]+)""",
    re.IGNORECASE,
)
"""What stands behind an exception's name (NoCredentialsError: Unable to locate credentials) is its message."""

OPTION = re.compile(
    rf"(?P<name>(?<!\S)--?{NAMES}[ \t]+)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|(?!-)[^\s\"']+)", re.IGNORECASE
)
SCHEMES = r"(?:basic|bearer|token|digest|negotiate)"
HEADER = re.compile(
    rf"\b(authorization[ \t]*[:=][ \t]*[\"']?(?:{SCHEMES}[ \t]+)?)(?!{SCHEMES}\b)[A-Za-z0-9+/=._~-]{{6,}}",
    re.IGNORECASE,
)
BEARER = re.compile(r"\b(bearer[ \t]+)[A-Za-z0-9+/=._~-]{12,}", re.IGNORECASE)
KNOWN_SHAPES = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{20,}"
    r"|nvapi-[A-Za-z0-9_-]{20,}"
    r"|pypi-[A-Za-z0-9_-]{40,}|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|sk-[A-Za-z0-9_-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{5,})"
)
"""Keys that are known by their looks: GitHub, GitLab, Hugging Face, NVIDIA, PyPI, AWS, Slack, sk-…, JSON web tokens."""

SECRET_VARIABLE = re.compile(rf"(?:{NAMES})\Z", re.IGNORECASE)
SHORTEST = 6
"""Characters that a secret of the environment must have to be looked for everywhere: shorter ones are parts of
words."""

IPV4 = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w]|\.\d)")
IPV6 = re.compile(
    r"(?<![\w:.])(?=[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:)(?:[0-9A-Fa-f]{1,4}"
    r"|:):(?:[0-9A-Fa-f]{0,4}:){0,6}[0-9A-Fa-f]{0,4}(?![\w:]|\.\d)"
)
"""Not the address of a PCI device (0000:17:00.0)."""
OWN = frozenset(("127.0.0.1", "0.0.0.0", "255.255.255.255", "::1", "::"))  # noqa: S104 - nothing listens; these name no machine
TIME = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?\Z")


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of this environment that nobody else may see, by the names of their variables; the longest
    first."""
    found = {value for name, value in environment.items() if SECRET_VARIABLE.match(name) and len(value) >= SHORTEST}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def scrub(text: str, secrets: tuple[str, ...] = (), hosts: Mapping[str, str] | None = None) -> str:
    """Return `text` without passwords, tokens, private keys, users in addresses, and the values in `secrets`.

    `hosts` maps names and addresses to what stands for them; where it is given, every other IP address gets a name of
    its own too. The same text scrubbed again stays the same.
    """
    for value in secrets:
        text = text.replace(value, REMOVED)
    text = PRIVATE_KEY.sub(lambda match: f"-----BEGIN {match[1]}-----\n{REMOVED}\n-----END {match[1]}-----", text)
    text = USER_IN_ADDRESS.sub(_address, text)
    text = IN_QUERY.sub(rf"\1{REMOVED}", text)
    text = HEADER.sub(rf"\1{REMOVED}", text)
    text = BEARER.sub(rf"\1{REMOVED}", text)
    text = NAMED.sub(_named, text)
    text = OPTION.sub(_named, text)
    text = KNOWN_SHAPES.sub(REMOVED, text)
    return text if hosts is None else _without_hosts(text, hosts)


def _address(match: re.Match[str]) -> str:
    """Without user and password; a user alone is part of an SSH address, elsewhere it may be a token."""
    if "ssh" in match["scheme"].lower() and ":" not in match["user"]:
        return match[0]
    return f"{match['scheme']}{REMOVED}@"


def _named(match: re.Match[str]) -> str:
    value = match["value"]
    if value.lower().rstrip(",;)}]") in HARMLESS or REMOVED in value:
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match['name']}{quote}{REMOVED}{quote}"


def _without_hosts(text: str, hosts: Mapping[str, str]) -> str:
    for name in sorted(hosts, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", hosts[name], text)
    text = IPV4.sub(lambda match: match[0] if match[0] in OWN else "[address]", text)
    return IPV6.sub(lambda match: match[0] if match[0] in OWN or TIME.match(match[0]) else "[address]", text)


def aliases(names: Mapping[str, str]) -> dict[str, str]:
    """Return what stands for hosts in a bundle without names: host-1, host-2 … in the order of `names` (name to
    address, "" for none)."""
    found: dict[str, str] = {}
    for number, (name, address) in enumerate(names.items(), start=1):
        found[name] = f"host-{number}"
        if address:
            found.setdefault(address, f"host-{number}")
    return found
