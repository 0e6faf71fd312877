"""Access to each host: the account to log in with (~/.ssh/config, the hosts file and private keys, resolved once,
before any thread starts), host keys held to known_hosts files, log-in, and adding a host key that was accepted.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import fnmatch
import getpass
import glob
import hashlib
import hmac
import os
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from msgspec import Struct, field
from msgspec.structs import replace
from paramiko.agent import AgentSSH

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.remote.host import Host

DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
SYSTEM_CONFIG = "/etc/ssh/ssh_config"
USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
DEEPEST = 16
BLOCK_LINE = re.compile(r"\s*(host|match)\b", re.IGNORECASE)
INCLUDE_LINE = re.compile(r"\s*include(?:\s*=\s*|\s+)(.+)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
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
    keys: tuple[paramiko.PKey, ...] = dataclasses.field(default=(), compare=False, repr=False)


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
            text = "".join(_config_lines(Path(os.path.expanduser(path)), 0, required=required))
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
        user_files = _known_hosts_files(options.get("userknownhostsfile", USER_KNOWN_HOSTS), address, user)
        global_files = _known_hosts_files(options.get("globalknownhostsfile", GLOBAL_KNOWN_HOSTS), address, user)
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
            via = reached if via is None else dataclasses.replace(reached, via=via, proxy="")
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
            self._keys[path] = _load_key(path)
        return self._keys[path]


CLIENT_OPTIONS = (
    *("StrictHostKeyChecking=yes", "UpdateHostKeys=no", "CheckHostIP=no", "VerifyHostKeyDNS=no", "BatchMode=yes"),
    *("ControlMaster=no", "ControlPath=none", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes"),
    *("PermitLocalCommand=no", "RequestTTY=no", "RemoteCommand=none", "LogLevel=ERROR"),
    *("ConnectTimeout=8", "ServerAliveInterval=15", "ServerAliveCountMax=3", "GlobalKnownHostsFile=/dev/null"),
)
"""What OpenSSH's client is told where it stands in for a session of ours; times as in remote.ssh.Timeouts."""


def client_words(account: Account, host: Host, config: str | None) -> tuple[str, ...]:
    """Return the words that start OpenSSH's client: the account of our own session, `config` in place of the user's
    ("" for none), and host keys held to the same files. The hosts file wins over the configuration here too."""
    files = " ".join(f'"{path}"' for path in account.known_hosts) or "/dev/null"
    options = [*CLIENT_OPTIONS, f"UserKnownHostsFile={files}", *([f"ProxyJump={host.jump}"] if host.jump else [])]
    return (
        *("ssh", *(("-F", config or "none") if config is not None else ())),
        *(f"-o{option}" for option in options),
        *("-l", account.user, "-p", str(account.port)),
        *(("-i", os.path.expanduser(host.identity)) if host.identity else ()),
        *("--", host.name),
    )


def _load_key(path: str) -> paramiko.PKey | Problem | None:
    try:
        return paramiko.PKey.from_path(path)
    except (TypeError, paramiko.PasswordRequiredException):
        return None
    except OSError as error:
        return Problem(path, f"the private key {path} cannot be read", error.strerror or str(error))
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, UnsupportedAlgorithm, ValueError, RuntimeError):
        return Problem(path, f"{path} is no private key of a known kind", wanted="an Ed25519, ECDSA or RSA key")


def _config_lines(path: Path, depth: int, *, required: bool) -> Iterator[str]:
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
        for name in _included(path, include[1]):
            yield from _config_lines(name, depth + 1, required=False)
            # What follows belongs to the block the Include stands in, not to the last one of the included file.
            yield block


def _included(path: Path, patterns: str) -> list[Path]:
    """Return the files that an Include line of `path` names, in the order in which ssh reads them."""
    base = Path("/etc/ssh") if str(path).startswith("/etc/ssh/") else Path(os.path.expanduser("~/.ssh"))
    files: list[Path] = []
    for pattern in shlex.split(patterns):
        files.extend(Path(name) for name in sorted(glob.glob(str(base / os.path.expanduser(pattern)))))
    return files


