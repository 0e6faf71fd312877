"""The way to each host: ~/.ssh/config, the hosts file and private keys, resolved once, before any thread
starts.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.remote.host import Host

DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
SYSTEM_CONFIG = "/etc/ssh/ssh_config"
USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
DEEPEST = 16
BLOCK_LINE = re.compile(r"\s*(host|match)\b", re.IGNORECASE)
INCLUDE_LINE = re.compile(r"\s*include(?:\s*=\s*|\s+)(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Account:
    """Everything needed to log in on one host.

    `via` is the jump host in front of it, `proxy` a ProxyCommand instead. `keys` are tried in order; `agent` is the
    socket of an agent to ask as well ("" for none), `locked` the key files that need a passphrase. `key_name` is what
    known_hosts calls the host, `known_hosts` the files, the first of which takes new keys.
    """

    name: str
    address: str
    port: int
    user: str
    via: Account | None = None
    proxy: str = ""
    key_name: str = ""
    known_hosts: tuple[str, ...] = ()
    hash_names: bool = False
    agent: str = ""
    locked: tuple[str, ...] = ()
    keys: tuple[paramiko.PKey, ...] = field(default=(), compare=False, repr=False)


class Resolver:
    """Looks hosts up in ssh_config and loads their keys, each file once."""

    def __init__(self, config: str | None = None, known_hosts: tuple[str, ...] = ()) -> None:
        """`config` is a file to read instead of the user's and the system's ("" for none), `known_hosts` overrides
        their files."""
        self._config = paramiko.SSHConfig()
        for path in ("~/.ssh/config", SYSTEM_CONFIG) if config is None else (config,) if config else ():
            self._read(path, required=config is not None)
        self._known_hosts = known_hosts
        self._keys: dict[str, paramiko.PKey | Problem | None] = {}

    def _read(self, path: str, *, required: bool) -> None:
        try:
            text = "".join(_lines(Path(os.path.expanduser(path)), 0, required=required))
            self._config.parse(StringIO(text))
        except (paramiko.ConfigParseError, ValueError) as error:
            raise Trouble(Problem(path, "this SSH configuration cannot be read", str(error))) from None
        except OSError as error:
            raise Trouble(
                Problem(path, "this SSH configuration cannot be read", error.strerror or str(error))
            ) from None

    def account(self, host: Host, depth: int = 0) -> Account:
        """Return how to log in on `host`. Raises Trouble for a key file that is named but cannot be used, and for
        endless jumps."""
        options = self._options(host)
        port = host.port or _port(host, options.get("port", "22"))
        user = host.user or options.get("user") or _local_user()
        address = options["hostname"]
        keys, locked, agent = self._identities(host, options)
        user_files = _files(options.get("userknownhostsfile", USER_KNOWN_HOSTS), address, user)
        global_files = _files(options.get("globalknownhostsfile", GLOBAL_KNOWN_HOSTS), address, user)
        alias = options.get("hostkeyalias", "")
        via, proxy = self._way(host, options, depth)
        return Account(
            name=host.name,
            address=address,
            port=port,
            user=user,
            via=via,
            proxy=proxy,
            key_name=alias or (address if port == 22 else f"[{address}]:{port}"),
            known_hosts=self._known_hosts or (*user_files, *global_files),
            hash_names=options.get("hashknownhosts", "no").lower() == "yes",
            agent=agent,
            locked=locked,
            keys=keys,
        )

    def _options(self, host: Host) -> Mapping[str, str]:
        try:
            return self._config.lookup(host.name)
        except (paramiko.SSHException, ValueError, KeyError) as error:
            raise Trouble(Problem(host.name, "its entry in the SSH configuration cannot be used", str(error))) from None

    def _way(self, host: Host, options: Mapping[str, str], depth: int) -> tuple[Account | None, str]:
        """Return the jump host and the ProxyCommand in front of `host`; the hosts file wins over ssh_config, a jump
        over a command."""
        if depth > DEEPEST:
            raise Trouble(
                Problem(host.name, "its jump hosts lead in a circle", try_="ssh -G on it, and look for ProxyJump")
            )
        jump = host.jump or options.get("proxyjump", "")
        if host.jump == "none" or jump.lower() == "none":
            return None, ""
        via: Account | None = None
        for hop in filter(None, jump.split(",")):
            user, _, place = hop.removeprefix("ssh://").rpartition("@")
            name, _, port = _place(place)
            if not name:
                raise Trouble(Problem(host.name, "a jump host without a name", jump[:80], "[user@]host[:port]"))
            if name in (host.name, options["hostname"]):
                # A pattern such as `Host *` also matches the jump host itself: it is reached directly.
                return None, ""
            # Only the first hop may need a way of its own; the others are reached through the one before.
            own_key = self._options(Host(name)).get("identityfile")
            identity = "" if own_key else host.identity
            step = Host(
                name, user=user, port=_port(host, port) if port else 0, jump="none" if via else "", identity=identity
            )
            reached = self.account(step, depth + 1)
            via = reached if via is None else replace(reached, via=via, proxy="")
        return via, "" if via else options.get("proxycommand") or ""

    def _identities(
        self, host: Host, options: Mapping[str, str]
    ) -> tuple[tuple[paramiko.PKey, ...], tuple[str, ...], str]:
        """Return keys, key files that need a passphrase, and the agent's socket: asked when no key is named, or one
        is locked."""
        named = [host.identity] if host.identity else list(options.get("identityfile", ()))
        default = [os.path.join("~/.ssh", name) for name in DEFAULT_KEYS]
        keys: list[paramiko.PKey] = []
        locked: list[str] = []
        for path in named or default:
            if path.lower() == "none":
                continue
            loaded = self._key(os.path.expanduser(path))
            if isinstance(loaded, paramiko.PKey):
                keys.append(loaded)
            elif loaded is None:
                locked.append(path)
            elif host.identity:
                raise Trouble(replace(loaded, where=host.name, try_=f"identity= in {host.where}" if host.where else ""))
        agent = options.get("identityagent", "SSH_AUTH_SOCK")
        common = {"SSH_AUTH_SOCK": os.environ.get("SSH_AUTH_SOCK", ""), "none": ""}
        socket = common.get(agent, os.path.expanduser(os.path.expandvars(agent)))
        return tuple(keys), tuple(locked), socket if locked or not named else ""

    def _key(self, path: str) -> paramiko.PKey | Problem | None:
        """Return the private key in a file, None when it needs a passphrase, or what is wrong with it."""
        if path not in self._keys:
            self._keys[path] = _load(path)
        return self._keys[path]


def _load(path: str) -> paramiko.PKey | Problem | None:
    try:
        return paramiko.PKey.from_path(path)
    except (TypeError, paramiko.PasswordRequiredException):
        return None
    except OSError as error:
        return Problem(path, f"the private key {path} cannot be read", error.strerror or str(error))
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, UnsupportedAlgorithm, ValueError, RuntimeError):
        return Problem(path, f"{path} is no private key of a known kind", wanted="an Ed25519, ECDSA or RSA key")


def _lines(path: Path, depth: int, *, required: bool) -> Iterator[str]:
    """Yield the lines of an ssh_config file with its Include files put in their places, which paramiko does not do
    itself."""
    if not required and not path.is_file():
        return
    if depth > DEEPEST:
        raise ValueError(f"{path} is included in a circle")
    block = "Host *\n"
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        include = INCLUDE_LINE.match(line)
        if BLOCK_LINE.match(line):
            block = line + "\n"
        if not include:
            yield line + "\n"
            continue
        base = Path("/etc/ssh") if str(path).startswith("/etc/ssh/") else Path(os.path.expanduser("~/.ssh"))
        for pattern in shlex.split(include[1]):
            for name in sorted(glob.glob(str(base / os.path.expanduser(pattern)))):
                yield from _lines(Path(name), depth + 1, required=False)
                # What follows belongs to the block the Include stands in, not to the last one of the included file.
                yield block


def _files(value: str, address: str, user: str) -> tuple[str, ...]:
    tokens = {"%d": os.path.expanduser("~"), "%h": address, "%r": user, "%u": _local_user(), "%%": "%"}
    try:
        split = shlex.split(value)
    except ValueError:
        raise Trouble(
            Problem(address, "its entry in the SSH configuration cannot be used", value[:80], "closed quotation marks")
        ) from None
    words = (re.sub(r"%.", lambda match: tokens.get(match[0], match[0]), word) for word in split)
    return tuple(os.path.expanduser(word) for word in words if word != "none")


def _place(place: str) -> tuple[str, str, str]:
    """Return name and port of `host:port` and `[address]:port`, with what stands between them."""
    if place.startswith("["):
        name, _, rest = place[1:].partition("]")
        return name, ":", rest.removeprefix(":")
    return place.partition(":")


def _port(host: Host, value: str) -> int:
    if re.fullmatch(r"[0-9]{1,5}", value) and 0 < int(value) < 65536:
        return int(value)
    raise Trouble(
        Problem(
            host.name,
            "its entry in the SSH configuration cannot be used",
            f"Port {value[:80]}",
            "a port from 1 to 65535",
        )
    )


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
