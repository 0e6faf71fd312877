"""A started shell on a host, behind one interface: a channel of an SSH session, or a process of this
machine; and the loader that receives a script there.

The loader's programs for sh are the files of the folder `loader`, which every installation of the package has with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Protocol

from deepep_bootstrap.core.process import end_group
from deepep_bootstrap.core.text import REMOVED

if TYPE_CHECKING:
    import paramiko

BLOCK = 256 * 1024
GRACE = 8.0
"""Seconds a watched process on this machine has to end after its stdin was closed: the watcher's own five, and some."""


class LineLostError(Exception):
    """The connection went away while something ran on it."""


class Channel(Protocol):
    """A started shell command with its three streams. `read` and `code` are for one thread, `offer` may be
    another's."""

    def offer(self, data: bytes) -> bool:
        """Send `data` to stdin, waiting for room; False when the other side no longer reads."""

    def end_input(self) -> None:
        """Close stdin."""

    def read(self, timeout: float | None) -> tuple[bytes, bytes]:
        """Wait for output and return what came on stdout and stderr; both empty: they ended. TimeoutError after
        `timeout` s."""

    def code(self, timeout: float | None) -> int:
        """Wait for the exit code. LineLostError when the connection went first, TimeoutError after `timeout` s."""

    def stop(self) -> None:
        """End it from any thread; a waiting `read` returns."""

    def close(self) -> None:
        """End it if it still runs, and give its streams back; for the thread that reads."""