def _known_hosts_files(value: str, address: str, user: str) -> tuple[str, ...]:
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


class _Agent(AgentSSH):
    """The keys of the agent behind one socket; each session has its own, for they answer one question at a time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(10)
        try:
            self._socket.connect(path)
            self._connect(self._socket)  # type: ignore[attr-defined]
        except (OSError, paramiko.SSHException):
            self._socket.close()


class Verifier(paramiko.MissingHostKeyPolicy):
    """Compares the key a host shows with what known_hosts says. Asked for every host: paramiko's own table stays
    empty."""

    def __init__(self, account: Account, known: Known, accept: Callable[[HostKey], None] | None) -> None:
        self._account, self._known, self._accept = account, known, accept

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raise Trouble unless the host may show `key`."""
        del client, hostname
        shown = HostKey(key.get_name(), key.asbytes())
        name, print_ = self._account.name, fingerprint(shown.blob)
        if any(other.blob == shown.blob for other in self._known.revoked):
            raise Trouble(
                Problem(name, "shows a host key that known_hosts marks as revoked", print_, "a key that is not")
            )
        if any(other.blob == shown.blob for other in self._known.keys + self._known.other_ports):
            return
        if self._known.keys:
            old = self._known.keys[0]
            raise Trouble(
                Problem(
                    name,
                    f"its host key has changed since {old.where} was written: it was installed anew, or something "
                    f"stands in between",
                    f"{print_} ({shown.kind})",
                    f"{fingerprint(old.blob)} ({old.kind})",
                    f"asking its owner, then ssh-keygen -R '{self._account.key_name}'",
                )
            )
        if self._accept:
            self._accept(shown)
            return
        reason = "its host key is not in known_hosts"
        if self._known.authorities:
            reason += (
                f", only a certificate authority ({self._known.authorities[0].where}), and certificates of "
                f"hosts are not checked here"
            )
        raise Trouble(
            Problem(
                name, reason, f"{print_} ({shown.kind})", try_="--accept-new-host-keys, after comparing the fingerprint"
            )
        )


class LogIn:
    """Tries the keys of an account one after the other; stands where paramiko expects an authentication strategy."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Log in, or raise Trouble saying what the host answered."""
        account, tried, began = self._account, 0, time.monotonic()
        for key in self._keys():
            tried += 1
            try:
                if not transport.auth_publickey(account.user, key):
                    return
                raise self._refused(tried, "a second factor, which cannot be given here")
            except paramiko.BadAuthenticationType as error:
                raise self._refused(tried, f"only {', '.join(error.allowed_types)}") from None
            except paramiko.SSHException:
                # This key was refused; a server that has closed the connection would refuse the others too.
                if not transport.is_active():
                    lost = self._problem("closed the connection during the log-in", tried)
                    raise Trouble(*lost.problems, may_pass=True) from None
                if time.monotonic() - began > (transport.auth_timeout or 0):
                    raise self._problem("the log-in was not answered in time", tried) from None
        raise (
            self._refused(tried, "")
            if tried
            else self._problem(f"there is no key to log in with as {account.user}", tried)
        )

    def _keys(self) -> Iterator[paramiko.PKey]:
        yield from self._account.keys
        if self._account.agent:
            yield from _Agent(self._account.agent).get_keys()

    def _refused(self, tried: int, accepts: str) -> Trouble:
        return self._problem(
            f"does not let {self._account.user} in" + (f", accepts {accepts}" if accepts else ""), tried
        )

    def _problem(self, what: str, tried: int) -> Trouble:
        account = self._account
        locked = f"; {', '.join(account.locked)} needs a passphrase" if account.locked else ""
        by_hand = f"ssh -p {account.port} {account.user}@{account.address}"
        try_ = (
            f"ssh-add {account.locked[0]}" if account.locked else f"{by_hand}, or user= and identity= in the hosts file"
        )
        return Trouble(
            Problem(
                account.name,
                what,
                f"{tried} key{'' if tried == 1 else 's'} tried{locked}",
                "a key that the host knows",
                try_,
            )
        )


