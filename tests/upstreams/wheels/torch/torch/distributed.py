"""Process groups as far as they say who takes part and where they meet; whoever uses one makes the connections."""

from urllib.parse import urlsplit


class ProcessGroup:
    """All ranks, and the address of the first."""

    def __init__(self, rank: int, size: int, host: str, port: int) -> None:
        self._rank, self._size, self.host, self.port = rank, size, host, port

    def rank(self) -> int:
        """This process among them."""
        return self._rank

    def size(self) -> int:
        """How many there are."""
        return self._size


class group:
    """Holds the group of all ranks."""

    WORLD = None


def init_process_group(backend=None, init_method=None, world_size=-1, rank=-1, **_) -> None:
    """Take part as `rank` of `world_size`; `init_method` is tcp://HOST:PORT."""
    address = urlsplit(init_method)
    group.WORLD = ProcessGroup(rank, world_size, address.hostname, address.port)


def destroy_process_group() -> None:
    """Forget it."""
    group.WORLD = None