class _Bell:
    """Rings when a paramiko buffer gets data or closes. Buffers clear their event when read empty; with two on one
    bell, we do."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def set(self) -> None:
        self.event.set()

    def clear(self) -> None:
        """Leave the bell alone."""


class SshChannel:
    """A command on an exec channel of an open SSH session: no thread of its own and no polling."""

    def __init__(self, channel: paramiko.Channel, command: str, lost: Callable[[], str]) -> None:
        """`lost` says how the connection ended, when it did."""
        self._channel, self._lost = channel, lost
        self._bell = _Bell()
        channel.in_buffer.set_event(self._bell)  # type: ignore[arg-type]
        channel.in_stderr_buffer.set_event(self._bell)  # type: ignore[arg-type]
        channel.exec_command(command)

    def offer(self, data: bytes) -> bool:
        """See Channel."""
        try:
            # In blocks: paramiko copies what is left after each packet.
            for start in range(0, len(data), BLOCK):
                self._channel.sendall(data[start : start + BLOCK])
        except (OSError, EOFError):
            return False
        return True

    def end_input(self) -> None:
        """See Channel."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def read(self, timeout: float | None) -> tuple[bytes, bytes]:
        """See Channel."""
        while True:
            self._bell.event.clear()
            ended = self._channel.eof_received or self._channel.closed
            out = self._channel.recv(BLOCK) if self._channel.recv_ready() else b""
            err = self._channel.recv_stderr(BLOCK) if self._channel.recv_stderr_ready() else b""
            if out or err or ended:
                return out, err
            if not self._bell.event.wait(timeout):
                raise TimeoutError

    def code(self, timeout: float | None) -> int:
        """See Channel."""
        if not self._channel.status_event.wait(timeout):
            raise TimeoutError
        code = self._channel.recv_exit_status()
        if code == -1 and not self._channel.get_transport().is_active():
            raise LineLostError(self._lost())
        return code

    def stop(self) -> None:
        """See Channel."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()

    close = stop


class LocalChannel:
    """The same command on this machine, in a session of its own."""

    def __init__(self, command: str, *, watched: bool) -> None:
        self._watched = watched
        pipe = subprocess.PIPE
        words = ["/bin/sh", "-c", command]
        self._process = subprocess.Popen(words, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        if self._process.stdin is None or self._process.stdout is None or self._process.stderr is None:
            raise AssertionError("all three streams are pipes")
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._selector.register(self._stderr, selectors.EVENT_READ)

    def offer(self, data: bytes) -> bool:
        """See Channel."""
        rest = memoryview(data)
        try:
            while rest:
                if self._stdin.closed:
                    return False
                rest = rest[self._stdin.write(rest) or 0 :]
        except OSError:
            return False
        return True

    def end_input(self) -> None:
        """See Channel."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def read(self, timeout: float | None) -> tuple[bytes, bytes]:
        """See Channel."""
        while self._selector.get_map():
            came = {self._stdout: b"", self._stderr: b""}
            ready = self._selector.select(timeout)
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, BLOCK)
                if data:
                    came[key.fileobj] = data  # type: ignore[index]
                else:
                    self._selector.unregister(key.fileobj)
            if any(came.values()):
                return came[self._stdout], came[self._stderr]
        return b"", b""

    def code(self, timeout: float | None) -> int:
        """See Channel. A shell ended by a signal has 128 and the signal's number, as shells say it themselves."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """See Channel."""
        self.end_input()
        if self._watched:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        if self._process.poll() is None:
            # A shell that sudo started is not ours to signal; it ends with its streams.
            with contextlib.suppress(PermissionError):
                end_group(self._process.pid, signal.SIGTERM)

    def close(self) -> None:
        """See Channel."""
        if self._process.poll() is None:
            self.stop()
        self.end_input()
        self._selector.close()
        self._stdout.close()
        self._stderr.close()


LOADER = 'read -r n && exec /bin/sh -c "$(head -c "$n")"'
COMMAND = f"exec /bin/sh -c {shlex.quote(LOADER)}"
MARK = b"@deepep-bootstrap starts@\n"
"""Written to both streams when the script is about to run: what stands before it comes from the account's own
start-up files."""


def _program(name: str) -> str:
    """Return a program of the folder `loader` as it is sent, behind a line of settings: what follows its head, which
    an empty line ends."""
    text = (files("deepep_bootstrap.remote") / "loader" / f"{name}.sh").read_text(encoding="utf-8")
    return "\n" + text.partition("\n\n")[2]


RAISE, KEEP, RELAY = _program("raise"), _program("keep"), _program("relay")
"""What becomes another user; what receives the script and runs it; what packs what it leaves."""


Hide = Callable[[str], str]
"""Takes secrets out of a text that a host printed."""


def as_is(text: str) -> str:
    """Return `text`: there is nothing in it to hide."""
    return text


SHORTEST_SECRET = 4
"""Characters that a secret must have to be looked for in what hosts print: shorter ones are parts of words."""


class Secret:
    """A text that must not be shown: printing, formatting and repr hide it."""

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(…)"

    def reveal(self) -> str:
        """Return the text itself."""
        return self._value

    def cut_from(self, text: str) -> str:
        """Return `text`, which a host printed, without this one in it."""
        return text.replace(self._value, REMOVED) if len(self._value) >= SHORTEST_SECRET else text


def compose(script: str, args: Sequence[str], env: Mapping[str, str], folder: str = "") -> bytes:
    """Return `script` for a shell, with its environment and arguments set in front of it; `folder` is put at the end
    of PATH."""
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII) or "\0" in value:
            raise ValueError(f"not an environment variable: {name}")
    if any("\0" in word for word in args):
        raise ValueError("an argument with a zero byte in it, which bash would leave out")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    lines += [f'export PATH="$PATH":{shlex.quote(folder)}'] if folder else []
    return "\n".join([*lines, f"set -- {shlex.join(args)}".rstrip(), script, ""]).encode()


def payload(
    body: bytes,
    *,
    user: str = "",
    password: str = "",
    watched: bool = False,
    merge: bool = False,
    interpreter: str = "bash",
) -> bytes:
    """Return what the loader reads from stdin to run `body` with `interpreter`: as `user` when given, with `password`
    for sudo when it asks."""
    mark = MARK.decode().rstrip()
    settings = (
        f"size={len(body)} watched={int(watched)} merge={int(merge)} interpreter={interpreter} mark={shlex.quote(mark)}"
    )
    keep = _frame(settings + KEEP) + body
    if not user:
        return keep
    if "\n" in password or "\0" in password:
        raise ValueError("a password is one line")
    return _frame(f"user={shlex.quote(user)} loader={shlex.quote(LOADER)}" + RAISE) + password.encode() + b"\n" + keep


def relayed(data: bytes, seconds: float, limit: int) -> bytes:
    """Return what the loader reads to run a payload and to print what it left packed (see remote.packed): the script
    has so many seconds, and `limit` bytes of each stream are kept."""
    mark = MARK.decode().rstrip()
    settings = f"loader={shlex.quote(LOADER)} seconds={seconds:g} bytes={limit} mark={shlex.quote(mark)}"
    return _frame(settings + RELAY) + data


def _frame(program: str) -> bytes:
    data = program.encode()
    return b"%d\n%s" % (len(data), data)


NO_SUDO = "this account cannot become root there"
START_FAILURES: tuple[tuple[str, str, str, str], ...] = (
    # Words on stderr (sudo speaks English here: LC_ALL=C), what it means, what is wanted, what to try.
    (
        "incorrect password",
        "sudo does not take the password",
        "the password of the account there",
        "--sudo-password-prompt",
    ),
    (
        "Sorry, try again",
        "sudo does not take the password",
        "the password of the account there",
        "--sudo-password-prompt",
    ),
    (
        "no password was provided",
        "sudo does not take the password",
        "the password of the account there",
        "--sudo-password-prompt",
    ),
    (
        "a password is required",
        "sudo asks for a password",
        "",
        "--sudo-password-prompt, or user=root in the hosts file",
    ),
    ("in the sudoers file", NO_SUDO, "the account in sudoers", "user=root in the hosts file"),
    ("not allowed to", NO_SUDO, "the account allowed to run /bin/sh in sudoers", "user=root in the hosts file"),
    ("may not run sudo", NO_SUDO, "the account in sudoers", "user=root in the hosts file"),
    ("must have a tty", "sudo wants a terminal", "no requiretty in sudoers", "user=root in the hosts file"),
    (
        "deepep-bootstrap: no such user",
        "this user is not there",
        "an account of this name",
        "another user, or creating this one",
    ),
    ("unknown user", "this user is not there", "an account of this name", "another user, or creating this one"),
    ("deepep-bootstrap: no sudo", "not root, and no sudo there", "sudo, or root itself", "user=root in the hosts file"),
    ("No space left on device", "no space left for a script in the directory for temporary files", "", "df -h /tmp"),
    ("Read-only file system", "the directory for temporary files is read-only", "", "mount, and TMPDIR"),
    ("head: ", "a script cannot be started there", "head of GNU coreutils", ""),
)


def explain_no_start(code: int, early: str, hide: Hide = as_is) -> tuple[str, str, str, str]:
    """Return what, found, wanted and try of a message when the script never began: `early` is what came instead,
    `code` the exit code of the shell, `hide` takes secrets away. sudo's own words are looked for in what really came: a
    password may be one of them."""
    last = hide(early.rpartition("\n")[2].removeprefix("deepep-bootstrap: "))[-200:]
    for words, what, wanted, try_ in START_FAILURES:
        if words in early:
            return what, last, wanted, try_
    return (
        "the shell of the account there did not start a script",
        last or f"exit code {code}",
        "",
        "logging in by hand",
    )