HASHED = "|1|"
NEGATED = "!"
MARKERS = ("@revoked", "@cert-authority")


class HostKey(Struct, frozen=True):
    """One key of a known_hosts line: its type, its bytes, the line's marker ("" without) and where the line stands."""

    kind: str
    blob: bytes
    marker: str = ""
    where: str = ""


class Known(Struct, frozen=True):
    """What the files say of one host name. `other_ports` are keys of the name without its port: good when shown,
    else no matter."""

    keys: tuple[HostKey, ...] = ()
    revoked: tuple[HostKey, ...] = ()
    authorities: tuple[HostKey, ...] = ()
    other_ports: tuple[HostKey, ...] = ()


class KnownHosts(Struct, frozen=True):
    """The lines of some known_hosts files, by plain name; hashed names and patterns apart."""

    plain: dict[str, list[HostKey]] = field(default_factory=dict)
    hashed: list[tuple[bytes, bytes, HostKey]] = field(default_factory=list)
    patterns: list[tuple[tuple[str, ...], HostKey]] = field(default_factory=list)

    def lookup(self, name: str) -> Known:
        """Return what is known of `name`, a host name, or `[name]:port` where the port is not 22."""
        found = list(self._matching(name.lower()))
        return Known(
            tuple(key for key in found if not key.marker),
            tuple(key for key in found if key.marker == "@revoked"),
            tuple(key for key in found if key.marker == "@cert-authority"),
        )

    def _matching(self, name: str) -> Iterator[HostKey]:
        yield from self.plain.get(name, [])
        yield from (key for patterns, key in self.patterns if _matches(patterns, name))
        data = name.encode()
        yield from (key for salt, digest, key in self.hashed if hmac.digest(salt, data, "sha1") == digest)


def read_known_hosts(paths: Iterable[str]) -> KnownHosts:
    """Read known_hosts files; one that is missing or cannot be read knows nobody, and a line that cannot be read is
    passed over."""
    known = KnownHosts()
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            _add(known, line.split(), f"{path}:{number}")
    return known


def _add(known: KnownHosts, words: list[str], where: str) -> None:
    marker = words.pop(0) if words and words[0] in MARKERS else ""
    if len(words) < 3 or words[0].startswith(("#", "@")):
        return
    names, kind, text = words[:3]
    try:
        key = HostKey(kind, base64.b64decode(text, validate=True), marker, where)
        if names.startswith(HASHED):
            salt, digest = (base64.b64decode(part, validate=True) for part in names[len(HASHED) :].split("|"))
            known.hashed.append((salt, digest, key))
            return
    except (ValueError, binascii.Error):
        return
    patterns = tuple(names.lower().split(","))
    if any(character in names for character in "*?!"):
        known.patterns.append((patterns, key))
        return
    for name in patterns:
        known.plain.setdefault(name, []).append(key)


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Return whether `name` is one of `patterns` with * and ?, and none of those with ! in front."""
    hit = False
    for pattern in patterns:
        # In fnmatch a bracket opens a class; in known_hosts it is itself, as in [host]:2222.
        literal = pattern.removeprefix(NEGATED).replace("[", "[[]")
        if fnmatch.fnmatchcase(name, literal):
            if pattern.startswith(NEGATED):
                return False
            hit = True
    return hit


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def add_host_key(path: str, name: str, key: HostKey, *, hashed: bool) -> None:
    """Add one line to a known_hosts file, which is made when missing; with `hashed` the name cannot be read from it.
    OSError."""
    file = Path(path)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hashed:
        salt = os.urandom(20)
        digest = hmac.digest(salt, name.encode(), "sha1")
        name = HASHED + "|".join(base64.b64encode(part).decode() for part in (salt, digest))
    line = f"{name} {key.kind} {base64.b64encode(key.blob).decode()}\n"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with open(descriptor, "r+b", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        if size:
            stream.seek(size - 1)
            line = line if stream.read(1) == b"\n" else "\n" + line
        stream.write(line.encode())
