"""Who stands at both ends of an SSH session: the host's key against known_hosts, and our keys against the host."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import paramiko
from paramiko.agent import AgentSSH

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.remote import hostkeys
from deepep_bootstrap.remote.hostkeys import HostKey, Known
from deepep_bootstrap.remote.ssh_config import Account


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
    """Compares the key a host shows with what known_hosts says. Asked for every host: paramiko's own table stays empty."""

    def __init__(self, account: Account, known: Known, accept: Callable[[HostKey], None] | None) -> None:
        self._account, self._known, self._accept = account, known, accept

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raise Trouble unless the host may show `key`."""
        del client, hostname
        shown = HostKey(key.get_name(), key.asbytes())
        name, print_ = self._account.name, hostkeys.fingerprint(shown.blob)
        if any(other.blob == shown.blob for other in self._known.revoked):
            raise Trouble(Problem(name, "shows a host key that known_hosts marks as revoked", print_, "a key that is not"))
        if any(other.blob == shown.blob for other in self._known.keys + self._known.other_ports):
            return
        if self._known.keys:
            old = self._known.keys[0]
            raise Trouble(
                Problem(
                    name,
                    f"its host key has changed since {old.where} was written: it was installed anew, or something stands in between",
                    f"{print_} ({shown.kind})",
                    f"{hostkeys.fingerprint(old.blob)} ({old.kind})",
                    f"asking its owner, then ssh-keygen -R '{self._account.key_name}'",
                )
            )
        if self._accept:
            self._accept(shown)
            return
        reason = "its host key is not in known_hosts"
        if self._known.authorities:
            reason += f", only a certificate authority ({self._known.authorities[0].where}), and certificates of hosts are not checked here"
        raise Trouble(Problem(name, reason, f"{print_} ({shown.kind})", try_="--accept-new-host-keys, after comparing the fingerprint"))


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
                    raise self._problem("closed the connection during the log-in", tried) from None
                if time.monotonic() - began > (transport.auth_timeout or 0):
                    raise self._problem("the log-in was not answered in time", tried) from None
        raise self._refused(tried, "") if tried else self._problem(f"there is no key to log in with as {account.user}", tried)

    def _keys(self) -> Iterator[paramiko.PKey]:
        yield from self._account.keys
        if self._account.agent:
            yield from _Agent(self._account.agent).get_keys()

    def _refused(self, tried: int, accepts: str) -> Trouble:
        return self._problem(f"does not let {self._account.user} in" + (f", accepts {accepts}" if accepts else ""), tried)

    def _problem(self, what: str, tried: int) -> Trouble:
        account = self._account
        locked = f"; {', '.join(account.locked)} needs a passphrase" if account.locked else ""
        by_hand = f"ssh -p {account.port} {account.user}@{account.address}"
        try_ = f"ssh-add {account.locked[0]}" if account.locked else f"{by_hand}, or user= and identity= in the hosts file"
        return Trouble(
            Problem(account.name, what, f"{tried} key{'' if tried == 1 else 's'} tried{locked}", "a key that the host knows", try_)
        )
