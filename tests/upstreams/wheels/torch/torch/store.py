"""TCPStore and PrefixStore: keys and values that all processes of a test see, over TCP."""

import datetime
import pickle
import socket
import struct
import threading
import time


def send(connection: socket.socket, message) -> None:
    """Send one message: its length, then itself."""
    data = pickle.dumps(message)
    connection.sendall(struct.pack("!Q", len(data)) + data)


def receive(connection: socket.socket):
    """Return the next message; ConnectionError when there is none."""
    return pickle.loads(read(connection, struct.unpack("!Q", read(connection, 8))[0]))


def read(connection: socket.socket, size: int) -> bytes:
    """Return that many bytes; ConnectionError when the other end closes before."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        data += part
    return data


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Return a connection, trying again until somebody listens there; RuntimeError after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic()))
        except OSError as error:
            if time.monotonic() >= end:
                raise RuntimeError(f"nobody answers at {host}:{port}: {error}") from None
            time.sleep(0.02)
        else:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


class _Server:
    """Holds the values and answers each connection in a thread of its own."""

    def __init__(self, port: int) -> None:
        self.values, self.changed = {}, threading.Condition()
        self.listener = socket.create_server(("", port), backlog=1024)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        try:
            while True:
                send(connection, self.answer(*receive(connection)))
        except (ConnectionError, OSError):
            connection.close()

    def answer(self, what: str, key, value):
        with self.changed:
            if what == "set":
                self.values[key] = value
                self.changed.notify_all()
            elif what == "check":
                return all(each in self.values for each in key)
            elif what == "get":
                self.changed.wait_for(lambda: key in self.values, value)
                return self.values.get(key)
        return None


class TCPStore:
    """A store at a process's port; the master, who opens it, is that process."""

    def __init__(self, host_name, port, world_size=None, is_master=False, timeout=datetime.timedelta(minutes=5), **_) -> None:
        self.host, self.port, self.timeout = host_name, port, timeout
        self._server = _Server(port) if is_master else None
        self._connection = connect("127.0.0.1" if is_master else host_name, port, timeout.total_seconds())
        self._lock = threading.Lock()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long `get` waits."""
        self.timeout = timeout

    def set(self, key: str, value) -> None:
        """Set a value, text or bytes."""
        self._ask("set", key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return a value, as soon as somebody has set it."""
        value = self._ask("get", key, self.timeout.total_seconds())
        if value is None:
            raise RuntimeError(f"nobody has set {key} within {self.timeout}")
        return value

    def check(self, keys: list) -> bool:
        """Say whether all of them were set."""
        return self._ask("check", keys)

    def _ask(self, what: str, key, value=None):
        with self._lock:
            send(self._connection, (what, key, value))
            return receive(self._connection)


class PrefixStore:
    """A store with a prefix before its keys."""

    def __init__(self, prefix: str, store) -> None:
        self.prefix, self.store = prefix, store

    def set(self, key: str, value) -> None:
        """As TCPStore's."""
        self.store.set(f"{self.prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        """As TCPStore's."""
        return self.store.get(f"{self.prefix}/{key}")

    def check(self, keys: list) -> bool:
        """As TCPStore's."""
        return self.store.check([f"{self.prefix}/{key}" for key in keys])
