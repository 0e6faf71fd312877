"""Process groups: who takes part, where they meet, and messages among them over TCP.

Connections are made by the first message, each with a socket for every other rank.
"""

import builtins
import datetime
import selectors
import socket
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

from . import counters
from .store import PrefixStore, TCPStore, connect, read

__all__ = ["P2POp", "PrefixStore", "ProcessGroup", "ReduceOp", "TCPStore"]

LINK = 10e6  # bytes a second that a message from one rank to another takes at least: what CPUs do varies too much to compare links
ReduceOp = SimpleNamespace(SUM="sum", MAX="max", MIN="min")


class ProcessGroup:
    """All ranks, and the store at which they meet."""

    def __init__(self, rank: int, size: int, store) -> None:
        self._rank, self._size, self._store, self._peers, self._away = rank, size, store, None, False

    def rank(self) -> int:
        """This process among them."""
        return self._rank

    def size(self) -> int:
        """How many there are."""
        return self._size

    def store(self):
        """The store, opened or connected when it is first needed."""
        if callable(self._store):
            self._store = self._store()
        return self._store

    def peers(self) -> dict:
        """A connection to every other rank, by rank: the higher one connects to the lower."""
        if self._peers is None:
            listener = socket.create_server(("", 0), backlog=self._size)
            name, port = socket.gethostname(), listener.getsockname()[1]
            self.store().set(f"rank/{self._rank}", f"{name} {port}")
            peers = {}
            everybody = [self.store().get(f"rank/{rank}").decode().split()[0] for rank in range(self._size)]
            self._away = len(set(everybody)) > 1
            for rank in range(self._rank):
                host, port = self.store().get(f"rank/{rank}").decode().split()
                peers[rank] = connect("127.0.0.1" if host == name else host, int(port), 60)
                peers[rank].sendall(self._rank.to_bytes(4, "big"))
            while len(peers) < self._size - 1:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peers[int.from_bytes(read(connection, 4), "big")] = connection
            listener.close()
            self._peers = peers
        return self._peers

    def exchange(self, given: dict, wanted: dict) -> None:
        """Send bytes to ranks and fill those that are wanted from ranks, all at the same time."""
        peers, todo = self.peers(), {}
        for kind, messages in ((selectors.EVENT_WRITE, given), (selectors.EVENT_READ, wanted)):
            for rank, message in messages.items():
                view = memoryview(message).cast("B")
                if len(view):
                    todo[rank, kind] = view
        with selectors.DefaultSelector() as selector:
            for rank in {rank for rank, _ in todo}:
                peers[rank].setblocking(False)
                selector.register(peers[rank], _events(todo, rank), rank)
            while todo:
                for key, events in selector.select():
                    rank = key.data
                    for kind in (selectors.EVENT_WRITE, selectors.EVENT_READ):
                        if events & kind and (rank, kind) in todo:
                            _advance(key.fileobj, todo, rank, kind)
                    if not _events(todo, rank):
                        selector.unregister(key.fileobj)
                        key.fileobj.setblocking(True)
                    elif _events(todo, rank) != key.events:
                        selector.modify(key.fileobj, _events(todo, rank), rank)

    def close(self) -> None:
        """Part from the others."""
        if self._away:
            counters.move()
        for connection in (self._peers or {}).values():
            connection.close()


def _events(todo: dict, rank: int) -> int:
    return sum(kind for kind in (selectors.EVENT_WRITE, selectors.EVENT_READ) if (rank, kind) in todo)


def _advance(connection, todo: dict, rank: int, kind: int) -> None:
    view = todo[rank, kind]
    try:
        done = connection.send(view) if kind == selectors.EVENT_WRITE else connection.recv_into(view)
    except BlockingIOError:
        return
    if not done:
        raise RuntimeError(f"rank {rank} has closed its connection")
    if done < len(view):
        todo[rank, kind] = view[done:]
    else:
        del todo[rank, kind]


class group:
    """Holds the group of all ranks."""

    WORLD = None


def init_process_group(
    backend=None, init_method=None, world_size=-1, rank=-1, store=None, timeout=datetime.timedelta(minutes=10), **_
) -> None:
    """Take part as `rank` of `world_size`; `init_method` is tcp://HOST:PORT, or `store` is where all meet."""
    if store is None:
        address = urlsplit(init_method)

        def store():
            return TCPStore(address.hostname, address.port, world_size, rank == 0, timeout)

    group.WORLD = ProcessGroup(rank, world_size, store)


def destroy_process_group() -> None:
    """Forget it."""
    group.WORLD.close()
    group.WORLD = None


def _get_default_store():
    return group.WORLD.store()


distributed_c10d = SimpleNamespace(_get_default_store=_get_default_store)


def barrier() -> None:
    """Wait for all."""
    world = group.WORLD
    others = [rank for rank in range(world.size()) if rank != world.rank()]
    world.exchange({rank: b"!" for rank in others}, {rank: bytearray(1) for rank in others})


def all_to_all_single(output, input) -> None:
    """Send one part of `input` to each rank, and put what each sends to this one into `output`, in order of ranks."""
    world, rank = group.WORLD, group.WORLD.rank()
    given, wanted = (tensor.array.reshape(world.size(), -1) for tensor in (input, output))
    wanted[rank] = given[rank]
    others = [other for other in range(world.size()) if other != rank]
    world.exchange({other: given[other] for other in others}, {other: wanted[other] for other in others})


def all_reduce(tensor, op="sum") -> None:
    """Replace each number by the sum, or the largest or smallest, of all ranks': each rank works out one part."""
    import numpy as np

    world, rank = group.WORLD, group.WORLD.rank()
    parts = np.array_split(tensor.array.reshape(-1), world.size())
    others = [other for other in range(world.size()) if other != rank]
    came = {other: np.empty_like(parts[rank]) for other in others}
    world.exchange({other: parts[other] for other in others}, came)
    work = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]
    for each in came.values():
        work(parts[rank], each, out=parts[rank])
    world.exchange({other: parts[rank] for other in others}, {other: parts[other] for other in others})


def isend() -> None:
    """A name for P2POp."""


def irecv() -> None:
    """A name for P2POp."""


class P2POp:
    """One message to or from a rank."""

    def __init__(self, op, tensor, peer: int) -> None:
        self.op, self.tensor, self.peer = op, tensor, peer


def batch_isend_irecv(operations: builtins.list) -> builtins.list:
    """Do them all at once, no more than one each way with a rank; return what can be waited for."""
    given = {each.peer: each.tensor.array for each in operations if each.op is isend}
    wanted = {each.peer: each.tensor.array for each in operations if each.op is irecv}
    end = time.monotonic() + max(len(array.data.cast("B")) for array in (*given.values(), *wanted.values())) / LINK
    group.WORLD.exchange(given, wanted)
    time.sleep(max(0.0, end - time.monotonic()))
    return [SimpleNamespace(wait=lambda: None) for _ in operations]
